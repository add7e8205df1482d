package controller

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// States of a node.
const (
	nodeAlive    = "alive"
	nodeSilent   = "silent" // no renewal for more than half of its lease
	nodeLost     = "lost"
	nodeDraining = "draining"
	nodeStopping = "stopping" // its process was told to end
	nodeDrained  = "drained"
	nodeUnknown  = "unknown" // no renewal under this leader
)

const (
	silentPart = 2 // of lease_ttl
	// skewNoted is the clock difference that users are told of: certificates and logs depend on the clocks.
	skewNoted  = time.Second
	seenLeader = "leader"
)

// Nodes returns the status of all nodes, in order. The caller fills in Voter and InFlight.
func (c *Controller) Nodes() []msg.NodeStatus {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Nodes(now, c.cfg.Self)
}

// Silence is the time since a node's last renewal, or since this leader began if the node has not renewed
// since.
type Silence struct {
	For  time.Duration
	Long bool // more than half of its lease: user requests do not wait for this node
}

// Silences returns the silence of every node that is not lost.
func (c *Controller) Silences() map[string]Silence {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Silences(now)
}

// Silences returns the silence of every node that is not lost.
func (c *Core) Silences(now time.Time) map[string]Silence {
	out := map[string]Silence{}
	if c.state == nil {
		return out
	}
	for id, n := range c.state.Nodes {
		if n.Lost {
			continue
		}
		heard := c.ledSince
		if p := c.peers[id]; p != nil && !p.seen.IsZero() {
			heard = p.seen
		}
		silent := now.Sub(heard)
		out[id] = Silence{For: silent, Long: silent > c.timers.LeaseTTL/silentPart}
	}
	return out
}

// Nodes returns the status of all nodes, in order. leader is the name of the leading node.
func (c *Core) Nodes(now time.Time, leader string) []msg.NodeStatus {
	if c.state == nil {
		return nil
	}
	out := make([]msg.NodeStatus, 0, len(c.state.Nodes))
	for _, id := range slices.Sorted(maps.Keys(c.state.Nodes)) {
		out = append(out, c.nodeStatus(now, c.state.Nodes[id], leader))
	}
	return out
}

func (c *Core) nodeStatus(now time.Time, n *state.Node, leader string) msg.NodeStatus {
	s := msg.NodeStatus{
		Node: n.ID, Address: n.Address, Zone: n.Zone, Version: n.Version, Leader: n.ID == leader,
		Slots: n.Offer.Slots, GPUs: len(n.Offer.Devices),
	}
	for _, r := range n.Roles {
		s.Roles = append(s.Roles, string(r))
	}
	c.addLoad(&s)
	p := c.peers[n.ID]
	if p != nil && !p.seen.IsZero() {
		s.LastSeen, s.SeenBy = p.seen, seenLeader
		s.LeaseLeftS = c.leases.Left(n.ID, now).Seconds()
		if !p.wall.IsZero() {
			s.SkewMs = p.wall.Sub(p.seen.Round(0)).Milliseconds()
		}
	}
	s.State, s.Reason = c.nodeState(now, n, p)
	s.Notes = c.nodeNotes(&s, p, leader)
	return s
}

// addLoad adds the resources that units use on the node.
func (c *Core) addLoad(s *msg.NodeStatus) {
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec := c.state.Units[id]
		if !rec.Holds() || !hasRankOn(rec, s.Node) {
			continue
		}
		if g := rec.App + "/" + strconv.Itoa(rec.Group); !slices.Contains(s.Groups, g) {
			s.Groups = append(s.Groups, g)
		}
		for i := range rec.Ranks {
			if r := &rec.Ranks[i]; r.Node == s.Node {
				s.Ranks++
				s.SlotsUsed += slotsOf(r)
				s.GPUsUsed += len(r.Devices)
			}
		}
	}
}

// nodeState is the state of a node, and its reason.
func (c *Core) nodeState(now time.Time, n *state.Node, p *peer) (word, reason string) {
	left := c.unitsOn(n.ID)
	switch {
	case n.Lost:
		return nodeLost, n.Reason
	case p != nil && p.stopping && !c.isSilent(now, p) && len(left) == 0:
		return nodeStopping, ""
	case p != nil && p.stopping && !c.isSilent(now, p):
		return nodeStopping, leftReason(left)
	case n.Draining && len(left) == 0:
		return nodeDrained, ""
	case n.Draining:
		return nodeDraining, leftReason(left)
	case p == nil || p.seen.IsZero():
		return nodeUnknown, "it has not renewed its lease since this leader leads"
	case c.isSilent(now, p):
		return nodeSilent, "it has not renewed its lease for " + now.Sub(p.seen).Round(time.Second).String()
	default:
		return nodeAlive, ""
	}
}

// isSilent reports whether the node has not renewed for more than half of its lease.
func (c *Core) isSilent(now time.Time, p *peer) bool {
	return now.Sub(p.seen) > c.timers.LeaseTTL/silentPart
}

// leftReason is the first reason why a unit is still on a draining or stopping node.
func leftReason(left []*unit) string {
	for _, u := range left {
		if u.stayReason != "" {
			return u.id + " " + u.stayReason
		}
	}
	return left[0].id + " is " + string(left[0].m.Phase)
}

// nodeNotes lists the warnings for the node's status.
func (c *Core) nodeNotes(s *msg.NodeStatus, p *peer, leader string) []string {
	var out []string
	if skew := time.Duration(s.SkewMs) * time.Millisecond; skew.Abs() > skewNoted {
		out = append(out, "its clock differs by "+skew.Round(time.Millisecond).String()+" from the leader's")
	}
	if l := c.state.Nodes[leader]; l != nil && l.Version != s.Version {
		out = append(out, "it runs version "+s.Version+", the leader "+l.Version)
	}
	if p == nil {
		return out
	}
	for _, why := range []string{p.why, p.warning} {
		if why != "" {
			out = append(out, why)
		}
	}
	return out
}
