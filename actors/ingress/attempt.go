package ingress

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// attempt is one dispatch to a rank.
type attempt struct {
	router     *routing.Router
	rank       *rank
	ticket     msg.Ticket
	cancel     context.CancelCauseFunc
	start      time.Time
	firstToken time.Time
	reportedAt time.Time // last FirstToken or Progress

	prev, next   *attempt // in rank.attempts
	isTracked    bool
	hasFirstByte bool // guarded by appRouter.mu
}

// tryRank dispatches to rk and relays its answer. When it returns, the request no longer counts in the rank's
// load. If status is 0 and cutConn is false, the client has received nothing.
func (req *request) tryRank(parent context.Context, rk *rank) (res result) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(errOver)
	a := &req.attempt
	*a = attempt{router: a.router, rank: rk, cancel: cancel, start: time.Now()}
	req.usage, req.countedTokens, req.stream.tokens = openai.Usage{}, 0, 0
	req.timer.attach(cancel)
	defer req.timer.detach()
	if !req.app.router.trackAttempt(rk, a) {
		if req.route.Generates() {
			req.undoPick()
		}
		return result{cause: causeGone}
	}
	defer req.app.router.untrackAttempt(rk, a)
	q := req.newAsk(parent, rk)
	res = result{cause: causeDrained} // if the attempt panics
	defer func() {
		if a.ticket.ID != 0 {
			req.returnTicket(&res)
		}
	}()
	resp, reply, err := req.ask(ctx, rk, q)
	switch {
	case reply.Refusal != msg.Granted && q.Admit == nil:
		return result{cause: refusedAs(reply.Refusal)}
	case reply.Refusal != msg.Granted:
		return req.endRefused(ctx, reply)
	case err != nil:
		if q.Admit != nil && a.ticket.ID == 0 { // not admitted, or the ticket is given back already
			req.undoPick()
		}
		return req.askFailure(ctx, err)
	}
	defer closeBody(resp)
	return req.relay(ctx, resp)
}

// newAsk is the request for a rank. A request that computes no tokens (/tokenize, /detokenize) takes no
// ticket. It counts neither in a rank's room nor as work before its prompts. life bounds the life of the
// ticket: it is the context of the request and not of the attempt, which ends at the same moment as its
// ticket, and the DPServer would take that for an abandoned request.
func (req *request) newAsk(life context.Context, rk *rank) *rankleg.Request {
	q := &rankleg.Request{Rank: rk.Rank, Route: req.route, Header: req.header, Body: req.engineBody}
	if req.route == openai.NoRoute || req.route.Generates() {
		q.Admit, q.OnTicket = req.newAdmit(life, rk), req.recordTicket
	}
	return q
}

// remoteGrace is added to the first token's time for a rank of another node, so that the other node reports
// the timeout first.
const remoteGrace = 500 * time.Millisecond

// ask asks the rank. The first token's time for a near rank begins with its ticket, because Near bounds the
// wait for that.
func (req *request) ask(ctx context.Context, rk *rank, q *rankleg.Request) (
	*http.Response, msg.AdmitReply, error,
) {
	switch due := req.firstTokenDue(); {
	case !rk.local:
		q.FirstToken = max(time.Until(due), time.Millisecond)
		req.timer.arm(time.Now(), due.Add(remoteGrace), errFirstToken)
	case q.Admit == nil:
		req.timer.arm(time.Now(), due, errFirstToken)
	default:
		q.OnTicket = func(t *msg.Ticket) {
			req.recordTicket(t)
			req.timer.arm(time.Now(), due, errFirstToken)
		}
	}
	resp, reply, err := rk.asker.Ask(ctx, q)
	req.timer.pause()
	if q.Resent {
		req.app.router.metrics.Load().Attempt("keepalive_resend", "free")
	}
	if q.IsBodyShared {
		req.bodySettled = false
	}
	req.prompt.shared = req.prompt.shared || q.IsAdmitPending
	return resp, reply, err
}

// recordTicket stores the ticket, which the attempt must return from now on, and tells the Router.
func (req *request) recordTicket(t *msg.Ticket) {
	a := &req.attempt
	a.ticket = *t
	a.router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: a.rank.ID, ReqID: req.query.ID, Seq: t.Seq, Incarnation: t.Incarnation,
		Now: req.in.clock(),
	})
}

// endRefused removes a refused request from the rank's load. It first corrects the picture of a full rank, so
// that the undo wakes no request without reason. A rank answers "expired" both to a client that left and to a
// deadline; only the ingress can tell them apart.
func (req *request) endRefused(ctx context.Context, reply msg.AdmitReply) result {
	why := refusedAs(reply.Refusal)
	if why == causeExpired && ctx.Err() != nil {
		why = contextCause(ctx)
	}
	req.app.router.metrics.Load().Refusal(causePolicies[why].name)
	if why == causeFull {
		req.app.router.markFull(req.attempt.rank, reply.Seq)
	}
	req.undoPick()
	return result{cause: why}
}

// undoPick removes the request from the picked rank's load in the Router.
func (req *request) undoPick() {
	req.attempt.router.Observe(&routing.Event{
		Kind: routing.EvUndo, Rank: req.attempt.rank.ID,
		ReqID: req.query.ID, Now: req.in.clock(),
	})
}

// returnTicket returns the ticket to the rank, exactly once, with what the attempt shows about the engine.
func (req *request) returnTicket(res *result) {
	a, what := &req.attempt, causePolicies[res.cause]
	var first time.Duration
	if !a.firstToken.IsZero() {
		first = a.firstToken.Sub(a.start)
	}
	a.rank.Mailbox.Send(&msg.Done{
		TicketID: a.ticket.ID, Outcome: what.done, Cause: what.name,
		PromptTokens: req.usage.PromptTokens, CachedTokens: req.usage.CachedTokens,
		HasCached: req.usage.HasCached, CompletionTokens: req.outputTokens(),
		FirstToken: first, Trip: req.countsToTrip(res), Busy: what.busy, Probe: what.probe,
	})
	req.app.router.recordServiceTime(time.Since(a.start))
	req.recordTokens()
}

// outputTokens is the engine's count of output tokens, or the number of chunks if that is larger.
func (req *request) outputTokens() int { return max(req.usage.CompletionTokens, req.stream.tokens) }

// recordTokens adds the tokens to the metrics and updates the estimate of bytes per token.
func (req *request) recordTokens() {
	n := req.outputTokens()
	req.in.tokens.Add(uint64(max(n-req.countedTokens, 0)))
	req.countedTokens = max(n, req.countedTokens)
	if req.usage.PromptTokens == 0 && n == 0 {
		return
	}
	req.app.router.metrics.Load().Tokens(req.usage.PromptTokens, req.usage.CachedTokens, n)
	if req.query.Estimated {
		req.app.router.estimators[req.route].ObservePrompt(&req.scan, req.usage.PromptTokens)
	}
}

// relay sends the engine's answer to the client.
func (req *request) relay(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return req.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices:
		// Its Location is an internal address, to which clients would send the prompt.
		return result{cause: causeStatus, status: resp.StatusCode}
	case isStream(resp.Header):
		return req.relayStream(ctx, resp)
	default:
		return req.relayWhole(ctx, resp)
	}
}

// firstTokenDue is the deadline of the attempt's first token. An answer that is not streamed has no visible
// first token: its deadline is that of a stream with the same number of tokens.
func (req *request) firstTokenDue() time.Time {
	d := req.app.firstToken
	if req.route.Generates() && !req.scan.Stream {
		n := req.scan.MaxTokens
		if n < 0 || n > unknownTokens {
			n = unknownTokens
		}
		d += time.Duration(n) * req.app.between
	}
	return req.attempt.start.Add(d)
}

// readFailure returns the result of an attempt whose answer could not be read to its end.
func (req *request) readFailure(ctx context.Context, err error, begun bool) result {
	switch {
	case ctx.Err() != nil:
		why := contextCause(ctx)
		if (why == causeStalled || why == causeSilent) && !begun {
			why = causeFirstToken // the engine sent an empty delta and then nothing
		}
		return result{cause: why, err: err}
	case errors.Is(err, rankleg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case errors.Is(err, rankleg.ErrNoLease):
		return result{cause: causeUnitLost}
	case begun:
		return result{cause: req.lostStreamCause(), err: err}
	default:
		return result{cause: causeEmpty, err: err}
	}
}

// lostStreamCause distinguishes a drained rank from a failed one.
func (req *request) lostStreamCause() cause {
	if req.app.router.isDraining(req.attempt.rank) {
		return causeDrained
	}
	return causeUpstreamLost
}

func closeBody(resp *http.Response) {
	if err := resp.Body.Close(); err != nil {
		return // the outcome is decided, and the connection is not used again
	}
}

// countOutput counts output tokens of the stream.
func (req *request) countOutput(n int, now time.Time) {
	if req.attempt.firstToken.IsZero() {
		req.attempt.firstToken = now
	}
	req.in.tokens.Add(uint64(n)) //nolint:gosec // a count
	req.countedTokens += n
}

// reportProgress tells the rank that prefill is done, and later at intervals how many tokens the stream has.
// It runs after the write to the client, because a message wakes its receiver and the client should not wait
// for that. A stream that has ended needs no report: Done contains everything.
func (req *request) reportProgress(now time.Time) {
	a := &req.attempt
	switch {
	case a.firstToken.IsZero() || now.Sub(a.reportedAt) < progressEvery:
		return
	case a.reportedAt.IsZero():
		a.rank.Mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.firstToken})
	default:
		a.rank.Mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: req.stream.tokens})
	}
	a.reportedAt = now
}

func asBodyError(err error) (*openai.BodyError, bool) {
	var e *openai.BodyError
	ok := errors.As(err, &e)
	return e, ok
}

// newAdmit is the message that asks the rank's DPServer for a ticket.
func (req *request) newAdmit(life context.Context, rk *rank) *msg.Admit {
	m := &msg.Admit{
		Ctx: life, ReqID: req.query.ID, Epoch: rk.Epoch, Class: msg.ClassBoth, Tokens: req.query.Tokens,
		Estimated: req.query.Estimated, Deadline: req.deadline, Ingress: req.in.node,
		Session: routing.SessionKey(req.query.Session), Weight: req.scan.Choices,
		// a reservation has no HTTP request: its caller reports the end of prefill
		Whole: req.r != nil && !req.scan.Stream,
	}
	if req.prompt.lookedUp {
		m.Hit, m.Blocks, m.HitBlocks = req.query.HitOn(rk.ID), req.prompt.blocks,
			req.prompt.cachedPrefix(rk.ID)
	}
	return m
}

// askFailure returns the result of an attempt that brought no byte of an answer.
func (req *request) askFailure(ctx context.Context, err error) result {
	switch {
	case ctx.Err() != nil:
		return result{cause: contextCause(ctx), err: err}
	case errors.Is(err, rankleg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case errors.Is(err, rankleg.ErrFirstToken):
		return result{cause: causeFirstToken, err: err}
	case rankleg.IsRefused(err):
		return result{cause: causeRefused, err: err}
	case rankleg.IsMalformed(err):
		return result{cause: causeMalformed, err: err}
	default:
		return result{cause: causeReset, err: err}
	}
}

// pickUncounted returns a rank for a request that computes no tokens: any ready rank that has not failed it,
// full or not, of this node if there is one. If there is none, the request waits like any other.
func (req *request) pickUncounted(ctx context.Context, last *result) (*rank, *failure) {
	if rk := req.app.router.anyReadyRank(req.tried, req.refusedBy); rk != nil {
		return rk, nil
	}
	rk, f := req.pickCounted(ctx, last)
	if f == nil {
		req.attempt.rank = rk
		req.undoPick() // pickCounted has counted it
	}
	return rk, f
}
