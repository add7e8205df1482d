package controller

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// A leader that did nothing for longer than its lease_ttl / frozenPart was frozen: it did not hear its nodes, so it says nothing
// about them. With nodes to watch it looks tickPart times per lease_ttl.
const (
	frozenPart = 2
	tickPart   = 4
)

// peer is what the core knows of a node beside its record.
type peer struct {
	uid     string
	process uint64     // the one that renewed last; 0 = none since this leader leads
	past    []uint64   // processes before it, the latest last
	node    state.Node // as it saw itself then
	wall    time.Time  // by its clock
	trouble string     // what people should know of it

	stopping  bool      // it says that it ends, or has refused a start because of that
	afterStop bool      // its process before this one was told to end
	seen      time.Time // by ours

	losing   bool // its lease is over and NodeLost is to be proposed
	returned bool // it was lost, and renews with nothing left of before
	changed  bool // its record is not what it says
	declined []byte
	why      string // why its record was not changed to declined

	busy    bool // a command about it is under way
	retryAt time.Time
}

// withoutStopping is s with the nodes that stop marked as draining: that is how placement treats them. s is not changed.
func (c *Core) withoutStopping(s *state.State) *state.State {
	out := s
	for id, p := range c.peers {
		if n := s.Nodes[id]; p.stopping && n != nil && n.UID == p.uid {
			if out == s {
				out = s.Clone()
			}
			marked := *n
			marked.Draining = true
			out.Nodes[id] = &marked
		}
	}
	return out
}

// nodesOf are the nodes that may be given ranks, in order.
func nodesOf(s *state.State) []placement.Node {
	var out []placement.Node
	for _, id := range slices.Sorted(maps.Keys(s.Nodes)) {
		if n := s.Nodes[id]; n.Takes() {
			out = append(out, placed(n))
		}
	}
	return out
}

// placed is a node as placement sees it.
func placed(n *state.Node) placement.Node {
	return placement.Node{
		ID: n.ID, Slots: n.Offer.Slots, Devices: n.Offer.Devices, Labels: n.Offer.Labels,
		Ports: placement.Ports{Lo: n.Offer.PortLo, Hi: n.Offer.PortHi},
	}
}

// joined says whether a node came that was not known before.
func joined(old, s *state.State) bool {
	for id, n := range s.Nodes {
		if was := old.Nodes[id]; n.Takes() && (was == nil || was.UID != n.UID) {
			return true
		}
	}
	return false
}

// retryFailed gives failed units another chance: there is a new node.
func (c *Core) retryFailed(now time.Time) {
	for _, id := range c.ids() {
		if u := c.units[id]; u.m.Phase == state.Failed {
			c.feed(now, u, state.Event{Kind: state.EvRedeploy})
		}
	}
}

// lookAtNodes brings the peers and their leases up to the state.
func (c *Core) lookAtNodes(now time.Time) {
	for id, n := range c.state.Nodes {
		p := c.peers[id]
		if p == nil || p.uid != n.UID {
			p = &peer{uid: n.UID}
			c.peers[id] = p
			c.leases.Forget(id)
		}
		switch {
		case n.Lost:
			p.losing = false
			c.leases.Forget(id)
		case p.losing:
		default:
			p.returned = false
			c.leases.Track(id, now)
		}
	}
	for id := range c.peers {
		if c.state.Nodes[id] == nil {
			delete(c.peers, id)
			c.leases.Forget(id)
		}
	}
}

// keepTime takes nodes whose lease is over for lost, unless this process itself did not run, or hears too little: then each gets one
// whole lease, and in the second case this node hands over to another leader, which hears for itself.
func (c *Core) keepTime(now time.Time) {
	if !c.last.IsZero() && now.Sub(c.last) > c.timers.LeaseTTL/frozenPart {
		c.thaw(now)
	}
	c.last = now
	over := c.leases.Overdue(now)
	if len(over) > 0 && c.hearsTooFew(now) {
		c.blamed, c.still = now, false
		c.thaw(now)
		c.emit(StepDownEffect{Overdue: over})
		return
	}
	for _, id := range over {
		c.peers[id].losing, c.still = true, false
		c.leases.Forget(id)
	}
}

// hearsTooFew says whether the silence of nodes speaks against this leader: its own node is silent, or more than half of all are. Only
// nodes that it has heard since it leads, or since it last blamed itself, count: their silence is new. So each silence is held
// against one leader once, and nodes that are truly gone are lost to the next leader, or to this one if nobody else could lead.
func (c *Core) hearsTooFew(now time.Time) bool {
	all, silent := 0, 0
	for id, p := range c.peers {
		if c.state.Nodes[id].Lost {
			continue
		}
		all++
		if p.seen.After(c.blamed) && c.leases.Left(id, now) < c.timers.LeaseTTL/silentPart {
			if id == c.Self {
				return true
			}
			silent++
		}
	}
	return 2*silent > all
}

// Stands says whether a command may still be proposed: a renewal withdraws the loss of its node.
func (c *Core) Stands(e *ProposeEffect) bool {
	if e.Command.NodeLost == nil {
		return true
	}
	p := c.peers[e.Node]
	return p != nil && p.losing
}

func (c *Core) thaw(now time.Time) {
	for id, p := range c.peers {
		if !c.state.Nodes[id].Lost {
			p.losing = false
			c.leases.Seen(id, now)
		}
	}
}

// dueOfNodes names the times at which leases and commands about nodes want a tick.
func (c *Core) dueOfNodes(earlier func(time.Time)) {
	if due := c.leases.Due(); !due.IsZero() {
		earlier(due)
		earlier(c.last.Add(c.timers.LeaseTTL / tickPart))
	}
	for id, p := range c.peers {
		if !p.busy && c.about(id) != nil {
			earlier(p.retryAt)
		}
		if by := time.UnixMilli(c.state.Nodes[id].DrainBy); by.After(c.last) {
			earlier(by)
		}
	}
}

// about is what raft should be told of a node; nil = nothing.
func (c *Core) about(id string) *state.Command {
	p, n := c.peers[id], c.state.Nodes[id]
	ref := &state.NodeRef{Node: id, UID: n.UID}
	switch {
	case n.Lost && p.returned:
		return &state.Command{NodeBack: ref}
	case !n.Lost && p.losing:
		ref.Reason = "silent for " + c.timers.Regrant.String()
		return &state.Command{NodeLost: ref}
	case !n.Lost && p.changed:
		return &state.Command{PutNode: &state.PutNode{Node: p.node}}
	default:
		return nil
	}
}

// tend proposes what raft should know of nodes.
func (c *Core) tend(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(c.peers)) {
		p := c.peers[id]
		if p.busy || now.Before(p.retryAt) {
			continue
		}
		if cmd := c.about(id); cmd != nil {
			p.busy = true
			c.emit(ProposeEffect{Node: id, Command: *cmd})
		}
	}
}

// answeredNode takes the outcome of a command about a node. The state that shows it may come a moment later.
func (c *Core) answeredNode(now time.Time, in Concluded) {
	p := c.peers[in.Node]
	if p == nil {
		return
	}
	p.busy, p.retryAt = false, now.Add(c.timers.Retry)
	if in.Err != nil && typedRefusal(in.Err) && p.changed {
		p.declined, p.why = record(&p.node), in.Err.Error()
	}
	if in.Err == nil || typedRefusal(in.Err) {
		p.changed = false
	}
}

// record is what a node says of itself, to be compared.
func record(n *state.Node) []byte {
	own := *n
	own.Lost, own.Reason, own.Draining, own.DrainBy, own.Key = false, "", false, 0, "" // not the node's to say
	own.Offer.Devices = append([]int(nil), n.Offer.Devices...)
	b, _ := json.Marshal(&own) // plain data
	return b
}

// compare notes whether a node's record is not what it says, unless it was refused to become that.
func (p *peer) compare(n *state.Node) {
	said := record(&p.node)
	switch {
	case bytes.Equal(said, record(n)):
		p.changed, p.declined, p.why = false, nil, ""
	default:
		p.changed = !bytes.Equal(said, p.declined)
	}
}

// gone is why nothing of a unit is left on a node; "" = the node is there.
func (c *Core) gone(id string) string {
	n := c.state.Nodes[id]
	switch {
	case len(c.state.Nodes) == 0:
		return "" // older than the records of nodes: theirs is on its way
	case n == nil:
		return "node " + id + " was removed"
	case n.Lost:
		return "node " + id + " is lost: " + n.Reason
	default:
		return ""
	}
}

// loseParts takes what units had on nodes that are lost for gone.
func (c *Core) loseParts(now time.Time) {
	for _, id := range c.ids() {
		u := c.units[id]
		for _, n := range u.nodes {
			why := c.gone(n)
			if p := u.parts[n]; why != "" && !p.gone {
				p.end()
				c.feed(now, u, state.Event{Kind: state.EvNodeLost, Reason: why, Others: u.others(n, isGone)})
			}
		}
	}
}

// liesOn says whether a unit has a rank on a node.
func liesOn(rec *state.Unit, node string) bool {
	return slices.ContainsFunc(rec.Ranks, func(r state.RankGrant) bool { return r.Node == node })
}
