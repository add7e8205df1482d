package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
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

// tryRank dispatches to rk and relays its answer. When it returns, the request no longer counts in the rank's
// load. If status is 0 and cutConn is false, the client has received nothing.
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
	res := result{cause: causeDrained} // the result if exchange panics
	defer func() { req.returnTicket(&res) }()
	res = req.exchange(ctx)
	return res
}

// recordTicket stores the ticket, which the attempt must return from now on, and tells the Router.
func (req *request) recordTicket(t *msg.Ticket) {
	a := &req.attempt
	a.ticket = *t
	a.router.Observe(&routing.Event{
		Kind: routing.EvTicket, Rank: a.rank.id, ReqID: req.query.ID, Seq: t.Seq, Incarnation: t.Incarnation,
		Now: req.in.clock(),
	})
}

// undoRefused removes a refused request from the rank's load. It first corrects the picture of a full rank,
// so that the undo wakes no request without reason.
func (req *request) undoRefused(rep msg.AdmitReply, why cause) result {
	req.app.router.metrics.Load().Refusal(causePolicies[why].name)
	if why == causeFull {
		req.app.router.markFull(req.attempt.rank, rep.Seq)
	}
	req.undoPick()
	return result{cause: why}
}

// endRefused is undoRefused for a request whose context may be over: a rank answers "expired" both to a
// client that left and to a deadline, and only the ingress can tell them apart.
func (req *request) endRefused(ctx context.Context, rep msg.AdmitReply, why cause) result {
	res := req.undoRefused(rep, why)
	if why == causeExpired && ctx.Err() != nil {
		res.cause = contextCause(ctx)
	}
	return res
}

// undoPick removes the request from the picked rank's load in the Router.
func (req *request) undoPick() {
	req.attempt.router.Observe(&routing.Event{
		Kind: routing.EvUndo, Rank: req.attempt.rank.id,
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
	a.rank.mailbox.Send(&msg.Done{
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

// sendWithResend sends the request, and sends it once more if a reused connection turns out to be closed.
// Engines close idle connections, so this is no failure and not a new attempt.
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
		o.Body = openai.AppendField(nil, req.engineBody, "routed_dp_rank",
			strconv.AppendInt(nil, int64(t.Selector), 10))
	}
	resp, err := req.in.legs.Send(ctx, a.ticket.Target.Owned, o)
	if !o.Settled() {
		req.bodySettled = false
	}
	return resp, o, err
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
	case errors.Is(err, msg.ErrUnreachable):
		return result{cause: causeUnreachable, err: err}
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

// admit asks the rank's DPServer for a ticket and waits for the reply, the end of ctx, or the end of the
// actor, which then replies to nothing. The message carries the context of the request, not of the attempt:
// the attempt's context ends at the same moment as its ticket, and the DPServer would take that for an
// abandoned request.
func (req *request) admit(ctx, request context.Context, rk *rank) (msg.AdmitReply, cause) {
	reply, _ := req.in.replyPool.Get().(chan msg.AdmitReply)
	m := &msg.Admit{Ctx: request, Reply: reply}
	req.fillAdmit(m, rk)
	if err := rk.mailbox.TrySend(m); err != nil {
		req.in.replyPool.Put(reply)
		return msg.AdmitReply{}, sendRefusal(rk)
	}
	select {
	case rep := <-reply:
		req.in.replyPool.Put(reply)
		return rep, refusedAs(rep.Refusal)
	case <-rk.mailbox.Stopped():
		req.prompt.shared = true
		return replyAfterStop(req.in, reply)
	case <-ctx.Done():
		req.prompt.shared = true
		awaitLateTicket(req.in, rk.mailbox, reply)
		return msg.AdmitReply{}, contextCause(ctx)
	}
}

// fillAdmit sets the fields of an Admit that describe the request.
func (req *request) fillAdmit(m *msg.Admit, rk *rank) {
	m.ReqID, m.Epoch, m.Class, m.Tokens, m.Estimated = req.query.ID, rk.epoch, msg.ClassBoth,
		req.query.Tokens, req.query.Estimated
	m.Deadline, m.Ingress, m.Session = req.deadline, req.in.node, routing.SessionKey(req.query.Session)
	m.Weight = req.scan.Choices
	// a reservation has no HTTP request: its caller reports the end of prefill
	m.Whole = req.r != nil && !req.scan.Stream
	if req.prompt.lookedUp {
		m.Hit, m.Blocks, m.HitBlocks = req.query.HitOn(rk.id), req.prompt.blocks,
			req.prompt.cachedPrefix(rk.id)
	}
}

// sendRefusal distinguishes a stopped mailbox from a full one.
func sendRefusal(rk *rank) cause {
	select {
	case <-rk.mailbox.Stopped():
		return causeGone
	default:
		return causeOverloaded
	}
}

// replyAfterStop takes a reply that arrived just before the actor ended.
func replyAfterStop(in *Ingress, reply chan msg.AdmitReply) (msg.AdmitReply, cause) {
	select {
	case rep := <-reply:
		in.replyPool.Put(reply)
		return rep, refusedAs(rep.Refusal)
	default:
		return msg.AdmitReply{}, causeGone // the channel is not used again: the message may still hold it
	}
}

// awaitLateTicket waits for the ticket of a request that has already left, and returns it. It uses one
// goroutine per such request, which ends with the reply, the actor or Timers.LateTicket.
func awaitLateTicket(in *Ingress, box msg.Mailbox, reply chan msg.AdmitReply) {
	in.background.Go(func() {
		timeout := time.NewTimer(in.timers.LateTicket)
		defer timeout.Stop()
		select {
		case rep := <-reply:
			in.replyPool.Put(reply)
			if rep.Refusal == msg.Granted {
				box.Send(&msg.Done{TicketID: rep.Ticket.ID, Outcome: msg.Refused, Cause: "late_ticket"})
			}
		case <-box.Stopped():
		case <-timeout.C:
		}
	})
}

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
	return &msg.Dispatch{
		Node: rk.node, App: req.app.app.Name, Unit: rk.unit, Rank: rk.id, Path: path,
		Admit: m,
	}
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

// admitBounded is admit with a time limit, because the mailbox may hold other messages.
func (req *request) admitBounded(ctx, life context.Context, rk *rank) (msg.AdmitReply, cause) {
	ctx, cancel := context.WithTimeoutCause(ctx, req.in.timers.Admit, errAdmitSlow)
	defer cancel()
	if !rk.local {
		return req.admitRemote(ctx, life, rk)
	}
	return req.admit(ctx, life, rk)
}

// Requests that compute no tokens (/tokenize, /detokenize) take no ticket. They count neither in a rank's
// room nor as work before its prompts. Any ready rank answers them, full or not.

// pickUncounted returns a ready rank that has not failed the request, of this node if there is one. If there
// is none, the request waits like any other.
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
