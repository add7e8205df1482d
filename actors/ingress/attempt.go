package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/internal/engineleg"
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

// tryRank dispatches to rk and relays its answer. When it returns, the rank's load is given back. If c.status is 0 and c.cut is
// false, the client has seen nothing.
func (req *request) tryRank(parent context.Context, rk *rank) result {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(errOver)
	a := &req.attempt
	*a = attempt{router: a.router, rank: rk, cancel: cancel, start: time.Now()}
	req.usage, req.countedTokens, req.stream.tokens = openai.Usage{}, 0, 0
	req.timer.attach(cancel)
	defer req.timer.detach()
	counted := req.route.Generates()
	if !req.app.router.trackAttempt(rk, a) {
		if counted {
			req.undoPick()
		}
		return result{cause: causeGone}
	}
	defer req.app.router.untrackAttempt(rk, a)
	if !counted {
		return req.tryUncounted(ctx, rk)
	}
	if !rk.local {
		return req.tryRemote(ctx, rk)
	}
	req.timer.arm(a.start, a.start.Add(req.in.timers.Admit), errAdmitSlow)
	rep, refused := req.admit(ctx, parent, rk)
	req.timer.pause()
	if refused != causeOK {
		return req.endRefused(ctx, rep, refused)
	}
	req.recordTicket(&rep.Ticket)
	res := result{cause: causeDrained} // what a panic leaves behind
	defer func() { req.returnTicket(&res) }()
	res = req.exchange(ctx)
	return res
}

// recordTicket notes the ticket: from here on it is owed back.
func (req *request) recordTicket(t *msg.Ticket) {
	a := &req.attempt
	a.ticket = *t
	a.router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: a.rank.id, ReqID: req.query.ID, Seq: t.Seq, Incarnation: t.Incarnation, Now: req.in.clock(),
	})
}

// undoRefused takes the bump back. A full rank's picture is corrected first, so the undo wakes nobody in vain.
func (req *request) undoRefused(rep msg.AdmitReply, why cause) result {
	req.app.router.metrics.Load().Refusal(causePolicies[why].name)
	if why == causeFull {
		req.app.router.markFull(req.attempt.rank, rep.Seq)
	}
	req.undoPick()
	return result{cause: why}
}

// endRefused is refused for a request whose end is known here: what the rank calls expired is a client that left, or a deadline.
func (req *request) endRefused(ctx context.Context, rep msg.AdmitReply, why cause) result {
	res := req.undoRefused(rep, why)
	if why == causeExpired && ctx.Err() != nil {
		res.cause = contextCause(ctx)
	}
	return res
}

func (req *request) undoPick() {
	req.attempt.router.Observe(&routing.Event{Kind: routing.EvUndo, Rank: req.attempt.rank.id, ReqID: req.query.ID, Now: req.in.clock()})
}

// returnTicket gives the ticket back, exactly once, with what the attempt says about the engine.
func (req *request) returnTicket(res *result) {
	a, what := &req.attempt, causePolicies[res.cause]
	var first time.Duration
	if !a.firstToken.IsZero() {
		first = a.firstToken.Sub(a.start)
	}
	a.rank.mailbox.Send(&msg.Done{
		TicketID: a.ticket.ID, Outcome: what.done, Cause: what.name,
		PromptTokens: req.usage.PromptTokens, CachedTokens: req.usage.CachedTokens, HasCached: req.usage.HasCached, CompletionTokens: req.outputTokens(),
		FirstToken: first, Trip: req.countsToTrip(res), Busy: what.busy, Probe: what.probe,
	})
	req.app.router.recordServiceTime(time.Since(a.start))
	req.recordTokens()
}

// outputTokens is the engine's count of output tokens, else the chunks seen.
func (req *request) outputTokens() int { return max(req.usage.CompletionTokens, req.stream.tokens) }

// recordTokens adds the tokens to the metrics and teaches the estimate.
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

// exchange sends the request to an engine of this node and relays the answer.
func (req *request) exchange(ctx context.Context) result {
	req.timer.arm(time.Now(), req.firstTokenDue(), errFirstToken)
	resp, err := req.sendWithResend(ctx)
	req.timer.pause()
	if err != nil {
		return req.exchangeFailure(ctx, err)
	}
	defer closeBody(resp)
	return req.relay(ctx, resp)
}

// relay passes the answer on.
func (req *request) relay(ctx context.Context, resp *http.Response) result {
	switch {
	case resp.StatusCode >= http.StatusBadRequest:
		return req.relayError(ctx, resp)
	case resp.StatusCode >= http.StatusMultipleChoices: // its Location is an address behind the ingress, and clients would send the prompt there
		return result{cause: causeStatus, status: resp.StatusCode}
	case isStream(resp.Header):
		return req.relayStream(ctx, resp)
	default:
		return req.relayWhole(ctx, resp)
	}
}

// firstTokenDue is when the attempt must have shown its first token. An answer that is not streamed shows none: it gets the
// time that a stream with its number of tokens could take at most.
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

// sendWithResend sends once, and once more if a reused connection turned out to be closed: engines close idle connections, so that is nobody's fault and
// no attempt.
func (req *request) sendWithResend(ctx context.Context) (*http.Response, error) {
	resp, o, err := req.sendOnce(ctx)
	if err == nil || !o.Stale() || ctx.Err() != nil {
		return resp, err
	}
	req.app.router.metrics.Load().Attempt("keepalive_resend", "free")
	resp, _, err = req.sendOnce(ctx)
	return resp, err
}

func (req *request) sendOnce(ctx context.Context) (*http.Response, *engineleg.Request, error) {
	a := &req.attempt
	o := &engineleg.Request{URL: a.rank.urls[req.route], Header: req.header, Body: req.engineBody}
	switch t := &a.ticket.Target; t.Addressing {
	case "header":
		o.Header = withRank(req.header, t.Selector)
	case "body":
		o.Body = openai.AppendField(nil, req.engineBody, "routed_dp_rank", strconv.AppendInt(nil, int64(t.Selector), 10))
	}
	resp, err := req.in.legs.Send(ctx, a.ticket.Target.Owned, o)
	if !o.Settled() {
		req.bodySettled = false
	}
	return resp, o, err
}

// readFailure says what a failed read of an answer's body means.
func (req *request) readFailure(ctx context.Context, err error, begun bool) result {
	switch {
	case ctx.Err() != nil:
		why := contextCause(ctx)
		if (why == causeStalled || why == causeSilent) && !begun {
			why = causeFirstToken // an empty delta came, and then nothing
		}
		return result{cause: why, err: err}
	case errors.Is(err, msg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
	case begun:
		return result{cause: req.lostStreamCause(), err: err}
	default:
		return result{cause: causeEmpty, err: err}
	}
}

// lostStreamCause tells a rank that was drained from one that failed.
func (req *request) lostStreamCause() cause {
	if req.app.router.isDraining(req.attempt.rank) {
		return causeDrained
	}
	return causeUpstreamLost
}

func closeBody(resp *http.Response) {
	if err := resp.Body.Close(); err != nil {
		return // the answer's outcome is decided; the connection is not used again
	}
}

// countOutput counts output.
func (req *request) countOutput(n int, now time.Time) {
	if req.attempt.firstToken.IsZero() {
		req.attempt.firstToken = now
	}
	req.in.tokens.Add(uint64(n)) //nolint:gosec // a count
	req.countedTokens += n
}

// reportProgress tells the rank that its prefill is done, and later now and then how far its stream is, so that it is seen to live. It
// comes behind the write: a message wakes its receiver, and the client need not wait for that. A stream that has ended needs no
// report: its Done says it all.
func (req *request) reportProgress(now time.Time) {
	a := &req.attempt
	switch {
	case a.firstToken.IsZero() || now.Sub(a.reportedAt) < progressEvery:
		return
	case a.reportedAt.IsZero():
		a.rank.mailbox.Send(&msg.FirstToken{TicketID: a.ticket.ID, At: a.firstToken})
	default:
		a.rank.mailbox.Send(&msg.Progress{TicketID: a.ticket.ID, Out: req.stream.tokens})
	}
	a.reportedAt = now
}

func asBodyError(err error) (*openai.BodyError, bool) {
	var e *openai.BodyError
	ok := errors.As(err, &e)
	return e, ok
}
