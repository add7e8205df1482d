package server

import (
	"bytes"
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// metaInterval is how often this node publishes the index of its copy of the state in its gossip metadata.
const metaInterval = 10 * time.Second

// startGossip starts the gossip, which finds nodes that have moved and suspects silent nodes. In-memory
// networks carry no packets and work without it, by the state's addresses and the leases.
func (m *peering) startGossip(ctx context.Context) error {
	n := m.n
	if n.cfg.Network != nil {
		return nil
	}
	key, err := membership.DeriveKey(m.files.GossipKey, n.ident.Cluster)
	if err != nil {
		return err
	}
	m.gossip, err = membership.New(ctx, membership.Config{
		Node: n.cfg.NodeID, Incarnation: randomUint64(), Meta: m.gossipMeta(), Bind: m.gossipAddress,
		Advertise: m.gossipAddress, Key: key,
		Seeds: m.gossipSeeds, Revoked: n.isRemoved,
		Refused: func(r membership.Reason) { n.nodeMetrics.Refused("gossip_" + string(r)) },
		Timers:  n.cfg.timers().gossip, Log: n.log.With(slog.String("room", "membership")),
	})
	if err != nil {
		return err
	}
	m.gossipAddress = m.gossip.Address()
	return m.gossip.Start()
}

func (m *peering) gossipMeta() membership.Meta {
	n := m.n
	return membership.Meta{
		Cluster: n.ident.Cluster, UID: n.ident.UID, Address: m.address, Roles: n.cfg.Roles,
		Version: n.cfg.Version, Zone: n.cfg.Zone,
		Index: deferredStore{n}.State().Index,
	}
}

// updateGossipMeta publishes the index of this node's copy of the state, until ctx ends.
func (m *peering) updateGossipMeta(ctx context.Context) {
	tick := time.NewTicker(metaInterval)
	defer tick.Stop()
	for last := m.gossipMeta().Index; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if now := m.gossipMeta(); now.Index != last {
			last = now.Index
			if err := m.gossip.UpdateMeta(now); err != nil {
				m.n.log.Debug("the gossip took no news", slog.Any("err", err))
			}
		}
	}
}

// gossipSeeds returns the gossip addresses of the other nodes.
func (m *peering) gossipSeeds() []string {
	var out []string
	for _, rec := range m.n.peers() {
		if rec.UID != m.n.ident.UID && rec.Gossip != "" {
			out = append(out, rec.Gossip)
		}
	}
	return out
}

// withLastAddress returns a node's record with the address where gossip saw it last. The state learns that
// address later, from the leader.
func (m *peering) withLastAddress(rec *state.Node) *state.Node {
	address, ok := m.lastAddress(rec.UID)
	if !ok || address == rec.Address {
		return rec
	}
	now := *rec
	now.Address = address
	return &now
}

// lastAddresses returns lastAddress of all nodes, by UID.
func (m *peering) lastAddresses() map[string]string {
	out := map[string]string{}
	if met := m.rejoinPeer.Load(); met != nil {
		out[met.UID] = met.Address
	}
	if m.gossip == nil {
		return out
	}
	newest := map[string]membership.Member{}
	for _, g := range m.gossip.Members() {
		if old, ok := newest[g.UID]; !ok || g.LastSeen.After(old.LastSeen) {
			newest[g.UID] = g
		}
	}
	for uid, g := range newest {
		if g.State == membership.Alive && g.Address != "" {
			out[uid] = g.Address
		}
	}
	return out
}

// lastAddress is a node's address as gossip reports it, or as the operator gave it with a join.
func (m *peering) lastAddress(uid string) (address string, ok bool) {
	if g, ok := m.gossipMember(uid); ok && g.State == membership.Alive && g.Address != "" {
		return g.Address, true
	}
	if met := m.rejoinPeer.Load(); met != nil && met.UID == uid {
		return met.Address, true
	}
	return "", false
}

// rejoinRetry is the pause between two attempts to identify the node at the address of a join.
const rejoinRetry = time.Second

// identifyRejoinPeer finds out which control node is at the address of a join with a member's data dir. That
// node may have moved there while this one was off. The result is used until ctx ends, when the state is
// there.
func (m *peering) identifyRejoinPeer(ctx context.Context) {
	defer m.rejoinPeer.Store(nil)
	for warned := false; ; {
		c, err := m.port.Dial(ctx, nodeport.Renew, m.rejoinAddress, "")
		if err == nil {
			m.rejoinPeer.Store(&state.Node{UID: c.Peer.UID, Address: m.rejoinAddress})
			_ = c.Close() // the handshake has identified the node
			<-ctx.Done()
			return
		}
		if !warned && ctx.Err() == nil {
			warned = true
			m.n.log.Info("the address of the join does not answer yet",
				slog.String("address", m.rejoinAddress), slog.Any("err", err))
		}
		t := time.NewTimer(rejoinRetry)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// gossipMember returns the newest gossip entry of a node.
func (m *peering) gossipMember(uid string) (found membership.Member, ok bool) {
	if m == nil || m.gossip == nil {
		return found, false
	}
	for _, g := range m.gossip.Members() {
		if g.UID == uid && (!ok || g.LastSeen.After(found.LastSeen)) {
			found, ok = g, true
		}
	}
	return found, ok
}

// addGossipView adds gossip's last sight of a node to its status.
func (m *peering) addGossipView(s *msg.NodeStatus, rec *state.Node) {
	g, ok := m.gossipMember(rec.UID)
	if ok && g.State == membership.Alive && g.LastSeen.After(s.LastSeen.Add(state.LeaseTTL/2)) {
		s.LastSeen, s.SeenBy = g.LastSeen, "gossip"
	}
}

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

// RotateKey implements api.Nodes.
func (b *backend) RotateKey(ctx context.Context) error {
	if b.n.peering == nil {
		return problem.New(problem.Conflict, "this node stands alone: it does not gossip").
			WithHint("start it with --advertise IP")
	}
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.upkeep.RotateKey(ctx)
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
