package routing

import (
	"math/rand/v2"
	"slices"
	"sync"
)

// Router is one application's view and policy under one lock (CONTRACTS 8). It is the only writer of both: Pick bumps
// the view in the same critical section that decided, so two picks never see the same free place.
//
// Bump rule: a dispatch counts at once (W+1, Q+tokens, Kq+tokens) under its ReqID. It lives until the stream says
// Admitted for that very ReqID, or until a record with seq ≥ the ticket's is applied, whichever comes first; from then
// on the replica's own account stands. Undo, RankDown and a new incarnation take it back. Nothing is counted twice and
// nothing goes below zero.
type Router struct {
	// OnRoom is called, outside the lock and never from Pick, after an event that can change what a queued request
	// gets: room, or the end of hope for it. Set it before the first event; it must not block.
	OnRoom func()

	policy Policy

	mu       sync.Mutex
	view     View
	accounts []account         // beside view.Ranks
	width    int               // ranks per group: 1 + the highest rank number seen
	epochs   map[RankID]uint64 // highest ever seen; outlives the rank
	state    State
	source   rand.PCG
	rand     *rand.Rand
	picked   Event // the Dispatched event of Pick: kept here so that it is not allocated
	dropped  uint64
}

// NewRouter is an empty view under policy p. The same seed and the same calls give the same decisions.
func NewRouter(p Policy, seed uint64) *Router {
	r := &Router{policy: p, epochs: make(map[RankID]uint64)}
	r.source.Seed(seed, fibonacci)
	r.rand = rand.New(&r.source)
	r.state = p.NewState(&r.view, r.rand)
	return r
}

// Policy is the policy's name.
func (r *Router) Policy() string { return r.policy.Name() }

// Pick decides for q and, on Route, bumps Ranked[0] under q.ID. The caller owes the bump's end: a ticket (EvTicket) or
// EvUndo. d is the caller's, reused.
func (r *Router) Pick(q *Request, d *Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.policy.Decide(q, &r.view, r.state, r.rand, d)
	if d.Kind != Route {
		return
	}
	i, _ := r.view.findNear(d.Ranked[0], r.width)
	r.accounts[i].bump(&r.view.Ranks[i].Load, q.ID, q.Tokens)
	if r.state != nil {
		r.picked = Event{Kind: EvDispatched, Rank: d.Ranked[0], ReqID: q.ID, Tokens: q.Tokens}
		r.policy.Observe(r.state, &r.view, &r.picked)
	}
}

// Observe applies an event: to the view first, then to the policy's state. Events of an older incarnation or epoch,
// or of a rank that is not in the view, are dropped and counted. e is not kept.
func (r *Router) Observe(e *Event) {
	if r.observe(e) && r.OnRoom != nil {
		r.OnRoom()
	}
}

func (r *Router) observe(e *Event) (wake bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.apply(e)
}

// apply is Observe under the lock; wake says that queued requests should look again.
func (r *Router) apply(e *Event) (wake bool) {
	wake, ok := r.update(e)
	if !ok {
		r.dropped++
		return false
	}
	if r.state != nil {
		r.policy.Observe(r.state, &r.view, e)
	}
	return wake
}

// Explain is what Pick would decide now, with Terms; nothing changes, not even the generator.
func (r *Router) Explain(q *Request) Decision {
	r.mu.Lock()
	defer r.mu.Unlock()
	source := r.source
	d := Decision{Explain: true}
	r.policy.Decide(q, &r.view, r.state, rand.New(&source), &d)
	return d
}

// Snapshot is a copy of the view.
func (r *Router) Snapshot() View {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.view
	v.Ranks = slices.Clone(v.Ranks)
	return v
}

// Dropped counts events that came too late: of an older incarnation or epoch, or for a rank that is not there.
func (r *Router) Dropped() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.dropped
}

// MaxMean is the imbalance of the ready ranks: open requests on the fullest over the mean; 1 is even, and so is idle.
func (r *Router) MaxMean() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, sum, most := 0, 0, 0
	for i := range r.view.Ranks {
		if rk := &r.view.Ranks[i]; rk.Ready {
			n++
			sum += rk.ongoing()
			most = max(most, rk.ongoing())
		}
	}
	if sum == 0 {
		return 1
	}
	return float64(most) * float64(n) / float64(sum)
}
