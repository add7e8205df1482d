package ingress

import (
	"context"
	"log/slog"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// attempt is one dispatch to a rank.
type attempt struct {
	router     *routing.Router
	rank       *rank
	isCounted  bool       // the Router counts the request on rank, and rank has not admitted it yet
	ticket     msg.Ticket // ID 0: none, or given back
	cancel     context.CancelCauseFunc
	start      time.Time
	firstToken time.Time
	reportedAt time.Time     // last FirstToken or Progress
	busyFor    time.Duration // what its engine said when it was full; 0: it was not

	prev, next   *attempt // in rank.attempts
	isTracked    bool
	hasFirstByte bool // guarded by appRouter.mu
}

// ends is how the legs of a request have ended that brought it no answer. The legs of a request over two
// ranks share it.
type ends struct {
	mu       sync.Mutex
	last     *result    // nil: none has
	isUnpaid bool       // no retry was counted for last yet
	words    *heldWords // what the last engine said that answered; nil: none
	attempts int        // engines that were asked in vain
}

// heldWords is an engine's answer that goes to the client if no rank is left to ask.
type heldWords struct {
	result
	header http.Header
	body   []byte
}

// note keeps the end of a leg that brought no answer. That a rank is full says nothing.
func (e *ends) note(res *result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	what := res.cause.Row()
	if what.Cost == dispatch.Run || what.Busy {
		e.attempts++
	}
	if res.cause != dispatch.Full {
		kept := *res
		e.last, e.isUnpaid = &kept, true
	}
}

// count is how many engines were asked in vain.
func (e *ends) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.attempts
}

// keepWords keeps an engine's answer, as dispatch decides whose words count: an engine that is full knows
// best what the client should do.
func (e *ends) keepWords(w heldWords) {
	e.mu.Lock()
	defer e.mu.Unlock()
	isBetter := e.words == nil || e.words.cause != dispatch.Busy || w.cause == dispatch.Busy
	if isBetter && len(w.body) <= maxWords {
		e.words = &w
	}
}

// takeUnpaid returns the last end if no retry was counted for it.
func (e *ends) takeUnpaid() *result {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.isUnpaid {
		return nil
	}
	e.isUnpaid = false
	return e.last
}

// get returns the last end and the last words.
func (e *ends) get() (last *result, words *heldWords) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last, e.words
}

// reset forgets all of it.
func (e *ends) reset() {
	e.last, e.isUnpaid, e.words, e.attempts = nil, false, nil, 0
}

// ask dispatches to the picked rank and relays its answer. When it returns, the engine works no longer for
// the request. ahead is what the plan has decided already about the end of the leg; nil: it has to be told.
func (req *request) ask(parent context.Context, number uint32) (ev dispatch.Event, ahead []dispatch.Command) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(errOver)
	a, rk := &req.attempt, req.attempt.rank
	*a = attempt{
		router: a.router, rank: rk, isCounted: a.isCounted, cancel: cancel, start: time.Now(),
	}
	req.number, req.ahead = number, nil
	req.usage, req.countedTokens, req.stream.tokens = openai.Usage{}, 0, 0
	req.timer.attach(cancel)
	defer req.timer.detach()
	if !req.app.router.trackAttempt(rk, a) {
		req.undoPick()
		req.result = result{cause: dispatch.Gone}
		return req.ended(dispatch.EvRefused), nil
	}
	defer req.app.router.untrackAttempt(rk, a)
	leg := req.spans.BeginLeg(req.legName(), a.start)
	defer func() { req.endLeg(leg, req.app.router, a, number, req.result.cause) }()
	q := req.newAsk(parent, rk)
	q.Header = leg.Header(q.Header)
	resp, reply, err := req.askRank(ctx, rk, q)
	switch {
	case reply.Refusal != msg.Granted:
		if parent.Err() != nil { // it ends a moment before its child
			ctx = parent
		}
		req.result = result{cause: noteRefusal(ctx, req.app.router, rk, refusedAs(reply.Refusal), reply.Seq)}
		req.undoPick()
		return req.ended(dispatch.EvRefused), nil
	case err != nil:
		req.result = failedAsk(ctx, err)
		if req.rest.fault() != nil {
			req.result.cause = dispatch.ClientGone // or it has sent what is not passed on: see finish
		}
	default:
		defer closeBody(resp)
		req.result = relay{req}.answer(ctx, resp)
	}
	ev = req.ended(dispatch.EvEnded)
	ev.CanContinue = req.noteBreak(parent, &req.result)
	return ev, req.ahead
}

// ended is what the plan is told of the end of the attempt.
func (req *request) ended(kind dispatch.EventKind) dispatch.Event {
	res := &req.result
	ev := req.eventOf(kind, res)
	if res.cause == dispatch.OK {
		return ev
	}
	ar, rk := req.app.router, req.attempt.rank
	ev.IsLost, ev.EngineFailed = ar.lossOf(rk)
	if req.status == 0 && !req.cutConn {
		req.ends.note(res)
	}
	return ev
}

// eventOf is an event of the running leg.
func (req *request) eventOf(kind dispatch.EventKind, res *result) dispatch.Event {
	rk := req.attempt.rank
	return dispatch.Event{
		Kind: kind, Side: dispatch.Decode, Cause: res.cause, Number: req.number, Rank: rk.ref(),
		Unit: rk.unitKey, Text: res.text, IsSpent: req.rest.IsBegun() || req.hasActed(kind, res.cause),
	}
}

// hasActed reports whether an engine may have acted on a request that is not sent again.
func (req *request) hasActed(kind dispatch.EventKind, why dispatch.Cause) bool {
	return !req.route.Again() && kind != dispatch.EvRefused && why != dispatch.ConnRefused &&
		why.Row().Cost == dispatch.Run
}

// newAsk is the request for a rank. A request that computes no tokens (/tokenize, /detokenize) takes no
// ticket. It counts neither in a rank's room nor as work before its prompts. life bounds the life of the
// ticket: it is the context of the request and not of the attempt, which ends at the same moment as its
// ticket, and the DPServer would take that for an abandoned request.
func (req *request) newAsk(life context.Context, rk *rank) *rankleg.Request {
	q := &rankleg.Request{
		Rank: rk.Rank, Route: req.route, Target: req.target, Header: req.header, Body: req.engineBody,
		IsPlain: req.scan.IsPlain, Model: req.prompt.engineName,
	}
	if req.route == openai.NoRoute || req.route.Computes() {
		q.Admit = req.newAdmit(life, rk)
	}
	return q
}

// newAdmit is the message that asks the rank's DPServer for a ticket.
func (req *request) newAdmit(life context.Context, rk *rank) *msg.Admit {
	m := &msg.Admit{
		Ctx: life, ReqID: req.query.ID, Epoch: rk.Epoch, Tokens: req.query.Tokens,
		Estimated: req.query.Estimated, Deadline: req.deadline, Ingress: req.in.node,
		Session: routing.SessionKey(req.query.Session), Weight: req.scan.Choices,
		// the caller of a reservation reports the end of prefill
		Whole: req.hold == nil && !req.scan.Stream,
	}
	if req.prompt.lookedUp {
		m.Hit, m.Blocks, m.HitBlocks = req.query.HitOn(rk.ID), req.prompt.blocks,
			req.prompt.cachedPrefix(rk.ID)
	}
	return m
}

// remoteGrace is added to the first token's time for a rank of another node, so that the other node reports
// the timeout first.
const remoteGrace = 500 * time.Millisecond

// armFirstToken begins the time of the first token of a rank that is asked now.
func (req *request) armFirstToken(rk *rank, q *rankleg.Request) {
	now, due := time.Now(), req.firstTokenDue()
	if !rk.local {
		q.FirstToken = max(due.Sub(now), time.Millisecond)
		due = due.Add(remoteGrace)
	}
	req.timer.arm(now, due, errFirstToken)
}

// firstTokenDue is the deadline of the attempt's first token.
func (req *request) firstTokenDue() time.Time { return req.attempt.start.Add(req.firstTokenLimit()) }

// firstTokenLimit is how long the first byte of an answer may take. An answer that is not streamed has no
// visible first token: it has the time of a stream with as many tokens.
func (req *request) firstTokenLimit() time.Duration {
	d := req.app.firstToken
	if req.route.Computes() && !req.scan.Stream {
		n := req.scan.MaxTokens
		if n < 0 || n > unknownTokens {
			n = unknownTokens
		}
		d += time.Duration(n) * req.app.between
	}
	if req.split.isUnderWay() {
		d += flightGrace
	}
	return d
}

// askRank asks the rank.
func (req *request) askRank(ctx context.Context, rk *rank, q *rankleg.Request) (
	*http.Response, msg.AdmitReply, error,
) {
	q.OnTicket = req.onTicket
	if !rk.local || q.Admit == nil {
		req.armFirstToken(rk, q)
	}
	take := req.rest.give(ctx, q, &req.timer, req.firstTokenLimit())
	resp, reply, err := rk.asker.Ask(ctx, q)
	if take(); req.rest.IsBegun() {
		req.attempt.start = time.Now() // before, the engine had no whole prompt
	}
	req.timer.pause()
	req.countResend(q)
	req.prompt.shared = req.prompt.shared || q.IsAdmitPending
	return resp, reply, err
}

// countResend counts a request that was sent twice because its connection was closed.
func (req *request) countResend(q *rankleg.Request) {
	if q.Resent {
		req.app.router.metrics.Load().Attempt("keepalive_resend", "free")
	}
}

// takeTicket stores the ticket, which the attempt must return from now on. The first token's time for a near
// rank begins with it, because Near bounds the wait for a ticket.
func (req *request) takeTicket(t *msg.Ticket) {
	req.recordTicket(t)
	if req.attempt.rank.local {
		req.timer.arm(time.Now(), req.firstTokenDue(), errFirstToken)
	}
}

// recordTicket stores the ticket and tells the Router.
func (req *request) recordTicket(t *msg.Ticket) {
	a := &req.attempt
	a.ticket, a.isCounted = *t, false
	req.in.observeTicket(a.router, a.rank.ID, req.query.ID, t)
}

// noteRefusal counts that a rank gives no ticket, and returns why. It corrects the picture of a full rank
// before the caller undoes the pick, so that the undo wakes no request without reason. A rank answers
// "expired" both to a client that left and to a deadline; only the ingress can tell them apart, by the
// context. A rank that is lost while it is asked has nothing of the request.
func noteRefusal(ctx context.Context, ar *appRouter, rk *rank, why dispatch.Cause, seq uint64,
) dispatch.Cause {
	if why == dispatch.Expired && ctx.Err() != nil {
		why = contextCause(ctx)
	}
	if why == dispatch.UnitLost {
		why = dispatch.Fenced
	}
	ar.metrics.Load().Refusal(why.String())
	if why == dispatch.Full {
		ar.markFull(rk, seq)
	}
	return why
}

// askTicket asks a rank for a ticket alone. If it is refused, the pick still counts.
func (req *request) askTicket(ctx context.Context, ar *appRouter, rk *rank, q *rankleg.Request,
) dispatch.Cause {
	ctx, cancel := context.WithTimeoutCause(ctx, req.in.timers.Admit, errAdmitSlow)
	defer cancel()
	reply, err := rk.asker.Reserve(ctx, q)
	if q.IsAdmitPending { // an actor may still read the blocks
		if req.prompt.shared = true; req.split != nil {
			req.split.prompt.shared = true
		}
	}
	switch {
	case err != nil:
		return noteRefusal(ctx, ar, rk, failedAsk(ctx, err).cause, 0)
	case reply.Refusal != msg.Granted:
		return noteRefusal(ctx, ar, rk, refusedAs(reply.Refusal), reply.Seq)
	}
	return dispatch.OK
}

// undoPick removes the request from the picked rank's load in the Router, if it counts there.
func (req *request) undoPick() {
	heldRequest{req}.end(true)
	if req.attempt.isCounted {
		req.attempt.isCounted = false
		req.in.observeUndo(req.attempt.router, req.attempt.rank.ID, req.query.ID)
	}
}

// returnTicket returns the ticket to the rank, exactly once, with what the attempt shows about the engine.
func (req *request) returnTicket(cmd *dispatch.Command) {
	a := &req.attempt
	if a.ticket.ID == 0 { // not admitted, or another node has given the ticket back already
		req.undoPick()
		return
	}
	d := &msg.Done{
		TicketID:     a.ticket.ID,
		PromptTokens: req.usage.PromptTokens, CachedTokens: req.usage.CachedTokens,
		HasCached: req.usage.HasCached, CompletionTokens: req.outputTokens(),
	}
	if !a.firstToken.IsZero() {
		d.FirstToken = a.firstToken.Sub(a.start)
	}
	a.judge(d, cmd)
	heldRequest{req}.end(false)
	a.ticket.ID = 0
	a.rank.Mailbox.Send(d)
	req.recordTokens()
}

// judge writes into the message about the attempt's ticket what the plan says of its end.
func (a *attempt) judge(d *msg.Done, cmd *dispatch.Command) {
	what := cmd.Cause.Row()
	d.Outcome, d.Cause = msg.Outcome(what.Done), what.Name
	d.Charge, d.CheckHealth = cmd.Charge, what.CheckHealth
	if what.Busy {
		d.BusyFor = a.busyFor
	}
}

// readRetryAfter is how long an engine that is full wants to be left alone, by its answer's Retry-After.
func readRetryAfter(header http.Header) time.Duration {
	seconds, _ := strconv.Atoi(header.Get("Retry-After"))
	return time.Duration(min(max(seconds, 1), maxRetryAfter)) * time.Second
}

// dropTicket gives a ticket back that a panic has left.
func (req *request) dropTicket() {
	if a := &req.attempt; a.ticket.ID != 0 {
		d := &msg.Done{TicketID: a.ticket.ID}
		a.judge(d, &dispatch.Command{Cause: dispatch.Drained})
		a.rank.Mailbox.Send(d)
		a.ticket.ID = 0
	}
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
		req.app.router.estimates.tokens[req.route].ObservePrompt(&req.scan, req.usage.PromptTokens)
	}
}

// countRetry counts a leg that has failed and is followed by another one; nil: none has.
func (req *request) countRetry(res *result, budget string) {
	if res == nil {
		return
	}
	metrics := req.app.router.metrics.Load()
	metrics.Attempt(res.cause.String(), budget)
	metrics.Retry(res.cause.String(), budget)
	req.logLine(slog.LevelDebug, "attempt failed, trying another rank", res)
}

// countLast counts a leg that has failed and is followed by none; nil: none has.
func (req *request) countLast(res *result, budget string) {
	if res != nil {
		req.app.router.metrics.Load().Attempt(res.cause.String(), budget)
	}
}

// mayRelay asks whether the client may get what the engine has answered: the content that has begun, or an
// error. From then on no other rank is asked.
func (req *request) mayRelay(ev dispatch.Event) bool {
	if req.split.isUnderWay() {
		return req.split.mayRelay(ev)
	}
	cmds := req.plan.Step(req.instant(), &ev)
	if len(cmds) > 0 && cmds[0].Kind == dispatch.CmdRelay {
		return true
	}
	if len(cmds) > 0 { // the plan has left the attempt
		req.ahead = cmds
	}
	return false
}
