package controller

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// Drain begins to move what a node has to other nodes. by is when running streams are cut; zero = each application's
// graceful_shutdown_timeout_s. Errors: state.ErrUnknownNode.
func (c *Controller) Drain(ctx context.Context, node string, by time.Time) error {
	d := &state.DrainNode{Node: node}
	if !by.IsZero() {
		d.By = by.UnixMilli()
	}
	return c.tell1(ctx, state.Command{DrainNode: d})
}

// Undrain lets a node have ranks again. What is on its way elsewhere goes there.
func (c *Controller) Undrain(ctx context.Context, node string) error {
	return c.tell1(ctx, state.Command{DrainNode: &state.DrainNode{Node: node, Undo: true}})
}

// Remove forgets a node for good. Errors: state.ErrUnitsLeft while a living node has ranks, state.ErrLastControl,
// state.ErrUnknownNode.
func (c *Controller) Remove(ctx context.Context, node string) error {
	return c.tell1(ctx, state.Command{RemoveNode: &state.RemoveNode{Node: node, Now: c.cfg.Clock().UnixMilli()}})
}

func (c *Controller) tell1(ctx context.Context, cmd state.Command) error {
	if _, err := c.cfg.Proposer.Propose(ctx, cmd); err != nil {
		return err
	}
	return c.catchUp(ctx, nil, nil)
}

// leaveNode gives up the units of a node that stops, but those that end already: such a node ends what it has in any case, room
// elsewhere or not. What has ended is granted anew, without counting as failed. No room is kept free for what still drains: the
// first one that ends takes it.
func (c *Core) leaveNode(now time.Time, node string) {
	for _, u := range c.partsOn(node) {
		if a := c.apps[u.app]; u.canMove() && !u.m.Stopping && a != nil && a.wants(u.id) {
			c.leave(now, u, node)
		}
	}
}

// leave gives up a unit because a node of it stops.
func (c *Core) leave(now time.Time, u *unit, node string) {
	u.away = nil
	c.feed(now, u, state.Event{Kind: state.EvUnwant, Grace: c.grace(u), Reason: "node " + node + " is stopping"})
}

// moveAway ends units on draining nodes that find room elsewhere: per application one ready unit at a time.
func (c *Core) moveAway(now time.Time) {
	draining := map[string]*state.Node{}
	for id, n := range c.state.Nodes {
		if n.Draining && !n.Lost {
			draining[id] = n
		}
	}
	for _, u := range c.units {
		u.stays = ""
	}
	if len(draining) == 0 {
		return
	}
	for _, id := range c.ids() {
		u := c.units[id]
		a := c.apps[u.app]
		if n := u.mustLeave(draining); n != nil && a != nil && a.spec != nil && a.wants(id) {
			c.move(now, a, u, n)
		}
	}
}

// mustLeave is the draining node that the unit lies on and can leave now, nil if there is none.
func (u *unit) mustLeave(draining map[string]*state.Node) *state.Node {
	if u.unsure() || u.m.Stopping || !u.canMove() {
		return nil
	}
	for _, id := range u.nodes {
		if n := draining[id]; n != nil && !u.parts[id].gone {
			return n
		}
	}
	return nil
}

// canMove is false for a unit that ends, or has ended: it starts again elsewhere by itself.
func (u *unit) canMove() bool {
	switch u.m.Phase {
	case state.Starting, state.Ready, state.Draining:
		return true
	default:
		return u.m.Phase == state.Fenced && u.m.Attach
	}
}

// move ends a unit on a draining node, or notes why it stays.
func (c *Core) move(now time.Time, a *application, u *unit, n *state.Node) {
	late := n.DrainBy > 0 && !now.Before(time.UnixMilli(n.DrainBy))
	if u.m.Phase == state.Ready && !late {
		if other := c.inTransit(a, u); other != "" {
			u.stays = "waits on draining node " + n.ID + " until " + other + " is ready"
			return
		}
	}
	to, err := c.roomFor(u)
	if err != nil {
		u.stays = "stays on draining node " + n.ID + ": " + explain(err)
		return
	}
	u.away = to
	c.feed(now, u, state.Event{Kind: state.EvUnwant, Grace: c.graceOfMove(now, u, n), Reason: "node " + n.ID + " is being drained"})
}

// inTransit names another unit of the application that is on its way up or down; "" = none. Failed units and those without room
// are not on their way.
func (c *Core) inTransit(a *application, but *unit) string {
	for i := range a.units {
		id := a.units[i].ID
		u := c.units[id]
		switch {
		case u == but:
		case u == nil, u.unsure():
			return id
		case u.m.Phase != state.Ready && u.m.Phase != state.Failed && u.noRoom == "":
			return id
		}
	}
	return ""
}

// roomFor is where the unit would go if it ended now.
func (c *Core) roomFor(u *unit) (*seat, error) {
	us := []*unit{u}
	p, err := placement.Place(c.overlay(us, nil), []placement.Group{c.groupOf(us, nil)})
	if err != nil {
		return nil, err
	}
	to := &seat{}
	to.fill(ranksOf(&p.Groups[0]), &p.Groups[0])
	return to, nil
}

// graceOfMove is how long running streams of a unit that moves may go on.
func (c *Core) graceOfMove(now time.Time, u *unit, n *state.Node) time.Duration {
	if n.DrainBy > 0 {
		return max(0, time.UnixMilli(n.DrainBy).Sub(now))
	}
	return c.grace(u)
}
