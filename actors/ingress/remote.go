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
	// Send returns when the engine's header has arrived, or when no answer will come; d's memory is the
	// caller's again then. If err is nil, reply is a refusal or resp is the answer. If err is not nil, there
	// is no answer: err is one of msg.Dispatch's errors, or the engine broke off. The caller returns the
	// ticket of reply, which has no Target. If ctx ends before the admission, no ticket remains.
	Send(ctx context.Context, d *msg.Dispatch) (resp *http.Response, reply msg.AdmitReply, err error)
}

// remoteGrace is added to the first token's time for a rank of another node, so that the other node reports
// the timeout first.
const remoteGrace = 500 * time.Millisecond

// tryRemote is tryRank for a rank of another node: admission and exchange are one request to its data port.
// The other node bounds the wait for the ticket.
func (req *request) tryRemote(ctx context.Context, rk *rank) result {
	due := req.firstTokenDue()
	req.timer.arm(time.Now(), due.Add(remoteGrace), errFirstToken)
	d := req.newDispatch(rk, req.route.Path())
	d.Header, d.Body, d.FirstToken = req.header, req.engineBody, max(time.Until(due), time.Millisecond)
	resp, rep, err := req.in.remote.Send(ctx, d)
	req.timer.pause()
	if d.Resent {
		req.app.router.metrics.Load().Attempt("keepalive_resend", "free")
	}
	switch {
	case rep.Refusal != msg.Granted:
		return req.endRefused(ctx, rep, refusedAs(rep.Refusal))
	case rep.Ticket.ID == 0: // not admitted, or given back already
		req.undoPick()
		return req.exchangeFailure(ctx, err)
	}
	req.recordTicket(&rep.Ticket)
	res := result{cause: causeDrained} // the result if exchange panics
	defer func() { req.returnTicket(&res) }()
	if err != nil {
		res = req.exchangeFailure(ctx, err)
		return res
	}
	defer closeBody(resp)
	res = req.relay(ctx, resp)
	return res
}

// newDispatch names the rank and contains the request's Admit.
func (req *request) newDispatch(rk *rank, path string) *msg.Dispatch {
	m := &msg.Admit{}
	req.fillAdmit(m, rk)
	return &msg.Dispatch{Node: rk.node, App: req.app.app.Name, Unit: rk.unit, Rank: rk.id, Path: path,
		Admit: m}
}

// exchangeFailure returns the result of an exchange that brought no byte of an answer.
func (req *request) exchangeFailure(ctx context.Context, err error) result {
	switch {
	case ctx.Err() != nil:
		return result{cause: contextCause(ctx), err: err}
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

// admitRemote asks a rank of another node for a ticket without a request. The ticket lives as long as life;
// ctx bounds the wait for it.
func (req *request) admitRemote(ctx, life context.Context, rk *rank) (msg.AdmitReply, cause) {
	life, cancel := context.WithCancelCause(life)
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	resp, rep, err := req.in.remote.Send(life, req.newDispatch(rk, ""))
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
		cause := req.exchangeFailure(life, err).cause
		cancel(errOver)
		return msg.AdmitReply{}, cause
	}
}
