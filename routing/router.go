package routing

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// Router is one application's view and policy under one lock. It is the only writer of both: Pick counts its
// dispatch in the view in the same critical section, so two picks never use the same free place.
//
// Bump rule: a dispatch counts at once (W+1, Q+tokens, Kq+tokens) under its ReqID. It lives until the stream
// says Admitted for that very ReqID, or until a record with seq ≥ the ticket's is applied, whichever comes
// first; from then on the replica's own account stands. Undo, RankDown and a new incarnation take it back.
// Nothing is counted twice and nothing goes below zero.
type Router struct {
	// OnRoom is called, outside the lock and never from Pick, after an event that can change the decision for
	// a queued request: a rank got room, or no rank can get it any more. Set it before the first event; it
	// must not block.
	OnRoom func()

	policy  Policy
	reckons bool // the policy reads prefill work
	compare bool // the policy reads how slow ranks are, and how busy with prefill

	mu       sync.Mutex
	view     View
	accounts []account         // beside view.Ranks
	width    int               // ranks per group: 1 + the highest rank number seen
	epochs   map[RankID]uint64 // highest ever seen; outlives the rank
	state    State
	source   rand.PCG
	rand     *rand.Rand
	picked   Event // the Dispatched event of Pick: kept here so that it is not allocated
	admitted Event // an EvAdmitted as the policy sees it: likewise
	derived  Event // EvOpened, EvClosed: likewise
	log      *opensLog
	model    costModel
	service  service
	dropped  uint64 // events: of an older incarnation or epoch, or of a rank that is not there
	spoiled  uint64 // candidates that were left out because a term of their score was not a finite number
}

// NewRouter is an empty view under policy p. The same seed and the same calls give the same decisions.
func NewRouter(p Policy, seed uint64) *Router {
	r := &Router{policy: p, reckons: readsWork(p), model: newCostModel(p), epochs: make(map[RankID]uint64)}
	_, r.compare = p.(Mex)
	r.source.Seed(seed, fibonacci)
	r.rand = rand.New(&r.source)
	r.state = p.NewState(&r.view, r.rand)
	if kv, ok := p.(KV); ok && !kv.NoTrack {
		r.log = &opensLog{}
	}
	return r
}

// Policy is the policy's name.
func (r *Router) Policy() string { return r.policy.Name() }

// Pick decides for q and, on Route, bumps Ranked[0] under q.ID. The caller owes the bump's end: a ticket
// (EvTicket) or EvUndo. d is the caller's, reused.
func (r *Router) Pick(q *Request, d *Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.choose(q, d)
	if d.Kind == Route {
		r.dispatch(q, d.Ranked[0], r.view.hitOn(q, d.Ranked[0]))
	}
}

// choose is a Pick that counts nothing.
func (r *Router) choose(q *Request, d *Decision) {
	r.view.Now = max(r.view.Now, q.Now)
	r.reckon(r.view.Now)
	r.decide(q, &r.view, r.rand, d)
	r.spoiled += uint64(d.Disqualified)
}

// dispatch counts q on a rank that has hit tokens of it.
func (r *Router) dispatch(q *Request, id RankID, hit int) {
	i, _ := r.view.findNear(id, r.width)
	rk := &r.view.Ranks[i]
	r.accounts[i].bump(rk, q.ID, q.Tokens, hit)
	if r.view.HasBusyThreshold {
		r.view.updateBusy(rk)
	}
	if r.state != nil {
		r.picked = Event{Kind: EvDispatched, Rank: rk.ID, ReqID: q.ID, Tokens: q.Tokens, Hit: hit, Request: q}
		r.policy.Observe(r.state, &r.view, &r.picked)
		r.derive(q)
		r.picked.Request = nil
	}
}

// reckon sets the prefill work of every row to what is left at now, and what failed answers count as. It may
// be repeated for any other time: only the rows change.
func (r *Router) reckon(now time.Duration) {
	r.countFailures(now)
	if !r.reckons {
		return
	}
	sum := 0.0
	for i := range r.accounts {
		rk, a := &r.view.Ranks[i], &r.accounts[i]
		if a.queue.first != 0 {
			a.queue.reckon(rk, &r.model, now)
		}
		if !r.compare {
			continue
		}
		if s := &a.queue.speed; s.predicted > 0 {
			rk.Slow, rk.SlowSpread = r.model.slow(s, now)
		}
		rk.Rho = a.work.share(now)
		sum += rk.Rho
	}
	if len(r.accounts) > 0 {
		r.view.Rho = sum / float64(len(r.accounts))
	}
}

// countFailures sets what failed answers add to the load of every row to its value at now. Like reckon it may
// be repeated for any other time.
func (r *Router) countFailures(now time.Duration) {
	s := &r.service
	if !s.hasFailures {
		return
	}
	s.hasFailures = false
	for i := range r.accounts {
		a := &r.accounts[i]
		a.failures = slices.DeleteFunc(a.failures, func(f failure) bool { return s.isOver(f, r.view.Now) })
		s.hasFailures = s.hasFailures || len(a.failures) > 0
		r.view.Ranks[i].setFailed(s.loadOfAll(a.failures, now))
	}
}

// decide asks the policy, unless the request forces a rank.
func (r *Router) decide(q *Request, v *View, rand *rand.Rand, d *Decision) {
	if q.Force && q.HasDirect {
		resetDecision(d)
		_, known := r.epochs[q.Direct]
		decideDirect(q, v, known, d)
		if q.Released && d.Kind == Route {
			d.Reason = ReasonReleased
		}
		return
	}
	r.policy.Decide(q, v, r.state, rand, d)
}

// Observe applies an event: to the view first, then to the policy's state. Events of an older incarnation or
// epoch, or of a rank that is not in the view, are dropped and counted. e is not kept.
func (r *Router) Observe(e *Event) {
	if r.observe(e) && r.OnRoom != nil {
		r.OnRoom()
	}
}

// observe is Observe; wake says that queued requests should look again.
func (r *Router) observe(e *Event) (wake bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.view.Now = max(r.view.Now, e.Now)
	seen := e
	// asked before the event is applied
	if e.Kind == EvAdmitted && r.state != nil && !r.isOpen(e.Rank, e.ReqID) {
		r.admitted = *e
		r.admitted.Elsewhere = true
		seen = &r.admitted
	}
	wake, ok := r.update(e)
	if !ok {
		r.dropped++
		return false
	}
	r.updateCostModel()
	if r.state != nil {
		r.policy.Observe(r.state, &r.view, seen)
		r.derive(e.Request)
	}
	return r.updateBusyAt(e.Rank) || wake
}

// isOpen reports whether the request counts on the rank already: it is a dispatch of this Router, or the
// record came twice.
func (r *Router) isOpen(id RankID, reqID uint64) bool {
	i, ok := r.view.findNear(id, r.width)
	return ok && r.accounts[i].opens.get(reqID) != nil
}

// StateOf reports whether a request counts on a rank, and whether its prompt is computed.
func (r *Router) StateOf(id RankID, reqID uint64) (isOpen, isComputed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i, ok := r.view.findNear(id, r.width)
	if !ok {
		return false, false
	}
	o := r.accounts[i].opens.get(reqID)
	return o != nil, o != nil && !o.hasPrefill()
}

// updateBusyAt updates the rank's Busy after an event; freed reports that the rank may be picked again.
func (r *Router) updateBusyAt(id RankID) (freed bool) {
	if !r.view.HasBusyThreshold {
		return false
	}
	i, ok := r.view.findNear(id, r.width)
	return ok && r.view.updateBusy(&r.view.Ranks[i])
}

// Reset forgets what the policy remembers and what the replicas have not confirmed (`router reset`); the view
// of the ranks stays until their next snapshots. In-flight requests go on; their tickets and ends are
// harmless.
func (r *Router) Reset() {
	r.mu.Lock()
	for i := range r.accounts {
		r.accounts[i].forget(&r.view.Ranks[i])
	}
	r.state = r.policy.NewState(&r.view, r.rand)
	if r.log != nil {
		r.log.list = r.log.list[:0]
		for i := range r.accounts {
			r.accounts[i].logDifference(r.view.Ranks[i].ID, &opens{})
		}
		r.derive(nil)
	}
	r.mu.Unlock()
	if r.OnRoom != nil {
		r.OnRoom()
	}
}

// Snapshot is a copy of the view.
func (r *Router) Snapshot() View {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reckon(r.view.Now)
	v := r.view
	v.Ranks = slices.Clone(v.Ranks)
	return v
}

// GroupRanks appends the ranks of a lockstep group that serve, as a GroupLine looks at them. Ranks whose
// stream is silent take none while others' are not.
func (r *Router) GroupRanks(group int, into []GroupRank) []GroupRank {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, _ := r.view.Find(ID(group, 0))
	heard := false
	for i := first; i < len(r.view.Ranks) && r.view.Ranks[i].ID.Group() == group; i++ {
		heard = heard || r.view.Ranks[i].Serves() && !r.view.Ranks[i].Silent
	}
	for i := first; i < len(r.view.Ranks) && r.view.Ranks[i].ID.Group() == group; i++ {
		rk := &r.view.Ranks[i]
		if !rk.Serves() {
			continue
		}
		row := GroupRank{
			ID: rk.ID, Slots: -1, Decodes: rk.Load.R, Open: rk.ongoing(), Context: rk.Load.K + rk.Load.Kq,
			Capacity: rk.Capacity,
		}
		if !rk.Busy && (!rk.Silent || !heard) {
			row.Slots = max(0, rk.MaxOngoing-row.Open)
		}
		into = append(into, row)
	}
	return into
}

// MaxMean is the imbalance of the ready ranks: open requests on the fullest over the mean; 1 is even, and so
// is idle.
func (r *Router) MaxMean() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, sum, most := 0, 0, 0
	for i := range r.view.Ranks {
		if rk := &r.view.Ranks[i]; rk.Serves() {
			n++
			sum += rk.Open()
			most = max(most, rk.Open())
		}
	}
	if sum == 0 {
		return 1
	}
	return float64(most) * float64(n) / float64(sum)
}

// Why is what Pick would decide now, with Terms, and the view that the decision read, so that a caller can
// show why some ranks were not candidates. Nothing changes, not even the generator.
func (r *Router) Why(q *Request) (Decision, View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why(q)
}

func (r *Router) why(q *Request) (Decision, View) {
	now := max(r.view.Now, q.Now)
	r.reckon(now)
	source, v, d := q.source(&r.source), r.view, Decision{Explain: true}
	v.Now = now
	r.decide(q, &v, rand.New(&source), &d)
	v.Now, v.Ranks = r.view.Now, slices.Clone(v.Ranks)
	return d, v
}

// AnswerTime is how long good answers take on the mean, from the dispatch on; 0 while there was none.
func (r *Router) AnswerTime() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.service.whole
}

// PotentialLoad is what a rank would have in hand with one more request (get_potential_loads).
type PotentialLoad struct {
	Rank          RankID `json:"rank"`
	PrefillTokens int64  `json:"potential_prefill_tokens"` // Q + L − hit
	// distinct blocks under policy kv, else the contexts of all open requests and this one
	DecodeBlocks int64 `json:"potential_decode_blocks"`
}

// PotentialLoads computes it for every rank of the view; nothing changes.
func (r *Router) PotentialLoads(q *Request) []PotentialLoad {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reckon(max(r.view.Now, q.Now))
	var d Decision
	clear(resize(&d.scratch.extra, len(r.view.Ranks)))
	kv, tracked := r.policy.(KV)
	tracked = tracked && !kv.NoTrack
	if tracked {
		kv.decodeBlocks(q, &r.view, r.state, &d.scratch)
	}
	out := make([]PotentialLoad, len(r.view.Ranks))
	for i := range out {
		rk := &r.view.Ranks[i]
		blocks := d.scratch.extra[i]
		if !tracked {
			blocks = ceilDiv(rk.Load.K+rk.Load.Kq+int64(q.Tokens), int64(rk.blockSize(q)))
		}
		out[i] = PotentialLoad{
			Rank: rk.ID, PrefillTokens: rk.Load.Q + int64(q.Tokens-r.view.hitOn(q, rk.ID)),
			DecodeBlocks: blocks,
		}
	}
	return out
}

// derive passes the logged changes to the policy. q is the request that was dispatched, nil for any other
// event.
func (r *Router) derive(q *Request) {
	if r.log == nil {
		return
	}
	for i := range r.log.list {
		c := &r.log.list[i]
		r.derived = Event{Kind: EvClosed, Rank: c.rank, ReqID: c.key, Tokens: int(c.tokens)}
		if c.open {
			r.derived.Kind = EvOpened
			if q != nil && q.ID == c.key {
				r.derived.Request = q
			}
		}
		r.policy.Observe(r.state, &r.view, &r.derived)
	}
	r.derived.Request = nil
	r.log.list = r.log.list[:0]
}

// CostModelInfo is what an application's Router knows of its engines' steps.
type CostModelInfo struct {
	Preset          string        // dense or moe
	Prefill, Decode float64       // measured factor on the preset's milliseconds; 1 = as the preset says
	PrefillSamples  uint64        // prompts whose first token was timed
	DecodeSamples   uint64        // spans in which a rank did nothing but decode
	Age             time.Duration // since the last sample; meaningless without one
	Error           float64       // mean |observed/predicted - 1| of the last first tokens that were timed
}

// CostModel says what the Router knows of its engines' steps; ok is false if the policy predicts nothing.
func (r *Router) CostModel() (info CostModelInfo, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := &r.model
	return CostModelInfo{
		Preset: l.preset, Prefill: l.prefill, Decode: l.decode, PrefillSamples: l.prompts,
		DecodeSamples: l.spans, Age: r.view.Now - l.last, Error: l.missed,
	}, r.reckons
}

// updateCostModel recomputes the cost model from the ranks' samples. Events call it, decisions never do: an
// explained decision must not change the next one.
func (r *Router) updateCostModel() {
	l, now := &r.model, r.view.Now
	if !l.stale || l.taken != 0 && now-l.taken < modelPeriod {
		return
	}
	l.stale, l.taken = false, max(now, 1)
	l.prefill = l.median(r.accounts, func(a *account) *speed { return &a.queue.speed })
	l.decode = l.median(r.accounts, func(a *account) *speed { return &a.pace.decode })
	if l.spans == 0 { // engines that answer in less time than a span
		l.decode = min(1, l.answers.slowness(1))
	}
	b := &l.base
	r.view.Model = steptime.Coefficients{
		TokenMS: b.TokenMS * l.prefill, PairMS: b.PairMS * l.prefill,
		WeightMS: b.WeightMS * l.decode, FixedMS: b.FixedMS * l.decode, DecodeMS: b.DecodeMS * l.decode,
		ContextMS: b.ContextMS * l.decode,
	}
}
