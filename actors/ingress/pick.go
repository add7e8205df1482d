package ingress

import (
	"context"
	"hash/maphash"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// pick returns a rank with room, and waits in the application's queue if there is none. last is the attempt
// before, nil for none: it decides what the client sees when no rank is left to try. On success the Router
// counts the request on that rank, unless the request computes no tokens.
func (req *request) pick(ctx context.Context, last *result) (*rank, *failure) {
	if !req.route.Generates() {
		return req.pickUncounted(ctx, last)
	}
	return req.pickCounted(ctx, last)
}

func (req *request) pickCounted(ctx context.Context, last *result) (*rank, *failure) {
	if req.app.router.queue.empty() {
		rk, f, wait := req.decide(last)
		if !wait {
			return rk, f
		}
	}
	return req.waitForRank(ctx, last)
}

// decide asks the Router once. wait: there is no room now, or no rank yet.
func (req *request) decide(last *result) (rk *rank, f *failure, wait bool) {
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
			// The rank is gone since the decision: the Router knows it when it is asked again.
			router.Observe(&routing.Event{Kind: routing.EvUndo, Rank: id, ReqID: req.query.ID,
				Now: req.in.clock()})
		case routing.Queue:
			return nil, nil, true
		default:
			return nil, req.pickFailure(last), false
		}
	}
}

// excludeTried lists the ranks that failed this request as often as the policy allows (once unless it says
// otherwise). A rank that returned as a new incarnation has not failed it.
func (req *request) excludeTried() {
	req.query.Tried = req.query.Tried[:0]
	most := max(req.app.router.inputs().needs.AttemptsPerRank, 1)
	for i, rk := range req.tried {
		if failures(req.tried[:i+1], rk) == most && req.app.router.findRank(rk.id) == rk {
			req.query.Tried = append(req.query.Tried, rk.id)
		}
	}
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
// the request and on the rank that it names.
func (req *request) restriction() uint64 {
	if len(req.tried) == 0 && !req.prompt.hasDirect {
		return unrestricted
	}
	var sum uint64 // the order of the attempts does not matter
	for _, rk := range req.tried {
		sum += maphash.Comparable(restrictionSeed, [2]uint64{uint64(rk.id), rk.incarnation})
	}
	if req.prompt.hasDirect {
		sum += maphash.Comparable(restrictionSeed, req.prompt.direct)
	}
	return max(sum, unrestricted+1)
}

var restrictionSeed = maphash.MakeSeed()

// pickFailure is the answer to a request that no rank can take.
func (req *request) pickFailure(last *result) *failure {
	switch req.choice.Reason {
	case routing.ReasonUnknownRank:
		return newFailure(openai.CodeInvalidRequest,
			"x-dpserve-rank names a rank that this application does not have")
	case routing.ReasonNoRankGiven:
		return newFailure(openai.CodeInvalidRequest,
			"this application uses routing policy direct: name the rank in x-dpserve-rank: GROUP/RANK")
	}
	if last != nil {
		return finalFailure(last)
	}
	if req.choice.Reason == routing.ReasonAllBusy {
		return newFailure(openai.CodeOverloaded,
			"every rank of this application is above routing.busy_threshold; try again").withRetryAfter(
			req.app.router.retryAfter())
	}
	text := "no rank of this application is ready"
	if why := req.app.router.noRoomReason(); why != "" {
		text += ", and there is no room to start one: " + why
	}
	f := newFailure(openai.CodeNoReadyRank, text+"; see `dpserve status`").withRetryAfter(
		req.app.router.retryAfter())
	f.cause = req.choice.Reason
	return f
}

// waitForRank queues the request until it has the turn and a rank has room, at most queue_s over all its
// waits.
func (req *request) waitForRank(ctx context.Context, last *result) (*rank, *failure) {
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
	ar.updateDemand()
	defer func() {
		ar.queue.leave(req.waiter)
		ar.updateDemand()
		ar.metrics.Load().QueueWait(time.Since(began))
	}()
	timeout := time.NewTimer(req.queueDeadline.Sub(began))
	defer timeout.Stop()
	for {
		if ar.queue.hasTurn(req.waiter) {
			rk, f, wait := req.decide(last)
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
