package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// Requests that compute no tokens (/tokenize, /detokenize) take no ticket. They count neither in a rank's
// room nor as work before its prompts. Any ready rank answers them, full or not.

// pickUncounted returns a ready rank that has not failed the request, of this node if there is one. If there
// is none, the request waits like any other.
func (req *request) pickUncounted(ctx context.Context, last *result) (*rank, *failure) {
	if rk := req.app.router.anyReadyRank(req.tried...); rk != nil {
		return rk, nil
	}
	rk, f := req.pickCounted(ctx, last)
	if f == nil {
		req.attempt.rank = rk
		req.undoPick() // pickCounted has counted it
	}
	return rk, f
}

// tryUncounted is the dispatch without a ticket.
func (req *request) tryUncounted(ctx context.Context, rk *rank) result {
	if rk.local {
		req.attempt.ticket = msg.Ticket{Target: rk.target}
		return req.exchange(ctx)
	}
	due := req.firstTokenDue()
	req.timer.arm(time.Now(), due.Add(remoteGrace), errFirstToken)
	resp, rep, err := req.in.remote.Send(ctx, &msg.Dispatch{
		Node: rk.node, App: req.app.app.Name, Unit: rk.unit, Rank: rk.id, Path: req.route.Path(),
		Header: req.header, Body: req.engineBody,
		FirstToken: max(time.Until(due), time.Millisecond),
	})
	req.timer.pause()
	switch {
	case rep.Refusal != msg.Granted:
		return result{cause: refusedAs(rep.Refusal)}
	case err != nil:
		return req.exchangeFailure(ctx, err)
	}
	defer closeBody(resp)
	return req.relay(ctx, resp)
}
