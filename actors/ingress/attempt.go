package ingress

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
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

// pick returns a rank with room, and waits in the application's queue if there is none. last is the attempt
// before, nil for none: it decides what the client sees when no rank is left to try. On success the Router
// counts the request on that rank, unless the request computes no tokens.
func (req *request) pick(ctx context.Context, last *result) (*rank, *failure) {
	if !req.route.Generates() {
		return req.pickUncounted(ctx, last)
	}
	return req.pickBy(ctx, last, req.decide)
}

// pickBy is pick with a decision of the caller's, which says whether the request must wait for room.
func (req *request) pickBy(ctx context.Context, last *result,
	decide func(last *result) (rk *rank, f *failure, wait bool),
) (*rank, *failure) {
	if req.app.router.queue.empty() {
		rk, f, wait := decide(last)
		if !wait {
			return rk, f
		}
	}
	return req.waitForRank(ctx, last, decide)
}

// pickUncounted returns a rank for a request that computes no tokens: any ready rank that has not failed it,
// full or not, of this node if there is one. If there is none, the request waits like any other.
func (req *request) pickUncounted(ctx context.Context, last *result) (*rank, *failure) {
	if req.prompt.hasDirect {
		return req.pickNamed(last)
	}
	if rk := req.app.router.anyReadyRank(req.tried, req.refusedBy); rk != nil {
		return rk, nil
	}
	rk, f := req.pickBy(ctx, last, req.decide)
	if f == nil {
		req.attempt.rank = rk
		req.undoPick() // decide has counted it
	}
	return rk, f
}

// pickNamed returns the rank that a request without work for the Router names.
func (req *request) pickNamed(last *result) (*rank, *failure) {
	rk := req.app.router.readyRank(req.prompt.direct)
	switch {
	case last != nil:
		return nil, finalFailure(last)
	case rk == nil:
		return nil, req.namedRankFailure()
	}
	return rk, nil
}

// decide asks the Router once. wait: there is no room now, or no rank yet.
func (req *request) decide(last *result) (rk *rank, f *failure, wait bool) {
	if req.split.decides() {
		return req.split.decide(last)
	}
	ar := req.app.router
	for {
		router := ar.router.Load()
		req.excludeTried()
		req.query.ID = req.in.requestID()
		// before the Router's lock, and for each decision, because the caches change
		ar.describeRequest(&req.query, &req.prompt)
		began := time.Now()
		router.Pick(&req.query, &req.choice)
		ar.metrics.Load().Decision(time.Since(began))
		switch req.choice.Kind {
		case routing.Route:
			id := req.choice.Ranked[0]
			if rk := ar.findRank(id); rk != nil {
				ar.metrics.Load().Pick(id.Group(), id.Rank(), req.choice.Reason)
				ar.decisions.record(req.id, req.attempts+1, router.Policy(), &req.prompt, &req.query,
					&req.choice)
				req.attempt.router = router
				return rk, nil, false
			}
			req.in.observeUndo(router, id, req.query.ID) // the rank is gone since the decision
		case routing.Queue:
			return nil, nil, true
		default:
			return nil, req.pickFailure(last), false
		}
	}
}

// excludeTried lists the ranks that refused this request, and those that failed it as often as the policy
// allows (once unless it says otherwise). A rank that returned as a new incarnation has done neither.
func (req *request) excludeTried() {
	req.query.Tried = req.query.Tried[:0]
	most := max(req.app.router.inputs().needs.AttemptsPerRank, 1)
	for i, rk := range req.tried {
		if failures(req.tried[:i+1], rk) == most && req.app.router.findRank(rk.ID) == rk {
			req.query.Tried = append(req.query.Tried, rk.ID)
		}
	}
	for _, rk := range req.refusedBy {
		if req.app.router.findRank(rk.ID) == rk {
			req.query.Tried = append(req.query.Tried, rk.ID)
		}
	}
	req.query.Tried = req.split.appendTried(req.query.Tried, pdproxy.Decode)
}

// failures counts the attempts on rk.
func failures(tried []*rank, rk *rank) int {
	n := 0
	for _, t := range tried {
		if t == rk {
			n++
		}
	}
	return n
}

// restriction is equal for requests that may use the same ranks. It depends on the incarnations that failed
// or refused the request and on the rank that it names.
func (req *request) restriction() uint64 {
	if req.split.isUnderWay() {
		return req.split.restriction()
	}
	if len(req.tried) == 0 && len(req.refusedBy) == 0 && !req.prompt.hasDirect {
		return unrestricted
	}
	var sum uint64 // the order of the attempts does not matter
	for _, ranks := range [...][]*rank{req.tried, req.refusedBy} {
		for _, rk := range ranks {
			sum += maphash.Comparable(restrictionSeed, [2]uint64{uint64(rk.ID), rk.Incarnation})
		}
	}
	if req.prompt.hasDirect {
		sum += maphash.Comparable(restrictionSeed, req.prompt.direct)
	}
	return max(sum, unrestricted+1)
}

var restrictionSeed = maphash.MakeSeed()

// waitForRank queues the request until it has the turn and a rank has room, at most queue_s over all its
// waits.
func (req *request) waitForRank(ctx context.Context, last *result,
	decide func(last *result) (rk *rank, f *failure, wait bool),
) (*rank, *failure) {
	ar, began := req.app.router, time.Now()
	if req.queueDeadline.IsZero() {
		req.queueDeadline = began.Add(req.app.queue)
	}
	req.waiter.restriction = req.restriction()
	if req.hadTurn {
		ar.queue.rejoin(req.waiter)
	} else if !ar.queue.join(req.waiter, req.app.app.MaxQueuedRequests, req.in.limits.MaxQueueTokens) {
		return nil, newFailure(openai.CodeOverloaded,
			"the queue of this application is full; try again later").withRetryAfter(ar.retryAfter())
	}
	ar.demand.update()
	defer func() {
		ar.queue.leave(req.waiter)
		ar.demand.update()
		ar.metrics.Load().QueueWait(time.Since(began))
	}()
	timeout := time.NewTimer(req.queueDeadline.Sub(began))
	defer timeout.Stop()
	for {
		if ar.queue.hasTurn(req.waiter) {
			rk, f, wait := decide(last)
			if !wait {
				return rk, f
			}
			ar.queue.yield(req.waiter)
		}
		select {
		case <-req.waiter.wake:
		case <-timeout.C:
			return nil, newFailure(openai.CodeQueueTimeout,
				"no rank had room in time; try again later").withRetryAfter(ar.retryAfter())
		case <-ctx.Done():
			return nil, finalFailure(&result{cause: contextCause(ctx)})
		}
	}
}

// pickFailure is the answer to a request that no rank can take.
func (req *request) pickFailure(last *result) *failure {
	if req.choice.Reason == routing.ReasonNoRankGiven {
		return newFailure(openai.CodeInvalidRequest,
			"this application uses routing policy direct: name the rank in x-dpserve-rank: GROUP/RANK")
	}
	if last != nil {
		return finalFailure(last)
	}
	if req.prompt.hasDirect {
		return req.namedRankFailure()
	}
	if req.choice.Reason == routing.ReasonAllBusy {
		return newFailure(openai.CodeOverloaded,
			"every rank of this application is above routing.busy_threshold; try again").withRetryAfter(
			req.app.router.retryAfter())
	}
	f := newFailure(openai.CodeNoReadyRank, "no rank of this application is ready"+
		req.app.router.noRoomText()+"; see `dpserve status`").withRetryAfter(req.app.router.retryAfter())
	f.cause = req.choice.Reason
	return f
}

// namedRankFailure is the answer to a request whose rank, named in x-dpserve-rank, cannot take it: the
// application has no such rank, or the rank is not ready or full. No other rank is asked.
func (req *request) namedRankFailure() *failure {
	ar, id := req.app.router, req.prompt.direct
	if !ar.hasRank(id) {
		return newFailure(openai.CodeInvalidRequest, fmt.Sprintf("x-dpserve-rank: this application has no "+
			"rank %s (it has %s); correct the header or leave it out", id, req.app.rankRange()))
	}
	why := "has all the requests that it may hold"
	if ar.readyRank(id) == nil {
		why = "is not ready"
	}
	f := newFailure(openai.CodeNoReadyRank, fmt.Sprintf("rank %s, which x-dpserve-rank names, %s; try again "+
		"later, or leave the header out and any rank may answer", id, why)).withRetryAfter(ar.retryAfter())
	f.cause = routing.ReasonRankUnavailable
	return f
}

// tryRank dispatches to rk and relays its answer. When it returns, the request no longer counts in the rank's
// load. If status is 0 and cutConn is false, the client has received nothing.
func (req *request) tryRank(parent context.Context, rk *rank) (res result) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(errOver)
	a := &req.attempt
	*a = attempt{router: a.router, rank: rk, cancel: cancel, start: time.Now()}
	req.usage, req.countedTokens, req.stream.tokens = openai.Usage{}, 0, 0
	req.split.beginPlain()
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
		return req.endRefused(parent, ctx, reply)
	case err != nil:
		if q.Admit != nil && a.ticket.ID == 0 { // not admitted, or the ticket is given back already
			req.undoPick()
		}
		return req.askFailure(ctx, err)
	}
	defer closeBody(resp)
	return relay{req}.answer(ctx, resp)
}

// newAsk is the request for a rank. A request that computes no tokens (/tokenize, /detokenize) takes no
// ticket. It counts neither in a rank's room nor as work before its prompts. life bounds the life of the
// ticket: it is the context of the request and not of the attempt, which ends at the same moment as its
// ticket, and the DPServer would take that for an abandoned request.
func (req *request) newAsk(life context.Context, rk *rank) *rankleg.Request {
	q := &rankleg.Request{Rank: rk.Rank, Route: req.route, Header: req.header, Body: req.engineBody}
	if req.route == openai.NoRoute || req.route.Generates() {
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
		// a reservation has no HTTP request: its caller reports the end of prefill
		Whole: req.r != nil && !req.scan.Stream,
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

// ask asks the rank.
func (req *request) ask(ctx context.Context, rk *rank, q *rankleg.Request) (
	*http.Response, msg.AdmitReply, error,
) {
	q.OnTicket = req.onTicket
	if !rk.local || q.Admit == nil {
		req.armFirstToken(rk, q)
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
	a.ticket = *t
	req.in.observeTicket(a.router, a.rank.ID, req.query.ID, t)
}

// endRefused removes a refused request from the rank's load. It first corrects the picture of a full rank, so
// that the undo wakes no request without reason. A rank answers "expired" both to a client that left and to a
// deadline; only the ingress can tell them apart. life is the context of the ticket: it ends a moment before
// that of the attempt, its child.
func (req *request) endRefused(life, ctx context.Context, reply msg.AdmitReply) result {
	why := refusedAs(reply.Refusal)
	switch {
	case why != causeExpired:
	case life.Err() != nil:
		why = contextCause(life)
	case ctx.Err() != nil:
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
	req.in.observeUndo(req.attempt.router, req.attempt.rank.ID, req.query.ID)
}

// decideRetry decides whether another rank is tried: nil means yes.
func (req *request) decideRetry(ctx context.Context, rk *rank, res *result) *failure {
	what, ar := causePolicies[res.cause], req.app.router
	if !what.retry {
		return req.giveUp(res, "free")
	}
	req.hadTurn = true // no later request may overtake it
	switch res.cause {
	case causeFull:
		return nil // not an attempt: the Router's view was outdated
	case causeStoodStill:
		ar.metrics.Load().Attempt(what.name, "free")
		return nil // not an attempt: the fault is this process's
	case causeUnreachable:
		ar.metrics.Load().Attempt(what.name, "free")
		ar.suspectNode(rk.Node)
		return nil // not an attempt: no engine was asked
	default:
	}
	more := req.recordFailure(rk, res.cause)
	if what.done == msg.Refused {
		if !more {
			return req.giveUp(res, "free")
		}
		req.countRetry(res, "free") //nolint:contextcheck // the line is the request's
		req.awaitFailingUnit(ctx, rk)
		return nil
	}
	if what.death && (res.cause != causeUnitLost || ar.hasFailed(rk)) && req.killedTwoRanks(rk) {
		f := req.giveUp(res, "free")
		f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one",
			"killed_two_ranks"
		return f
	}
	budget := "free"
	if !what.free && !ar.isLost(rk) {
		budget = "drawn"
	}
	if !more && !req.mergeUnitAttempts(ctx, rk, res.cause) {
		return req.giveUp(res, budget)
	}
	if budget == "drawn" && !ar.retryBudget.draw(req.in.clock()) {
		return req.giveUp(res, "empty")
	}
	req.countRetry(res, budget) //nolint:contextcheck // the line is the request's
	req.awaitFailingUnit(ctx, rk)
	return nil
}

// recordFailure excludes rk and reports whether this request may ask another rank. A rank that refused at
// admission asked no engine: that is no attempt, and refusals have a limit of their own. Otherwise three
// fenced ranks of one node could use up a request's attempts while the ranks of other nodes are ready. A rank
// that is too slow to answer takes seconds, so it counts as an attempt.
func (req *request) recordFailure(rk *rank, why cause) bool {
	if causePolicies[why].done == msg.Refused && why != causeOverloaded {
		req.refusedBy = append(req.refusedBy, rk)
		return len(req.refusedBy) < maxRefusals
	}
	req.tried, req.attempts = append(req.tried, rk), req.attempts+1
	return req.attempts < req.maxAttempts()
}

// killedTwoRanks records that rk died while it had the request, and reports whether a rank of another unit
// had died with it before. Then the request itself may kill engines, and further attempts could take down the
// whole application. Ranks of one lockstep unit die together and count as one.
func (req *request) killedTwoRanks(rk *rank) bool {
	before := req.diedOn
	req.diedOn = rk
	return before != nil && (before.Unit != rk.Unit || before.Epoch != rk.Epoch)
}

// countsToTrip reports whether the failure of an attempt counts towards its rank's trip. Only the first
// failure of a request counts: a request that fails on several ranks is more likely the cause than they are.
// An engine's own limits (408, 429) never count.
func (req *request) countsToTrip(res *result) bool {
	if !causePolicies[res.cause].trip || req.countedTrip || req.app.router.isLost(req.attempt.rank) {
		return false
	}
	if res.status == http.StatusRequestTimeout || res.status == http.StatusTooManyRequests {
		return false
	}
	req.countedTrip = true
	return true
}

// maxAttempts is the policy's number of attempts per request if it has one (cache-aware), otherwise the
// application's.
func (req *request) maxAttempts() int {
	if n := req.app.router.inputs().needs.AttemptsPerRequest; n > 0 {
		return n
	}
	return req.app.attempts
}

func (req *request) countRetry(res *result, budget string) {
	metrics := req.app.router.metrics.Load()
	metrics.Attempt(causePolicies[res.cause].name, budget)
	metrics.Retry(causePolicies[res.cause].name, budget)
	req.logLine(slog.LevelDebug, "attempt failed, trying another rank", res)
}

// giveUp counts the last attempt and returns the failure for the client.
func (req *request) giveUp(res *result, budget string) *failure {
	req.app.router.metrics.Load().Attempt(causePolicies[res.cause].name, budget)
	return finalFailure(res)
}

// Limits for the wait for a stream to report the loss of a lockstep unit: its ranks fail one by one before
// the first of their streams reports the reason.
const (
	lossWait       = 250 * time.Millisecond
	deadEngineWait = 2 * time.Second // the engine reported its dead core: it exits within a second
)

// mergeUnitAttempts checks, when a request has no attempt left, whether one lockstep unit failed it several
// times. It waits for the unit's stream to report the loss. All attempts on a lost unit then count as one,
// and the request may be tried again.
func (req *request) mergeUnitAttempts(ctx context.Context, rk *rank, why cause) bool {
	there := countOfUnit(req.tried, rk)
	wait := lossWait
	if why == causeEngineDead {
		wait = deadEngineWait
	}
	if there < 2 || !req.app.router.isLockstep() || !req.awaitUnitLoss(ctx, rk, wait) {
		return false
	}
	req.attempts = max(req.attempts-there, 0) + 1
	return true
}

// countOfUnit counts the ranks of rk's unit.
func countOfUnit(ranks []*rank, rk *rank) int {
	n := 0
	for _, t := range ranks {
		if t.Unit == rk.Unit && t.Epoch == rk.Epoch {
			n++
		}
	}
	return n
}

// awaitFailingUnit waits, when ranks of one lockstep unit refused or failed the request as often as it may
// be tried, for the unit's streams to report the loss. The request then waits for the unit to return, like a
// later one; without the report it would ask the rest of the unit, and fail because no rank is left. Where
// the unit is on several nodes, the ranks of one may be lost, one by one, before the stream of the other
// reports its own. It is called for every refusal and failure, so that it sees each number once.
func (req *request) awaitFailingUnit(ctx context.Context, rk *rank) {
	there := countOfUnit(req.tried, rk) + countOfUnit(req.refusedBy, rk)
	if there != req.maxAttempts() || !req.app.router.isLockstep() {
		return
	}
	until := time.Now().Add(lossWait)
	for rest := req.app.router.survivorOf(rk); rest != nil; rest = req.app.router.survivorOf(rk) {
		if !req.awaitUnitLoss(ctx, rest, time.Until(until)) {
			return
		}
	}
}

// awaitUnitLoss waits until a rank is lost; it returns false if that does not happen within wait.
func (req *request) awaitUnitLoss(ctx context.Context, rk *rank, wait time.Duration) bool {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errOver)
	a := &attempt{router: req.attempt.router, rank: rk, cancel: cancel}
	if !req.app.router.trackAttempt(rk, a) {
		return true
	}
	defer req.app.router.untrackAttempt(rk, a)
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
	return req.app.router.isLost(rk)
}
