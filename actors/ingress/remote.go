package ingress

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engineleg"
)

// Remote reaches ranks of other nodes. *remote.DataClient implements it.
type Remote interface {
	// Send returns when the engine's header is there, or it is known that none comes. d's memory is the caller's again then.
	// Without an error reply refuses, or resp is the answer; with one there is no answer (the errors of msg.Dispatch; others
	// are an engine that broke off). A ticket that reply holds, always without a Target, is the caller's to give back. A
	// request that ctx ends earlier leaves none behind.
	Send(ctx context.Context, d *msg.Dispatch) (resp *http.Response, reply msg.AdmitReply, err error)
}

// remoteGrace is what the other node has on top of the first token's time, so that it is the one who says that the engine is late.
const remoteGrace = 500 * time.Millisecond

// tryRemote is try at a rank of another node: admission and exchange are one request to its data port. The other node bounds the
// wait for the ticket.
func (c *call) tryRemote(ctx context.Context, rk *rank) result {
	due := c.firstTokenDue()
	c.guard.arm(time.Now(), due.Add(remoteGrace), errFirstToken)
	d := c.dispatchTo(rk, c.route.Path())
	d.Header, d.Body, d.FirstToken = c.header, c.send, max(time.Until(due), time.Millisecond)
	resp, rep, err := c.in.remote.Send(ctx, d)
	c.guard.pause()
	if d.Resent {
		c.entry.lane.meter.Load().Attempt("keepalive_resend", "free")
	}
	switch {
	case rep.Refusal != msg.Granted:
		return c.turnedAway(ctx, rep, refusedAs(rep.Refusal))
	case rep.Ticket.ID == 0: // not admitted, or given back already
		c.undo()
		return c.unanswered(ctx, err)
	}
	c.granted(&rep.Ticket)
	res := result{cause: causeDrained} // what a panic leaves behind
	defer func() { c.done(&res) }()
	if err != nil {
		res = c.unanswered(ctx, err)
		return res
	}
	defer closeBody(resp)
	res = c.relay(ctx, resp)
	return res
}

// dispatchTo names the rank and what its admission has to know.
func (c *call) dispatchTo(rk *rank, path string) *msg.Dispatch {
	m := &msg.Admit{}
	c.admission(m, rk)
	return &msg.Dispatch{Node: rk.node, App: c.entry.app.Name, Unit: rk.unit, Rank: rk.id, Path: path, Admit: m}
}

// unanswered says what a failed exchange means: no byte of an answer came.
func (c *call) unanswered(ctx context.Context, err error) result {
	switch {
	case ctx.Err() != nil:
		return result{cause: ended(ctx), err: err}
	case errors.Is(err, msg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case errors.Is(err, msg.ErrFirstToken):
		return result{cause: causeFirstToken, err: err}
	case engineleg.Refused(err), errors.Is(err, msg.ErrEngineRefused):
		return result{cause: causeRefused, err: err}
	case engineleg.Malformed(err), errors.Is(err, msg.ErrMalformed):
		return result{cause: causeMalformed, err: err}
	default:
		return result{cause: causeReset, err: err}
	}
}

// hold asks a rank of another node for a ticket without a request: it lives as long as life. ctx ends the waiting for it.
func (c *call) hold(ctx, life context.Context, rk *rank) (msg.AdmitReply, cause) {
	life, cancel := context.WithCancelCause(life)
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	resp, rep, err := c.in.remote.Send(life, c.dispatchTo(rk, ""))
	switch waited := !stop(); {
	case err == nil && rep.Refusal == msg.Granted && !waited:
		context.AfterFunc(life, func() { closeBody(resp) })
		return rep, causeOK
	case err == nil && rep.Refusal != msg.Granted:
		cancel(errOver)
		return rep, refusedAs(rep.Refusal)
	default:
		if resp != nil {
			closeBody(resp)
		}
		cause := c.unanswered(life, err).cause
		cancel(errOver)
		return msg.AdmitReply{}, cause
	}
}
