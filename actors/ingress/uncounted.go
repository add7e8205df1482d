package ingress

import (
	"context"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// Requests that compute no tokens (/tokenize, /detokenize) take no ticket: they must not wait for a rank that
// is full. But engines tokenize in the process that streams, so each rank has only some of them at a time.
const (
	uncountedPerRank = 8   // from one ingress; more wait, at most queue_s
	maxUncounted     = 256 // of them that wait per application; more are refused
)

// uncountedWaiters are the requests of an application that wait for a rank with fewer requests without a
// ticket. The zero value has none. appRouter.mu guards it.
type uncountedWaiters struct {
	n     int
	freed chan struct{} // closed when a rank has one less; nil: no request waits
}

// pickUncounted returns a rank for a request that computes no tokens: the rank that it names, or any ready
// rank that has not failed it, full or not, of this node if there is one. If no rank is ready, the request
// waits like any other.
func (req search) pickUncounted(ctx context.Context, pays bool) (rk *rank, hasWaited bool) {
	req.place.leave()
	ar, tried := req.app.router, req.plan.Tried(dispatch.Decode)
	var names *routing.RankID
	if req.prompt.hasDirect {
		if names = &req.prompt.direct; len(tried) > 0 {
			req.failure = req.namedRankFailure()
			return nil, false
		}
	}
	rk, freed := ar.uncounted.take(ar, tried, names, req.prompt.adapter)
	if freed != nil {
		if rk = req.waitUncounted(ctx, freed, tried, names); rk == nil && req.failure != nil {
			return nil, true
		}
	}
	switch {
	case rk != nil:
		req.place = uncountedPlace{ar, rk}
		req.countRetry(req.ends.takeUnpaid(), "free") //nolint:contextcheck // the line is the request's
		return rk, false
	case names != nil:
		req.failure = req.namedRankFailure()
		return nil, false
	}
	rk, hasWaited = req.pickBy(ctx, pays, req.decide)
	if rk != nil {
		req.attempt.rank = rk
		req.undoPick() // decide has counted it
	}
	return rk, hasWaited
}

// waitUncounted waits until one of the ranks that the request may use has a place. Without a rank,
// req.failure says why; nil: none of them is ready any more.
func (req search) waitUncounted(ctx context.Context, freed <-chan struct{}, but []dispatch.Excluded,
	names *routing.RankID,
) (rk *rank) {
	ar := req.app.router
	req.failure = newFailure(openai.CodeOverloaded, "every rank has as many requests to tokenize as it may; "+
		"try again later").withRetryAfter(1)
	if !ar.uncounted.count(ar, 1) {
		return nil
	}
	defer ar.uncounted.count(ar, -1)
	timeout := time.NewTimer(req.app.queue)
	defer timeout.Stop()
	for {
		select {
		case <-freed:
		case <-timeout.C:
			return nil
		case <-ctx.Done():
			req.failure = finalFailure(&result{cause: contextCause(ctx)})
			return nil
		}
		if rk, freed = ar.uncounted.take(ar, but, names, req.prompt.adapter); freed == nil {
			req.failure = nil
			return rk
		}
	}
}

// uncountedPlace is the place of a request without a ticket on a rank. The zero value is none.
type uncountedPlace struct {
	ar *appRouter
	rk *rank
}

// leave gives the place back. Safe to call twice.
func (p *uncountedPlace) leave() {
	if p.rk == nil {
		return
	}
	p.ar.mu.Lock()
	defer p.ar.mu.Unlock()
	p.rk.uncounted--
	if u := &p.ar.uncounted; u.freed != nil {
		close(u.freed)
		u.freed = nil
	}
	*p = uncountedPlace{}
}

// take takes a place for a request without a ticket on a ready rank that is in none of but, and on
// none but the named one. If only the places are missing, freed is closed when there may be one.
func (u *uncountedWaiters) take(ar *appRouter, but []dispatch.Excluded, names *routing.RankID,
	adapter string,
) (rk *rank, freed <-chan struct{}) {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	isFull := false
	for _, r := range ar.ranks { // map order is random, so the requests are spread
		switch {
		case !r.publishedReady, names != nil && r.ID != *names,
			adapter != "" && !slices.Contains(r.adapters, adapter),
			slices.ContainsFunc(but, func(x dispatch.Excluded) bool { return x.Rank == r.ref() }):
		case r.uncounted >= uncountedPerRank:
			isFull = true
		case rk == nil, r.local && !rk.local:
			rk = r
		}
	}
	switch {
	case rk != nil:
		rk.uncounted++
	case isFull:
		if u.freed == nil {
			u.freed = make(chan struct{})
		}
		freed = u.freed
	}
	return rk, freed
}

// count counts a request that begins (1) or ends (-1) to wait; false: too many wait already.
func (u *uncountedWaiters) count(ar *appRouter, n int) bool {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	if n > 0 && u.n >= maxUncounted {
		return false
	}
	u.n += n
	return true
}
