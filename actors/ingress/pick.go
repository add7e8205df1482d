package ingress

import (
	"context"
	"fmt"
	"hash/maphash"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// search is a request that looks for a rank.
type search struct{ *request }

// chooser asks the Router once: for a rank, or why there is none. wait: there is no room now, or no rank yet.
type chooser func() (rk *rank, f *failure, wait bool)

// pick picks a rank with room, and waits in the application's queue if there is none. On success the Router
// counts the request on that rank, unless the request computes no tokens.
func (req search) pick(ctx context.Context, cmd *dispatch.Command) dispatch.Event {
	ev := dispatch.Event{Kind: dispatch.EvNoRank, Number: cmd.Number}
	var rk *rank
	switch {
	case req.route.Computes():
		rk, ev.HasWaited = req.pickBy(ctx, cmd.Pays, req.decide)
	default:
		rk, ev.HasWaited = req.pickUncounted(ctx, cmd.Pays)
	}
	if rk != nil {
		ev.Kind, ev.Decode, req.attempt.rank = dispatch.EvPicked, rk.ref(), rk
	}
	return ev
}

// pickBy picks with a decision of the caller's. Without a rank, req.failure says why; hasWaited: the request
// has waited for room as long as it may, or it may not wait: a reservation does not. pays: a retry that must
// wait for room draws from the retry budget, so that requests which fail everywhere do not take the room of
// others.
func (req search) pickBy(ctx context.Context, pays bool, decide chooser) (rk *rank, hasWaited bool) {
	req.picks++
	req.hadTurn = req.picks > 1 // no later request may overtake it
	ar, last := req.app.router, req.ends.takeUnpaid()
	if !req.split.awaitPrefill(ctx) {
		return nil, true
	}
	defer req.split.dropRelease()
	if held := heldRequest(req); held.poolWait().isWanted() {
		if rk, hasWaited, isHeld := held.pick(ctx, decide); isHeld {
			return rk, hasWaited
		}
	}
	for asks := req.hold != nil || ar.queue.empty(); ; asks = true {
		if asks {
			rk, f, wait := decide()
			if !wait || req.hold != nil {
				if req.failure = f; rk == nil {
					req.countLast(last, "free")
					return nil, wait
				}
				req.countRetry(last, "free") //nolint:contextcheck // the line is the request's
				return rk, false
			}
		}
		if !pays || ar.retryBudget.draw(req.in.clock()) {
			break
		}
		if asks {
			req.countLast(last, "empty")
			return nil, false
		}
		// others wait, and it may not: but an idle rank that they cannot use is free
	}
	budget := "free"
	if pays {
		budget = "drawn"
	}
	req.countRetry(last, budget) //nolint:contextcheck // the line is the request's
	req.split.dropRelease()
	return req.waitForRank(ctx, decide)
}

// decide asks the Router until its answer holds.
func (req search) decide() (rk *rank, f *failure, wait bool) {
	if req.split.decides() {
		return req.split.decide()
	}
	ar, none := req.app.router, routing.RankRef{}
	for avoid := req.avoided(); ; {
		router := ar.router.Load()
		if req.mate != none {
			_, router = req.split.pair.router.Routers()
		}
		req.excludeTried()
		req.query.Tried = append(req.query.Tried, avoid...)
		req.query.ID = req.nextID()
		// before the Router's lock, and for each decision, because the caches change
		ar.describeRequest(&req.query, &req.prompt)
		req.askRouter(router)
		switch {
		case req.choice.Kind == routing.Route:
			id := req.choice.Ranked[0]
			rk := ar.findRank(id)
			switch {
			case rk != nil && req.why != nil:
				return rk, nil, false
			case rk != nil:
				ar.metrics.Load().Pick(id.Group(), id.Rank(), req.choice.Reason)
				if req.mate == none { // else the decision for its pair is kept
					ar.decisions.record(req.id, req.ends.count()+1, router.Policy(), &req.prompt, &req.query,
						&req.choice)
				}
				req.attempt.router, req.attempt.isCounted = router, true
				return rk, nil, false
			case req.why == nil:
				req.in.observeUndo(router, id, req.query.ID) // the rank is gone since the decision
			}
		case len(avoid) > 0:
			avoid = nil // there is no other
		case req.choice.Kind == routing.Queue:
			return nil, nil, true
		default:
			switch isDoubtful, isOver := req.doubtsUnit(); {
			case isOver:
			case isDoubtful:
				return nil, nil, true
			default:
				return nil, req.pickFailure(), false
			}
		}
	}
}

// avoided are the ranks to be picked only if there is no other. A stream that goes on avoids ranks that a
// roll-out replaces next, because it can move only so often.
func (req search) avoided() (out []routing.RankID) {
	if req.avoid != (routing.RankRef{}) {
		out = append(out, req.avoid.ID)
	}
	if req.kept.isResumed {
		out = req.app.router.appendOlder(out)
	}
	return out
}

// askRouter decides once, for one rank.
func (req search) askRouter(router *routing.Router) {
	began := time.Now()
	switch {
	case req.why != nil:
		req.why.ask(router)
		return
	case req.mate != (routing.RankRef{}):
		req.split.pair.router.PickDecode(&req.query, req.mate, &req.choice)
	default:
		router.Pick(&req.query, &req.choice)
	}
	req.app.router.metrics.Load().Decision(time.Since(began))
}

// nextID is the number of the next decision.
func (req search) nextID() uint64 {
	if q := req.why; q != nil && q.isExact {
		q.lastID++
		return q.lastID
	}
	if req.prompt.isReleased {
		return req.held.id
	}
	return req.in.requestID()
}

// excluded are the ranks of a side that the request must not ask again.
func (req search) excluded(side dispatch.Side) []dispatch.Excluded {
	if req.split.isUnderWay() {
		return req.split.flight.AppendTried(nil, side)
	}
	return req.plan.Tried(side)
}

// excludeTried lists the ranks that the Router must not pick. A rank that returned as a new incarnation has
// neither failed nor refused the request.
func (req search) excludeTried() {
	req.query.Tried = req.app.router.appendExcluded(req.query.Tried[:0], req.excluded(dispatch.Decode),
		!req.unitLives)
	req.query.Tried = req.split.appendPaired(req.query.Tried)
}

// How long the ranks of a unit count as lost after one of them died or refused, though the unit's stream does
// not say so yet: the ranks of a lockstep unit fail one by one before.
const (
	lossWait       = 250 * time.Millisecond
	deadEngineWait = 2 * time.Second // it reported its dead core and exits within a second, or a stream broke
)

// doubtsUnit reports whether the request is kept from ready ranks only because a rank of their unit died
// under it or refused it: then it waits until the stream says that the unit is lost, and goes on waiting for
// its return. isOver: the wait has just ended, and the unit lives. A request for a rank that stands alone
// waits so only for the rest of its answer; without an answer it ends at once.
func (req search) doubtsUnit() (isDoubtful, isOver bool) {
	ar, excluded := req.app.router, req.excluded(dispatch.Decode)
	if req.unitLives || len(excluded) == 0 || req.status == 0 && !ar.isLockstep() ||
		!ar.hasDoubtfulUnit(excluded) {
		return false, false
	}
	now := time.Now()
	if req.unitDue.IsZero() {
		wait := lossWait
		if last, _ := req.ends.get(); last != nil && last.cause == dispatch.EngineDead || req.status != 0 {
			wait = deadEngineWait
		}
		req.unitDue = now.Add(wait)
	}
	req.unitLives = !now.Before(req.unitDue)
	return !req.unitLives, req.unitLives
}

// restriction is equal for requests that may use the same ranks. It depends on the incarnations that failed
// or refused the request, on the rank that it names, and on its adapter if only some ranks have it.
func (req search) restriction() uint64 {
	excluded := req.excluded(dispatch.Decode)
	isEverywhere := req.app.router.isEverywhere(req.prompt.adapter)
	if len(excluded) == 0 && !req.prompt.hasDirect && isEverywhere {
		return unrestricted
	}
	var sum uint64 // the order of the attempts does not matter
	for _, x := range excluded {
		sum += maphash.Comparable(restrictionSeed, x)
	}
	if req.prompt.hasDirect {
		sum += maphash.Comparable(restrictionSeed, req.prompt.direct)
	}
	if !isEverywhere {
		sum += maphash.String(restrictionSeed, req.prompt.adapter)
	}
	return max(sum, unrestricted+1)
}

var restrictionSeed = maphash.MakeSeed()

// waitForRank queues the request until it has the turn and a rank has room, at most queue_s over all its
// waits. It does not wait for a start that will take longer.
func (req search) waitForRank(ctx context.Context, decide chooser) (rk *rank, hasWaited bool) {
	ar, began := req.app.router, time.Now()
	if req.queueDeadline.IsZero() {
		req.queueDeadline = began.Add(req.app.queue)
	}
	if req.failure = req.noRankInTime(time.Until(req.queueDeadline)); req.failure != nil {
		return nil, true
	}
	req.waiter.restriction, req.waiter.client = req.restriction(), clientOf(req.r)
	if req.hadTurn {
		ar.queue.rejoin(req.waiter)
	} else if full := ar.queue.join(req.waiter, req.queueBounds()); full != "" {
		req.failure = req.queueFull(full)
		return nil, true
	}
	ar.demand.update()
	if n, _ := ar.queue.size(); n == 1 {
		if f := req.noRankInTime(0); f != nil {
			req.in.log.Info("requests wait for a rank to start", slog.String("app", ar.name),
				slog.String("cause", f.message))
		}
	}
	req.timer.await(began)
	defer func() {
		req.timer.pause()
		ar.queue.leave(req.waiter)
		ar.demand.update()
		req.countWait(ar, began)
	}()
	timeout := time.NewTimer(time.Until(req.nextDue()))
	defer timeout.Stop()
	for asks := ar.queue.hasTurn(req.waiter); ; {
		if full := ar.queue.lostPlace(req.waiter); full != "" {
			req.failure = req.queueFull(full + "; this client holds more places than others")
			return nil, true
		}
		if asks {
			rk, f, wait := decide()
			if !wait {
				req.failure = f
				return rk, false
			}
			if f := req.noRankInTime(time.Until(req.queueDeadline)); f != nil {
				req.failure = f
				return nil, true
			}
			ar.queue.yield(req.waiter, req.restriction())
			timeout.Reset(time.Until(req.nextDue()))
		}
		select {
		case <-req.waiter.wake:
			asks = ar.queue.hasTurn(req.waiter)
		case <-timeout.C:
			if asks = true; time.Now().Before(req.queueDeadline) {
				continue // the wait for a unit or a full engine is over
			}
			req.failure = req.queueTimeout()
			return nil, true
		case <-ctx.Done():
			req.failure = finalFailure(&result{cause: contextCause(ctx)})
			return nil, true
		}
	}
}

// noRankInTime is the answer to a request that has waited, or would wait, for nothing: no rank is ready, and
// none can be within left. nil: a rank is ready, or may become so.
func (req search) noRankInTime(left time.Duration) *failure {
	ar := req.app.router
	ar.mu.Lock()
	isReady := ar.hasReadyRank()
	least := ar.coming.readyIn(time.Now())
	// what the streams are about to tell, or somebody else starts, may be there at any moment
	if spec := ar.revision.Load(); len(ar.suspectedNodes)+len(ar.unseenUnits) > 0 ||
		spec == nil || spec.app.Engine.Kind == app.KindAttach {
		least = 0
	}
	ar.mu.Unlock()
	if isReady || left > 0 && least <= left {
		return nil
	}
	return req.noReadyRank(int(least / time.Second))
}

// noReadyRank says that no rank is ready, and why.
func (req search) noReadyRank(retryAfter int) *failure {
	ar := req.app.router
	what := "of this application"
	if req.prompt.adapter != "" {
		what = "that has the adapter " + clipped([]byte(req.prompt.adapter))
	}
	return newFailure(openai.CodeNoReadyRank, "no rank "+what+" is ready"+ar.whyNotReady()+
		"; see `dpserve status`").withRetryAfter(min(max(retryAfter, ar.retryAfter()), maxRetryAfter))
}

// queueFull is the answer to a request for which the queue has no place. full is the bound.
func (req search) queueFull(full string) *failure {
	return newFailure(openai.CodeOverloaded, "the queue of this application is full ("+full+
		"); try again later").withRetryAfter(req.app.router.retryAfter())
}

// queueTimeout is the answer to a request that has waited for queue_s.
func (req search) queueTimeout() *failure {
	if f := req.noRankInTime(0); f != nil {
		return f
	}
	return newFailure(openai.CodeQueueTimeout, "no rank had room in time; try again later").withRetryAfter(
		req.app.router.retryAfter())
}

// clientOf is equal for the requests of one client: of one key, and without a key of one address. Behind a
// load balancer, all clients without a key have one address. 0: a request of the router's own API.
func clientOf(r *http.Request) uint64 {
	if r == nil {
		return 0
	}
	if keys := r.Header["Authorization"]; len(keys) > 0 {
		return maphash.String(restrictionSeed, keys[0])
	}
	address := r.RemoteAddr
	if port := strings.LastIndexByte(address, ':'); port >= 0 {
		address = address[:port]
	}
	return maphash.String(restrictionSeed, address)
}

// queueBounds are the bounds of the application's queue at this ingress.
func (req search) queueBounds() queueBounds {
	a := req.app.app
	tokens := int64(a.MaxQueuedTokens)
	if tokens == 0 {
		tokens = queueTokens(req.in.bodies.budget)
	}
	return queueBounds{requests: a.MaxQueuedRequests, tokens: tokens}
}

// nextDue is when a request in the queue looks again by itself. What is over already was looked at.
func (req search) nextDue() time.Time {
	due, now := req.queueDeadline, time.Now()
	if req.unitDue.After(now) && req.unitDue.Before(due) {
		due = req.unitDue
	}
	return due
}

// pickFailure is the answer to a request that no rank can take.
func (req search) pickFailure() *failure {
	if req.choice.Reason == routing.ReasonNoRankGiven {
		return newFailure(openai.CodeInvalidRequest,
			"this application uses routing policy direct: name the rank in x-dpserve-rank: GROUP/RANK")
	}
	if req.prompt.hasDirect {
		return req.namedRankFailure()
	}
	if req.choice.Reason == routing.ReasonAllBusy {
		return newFailure(openai.CodeOverloaded,
			"every rank of this application is above routing.busy_threshold; try again").withRetryAfter(
			req.app.router.retryAfter())
	}
	f := req.noReadyRank(0)
	f.cause = req.choice.Reason
	return f
}

// namedRankFailure is the answer to a request whose rank, named in x-dpserve-rank, cannot take it: the
// application has no such rank, or the rank is not ready or full. No other rank is asked.
func (req search) namedRankFailure() *failure {
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
