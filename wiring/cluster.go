package wiring

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

var _ api.Nodes = (*backend)(nil)

// Nodes implements api.Nodes.
func (b *backend) Nodes(ctx context.Context) ([]msg.NodeStatus, error) {
	l, err := b.n.requireLeader()
	if err != nil {
		return b.n.nodesWithoutLeader(), nil //nolint:nilerr // show what this node knows
	}
	list := l.control.Nodes()
	inflight := map[string]int{}
	ranks, _, _ := b.n.collectStatus(ctx)
	for _, unit := range ranks {
		for i := range unit {
			inflight[unit[i].Node] += unit[i].InFlight
		}
	}
	for i := range list {
		s := &list[i]
		s.Leader, s.InFlight = s.Node == b.n.cfg.NodeID, inflight[s.Node]
		if rec := b.n.store.State().Nodes[s.Node]; rec != nil {
			s.Voter = b.n.isVoter(rec.UID)
			b.n.peering.addGossipView(s, rec)
		}
	}
	return list, nil
}

// nodesWithoutLeader returns what this node knows by itself: the last state, and the nodes that gossip sees.
func (n *Node) nodesWithoutLeader() []msg.NodeStatus {
	st := n.store.State()
	who := n.describeVoters()
	var out []msg.NodeStatus
	for _, id := range slices.Sorted(maps.Keys(st.Nodes)) {
		rec := st.Nodes[id]
		s := msg.NodeStatus{
			Node: id, State: "unknown", Reason: "no node leads; " + who, Address: rec.Address, Zone: rec.Zone,
			Version: rec.Version, Voter: n.isVoter(rec.UID), Slots: rec.Offer.Slots,
			GPUs: len(rec.Offer.Devices),
		}
		for _, r := range rec.Roles {
			s.Roles = append(s.Roles, string(r))
		}
		n.peering.addGossipView(&s, rec)
		if t := n.warning(); t != "" && rec.UID == n.ident.UID {
			s.Notes = append(s.Notes, t)
		}
		if s.SeenBy == "" && rec.UID != n.ident.UID {
			s.Reason = "not heard of, and " + s.Reason
		}
		out = append(out, s)
	}
	return out
}

// Drain implements api.Nodes.
func (b *backend) Drain(ctx context.Context, node string, deadline *time.Duration) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	var by time.Time
	if deadline != nil {
		by = time.Now().Add(*deadline)
	}
	return l.control.Drain(ctx, node, by)
}

// Undrain implements api.Nodes.
func (b *backend) Undrain(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return l.control.Undrain(ctx, node)
}

// Remove implements api.Nodes.
func (b *backend) Remove(ctx context.Context, node string) error {
	l, err := b.n.requireLeader()
	if err != nil {
		return err
	}
	return b.n.remove(ctx, l, node)
}

// CheckLeave implements api.Nodes.
func (b *backend) CheckLeave(ctx context.Context, node string) error {
	if _, err := b.n.requireLeader(); err != nil {
		return err
	}
	return b.n.checkLeave(ctx, node)
}

// NewToken implements api.Nodes.
func (b *backend) NewToken(ctx context.Context, req api.TokenRequest) (api.Token, error) {
	if b.n.peering == nil {
		return api.Token{}, problem.New(problem.Conflict, "this node stands alone: no other can join it").
			WithHint("start it with --advertise IP")
	}
	return b.n.newToken(ctx, req.TTL, req.Uses)
}

// newToken makes a join token. The cluster stores only its hash.
func (n *Node) newToken(ctx context.Context, ttl time.Duration, uses int) (api.Token, error) {
	authority := n.store.State().Secrets.Authority
	if len(authority) == 0 {
		return api.Token{}, n.errNotLeading()
	}
	t, err := pki.NewToken(authority)
	if err != nil {
		return api.Token{}, err
	}
	expires := time.Now().Add(ttl)
	put := &state.Token{Hash: t.Hash(), Expires: expires.UnixMilli(), Uses: uses}
	if _, err := n.store.Propose(ctx, state.Command{PutToken: put}); err != nil {
		return api.Token{}, err
	}
	return api.Token{Token: t.String(), Address: n.peering.address, Uses: uses, Expires: expires}, nil
}
