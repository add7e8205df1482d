package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

const (
	// firstRenewal is after what time the hits of a request that waits are looked up anew; each time after
	// that is twice the one before.
	firstRenewal = 250 * time.Millisecond
	// maxGroupReturns is how often a request goes back to its group's queue because its ingress sees no room
	// on the rank that the owner names.
	maxGroupReturns = 3
)

// groupWait is a request of this ingress that waits for a lockstep group. It can be used again once it is
// answered or has left.
type groupWait struct {
	id       uint64
	group    int
	owner    string // the node whose ingress has the queue
	tokens   int
	hits     []routing.Hit
	since    time.Duration
	client   uint64
	answered chan groupAnswer // one slot
}

// groupAnswer ends a wait.
type groupAnswer struct {
	rank routing.RankID
	// no group can serve the request now, or its application holds none: it goes on as if it had not waited
	isNobody bool
}

// heldRequest is a request in the queue of a lockstep group, or released from there.
type heldRequest struct{ *request }

// poolWait is a request before the groups of a pool, which reads its prompt in its own way.
type poolWait struct {
	*request
	pool   *appRouter
	wait   *groupWait
	prompt *prompt
	query  *routing.Request
}

// poolWait is the wait for the only pool, or for the decode pool.
func (req heldRequest) poolWait() poolWait {
	return poolWait{req.request, req.app.router, &req.held, &req.prompt, &req.query}
}

// isWanted reports whether the request is one that groups hold: it searches for the first time, for any
// rank. A reservation does not wait.
func (req poolWait) isWanted() bool {
	return req.picks == 1 && req.hold == nil && req.why == nil && !req.prompt.hasDirect &&
		req.pool.groups.rule.Load() != nil && req.route.Generates() &&
		req.pool.isEverywhere(req.prompt.adapter) && search{req.request}.restriction() == unrestricted
}

// pick waits until the owner of a group's queue names a rank, and takes it. isHeld is false if no
// group can hold the request.
func (req heldRequest) pick(ctx context.Context, decide chooser) (rk *rank, hasWaited, isHeld bool) {
	isTaken, isHeld := req.poolWait().await(ctx, func(id routing.RankID) bool {
		rk = req.take(id, decide)
		return rk != nil
	})
	return rk, isHeld && !isTaken, isHeld
}

// await waits until the owner of a group's queue names a rank, and take has taken it. Without a rank,
// req.failure says why; isHeld is false if no group can hold the request.
func (req poolWait) await(ctx context.Context, take func(routing.RankID) bool) (isTaken, isHeld bool) {
	ar, w, began, find := req.pool, req.wait, time.Now(), search{req.request}
	if full := ar.queue.hold(req.waiter, find.queueBounds()); full != "" {
		req.failure = find.queueFull(full)
		return false, true
	}
	defer ar.queue.unhold(req.waiter)
	if !req.join() {
		return false, false
	}
	req.timer.await(began)
	defer func() {
		req.timer.pause()
		ar.groups.leave(w)
		req.countWait(ar, began)
	}()
	if req.queueDeadline.IsZero() {
		req.queueDeadline = began.Add(req.app.queue)
	}
	renewal := firstRenewal
	timer := time.NewTimer(min(renewal, time.Until(req.queueDeadline)))
	defer timer.Stop()
	for returns := 0; ; {
		select {
		case a := <-w.answered:
			if a.isNobody || returns > maxGroupReturns {
				return false, false
			}
			if take(a.rank) {
				return true, true
			}
			returns++
			ar.groups.putBack(w)
		case <-timer.C:
			left := time.Until(req.queueDeadline)
			if left <= 0 {
				req.failure = find.queueTimeout()
				return false, true
			}
			renewal *= 2
			timer.Reset(min(renewal, left))
			ar.describeRequest(req.query, req.prompt)
			ar.groups.renew(w, req.query.Hits)
		case <-ctx.Done():
			req.failure = finalFailure(&result{cause: contextCause(ctx)})
			return false, true
		}
	}
}

// join puts the request into the queue of a group. It returns false if no group serves and none is
// coming, and if every rank is above busy_threshold. For a prefill rank that is coming nobody waits: a decode
// rank can compute the prompt.
func (req poolWait) join() bool {
	ar, w := req.pool, req.wait
	ar.describeRequest(req.query, req.prompt)
	spec := ar.revision.Load().app
	if spec.Routing.BusyThreshold != nil {
		if d, _ := ar.router.Load().Why(req.query); d.Kind == routing.Reject {
			return false
		}
	}
	*w = groupWait{
		id: req.in.requestID(), tokens: req.query.Tokens, hits: append(w.hits[:0], req.query.Hits...),
		since: ar.in.clock(), client: max(clientOf(req.r), 1), answered: w.answered,
	}
	if !ar.groups.choose(w, spec.NumGroups) &&
		(spec.Pool == app.PoolPrefill || search{req.request}.noRankInTime(req.app.queue) != nil) {
		return false
	}
	return ar.groups.join(w)
}

// take takes the rank that the owner of the queue has named, if it has room as far as this ingress
// knows; nil: it has not.
func (req heldRequest) take(id routing.RankID, decide chooser) *rank {
	p := &req.prompt
	p.direct, p.hasDirect, p.isReleased = id, true, true
	rk, _, _ := decide()
	p.direct, p.hasDirect, p.isReleased = 0, false, false
	return rk
}

// isReleased reports whether the request runs as the one that a group has released.
func (req heldRequest) isReleased() bool { return req.held.id != 0 && req.held.id == req.query.ID }

// noteFirstToken tells the queue of the group that the prompt is computed, if the queue is here: the rank's
// stream says so later.
func (req heldRequest) noteFirstToken() {
	if req.isReleased() {
		req.app.router.groups.observe(routing.EvFirstToken, req.attempt.rank.ID, req.held.id, 0)
	}
}

// end tells the owner of the queue that the request has ended; isUndone: no rank has taken it.
func (req heldRequest) end(isUndone bool) {
	if !req.isReleased() {
		return
	}
	req.app.router.groups.finish(&req.held, req.attempt.rank.ID, req.outputTokens(), isUndone)
	req.held.id = 0
}

// uncached is the number of prompt tokens that the rank of a group with the longest hit computes.
func (w *groupWait) uncached(group int) int {
	n := w.tokens
	for _, h := range w.hits {
		if h.Rank.Group() == group {
			n = min(n, w.tokens-int(h.Tokens))
		}
	}
	return n
}
