package ingress

import (
	"context"
	"hash/maphash"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// pick finds a rank with room, waiting in the application's queue if it must. last is the attempt before, nil for none: it
// decides what the client sees when nothing is left to try. On success the Router counts the request on that rank, unless it computes
// no tokens.
func (c *call) pick(ctx context.Context, last *result) (*rank, *failure) {
	if !c.route.Generates() {
		return c.pickUncounted(ctx, last)
	}
	return c.pickCounted(ctx, last)
}

func (c *call) pickCounted(ctx context.Context, last *result) (*rank, *failure) {
	if c.entry.lane.queue.empty() {
		rk, f, wait := c.decide(last)
		if !wait {
			return rk, f
		}
	}
	return c.wait(ctx, last)
}

// decide asks the Router once. wait: there is no room now, or no rank yet.
func (c *call) decide(last *result) (rk *rank, f *failure, wait bool) {
	l := c.entry.lane
	for {
		router := l.router.Load()
		c.exclude()
		c.query.ID = c.in.requestID()
		l.describe(&c.query, &c.prompt) // before the Router's lock, and anew each time: the caches have moved on
		began := time.Now()
		router.Pick(&c.query, &c.choice)
		l.meter.Load().Decision(time.Since(began))
		switch c.choice.Kind {
		case routing.Route:
			id := c.choice.Ranked[0]
			if rk := l.find(id); rk != nil {
				l.meter.Load().Pick(id.Group(), id.Rank(), c.choice.Reason)
				l.recent.note(c.id, c.attempts+1, router.Policy(), &c.prompt, &c.query, &c.choice)
				c.attempt.router = router
				return rk, nil, false
			}
			// Gone between the decision and now: the Router knows by the time it is asked again.
			router.Observe(&routing.Event{Kind: routing.EvUndo, Rank: id, ReqID: c.query.ID, Now: c.in.clock()})
		case routing.Queue:
			return nil, nil, true
		default:
			return nil, c.rejected(last), false
		}
	}
}

// exclude names the ranks that failed this request, as often as the policy lets them (once unless it says otherwise). One that
// came back as a new incarnation has not failed it.
func (c *call) exclude() {
	c.query.Tried = c.query.Tried[:0]
	most := max(c.entry.lane.reads().needs.AttemptsPerRank, 1)
	for i, rk := range c.tried {
		if failures(c.tried[:i+1], rk) == most && c.entry.lane.find(rk.id) == rk {
			c.query.Tried = append(c.query.Tried, rk.id)
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

// restriction tells requests that may use different ranks apart: by the incarnations that failed them, and by the rank that they name.
func (c *call) restriction() uint64 {
	if len(c.tried) == 0 && !c.prompt.hasDirect {
		return unrestricted
	}
	var sum uint64 // the order of the attempts does not matter
	for _, rk := range c.tried {
		sum += maphash.Comparable(restrictionSeed, [2]uint64{uint64(rk.id), rk.incarnation})
	}
	if c.prompt.hasDirect {
		sum += maphash.Comparable(restrictionSeed, c.prompt.direct)
	}
	return max(sum, unrestricted+1)
}

var restrictionSeed = maphash.MakeSeed()

// rejected says what a request gets that no rank can take.
func (c *call) rejected(last *result) *failure {
	switch c.choice.Reason {
	case routing.ReasonUnknownRank:
		return fail(openai.CodeInvalidRequest, "x-dpserve-rank names a rank that this application does not have")
	case routing.ReasonNoRankGiven:
		return fail(openai.CodeInvalidRequest, "this application uses routing policy direct: name the rank in x-dpserve-rank: GROUP/RANK")
	}
	if last != nil {
		return final(last)
	}
	if c.choice.Reason == routing.ReasonAllBusy {
		return fail(openai.CodeOverloaded, "every rank of this application is above routing.busy_threshold; try again").after(c.entry.lane.retryAfter())
	}
	text := "no rank of this application is ready"
	if why := c.entry.lane.whyNoRoom(); why != "" {
		text += ", and there is no room to start one: " + why
	}
	f := fail(openai.CodeNoReadyRank, text+"; see `dpserve status`").after(c.entry.lane.retryAfter())
	f.cause = c.choice.Reason
	return f
}

// wait queues the request until it is its turn and a rank has room, at most queue_s over all its waits.
func (c *call) wait(ctx context.Context, last *result) (*rank, *failure) {
	l, began := c.entry.lane, time.Now()
	if c.waitDue.IsZero() {
		c.waitDue = began.Add(c.entry.queue)
	}
	c.waiter.restriction = c.restriction()
	if c.rejoin {
		l.queue.rejoin(c.waiter)
	} else if !l.queue.join(c.waiter, c.entry.app.MaxQueuedRequests, c.in.limits.MaxQueueTokens) {
		return nil, fail(openai.CodeOverloaded, "the queue of this application is full; try again later").after(l.retryAfter())
	}
	l.tellDemand()
	defer func() {
		l.queue.leave(c.waiter)
		l.tellDemand()
		l.meter.Load().QueueWait(time.Since(began))
	}()
	timeout := time.NewTimer(c.waitDue.Sub(began))
	defer timeout.Stop()
	for {
		if l.queue.hasTurn(c.waiter) {
			rk, f, wait := c.decide(last)
			if !wait {
				return rk, f
			}
			l.queue.yield(c.waiter)
		}
		select {
		case <-c.waiter.wake:
		case <-timeout.C:
			return nil, fail(openai.CodeQueueTimeout, "no rank had room in time; try again later").after(l.retryAfter())
		case <-ctx.Done():
			return nil, final(&result{cause: ended(ctx)})
		}
	}
}
