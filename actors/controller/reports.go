package controller

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// report takes what a node says of a unit: once per number, and only for the grant in hand.
func (c *Core) report(now time.Time, e *msg.UnitEvent) {
	s := c.seen[e.Node]
	if s == nil {
		s = &numbers{}
		c.seen[e.Node] = s
	}
	if !s.first(e.Number) {
		return
	}
	u := c.units[e.Unit]
	if u == nil || e.Epoch != u.m.Epoch || !u.on(e.Node) {
		c.orphan(e)
		return
	}
	c.heard(now, u, e)
}

// on says whether the node has a rank of the grant in hand.
func (u *unit) on(node string) bool {
	for i := range u.seat.ranks {
		if u.seat.ranks[i].Node == node {
			return true
		}
	}
	return false
}

// orphan stops an old incarnation that came back: its epoch is not, or no longer, granted to this node.
func (c *Core) orphan(e *msg.UnitEvent) {
	if c.state != nil && (e.Kind == msg.UnitStarted || e.Kind == msg.UnitReady) {
		c.emit(StopEffect{e.Node, &msg.StopRank{Unit: e.Unit, Epoch: e.Epoch, Reason: "superseded"}})
	}
}

// heard sums the reports of the unit's nodes up: ready when all are, gone when all are, fenced with the first.
func (c *Core) heard(now time.Time, u *unit, e *msg.UnitEvent) {
	ev := state.Event{Epoch: e.Epoch, Reason: e.Reason, LogTail: e.LogTail, WasReady: e.WasReady}
	switch e.Kind {
	case msg.UnitStarted:
		u.started[e.Node] = true
		if u.all(u.started) {
			ev.Kind = state.EvStarted
			c.feed(now, u, ev)
		}
	case msg.UnitReady:
		u.started[e.Node], u.ready[e.Node] = true, true
		if u.all(u.ready) {
			ev.Kind = state.EvReady
			c.feed(now, u, ev)
		}
	case msg.UnitFenced:
		u.ready[e.Node], u.ended[e.Node] = false, !u.m.Attach
		ev.Kind = state.EvFenced
		c.feed(now, u, ev)
	case msg.UnitKilling:
		u.ended[e.Node] = true
		ev.Kind = state.EvKilling
		c.feed(now, u, ev)
	case msg.UnitDraining:
		ev.Kind = state.EvDraining
		c.feed(now, u, ev)
	case msg.UnitGone:
		c.goneFrom(now, u, e.Node, ev)
	}
}

// goneFrom notes that nothing of the unit is left on a node. The unit is gone with the last one; until then it is being killed.
func (c *Core) goneFrom(now time.Time, u *unit, node string, ev state.Event) {
	u.ended[node], u.gone[node] = true, true
	ev.Kind = state.EvGone
	if !u.all(u.gone) {
		ev.Kind = state.EvKilling
	}
	c.feed(now, u, ev)
}

// refuse takes a node's refusal to start: nothing runs there, and the start has failed.
func (c *Core) refuse(now time.Time, in Refused) {
	u := c.units[in.Unit]
	if u == nil || in.Epoch != u.m.Epoch || !u.on(in.Node) {
		return
	}
	c.goneFrom(now, u, in.Node, state.Event{Epoch: in.Epoch, Reason: "node " + in.Node + " Refused: " + in.Err.Error()})
}
