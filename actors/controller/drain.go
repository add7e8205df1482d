package controller

import (
	"time"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/state"
)

// giveUpUnitsOn gives up the units of a stopping node, except those that already end. The node ends them in
// any case, even without room elsewhere. They are granted anew after their end and do not count as failed. No
// room is reserved: the first unit that ends takes it.
func (c *Core) giveUpUnitsOn(now time.Time, node string) {
	for _, u := range c.unitsOn(node) {
		if a := c.apps[u.app]; u.canMove() && !u.m.Stopping && a != nil && a.isWanted(u.id) {
			c.giveUp(now, u, node)
		}
	}
}

// giveUp gives up a unit because one of its nodes stops.
func (c *Core) giveUp(now time.Time, u *unit, node string) {
	u.reserved = nil
	c.stepUnit(now, u, state.Event{
		Kind: state.EvUnwant, Grace: c.grace(u),
		Reason: "node " + node + " is stopping",
	})
}

// moveOffDraining ends units on draining nodes that find room elsewhere, one ready unit at a time per
// application. It waits for the answers of the RankAssigner, which may be giving that room away.
func (c *Core) moveOffDraining(now time.Time) {
	c.movesWait = false
	for _, u := range c.units {
		c.movesWait = c.movesWait || u.isAssigning()
	}
	if c.movesWait {
		return
	}
	draining := map[string]*state.Node{}
	for id, n := range c.state.Nodes {
		if n.Draining && !n.Lost {
			draining[id] = n
		}
	}
	for _, u := range c.units {
		u.stayReason = ""
	}
	if len(draining) == 0 {
		return
	}
	for _, id := range c.unitIDs() {
		u := c.units[id]
		a := c.apps[u.app]
		if n := u.drainingNode(draining); n != nil && a != nil && a.spec != nil && a.isWanted(id) {
			c.moveUnit(now, a, u, n)
		}
	}
}

// drainingNode is the draining node that the unit has ranks on and can leave now; nil if there is none.
func (u *unit) drainingNode(draining map[string]*state.Node) *state.Node {
	if u.hasUnreportedPart() || u.m.Stopping || !u.canMove() {
		return nil
	}
	for _, id := range u.nodes {
		if n := draining[id]; n != nil && !u.parts[id].gone {
			return n
		}
	}
	return nil
}

// canMove is false for a unit that ends or has ended: it starts elsewhere without a move.
func (u *unit) canMove() bool {
	switch u.m.Phase {
	case state.Starting, state.Ready, state.Draining:
		return true
	default:
		return u.m.Phase == state.Fenced && u.m.Attach
	}
}

// moveUnit ends a unit on a draining node, or notes why it stays.
func (c *Core) moveUnit(now time.Time, a *application, u *unit, n *state.Node) {
	late := n.DrainBy > 0 && !now.Before(time.UnixMilli(n.DrainBy))
	if u.m.Phase == state.Ready && !late {
		if other := c.unitInTransit(a, u); other != "" {
			u.stayReason = "waits on draining node " + n.ID + " until " + other + " is ready"
			return
		}
	}
	to, noRoom := c.placeElsewhere(now, u)
	if to == nil {
		u.stayReason = "stays on draining node " + n.ID + ": " + noRoom
		return
	}
	u.reserved = to
	c.stepUnit(now, u, state.Event{
		Kind: state.EvUnwant, Grace: c.moveGrace(now, u, n),
		Reason: "node " + n.ID + " is being drained",
	})
}

// unitInTransit names another unit of the application that is starting or ending; "" = none. Failed units and
// units without room do not count.
func (c *Core) unitInTransit(a *application, but *unit) string {
	for i := range a.units {
		id := a.units[i].ID
		u := c.units[id]
		switch {
		case u == but:
		case u == nil, u.hasUnreportedPart():
			return id
		case u.m.Phase != state.Ready && u.m.Phase != state.Failed && u.noRoom == "":
			return id
		}
	}
	return ""
}

// placeElsewhere returns the seats that the unit would get if it ended now; else why it would get none.
func (c *Core) placeElsewhere(now time.Time, u *unit) (to *state.UnitGrant, noRoom string) {
	grant, why := rankassigner.Place(c.state, c.groupRequest(now, []*unit{u}), nil)
	if len(grant.Units) == 0 {
		return nil, why[u.id]
	}
	return &grant.Units[0], ""
}

// moveGrace is how long running streams of a moving unit may continue.
func (c *Core) moveGrace(now time.Time, u *unit, n *state.Node) time.Duration {
	if n.DrainBy > 0 {
		return max(0, time.UnixMilli(n.DrainBy).Sub(now))
	}
	return c.grace(u)
}
