package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// Requests that compute no tokens (/tokenize, /detokenize) take no ticket and count nowhere: neither in a rank's room nor as work in front
// of its prompts. Any ready rank answers them, full or not.

// pickUncounted finds a ready rank that has not failed the request, of this node if there is one. Without one the request waits like any
// other.
func (c *call) pickUncounted(ctx context.Context, last *result) (*rank, *failure) {
	if rk := c.entry.lane.anyReady(c.tried...); rk != nil {
		return rk, nil
	}
	rk, f := c.pickCounted(ctx, last)
	if f == nil {
		c.attempt.rank = rk
		c.undo() // the Router has counted it
	}
	return rk, f
}

// tryUncounted is the dispatch without a ticket.
func (c *call) tryUncounted(ctx context.Context, rk *rank) result {
	if rk.local {
		c.attempt.ticket = msg.Ticket{Target: rk.target}
		return c.exchange(ctx)
	}
	due := c.firstTokenDue()
	c.guard.arm(time.Now(), due.Add(remoteGrace), errFirstToken)
	resp, rep, err := c.in.remote.Send(ctx, &msg.Dispatch{
		Node: rk.node, App: c.entry.app.Name, Unit: rk.unit, Rank: rk.id, Path: c.route.Path(), Header: c.header, Body: c.send,
		FirstToken: max(time.Until(due), time.Millisecond),
	})
	c.guard.pause()
	switch {
	case rep.Refusal != msg.Granted:
		return result{cause: refusedAs(rep.Refusal)}
	case err != nil:
		return c.unanswered(ctx, err)
	}
	defer closeBody(resp)
	return c.relay(ctx, resp)
}
