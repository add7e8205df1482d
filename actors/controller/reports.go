package controller

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// applyEvent takes an event of one incarnation of a node, if it is newer than the last one and about the
// current grant. It returns whether it is about the current grant.
func (c *Core) applyEvent(now time.Time, process uint64, e *msg.UnitEvent) bool {
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || u.parts[e.Node] == nil {
		return false
	}
	if u.parts[e.Node].isNewer(process, e.Number) {
		c.applyNewEvent(now, u, e)
	}
	return true
}

// applyPresent takes the report of a newer node that it has a part of the current grant, in an unknown phase:
// the unit's phase stays. The event's number is not taken, because an earlier event that this version knows
// may still arrive.
func (c *Core) applyPresent(process uint64, e *msg.UnitEvent) {
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || u.parts[e.Node] == nil {
		return
	}
	p := u.parts[e.Node]
	if p.process != process {
		p.process, p.number = process, 0
	}
	if !p.gone && (p.adopted || !p.started) {
		p.adopted, p.started, c.noChange = false, true, false
	}
}

// isRunning reports whether a node with this event has processes of the unit.
func isRunning(k msg.UnitEventKind) bool {
	switch k {
	case msg.UnitStarted, msg.UnitReady, msg.UnitFenced, msg.UnitDraining:
		return true
	default:
		return false
	}
}

// stopOrphan stops an old incarnation of a unit whose epoch is not granted to this node.
func (c *Core) stopOrphan(e *msg.UnitEvent) {
	if !isRunning(e.Kind) {
		return
	}
	if rec := c.state.Units[e.Unit]; rec != nil && rec.Epoch == e.Epoch && rec.Holds() &&
		hasRankOn(rec, e.Node) {
		return // granted, but the answer has not arrived yet
	}
	c.stopSuperseded(e)
}

func (c *Core) stopSuperseded(e *msg.UnitEvent) {
	c.emit(StopEffect{e.Node, &msg.StopRank{Unit: e.Unit, Epoch: e.Epoch, Reason: "superseded"}})
}

// applyNewEvent combines the events of the unit's nodes: the unit is ready or gone when all parts are, and
// fenced with the first.
func (c *Core) applyNewEvent(now time.Time, u *unit, e *msg.UnitEvent) {
	c.noChange = false
	p := u.parts[e.Node]
	p.adopted = false
	if p.gone && isRunning(e.Kind) {
		c.stopSuperseded(e) // the node was declared lost
		return
	}
	ev := state.Event{Epoch: e.Epoch, Reason: e.Reason, LogTail: e.LogTail, WasReady: e.WasReady}
	switch e.Kind {
	case msg.UnitStarted, msg.UnitReady:
		c.markUp(now, u, p, e, ev)
	case msg.UnitFenced:
		p.started, p.ready, p.ended = true, false, !u.m.Attach
		ev.Kind, ev.Others = state.EvFenced, u.othersLack(e.Node, isEnded)
		c.stepUnit(now, u, ev)
	case msg.UnitKilling:
		p.started, p.ended = true, true
		ev.Kind, ev.Others = state.EvKilling, u.othersLack(e.Node, isEnded)
		c.stepUnit(now, u, ev)
	case msg.UnitDraining:
		p.started, p.draining = true, true
		ev.Kind, ev.Others = state.EvDraining, u.othersLack(e.Node, isDraining)
		c.stepUnit(now, u, ev)
	case msg.UnitGone:
		c.markPartGone(now, u, e.Node, ev)
	case msg.UnitPresent: // does not change the phase: see applyPresent
	}
}

// markUp takes a started or ready event. A ready node has started.
func (c *Core) markUp(now time.Time, u *unit, p *part, e *msg.UnitEvent, ev state.Event) {
	p.started = true
	ev.Kind = state.EvStarted
	done := u.allParts(isStarted)
	if e.Kind == msg.UnitReady {
		p.ready = true
		ev.Kind, done = state.EvReady, u.allParts(isReady)
	}
	if done {
		c.stepUnit(now, u, ev)
	}
}

// markPartGone notes that nothing of the unit is left on a node. The unit becomes Gone when every node has
// reported Gone; until then it stays Killing.
func (c *Core) markPartGone(now time.Time, u *unit, node string, ev state.Event) {
	u.parts[node].markGone()
	ev.Kind = state.EvGone
	if !u.allParts(isGone) {
		ev.Kind, ev.Others = state.EvKilling, u.othersLack(node, isEnded)
	}
	c.stepUnit(now, u, ev)
}

// applyRefusal takes a node's refusal to start: nothing runs there, and the start has failed. If the node
// refuses an epoch from before this leader because it has seen it, the unit ended with the node's process.
func (c *Core) applyRefusal(now time.Time, in Refused) {
	u := c.units[in.Unit]
	if u == nil || in.Epoch != u.m.Epoch || u.parts[in.Node] == nil || u.parts[in.Node].started {
		return
	}
	if p := c.peers[in.Node]; p != nil && errors.Is(in.Err, msg.ErrNodeStopping) {
		p.stopping = true // until a report says otherwise
		c.giveUp(now, u, in.Node)
	}
	if u.parts[in.Node].adopted && problem.CodeOf(in.Err) == problem.Conflict {
		c.markEndedWithProcess(now, u, in.Node)
		return
	}
	c.markPartGone(now, u, in.Node, state.Event{
		Epoch:  in.Epoch,
		Reason: "node " + in.Node + " refused: " + in.Err.Error(),
	})
}

// markEndedWithProcess marks a part as gone because the node's process that had it has ended. If that process
// was not told to end while the unit was starting, the start may be the cause.
func (c *Core) markEndedWithProcess(now time.Time, u *unit, node string) {
	ev := state.Event{
		Kind: state.EvLost, Epoch: u.m.Epoch,
		Reason: "dpserve was started again on node " + node, WasReady: u.m.WasReady,
	}
	if p := c.peers[node]; p != nil {
		ev.Asked = p.afterStop
	}
	if u.othersLack(node, isGone) {
		c.markPartGone(now, u, node, ev)
		return
	}
	u.parts[node].markGone()
	c.stepUnit(now, u, ev)
}

const (
	// delayPart of lease_ttl is the longest delay of a report. A report that is older than the last one by
	// less was overtaken; a report that is older by more comes from a clock that was set back.
	delayPart = 2
	// maxPast bounds the memory of a node's earlier incarnations.
	maxPast = 16
)

// renew takes a node's report and answers with a lease.
func (c *Core) renew(now time.Time, r *msg.NodeReport) RenewEffect {
	out := RenewEffect{Node: r.Node.ID}
	if c.state == nil {
		out.Err = problem.New(problem.Unavailable, "renew the lease of node %s: this leader is not ready",
			r.Node.ID).WithHint("try again in a second")
		return out
	}
	n := c.state.Nodes[r.Node.ID]
	if n == nil || n.UID != r.Node.UID {
		out.Err = leaseRefusal(c.state, &r.Node, n)
		return out
	}
	p := c.peers[n.ID]
	if out.Err = c.refuseOvertaken(now, p, r); out.Err != nil {
		return out
	}
	c.noChange = c.noChange && p.stopping == r.Stopping
	p.recordReport(now, r)
	p.node = r.Node.ReadableAt(c.state.ControlLevel())
	p.compareRecord(n)
	if p.stopping && !n.Lost {
		// before the report's events, so that units it ended do not count as failed
		c.giveUpUnitsOn(now, n.ID)
	}
	c.applyReport(now, p, r)
	if n.Lost {
		p.returned, c.noChange = c.stopLeftovers(r), false
		out.Err = problem.New(problem.Unavailable,
			"renew the lease of node %s: it was taken for lost (%s); it is back when nothing of before "+
				"is left there",
			n.ID, n.Reason).WithHint("try again in a moment")
		return out
	}
	p.losing = false
	c.noChange = c.noChange && !p.changed
	c.leases.Seen(n.ID, now)
	out.Lease = msg.Lease{TTL: c.timers.LeaseTTL, Taken: ackedEvent(r), Index: c.state.Index}
	if slices.Contains(r.Node.Roles, state.RoleIngress) {
		out.Lease.Waiting = c.waiting
	}
	return out
}

// stopLeftovers stops all processes on a node that was lost. Its slots and devices were released, so nothing
// may be placed there while they run. It returns true if nothing is left.
func (c *Core) stopLeftovers(r *msg.NodeReport) bool {
	empty := true
	for _, e := range r.Units {
		if e.Kind == msg.UnitGone {
			continue
		}
		empty, e.Node = false, r.Node.ID
		if isRunning(e.Kind) || e.Kind == msg.UnitPresent {
			c.stopSuperseded(&e)
		}
	}
	return empty
}

// leaseRefusal says why a node gets no lease.
func leaseRefusal(s *state.State, said, holder *state.Node) error {
	switch {
	case slices.Contains(s.Removed, said.UID):
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID,
			state.ErrNodeRemoved).
			WithHint("join again with a new --data-dir and a new token")
	case holder != nil:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID,
			state.ErrNodeTaken).
			WithHint("another machine has this name: join again under another --node-id")
	default:
		return problem.New(problem.PermissionDenied, "renew the lease of node %s: %w", said.ID,
			state.ErrUnknownNode).
			WithHint("join again: dpserve join ADDR --token TOKEN")
	}
}

// refuseOvertaken refuses reports that were overtaken: older than the last one, or from an incarnation that
// was replaced. If the current incarnation is silent for its whole lease, any other one may replace it.
func (c *Core) refuseOvertaken(now time.Time, p *peer, r *msg.NodeReport) error {
	late := r.Wall.Before(p.wall) && p.wall.Sub(r.Wall) < c.timers.LeaseTTL/delayPart
	replaced := slices.Contains(p.past, r.Incarnation) && c.leases.Left(r.Node.ID, now) > 0
	if !late && !replaced {
		return nil
	}
	return problem.New(problem.Conflict,
		"renew the lease of node %s: a later report of it was taken already", r.Node.ID).
		WithHint("if two machines run copies of one data dir, stop one")
}

// recordReport stores the incarnation and the record of a report.
func (p *peer) recordReport(now time.Time, r *msg.NodeReport) {
	if p.process != r.Incarnation && p.process != 0 {
		p.past = append(p.past, p.process)
		p.past = p.past[max(0, len(p.past)-maxPast):]
	}
	p.process, p.node, p.wall, p.warning, p.seen = r.Incarnation, r.Node, r.Wall, r.Trouble, now
	p.stopping, p.afterStop = r.Stopping, r.AfterStop
}

// ackedEvent is the highest event number to acknowledge. The leader acknowledges all: an event lost later is
// recovered from the next digest.
func ackedEvent(r *msg.NodeReport) uint64 {
	var n uint64
	for i := range r.Events {
		n = max(n, r.Events[i].Number)
	}
	return n
}

// applyReport applies the report's events, then its digest. A unit missing from the digest is not running on
// that node.
func (c *Core) applyReport(now time.Time, p *peer, r *msg.NodeReport) {
	has := make(map[string]uint64, len(r.Units))
	for _, e := range r.Events {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		c.applyEvent(now, p.process, &e)
	}
	for _, e := range r.Units {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		switch {
		case e.Kind == msg.UnitPresent:
			c.applyPresent(p.process, &e)
		case !c.applyEvent(now, p.process, &e):
			c.stopOrphan(&e)
		}
	}
	for _, u := range c.unitsOn(r.Node.ID) {
		part := u.parts[r.Node.ID]
		if has[u.id] < u.m.Epoch {
			c.handleMissingPart(now, u, r.Node.ID, part, p.process)
		} else {
			part.missingSince = time.Time{}
		}
	}
}

// unitsOn returns the units with a part on a node, in order.
func (c *Core) unitsOn(node string) []*unit {
	var out []*unit
	for _, u := range c.units {
		if p := u.parts[node]; p != nil && !p.gone {
			out = append(out, u)
		}
	}
	slices.SortFunc(out, func(a, b *unit) int { return cmp.Compare(a.id, b.id) })
	return out
}

// handleMissingPart handles a node that does not report its part of a unit. If the node never had the part,
// or may still get an earlier leader's order to start it, the leader sends the order again: to start it, or,
// by the resend timer, to stop it.
func (c *Core) handleMissingPart(now time.Time, u *unit, node string, p *part, process uint64) {
	switch {
	case p.adopted && !u.m.WasReady:
		if !p.absent && u.m.Phase == state.Starting {
			p.absent = true
			c.startOn(u, node)
		}
	case p.adopted, p.started && p.process != process:
		c.markEndedWithProcess(now, u, node)
	case p.started && p.missingSince.IsZero():
		p.missingSince = now // the report may have been overtaken
	case p.started && now.Sub(p.missingSince) >= c.timers.LeaseTTL/delayPart:
		c.markPartGone(now, u, node, state.Event{
			Epoch:  u.m.Epoch,
			Reason: "node " + node + " has it no more", WasReady: u.m.WasReady,
		})
	}
}
