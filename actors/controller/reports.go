package controller

import (
	"errors"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
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
	c.markPartGone(now, u, in.Node, state.Event{Epoch: in.Epoch,
		Reason: "node " + in.Node + " refused: " + in.Err.Error()})
}

// markEndedWithProcess marks a part as gone because the node's process that had it has ended. If that process
// was not told to end while the unit was starting, the start may be the cause.
func (c *Core) markEndedWithProcess(now time.Time, u *unit, node string) {
	ev := state.Event{Kind: state.EvLost, Epoch: u.m.Epoch,
		Reason: "dpserve was started again on node " + node, WasReady: u.m.WasReady}
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
