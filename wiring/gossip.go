package wiring

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/cluster/membership"
	"github.com/dpserve/dpserve/cluster/nodeport"
	"github.com/dpserve/dpserve/state"
)

// metaEvery is how often the gossip is told how far this node's copy of the state has come.
const metaEvery = 10 * time.Second

// talk starts the gossip, which finds nodes that have moved and suspects silent ones. Without it the state's addresses and the
// leases are what there is: networks in memory have no packets and do without.
func (m *mesh) talk(ctx context.Context) error {
	n := m.n
	if n.cfg.Network != nil {
		return nil
	}
	key, err := membership.DeriveKey(m.files.GossipKey, n.ident.Cluster)
	if err != nil {
		return err
	}
	m.gossip, err = membership.New(ctx, membership.Config{
		Node: n.cfg.NodeID, Incarnation: random(), Meta: m.meta(), Bind: m.gossipAddress, Advertise: m.gossipAddress, Key: key,
		Seeds: m.gossipSeeds, Revoked: n.removed, Refused: func(r membership.Reason) { n.here.Refused("gossip_" + string(r)) },
		Timers: n.cfg.timers().gossip, Log: n.log.With(slog.String("room", "membership")),
	})
	if err != nil {
		return err
	}
	m.gossipAddress = m.gossip.Address()
	return m.gossip.Start()
}

func (m *mesh) meta() membership.Meta {
	n := m.n
	return membership.Meta{
		Cluster: n.ident.Cluster, UID: n.ident.UID, Address: m.address, Roles: n.cfg.Roles, Version: n.cfg.Version, Zone: n.cfg.Zone,
		Index: late{n}.State().Index,
	}
}

// keepMeta tells the gossip how far this node's copy of the state has come, until ctx ends.
func (m *mesh) keepMeta(ctx context.Context) {
	tick := time.NewTicker(metaEvery)
	defer tick.Stop()
	for last := m.meta().Index; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if now := m.meta(); now.Index != last {
			last = now.Index
			if err := m.gossip.UpdateMeta(now); err != nil {
				m.n.log.Debug("the gossip took no news", slog.Any("err", err))
			}
		}
	}
}

// gossipSeeds are where other nodes should gossip.
func (m *mesh) gossipSeeds() []string {
	var out []string
	for _, rec := range m.n.peers() {
		if rec.UID != m.n.ident.UID && rec.Gossip != "" {
			out = append(out, rec.Gossip)
		}
	}
	return out
}

// moved gives a node's record with the address where it was seen, if that is newer: the state learns it from the leader.
func (m *mesh) moved(rec *state.Node) *state.Node {
	address, ok := m.sighted(rec.UID)
	if !ok || address == rec.Address {
		return rec
	}
	now := *rec
	now.Address = address
	return &now
}

// sightings is sighted of all nodes, by UID.
func (m *mesh) sightings() map[string]string {
	out := map[string]string{}
	if met := m.met.Load(); met != nil {
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

// sighted is where a node is, as the gossip says, or as the operator has said with a join.
func (m *mesh) sighted(uid string) (address string, ok bool) {
	if g, ok := m.seen(uid); ok && g.State == membership.Alive && g.Address != "" {
		return g.Address, true
	}
	if met := m.met.Load(); met != nil && met.UID == uid {
		return met.Address, true
	}
	return "", false
}

// meetEvery is the pause between two attempts to find out which node is at the address of a join.
const meetEvery = time.Second

// meet finds out which control node is at the address of a join with the data dir of a member: it may have moved there while this node
// was off. It is believed until ctx ends, when the state is there.
func (m *mesh) meet(ctx context.Context) {
	defer m.met.Store(nil)
	for warned := false; ; {
		c, err := m.port.Dial(ctx, nodeport.Renew, m.rejoin, "")
		if err == nil {
			m.met.Store(&state.Node{UID: c.Peer.UID, Address: m.rejoin})
			_ = c.Close() // it has said who it is
			<-ctx.Done()
			return
		}
		if !warned && ctx.Err() == nil {
			warned = true
			m.n.log.Info("the address of the join does not answer yet", slog.String("address", m.rejoin), slog.Any("err", err))
		}
		t := time.NewTimer(meetEvery)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// seen is the newest that the gossip knows of a node.
func (m *mesh) seen(uid string) (found membership.Member, ok bool) {
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

// sight adds what the gossip knows of a node to its status.
func (m *mesh) sight(s *msg.NodeStatus, rec *state.Node) {
	g, ok := m.seen(rec.UID)
	if ok && g.State == membership.Alive && g.LastSeen.After(s.LastSeen.Add(state.LeaseTTL/2)) {
		s.LastSeen, s.SeenBy = g.LastSeen, "gossip"
	}
}
