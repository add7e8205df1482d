package controller

import (
	"cmp"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

const (
	// delayPart of lease_ttl is how long a report may be on its way. One that is older than the last by less was overtaken by it; one
	// that is older by more comes from a clock that was set back.
	delayPart = 2
	// maxPast bounds the memory of a node's earlier processes.
	maxPast = 16
)

// renew takes a node's report and answers with a lease.
func (c *Core) renew(now time.Time, r *msg.NodeReport) RenewEffect {
	out := RenewEffect{Node: r.Node.ID}
	if c.state == nil {
		out.Err = problem.New(problem.Unavailable, "renew the lease of node %s: this leader is not ready", r.Node.ID).WithHint("try again in a second")
		return out
	}
	n := c.state.Nodes[r.Node.ID]
	if n == nil || n.UID != r.Node.UID {
		out.Err = stranger(c.state, &r.Node, n)
		return out
	}
	p := c.peers[n.ID]
	if out.Err = c.follows(now, p, r); out.Err != nil {
		return out
	}
	c.still = c.still && p.stopping == r.Stopping
	p.follow(now, r)
	p.node = r.Node.ReadableAt(c.state.ControlLevel())
	p.compare(n)
	if p.stopping && !n.Lost {
		c.leaveNode(now, n.ID) // first: what the report says has ended did not fail
	}
	c.hear(now, p, r)
	if n.Lost {
		p.returned, c.still = c.empty(r), false
		out.Err = problem.New(problem.Unavailable, "renew the lease of node %s: it was taken for lost (%s); it is back when nothing of before is left there",
			n.ID, n.Reason).WithHint("try again in a moment")
		return out
	}
	p.losing = false
	c.still = c.still && !p.changed
	c.leases.Seen(n.ID, now)
	out.Lease = msg.Lease{TTL: c.timers.LeaseTTL, Taken: taken(r), Index: c.state.Index}
	if slices.Contains(r.Node.Roles, state.RoleIngress) {
		out.Lease.Waiting = c.waiting
	}
	return out
}

// empty says whether nothing is left on a node that was lost: its slots and devices were given up, so what it has is not wanted, and
// nothing may be placed beside it.
func (c *Core) empty(r *msg.NodeReport) bool {
	empty := true
	for _, e := range r.Units {
		if e.Kind == msg.UnitGone {
			continue
		}
		empty, e.Node = false, r.Node.ID
		if runs(e.Kind) || e.Kind == msg.UnitPresent {
			c.supersede(&e)
		}
	}
	return empty
}

// stranger is why a node has no lease here.
func stranger(s *state.State, said, holder *state.Node) error {
	switch {
	case slices.Contains(s.Removed, said.UID):
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID, state.ErrNodeRemoved).
			WithHint("join again with a new --data-dir and a new token")
	case holder != nil:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID, state.ErrNodeTaken).
			WithHint("another machine has this name: join again under another --node-id")
	default:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID, state.ErrUnknownNode).
			WithHint("join again: dpserve join ADDR --token TOKEN")
	}
}

// follows refuses reports that were overtaken: from a moment before the last one, or from a process that was replaced. If the
// present process is silent for its whole lease, anything it is replaced by will do.
func (c *Core) follows(now time.Time, p *peer, r *msg.NodeReport) error {
	late := r.Wall.Before(p.wall) && p.wall.Sub(r.Wall) < c.timers.LeaseTTL/delayPart
	replaced := slices.Contains(p.past, r.Incarnation) && c.leases.Left(r.Node.ID, now) > 0
	if !late && !replaced {
		return nil
	}
	return problem.New(problem.Conflict, "renew the lease of node %s: a later report of it was taken already", r.Node.ID).
		WithHint("if two machines run copies of one data dir, stop one")
}

// follow notes who reported what of itself.
func (p *peer) follow(now time.Time, r *msg.NodeReport) {
	if p.process != r.Incarnation && p.process != 0 {
		p.past = append(p.past, p.process)
		p.past = p.past[max(0, len(p.past)-maxPast):]
	}
	p.process, p.node, p.wall, p.trouble, p.seen = r.Incarnation, r.Node, r.Wall, r.Trouble, now
	p.stopping, p.afterStop = r.Stopping, r.AfterStop
}

// taken is the number up to which a report's events need not be sent again: all of them, as nothing behind this can lose one that
// the digest does not bring back.
func taken(r *msg.NodeReport) uint64 {
	var n uint64
	for i := range r.Events {
		n = max(n, r.Events[i].Number)
	}
	return n
}

// hear takes a report's events, then its digest, and what follows from it: what is not in it is not there.
func (c *Core) hear(now time.Time, p *peer, r *msg.NodeReport) {
	has := make(map[string]uint64, len(r.Units))
	for _, e := range r.Events {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		c.report(now, p.process, &e)
	}
	for _, e := range r.Units {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		switch {
		case e.Kind == msg.UnitPresent:
			c.present(p.process, &e)
		case !c.report(now, p.process, &e):
			c.orphan(&e)
		}
	}
	for _, u := range c.partsOn(r.Node.ID) {
		part := u.parts[r.Node.ID]
		if has[u.id] < u.m.Epoch {
			c.missing(now, u, r.Node.ID, part, p.process)
		} else {
			part.missed = time.Time{}
		}
	}
}

// partsOn are the units, in order, that have a part on a node.
func (c *Core) partsOn(node string) []*unit {
	var out []*unit
	for _, u := range c.units {
		if p := u.parts[node]; p != nil && !p.gone {
			out = append(out, u)
		}
	}
	slices.SortFunc(out, func(a, b *unit) int { return cmp.Compare(a.id, b.id) })
	return out
}

// missing follows from a node that does not have its part of a unit. One that never had it is told again, and so is one that may
// still get an order to start it from an earlier leader: to start it, or, by the resend timer, to stop it.
func (c *Core) missing(now time.Time, u *unit, node string, p *part, process uint64) {
	switch {
	case p.adopted && !u.m.WasReady:
		if !p.absent && u.m.Phase == state.Starting {
			p.absent = true
			c.startOn(u, node)
		}
	case p.adopted, p.started && p.process != process:
		c.endedWith(now, u, node)
	case p.started && p.missed.IsZero():
		p.missed = now // or this report was overtaken
	case p.started && now.Sub(p.missed) >= c.timers.LeaseTTL/delayPart:
		c.goneFrom(now, u, node, state.Event{Epoch: u.m.Epoch, Reason: "node " + node + " has it no more", WasReady: u.m.WasReady})
	}
}
