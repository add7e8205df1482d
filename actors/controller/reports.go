package controller

import (
	"errors"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// report takes what a process of a node says of a unit: what is not older than the last, and only for the grant in hand. It says
// whether it is about that.
func (c *Core) report(now time.Time, process uint64, e *msg.UnitEvent) bool {
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || u.parts[e.Node] == nil {
		return false
	}
	if u.parts[e.Node].news(process, e.Number) {
		c.heard(now, u, e)
	}
	return true
}

// present takes the word of a newer node that it has a part of the grant in hand, and nothing else: what the unit does there is not
// known, so its phase stays. The event's number is not taken, as an earlier event that this version knows may still be on its way.
func (c *Core) present(process uint64, e *msg.UnitEvent) {
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || u.parts[e.Node] == nil {
		return
	}
	p := u.parts[e.Node]
	if p.process != process {
		p.process, p.number = process, 0
	}
	if !p.gone && (p.adopted || !p.started) {
		p.adopted, p.started, c.still = false, true, false
	}
}

// runs says whether a node with this news has processes of the unit.
func runs(k msg.UnitEventKind) bool {
	switch k {
	case msg.UnitStarted, msg.UnitReady, msg.UnitFenced, msg.UnitDraining:
		return true
	default:
		return false
	}
}

// orphan stops an old incarnation that came back: its epoch is not, or no longer, granted to this node.
func (c *Core) orphan(e *msg.UnitEvent) {
	if !runs(e.Kind) {
		return
	}
	if rec := c.state.Units[e.Unit]; rec != nil && rec.Epoch == e.Epoch && rec.Holds() && liesOn(rec, e.Node) {
		return // granted, and we have not been told yet
	}
	c.supersede(e)
}

func (c *Core) supersede(e *msg.UnitEvent) {
	c.emit(StopEffect{e.Node, &msg.StopRank{Unit: e.Unit, Epoch: e.Epoch, Reason: "superseded"}})
}

// heard sums the reports of the unit's nodes up: ready when all are, gone when all are, fenced with the first.
func (c *Core) heard(now time.Time, u *unit, e *msg.UnitEvent) {
	c.still = false
	p := u.parts[e.Node]
	p.adopted = false
	if p.gone && runs(e.Kind) {
		c.supersede(e) // it was taken for lost
		return
	}
	ev := state.Event{Epoch: e.Epoch, Reason: e.Reason, LogTail: e.LogTail, WasReady: e.WasReady}
	switch e.Kind {
	case msg.UnitStarted, msg.UnitReady:
		c.cameUp(now, u, p, e, ev)
	case msg.UnitFenced:
		p.started, p.ready, p.ended = true, false, !u.m.Attach
		ev.Kind, ev.Others = state.EvFenced, u.others(e.Node, isEnded)
		c.feed(now, u, ev)
	case msg.UnitKilling:
		p.started, p.ended = true, true
		ev.Kind, ev.Others = state.EvKilling, u.others(e.Node, isEnded)
		c.feed(now, u, ev)
	case msg.UnitDraining:
		p.started, p.draining = true, true
		ev.Kind, ev.Others = state.EvDraining, u.others(e.Node, isDraining)
		c.feed(now, u, ev)
	case msg.UnitGone:
		c.goneFrom(now, u, e.Node, ev)
	case msg.UnitPresent: // says nothing of the unit's phase: see present
	}
}

// cameUp takes a start or readiness. A node that is ready has started.
func (c *Core) cameUp(now time.Time, u *unit, p *part, e *msg.UnitEvent, ev state.Event) {
	p.started = true
	ev.Kind = state.EvStarted
	done := u.all(isStarted)
	if e.Kind == msg.UnitReady {
		p.ready = true
		ev.Kind, done = state.EvReady, u.all(isReady)
	}
	if done {
		c.feed(now, u, ev)
	}
}

// goneFrom notes that nothing of the unit is left on a node. The unit is gone with the last one; until then it is being killed.
func (c *Core) goneFrom(now time.Time, u *unit, node string, ev state.Event) {
	u.parts[node].end()
	ev.Kind = state.EvGone
	if !u.all(isGone) {
		ev.Kind, ev.Others = state.EvKilling, u.others(node, isEnded)
	}
	c.feed(now, u, ev)
}

// refuse takes a node's refusal to start: nothing runs there, and the start has failed. A start from before this leader led that
// the node has seen, and has no more, ended with the node's process.
func (c *Core) refuse(now time.Time, in Refused) {
	u := c.units[in.Unit]
	if u == nil || in.Epoch != u.m.Epoch || u.parts[in.Node] == nil || u.parts[in.Node].started {
		return
	}
	if p := c.peers[in.Node]; p != nil && errors.Is(in.Err, msg.ErrNodeStopping) {
		p.stopping = true // until a report says otherwise
		c.leave(now, u, in.Node)
	}
	if u.parts[in.Node].adopted && problem.CodeOf(in.Err) == problem.Conflict {
		c.endedWith(now, u, in.Node)
		return
	}
	c.goneFrom(now, u, in.Node, state.Event{Epoch: in.Epoch, Reason: "node " + in.Node + " refused: " + in.Err.Error()})
}

// endedWith takes a part for gone because the node's process that had it is no more. If that was not told to end, and the unit
// was starting, the start may be what ended it.
func (c *Core) endedWith(now time.Time, u *unit, node string) {
	ev := state.Event{Kind: state.EvLost, Epoch: u.m.Epoch, Reason: "dpserve was started again on node " + node, WasReady: u.m.WasReady}
	if p := c.peers[node]; p != nil {
		ev.Asked = p.afterStop
	}
	if u.others(node, isGone) {
		c.goneFrom(now, u, node, ev)
		return
	}
	u.parts[node].end()
	c.feed(now, u, ev)
}
