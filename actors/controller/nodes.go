package controller

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// A leader that did nothing for longer than lease_ttl / frozenPart was frozen. It did not receive renewals,
// so it declares no node lost. A leader with nodes checks the leases tickPart times per lease_ttl.
const (
	frozenPart = 2
	tickPart   = 4
)

// withStoppingAsDraining returns s with nodes that stop or restart marked as draining, as placement must
// treat them. It does not change s.
func (c *Core) withStoppingAsDraining(s *state.State) *state.State {
	out := s
	for id, p := range c.peers {
		if n := s.Nodes[id]; (p.stopping || p.restarts) && n != nil && n.UID == p.uid {
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

func hasNewNode(old, s *state.State) bool {
	for id, n := range s.Nodes {
		if was := old.Nodes[id]; n.Takes() && (was == nil || was.UID != n.UID) {
			return true
		}
	}
	return false
}

// retryFailed tries failed units again, because there is a new node.
func (c *Core) retryFailed(now time.Time) {
	for _, id := range c.unitIDs() {
		if u := c.units[id]; u.m.Phase == state.Failed {
			c.stepUnit(now, u, state.Event{Kind: state.EvRedeploy})
		}
	}
}

func (c *Core) updatePeers(now time.Time) {
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
			c.emit(ForgetNodeEffect{id})
		}
	}
}

// checkLeases marks nodes with an expired lease as lost. If this process was suspended, or if this leader is
// the likelier fault, each node gets a new lease instead; in the second case the leader also hands over to
// another one.
func (c *Core) checkLeases(now time.Time) {
	if !c.lastStep.IsZero() && now.Sub(c.lastStep) > c.timers.LeaseTTL/frozenPart {
		c.prolongLeases(now)
	}
	c.lastStep = now
	over := c.leases.Overdue(now)
	if len(over) > 0 && c.isLeaderAtFault(now) {
		c.blamedAt, c.noChange = now, false
		c.prolongLeases(now)
		c.emit(StepDownEffect{Overdue: over})
		return
	}
	for _, id := range over {
		c.peers[id].losing, c.noChange = true, false
		c.leases.Forget(id)
	}
}

// isLeaderAtFault reports whether this leader is the likelier cause of the silence: its own node, or more
// than half of all nodes, are silent, or were until a moment ago. Only nodes that have renewed since this
// leader began, or since it last blamed itself, count, and none whose process is being replaced. Other nodes
// that said that they stop are left out. So each silence is held against one leader once, and nodes that are
// really gone are declared lost by the next leader, or by this one if no other can lead.
func (c *Core) isLeaderAtFault(now time.Time) bool {
	all, silent := 0, 0
	for id, p := range c.peers {
		if c.state.Nodes[id].Lost || p.stopping && id != c.Self {
			continue
		}
		all++
		long := c.timers.LeaseTTL / silentPart
		wasSilent := p.backAt.After(c.blamedAt) && now.Sub(p.backAt) < long
		isSilent := p.seen.After(c.blamedAt) && c.leases.Left(id, now) < long && !c.leases.IsKept(id, now)
		if isSilent || wasSilent {
			if id == c.Self {
				return true
			}
			silent++
		}
	}
	return 2*silent > all
}

// Stands reports whether a command may still be proposed. A renewal withdraws the loss of its node.
func (c *Core) Stands(e *ProposeEffect) bool {
	if e.Command.NodeLost == nil {
		return true
	}
	p := c.peers[e.Node]
	return p != nil && p.losing
}

func (c *Core) prolongLeases(now time.Time) {
	for id, p := range c.peers {
		if !c.state.Nodes[id].Lost {
			p.losing = false
			c.leases.Seen(id, now)
		}
	}
}

// addNodeDueTimes reports the times at which leases and commands about nodes need a tick.
func (c *Core) addNodeDueTimes(earlier func(time.Time)) {
	if due := c.leases.Due(); !due.IsZero() {
		earlier(due)
		earlier(c.lastStep.Add(c.timers.LeaseTTL / tickPart))
	}
	for id, p := range c.peers {
		if !p.busy && c.peerCommand(id) != nil {
			earlier(p.retryAt)
		}
		if by := time.UnixMilli(c.state.Nodes[id].DrainBy); by.After(c.lastStep) {
			earlier(by)
		}
	}
}

// peerCommand is the next command about a node; nil = none.
func (c *Core) peerCommand(id string) *state.Command {
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

func (c *Core) proposePeerCommands(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(c.peers)) {
		p := c.peers[id]
		if p.busy || now.Before(p.retryAt) {
			continue
		}
		if cmd := c.peerCommand(id); cmd != nil {
			p.busy = true
			c.emit(ProposeEffect{Node: id, Command: *cmd})
		}
	}
}

// nodeCommandDone takes the result of a command about a node. The state may show it a moment later.
func (c *Core) nodeCommandDone(now time.Time, in CommandDone) {
	p := c.peers[in.Node]
	if p == nil {
		return
	}
	p.busy, p.retryAt = false, now.Add(c.timers.Retry)
	if in.Err != nil && isTypedRefusal(in.Err) && p.changed {
		p.declined, p.why = reportedRecord(&p.node), in.Err.Error()
	}
	if in.Err == nil || isTypedRefusal(in.Err) {
		p.changed = false
	}
}

// nodeGoneReason says why nothing of a unit is left on a node; "" = the node is there.
func (c *Core) nodeGoneReason(id string) string {
	n := c.state.Nodes[id]
	switch {
	case n == nil:
		return "node " + id + " was removed"
	case n.Lost:
		return "node " + id + " is lost: " + n.Reason
	default:
		return ""
	}
}

// markLostParts marks the parts of units on lost nodes as gone.
func (c *Core) markLostParts(now time.Time) {
	for _, id := range c.unitIDs() {
		u := c.units[id]
		for _, n := range u.nodes {
			why := c.nodeGoneReason(n)
			if p := u.parts[n]; why != "" && !p.gone {
				p.markGone()
				c.stepUnit(now, u, state.Event{
					Kind: state.EvNodeLost, Reason: why, Others: u.othersLack(n, isGone),
				})
			}
		}
	}
}

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

// applyPresent takes the report of a node that it has a part of the current grant, in an unknown phase: the
// unit's phase stays. The event's number is not taken, because an earlier event that this version knows may
// still arrive. A new process of the node has found the engines of the former one, and has not heard what
// that one was told.
func (c *Core) applyPresent(now time.Time, process uint64, e *msg.UnitEvent) {
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || u.parts[e.Node] == nil {
		return
	}
	p := u.parts[e.Node]
	replaced := p.process != process && p.process != 0 && !p.gone
	if p.process != process {
		p.process, p.number = process, 0
	}
	if replaced {
		p.ready, p.draining, p.idle, p.ended = false, false, false, false
		c.stepUnit(now, u, state.Event{Kind: state.EvReturned, Epoch: e.Epoch})
	}
	if !p.gone && (p.adopted || !p.started) {
		p.adopted, p.started, c.noChange = false, true, false
	}
}

func isRunning(k msg.UnitEventKind) bool {
	return k != msg.UnitKilling && k != msg.UnitGone && k != msg.UnitPresent
}

// stopOrphan stops an old incarnation of a unit whose epoch is not granted to this node.
func (c *Core) stopOrphan(e *msg.UnitEvent) {
	if !isRunning(e.Kind) {
		return
	}
	if rec := c.state.Units[e.Unit]; rec != nil && rec.Epoch == e.Epoch && rec.Holds() && rec.IsOn(e.Node) {
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
	p.adopted, p.wasReady = false, p.wasReady || e.WasReady || e.Kind == msg.UnitReady
	if p.gone && isRunning(e.Kind) {
		c.stopSuperseded(e) // the node was declared lost
		return
	}
	ev := state.Event{
		Epoch: e.Epoch, Reason: e.Reason, LogTail: e.LogTail, Exit: e.Exit,
		WasReady: u.allParts(hasBeenReady),
	}
	switch e.Kind {
	case msg.UnitStarted, msg.UnitReady:
		c.markUp(now, u, p, e, ev)
	case msg.UnitFenced:
		u.noteFailure(e.Node)
		p.started, p.ready, p.ended = true, false, !u.m.Attach
		ev.Kind, ev.Others = state.EvFenced, u.othersLack(e.Node, isEnded)
		c.stepUnit(now, u, ev)
	case msg.UnitKilling:
		u.noteFailure(e.Node)
		p.started, p.ended = true, true
		ev.Kind, ev.Others, ev.Idle = state.EvKilling, u.othersLack(e.Node, isEnded), u.allParts(isIdle)
		c.stepUnit(now, u, ev)
	case msg.UnitDraining, msg.UnitIdle:
		wasIdle := p.idle // the answer to an order to stop repeats the event
		p.started, p.draining, p.idle = true, true, e.Kind == msg.UnitIdle
		ev.Kind, ev.Others = state.EvDraining, u.othersLack(e.Node, isDraining)
		ev.Idle = !wasIdle && p.idle && u.allParts(isIdle)
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
	u.noteFailure(node)
	u.parts[node].markGone()
	ev.Kind, ev.Taken, ev.Idle = state.EvGone, c.findsPortsTaken(u), u.allParts(isIdle)
	if !u.allParts(isGone) {
		ev.Kind, ev.Others = state.EvKilling, u.othersLack(node, isEnded)
	}
	c.stepUnit(now, u, ev)
}

// findsPortsTaken reports whether a node of the unit says that another program holds ports of its block. A
// node says so only after a start that has found them taken.
func (c *Core) findsPortsTaken(u *unit) bool {
	rec := c.state.Units[u.id]
	return rec != nil && slices.ContainsFunc(rec.Blocks, func(b state.Block) bool {
		p := c.peers[b.Node]
		return p != nil && p.node.Resources.HasTaken(b)
	})
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
		ev.Died = !ev.Asked
		c.markPartGone(now, u, node, ev)
		return
	}
	u.parts[node].markGone()
	c.stepUnit(now, u, ev)
}

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
	c.noChange = c.noChange && p.stopping == r.Stopping && p.restarts == (r.RestartGrace > 0)
	if !p.seen.IsZero() && now.Sub(p.seen) >= c.timers.LeaseTTL/silentPart && !c.leases.IsKept(n.ID, now) {
		p.backAt = now
	}
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
	c.keepGrants(now, r)
	c.noteLoads(now, r.Loads)
	out.Lease = msg.Lease{TTL: c.timers.LeaseTTL, Acked: ackedEvent(r), Index: c.state.Index}
	if slices.Contains(r.Node.Roles, state.RoleIngress) {
		out.Lease.Waiting = c.waiting
	}
	return out
}

// keepGrants waits for a node whose process is being replaced as long as it asks for. A new leader does not
// know that, and waits for one lease.
func (c *Core) keepGrants(now time.Time, r *msg.NodeReport) {
	if r.RestartGrace <= 0 {
		c.leases.Keep(r.Node.ID, time.Time{})
		return
	}
	c.leases.Keep(r.Node.ID, now.Add(r.RestartGrace))
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

// applyReport applies the report's events, then its list of units. A unit that is not in the list is not
// running on that node, nor is one that the node has at a later epoch: a grant by voters that were lost
// (state.Recover).
func (c *Core) applyReport(now time.Time, p *peer, r *msg.NodeReport) {
	has := make(map[string]uint64, len(r.Units))
	for _, e := range r.Events {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		if e.Kind != msg.UnitPresent { // in the list it says enough
			c.applyEvent(now, p.process, &e)
		}
	}
	for _, e := range r.Units {
		e.Node, has[e.Unit] = r.Node.ID, max(has[e.Unit], e.Epoch)
		switch {
		case e.Kind == msg.UnitPresent:
			c.applyPresent(now, p.process, &e)
		case !c.applyEvent(now, p.process, &e):
			c.stopOrphan(&e)
		}
	}
	for _, u := range c.unitsOn(r.Node.ID) {
		part := u.parts[r.Node.ID]
		if has[u.id] != u.m.Epoch {
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
			Epoch: u.m.Epoch, Reason: "node " + node + " has it no more", WasReady: u.m.WasReady,
		})
	}
}
