package routing

import (
	"maps"
	"math/rand/v2"
	"sync"
)

// PairRouter decides over the Routers of both pools of an application. It locks itself, then the prefill
// pool's Router, then the decode pool's; nothing else holds two of them.
type PairRouter struct {
	prefill, decode *Router

	mu     sync.Mutex
	rule   PairRule
	table  *PairTable
	source rand.PCG
	rand   *rand.Rand
	counts map[string]uint64 // decisions by reason
	in     PairInput         // of the decision at hand: kept here so that it is not allocated
	p, d   Decision          // likewise
	dry    PairDecision      // of WantsPrefill: likewise
	alone  Request           // of PickPrefill and PickDecode: likewise
	tried  []RankID          // likewise
}

// NewPairRouter is a PairRouter over both pools' Routers. prewarm is that of NewPairTable.
func NewPairRouter(prefill, decode *Router, rule PairRule, prewarm bool, seed uint64) *PairRouter {
	r := &PairRouter{
		prefill: prefill, decode: decode, rule: rule, table: NewPairTable(prewarm),
		counts: map[string]uint64{},
	}
	r.source.Seed(seed, fibonacci)
	r.rand = rand.New(&r.source)
	return r
}

// Pick decides and, on Route, counts the request on the decode rank, and on the prefill rank if there is one,
// under the IDs of d and p. Each count ends as one of Router.Pick does. p and d are the same request with
// what the ranks of either pool hold of it. A decode rank of a pair counts the prompt as computed. Decode
// ranks that PairRule.NeedsMet leaves out are added to d.Tried.
func (r *PairRouter) Pick(p, d *Request, cannotSplit bool, out *PairDecision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prefill.mu.Lock()
	defer r.prefill.mu.Unlock()
	r.decode.mu.Lock()
	defer r.decode.mu.Unlock()
	r.decide(p, d, cannotSplit, out)
	r.counts[out.Reason]++
	switch {
	case out.Kind != Route:
	case out.Remote:
		r.prefill.dispatch(p, out.Prefill, r.prefill.view.hitOn(p, out.Prefill))
		r.decode.dispatch(d, out.Decode, d.Tokens)
	default:
		r.decode.dispatch(d, out.Decode, r.decode.view.hitOn(d, out.Decode))
	}
}

// WantsPrefill reports whether Pick would take a prefill rank now, or would if one had room. It counts
// nothing, and changes d.Tried as Pick does.
func (r *PairRouter) WantsPrefill(p, d *Request) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prefill.mu.Lock()
	defer r.prefill.mu.Unlock()
	r.decode.mu.Lock()
	defer r.decode.mu.Unlock()
	r.decide(p, d, false, &r.dry)
	return r.dry.Remote || r.dry.Reason == PairPrefillFull
}

// decide decides. The caller holds all locks.
func (r *PairRouter) decide(p, d *Request, cannotSplit bool, out *PairDecision) {
	r.prefill.choose(p, &r.p)
	for {
		r.decode.choose(d, &r.d)
		r.in = PairInput{
			Prefill:     newPairPool(r.prefill, p, &r.prefill.view, &r.p),
			Decode:      newPairPool(r.decode, d, &r.decode.view, &r.d),
			Table:       r.table,
			CannotSplit: cannotSplit,
		}
		r.rule.Decide(&r.in, r.rand, out)
		r.in = PairInput{}
		if !r.rule.leavesOut(d, out) {
			return
		}
		d.Tried = append(d.Tried, out.Decode)
	}
}

// Next is a PairRouter over other Routers or with another rule, for ranks that r knows: pairs that have met
// stay so, and what their transfers took is known. Leases stay with r, because their requests release them
// there.
func (r *PairRouter) Next(prefill, decode *Router, rule PairRule, seed uint64) *PairRouter {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := NewPairRouter(prefill, decode, rule, r.table.prewarm, seed)
	for key := range r.table.met {
		next.table.SetMet(key.prefill, key.decode)
	}
	next.table.transfers = r.table.transfers.clone()
	return next
}

// Routers are those of the prefill pool and of the decode pool.
func (r *PairRouter) Routers() (prefill, decode *Router) { return r.prefill, r.decode }

// PickPrefill chooses another prefill rank for a request that keeps its decode rank, and on Route counts the
// request there, under the ID of p. Ranks that have not met the decode rank, or whose caches are full of
// leases, are left out.
func (r *PairRouter) PickPrefill(p *Request, decode RankRef, d *Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prefill.mu.Lock()
	defer r.prefill.mu.Unlock()
	r.pickAlone(r.prefill, p, d, func(rk *Rank) bool {
		return r.table.HasMet(RefOf(rk), decode) && r.table.skipPrefill(rk, p.Tokens) == ""
	})
}

// PickDecode chooses another decode rank for a prompt that prefill has computed, and on Route counts the
// request there, under the ID of q.
func (r *PairRouter) PickDecode(q *Request, prefill RankRef, d *Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.decode.mu.Lock()
	defer r.decode.mu.Unlock()
	r.pickAlone(r.decode, q, d, func(rk *Rank) bool { return r.table.HasMet(prefill, RefOf(rk)) })
}

// pickAlone is a Pick of one pool among the ranks that fit. The caller holds its lock.
func (r *PairRouter) pickAlone(pool *Router, q *Request, d *Decision, fits func(rk *Rank) bool) {
	r.alone = *q
	r.tried = append(r.tried[:0], q.Tried...)
	for i := range pool.view.Ranks {
		if rk := &pool.view.Ranks[i]; !fits(rk) {
			r.tried = append(r.tried, rk.ID)
		}
	}
	r.alone.Tried = r.tried
	pool.choose(&r.alone, d)
	if d.Kind == Route {
		hit := pool.view.hitOn(q, d.Ranked[0])
		if pool == r.decode { // it reads the whole prompt
			hit = q.Tokens
		}
		pool.dispatch(q, d.Ranked[0], hit)
	}
	r.alone = Request{}
}

func newPairPool(r *Router, q *Request, v *View, choice *Decision) PairPool {
	return PairPool{View: v, Query: q, Choice: choice, Policy: r.policy, State: r.state}
}

// PairWhy is a decision with all that it was made of.
type PairWhy struct {
	Pair            PairDecision
	Prefill, Decode Decision // of the pools' policies
	PrefillView     View
	DecodeView      View
}

// Explain is what Pick would decide now, with all candidates; nothing changes but d.Tried, not even the
// generators.
func (r *PairRouter) Explain(p, d *Request, cannotSplit bool) PairWhy {
	r.mu.Lock()
	defer r.mu.Unlock()
	why := PairWhy{Pair: PairDecision{Explain: true}}
	// both locks are held until the views are copied: Pick sees both pools at one moment
	r.prefill.mu.Lock()
	defer r.prefill.mu.Unlock()
	r.decode.mu.Lock()
	defer r.decode.mu.Unlock()
	why.Prefill, why.PrefillView = r.prefill.why(p)
	why.PrefillView.Now = max(why.PrefillView.Now, p.Now)
	for {
		why.Decode, why.DecodeView = r.decode.why(d)
		why.DecodeView.Now = max(why.DecodeView.Now, d.Now)
		source := d.source(&r.source)
		r.rule.Decide(&PairInput{
			Prefill:     newPairPool(r.prefill, p, &why.PrefillView, &why.Prefill),
			Decode:      newPairPool(r.decode, d, &why.DecodeView, &why.Decode),
			Table:       r.table,
			CannotSplit: cannotSplit,
		}, rand.New(&source), &why.Pair)
		if !r.rule.leavesOut(d, &why.Pair) {
			break
		}
		d.Tried = append(d.Tried, why.Pair.Decode)
		why.Pair = PairDecision{Explain: true}
	}
	return why
}

// Update changes the table of pairs and leases. change must not call the PairRouter.
func (r *PairRouter) Update(change func(t *PairTable)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change(r.table)
}

// Counts are the decisions so far by reason.
func (r *PairRouter) Counts() map[string]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.counts)
}

// RankRef names one incarnation of a rank.
type RankRef struct {
	ID          RankID
	Incarnation uint64
}

// RefOf names the incarnation that is in the view.
func RefOf(rk *Rank) RankRef { return RankRef{rk.ID, rk.Incarnation} }

const (
	// leasedShare is the part of a prefill rank's KV cache that finished prompts may hold for decode ranks
	// that have not read them yet. A prefill rank that is full of them computes nothing until their leases
	// end.
	leasedShare = 0.5
	// leasedTokens is the bound where the size of the cache is not known.
	leasedTokens = 1 << 16
)

// PairTable holds what a pair decision needs to know beyond both pools' views: which ranks have met, what
// prefill ranks hold for decode ranks, and how long transfers take. Rank numbers of the two pools may be
// equal, so a rank is always named together with its pool. The caller serializes all calls; the table reads
// no clock.
type PairTable struct {
	prewarm  bool
	met      map[pairKey]struct{}
	prefills map[RankRef]int // met decode ranks
	decodes  map[RankRef]int // met prefill ranks
	leased   map[RankRef]int64
	failed   map[pairKey]int // prompts in a row that failed on their way, of pairs that have met

	transfers transferTimes
}

type pairKey struct{ prefill, decode RankRef }

// IsFullOfLeases reports whether a prefill rank that holds so many tokens for decode ranks may not get a
// prompt of so many tokens more. capacity is the size of its KV cache in tokens, 0 if it is not known. A rank
// that holds nothing takes a prompt of any length.
func IsFullOfLeases(held, tokens, capacity int64) bool {
	most := int64(leasedTokens)
	if capacity > 0 {
		most = int64(leasedShare * float64(capacity))
	}
	return held > 0 && held+tokens > most
}

// NewPairTable is an empty table. With prewarm, only pairs that SetMet was called for are used; transfers
// whose engines need no handshake do without.
func NewPairTable(prewarm bool) *PairTable {
	return &PairTable{
		prewarm: prewarm, met: map[pairKey]struct{}{}, prefills: map[RankRef]int{},
		decodes: map[RankRef]int{}, leased: map[RankRef]int64{}, failed: map[pairKey]int{},
	}
}

// SetMet records that a first transfer from p to d has ended well since both started.
func (t *PairTable) SetMet(p, d RankRef) {
	key := pairKey{p, d}
	if _, ok := t.met[key]; ok {
		return
	}
	t.met[key] = struct{}{}
	t.prefills[p]++
	t.decodes[d]++
}

// HasMet reports whether p and d may have a client's request.
func (t *PairTable) HasMet(p, d RankRef) bool {
	if !t.prewarm {
		return true
	}
	_, ok := t.met[pairKey{p, d}]
	return ok
}

// pairFailures is how many prompts in a row may fail on their way between two ranks.
const pairFailures = 3

// Failed records that a prompt failed on its way from p to d, by whatever fault. The last of pairFailures
// in a row ends the pair, until SetMet: a first transfer has to end well again.
func (t *PairTable) Failed(p, d RankRef) (isOver bool) {
	key := pairKey{p, d}
	if _, ok := t.met[key]; !ok {
		return false
	}
	if t.failed[key]++; t.failed[key] < pairFailures {
		return false
	}
	t.forget(func(k pairKey) bool { return k == key })
	return true
}

// Worked records that d has read a prompt of p.
func (t *PairTable) Worked(p, d RankRef) {
	if len(t.failed) > 0 {
		delete(t.failed, pairKey{p, d})
	}
}

// hasPartner reports whether any prefill rank has met the decode rank.
func (t *PairTable) hasPartner(d *Rank) bool { return !t.prewarm || t.decodes[RefOf(d)] > 0 }

// ForgetPrefill drops an incarnation of a prefill rank that is gone, with its leases.
func (t *PairTable) ForgetPrefill(p RankRef) {
	delete(t.leased, p)
	t.forget(func(k pairKey) bool { return k.prefill == p })
}

// ForgetDecode drops an incarnation of a decode rank that is gone.
func (t *PairTable) ForgetDecode(d RankRef) {
	t.forget(func(k pairKey) bool { return k.decode == d })
}

func (t *PairTable) forget(isGone func(pairKey) bool) {
	for key := range t.met {
		if isGone(key) {
			delete(t.met, key)
			delete(t.failed, key)
			subtract(t.prefills, key.prefill, 1)
			subtract(t.decodes, key.decode, 1)
		}
	}
}

// Lease counts tokens that p holds for a decode rank, from the dispatch of the prefill leg on.
func (t *PairTable) Lease(p RankRef, tokens int) { t.leased[p] += int64(max(0, tokens)) }

// Release ends a Lease of as many tokens. One of an incarnation that is gone changes nothing.
func (t *PairTable) Release(p RankRef, tokens int) { subtract(t.leased, p, int64(max(0, tokens))) }

// subtract takes n off a count, which goes when it is 0.
func subtract[N int | int64](counts map[RankRef]N, ref RankRef, n N) {
	if left := counts[ref] - n; left > 0 {
		counts[ref] = left
	} else {
		delete(counts, ref)
	}
}

// Leased is the number of tokens that rk holds for decode ranks.
func (t *PairTable) Leased(rk *Rank) int64 {
	if len(t.leased) == 0 {
		return 0
	}
	return t.leased[RefOf(rk)]
}

// skipPrefill is why a prefill rank may not get a prompt of so many tokens whatever the decode rank; "" if it
// may.
func (t *PairTable) skipPrefill(rk *Rank, tokens int) string {
	switch {
	case IsFullOfLeases(t.Leased(rk), int64(tokens), rk.Capacity):
		return PairLeasesFull
	case t.prewarm && t.prefills[RefOf(rk)] == 0:
		return PairNotPrewarmed
	}
	return ""
}

// skipPair is why two ranks may not be paired; "" if they may.
func (t *PairTable) skipPair(p, d *Rank) string {
	if t.HasMet(RefOf(p), RefOf(d)) {
		return ""
	}
	return PairNotPrewarmed
}
