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

// rotateTimeout bounds one step of a rotation of the gossip key.
const rotateTimeout = 5 * time.Second

// keyringLeader wraps lease renewal: new gossip keys in the reply are installed before the next renewal
// reports them, and the ingress learns which units wait for resources.
type keyringLeader struct{ n *Node }

// Renew implements msg.Leader.
func (k keyringLeader) Renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	lease, err := k.n.leader.Renew(ctx, withNextVersionEvents(r))
	if in := k.n.readyIngress.Load(); err == nil && in != nil {
		in.TakeWaiting(lease.Waiting, lease.TTL)
	}
	if err == nil && len(lease.Keyring) > 0 && k.n.peering != nil {
		if err := k.n.peering.applyKeyring(lease.Keyring); err != nil {
			k.n.log.Warn("the gossip's new key cannot be taken, trying again", slog.Any("err", err))
		}
	}
	return lease, err
}

// applyKeyring accepts these keys, sends with the first one and saves it in the data dir.
func (m *peering) applyKeyring(ring [][]byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.setGossipKeys(ring); err != nil {
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

// setGossipKeys gives the gossip its keys. An in-memory network has no gossip.
func (m *peering) setGossipKeys(ring [][]byte) error {
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

// keyringSum identifies the keys of this node; "" before it has one.
func (m *peering) keyringSum() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return state.KeyringSum(m.keyring)
}

// continueKeyRotation takes the next step of a rotation once every node has taken the previous one. It
// returns false if there is nothing to do now.
func (n *Node) continueKeyRotation(ctx context.Context) bool {
	st := n.store.State()
	if !st.Secrets.Turning() || len(st.Untaken()) > 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, rotateTimeout)
	defer cancel()
	if err := n.rotateKey(ctx, st, nil); err != nil {
		n.log.Warn("the change of the gossip key did not go on, trying again", slog.Any("err", err))
		return false
	}
	return true
}

// rotateKey begins a rotation to the key next, or continues the one in st.
func (n *Node) rotateKey(ctx context.Context, st *state.State, next []byte) error {
	_, err := n.consensus.ProposeHere(ctx,
		state.Command{TurnKey: &state.TurnKey{From: state.KeyringSum(st.Secrets.Keyring()), Next: next}})
	return err
}

// RotateKey implements api.Nodes.
func (b *backend) RotateKey(ctx context.Context) error {
	if b.n.peering == nil {
		return problem.New(problem.Conflict, "this node stands alone: it does not gossip").
			WithHint("start it with --advertise IP")
	}
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.rotateKey(ctx, b.n.store.State(), newGossipKey())
}

func newGossipKey() []byte {
	key := make([]byte, state.GossipKeySize)
	_, _ = rand.Read(key) // never fails since Go 1.24
	return key
}

// KeyRotation implements api.Nodes.
func (b *backend) KeyRotation(context.Context) (api.KeyRotation, error) {
	if _, err := b.n.requireLeader(); err != nil {
		return api.KeyRotation{}, err
	}
	st := b.n.store.State()
	r := api.KeyRotation{Done: !st.Secrets.Turning()}
	if !r.Done {
		r.Waiting = st.Untaken()
	}
	return r, nil
}
