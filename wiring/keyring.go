package wiring

import (
	"bytes"
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// turnCall bounds one step of a change of the gossip key.
const turnCall = 5 * time.Second

// keyed is the leader as this node renews its lease with it: what it says of the gossip's keys is done before the next renewal, which
// tells the leader so, and the ingress hears of units that find no room.
type keyed struct{ n *Node }

// Renew implements msg.Leader.
func (k keyed) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	lease, err := k.n.leader.Renew(ctx, nextReport(r))
	if in := k.n.serving.Load(); err == nil && in != nil {
		in.TakeWaiting(lease.Waiting, lease.TTL)
	}
	if err == nil && len(lease.Keyring) > 0 && k.n.mesh != nil {
		if err := k.n.mesh.takeKeyring(lease.Keyring); err != nil {
			k.n.log.Warn("the gossip's new key cannot be taken, trying again", slog.Any("err", err))
		}
	}
	return lease, err
}

// takeKeyring lets these keys in and sends with the first, which the data dir keeps.
func (m *mesh) takeKeyring(ring [][]byte) error {
	m.held.Lock()
	defer m.held.Unlock()
	if err := m.gossipWith(ring); err != nil {
		return err
	}
	if next := m.files; !bytes.Equal(next.GossipKey, ring[0]) {
		next.GossipKey = ring[0]
		if err := m.save(next); err != nil {
			return err
		}
	}
	m.keyring = ring
	m.n.log.Info("the keys of the gossip have changed", slog.Int("keys", len(ring)))
	return nil
}

// gossipWith gives the gossip its keys; a network in memory has none to give them to.
func (m *mesh) gossipWith(ring [][]byte) error {
	if m.gossip == nil {
		return nil
	}
	derived := make([][]byte, len(ring))
	for i, secret := range ring {
		key, err := membership.DeriveKey(secret, m.n.ident.Cluster)
		if err != nil {
			return err
		}
		derived[i] = key
	}
	return m.gossip.SetKeys(derived...)
}

// keyringSum names the keys this node has, "" before it has one.
func (m *mesh) keyringSum() string {
	m.held.Lock()
	defer m.held.Unlock()
	return state.KeyringSum(m.keyring)
}

// turnKey goes on with a change of the gossip key once every node has taken the step before; false = there is nothing to do now.
func (n *Node) turnKey(ctx context.Context) bool {
	st := n.store.State()
	if !st.Secrets.Turning() || len(st.Untaken()) > 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, turnCall)
	defer cancel()
	if err := n.turn(ctx, st, nil); err != nil {
		n.log.Warn("the change of the gossip key did not go on, trying again", slog.Any("err", err))
		return false
	}
	return true
}

// turn begins a change to the next key, or goes on with the one that st shows.
func (n *Node) turn(ctx context.Context, st *state.State, next []byte) error {
	_, err := n.consensus.ProposeHere(ctx, state.Command{TurnKey: &state.TurnKey{From: state.KeyringSum(st.Secrets.Keyring()), Next: next}})
	return err
}

// RotateKey implements api.Nodes.
func (b *backend) RotateKey(ctx context.Context) error {
	if b.n.mesh == nil {
		return problem.New(problem.Conflict, "this node stands alone: it does not gossip").WithHint("start it with --advertise IP")
	}
	if _, err := b.n.lead(); err != nil {
		return err
	}
	return b.n.turn(ctx, b.n.store.State(), newGossipKey())
}

func newGossipKey() []byte {
	key := make([]byte, state.GossipKeySize)
	_, _ = rand.Read(key) // never fails since Go 1.24
	return key
}

// KeyRotation implements api.Nodes.
func (b *backend) KeyRotation(context.Context) (api.KeyRotation, error) {
	if _, err := b.n.lead(); err != nil {
		return api.KeyRotation{}, err
	}
	st := b.n.store.State()
	r := api.KeyRotation{Done: !st.Secrets.Turning()}
	if !r.Done {
		r.Waiting = st.Untaken()
	}
	return r, nil
}
