package routing

import (
	"math/rand/v2"
	"slices"
)

// Random is uniform over the live ranks with room. No parameters, no state.
type Random struct{ stateless }

func (Random) Name() string { return nameRandom }

func (Random) Decide(q *Request, v *View, _ State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	for _, t := range [...]tier{tierOpen, tierSilent} {
		if i := t.one(q, v, r); i >= 0 {
			routeTo(d, t, &v.Ranks[i], ReasonUniform)
			explainUniform(t, q, v, d)
			return
		}
	}
	queueOrReject(q, v, d)
}

// explainUniform shows every candidate with the same score.
func explainUniform(t tier, q *Request, v *View, d *Decision) {
	if !d.Explain {
		return
	}
	for i := range v.Ranks {
		if t.has(q, &v.Ranks[i]) {
			d.Terms = append(d.Terms, newTerm(v.Ranks[i].ID, label{"uniform", "none"}, 0, 0))
		}
	}
}

// RoundRobin takes live ranks in id order. The cursor holds the last rank id, not an index, so that joins and
// leaves do not shift the turn. The start is drawn, or all front-ends would pile their first requests onto
// rank 0. No parameters.
type RoundRobin struct{}

type roundRobinState struct {
	last    RankID
	started bool
}

func (RoundRobin) Name() string { return nameRoundRobin }

// NewState begins before the first turn.
func (RoundRobin) NewState(*View, *rand.Rand) State { return &roundRobinState{} }

// Observe moves the cursor to the rank that was dispatched to.
func (RoundRobin) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*roundRobinState); ok && e.Kind == EvDispatched {
		st.last, st.started = e.Rank, true
	}
}

// Decide takes the smallest candidate id above the cursor, cyclically.
func (RoundRobin) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	t, ok := openTier(q, v)
	if !ok {
		queueOrReject(q, v, d)
		return
	}
	first := startIndex(t, q, v, s, r)
	routeTo(d, t, &v.Ranks[first], ReasonNextInTurn)
	if d.Explain {
		explainTurns(t, q, v, first, d)
	}
}

// startIndex is the candidate whose turn it is; the tier is not empty.
func startIndex(t tier, q *Request, v *View, s State, r *rand.Rand) int {
	st, ok := s.(*roundRobinState)
	if !ok || !st.started {
		return t.one(q, v, r)
	}
	first := -1
	for i := range v.Ranks {
		if !t.has(q, &v.Ranks[i]) {
			continue
		}
		if v.Ranks[i].ID > st.last {
			return i
		}
		if first < 0 {
			first = i
		}
	}
	return first
}

// explainTurns gives each candidate its distance from the chosen one, in turns.
func explainTurns(t tier, q *Request, v *View, first int, d *Decision) {
	turn := 0.0
	for k := range v.Ranks {
		rk := &v.Ranks[(first+k)%len(v.Ranks)]
		if t.has(q, rk) {
			d.Terms = append(d.Terms, newTerm(rk.ID, label{"turns_away", "turns"}, turn, 1))
			turn++
		}
	}
}

// PowerOfTwo draws two distinct ranks and takes the one with fewer ongoing requests: the choice rule, tie
// rule and full-means-unknown rule of Ray Serve's router, on the published view instead of probes.
type PowerOfTwo struct {
	stateless
	// PreferLocal draws among ranks of the ingress's own node first (params: prefer_local, default false).
	PreferLocal bool
}

func newPowerOfTwo(p *params) Policy {
	return PowerOfTwo{PreferLocal: p.boolean("prefer_local")}
}

func (PowerOfTwo) Name() string { return namePowerOfTwo }

// Decide draws from the first tier that is not empty: local (if asked for), open, silent.
func (p PowerOfTwo) Decide(q *Request, v *View, _ State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	t := tierOpen
	if p.PreferLocal {
		t = tierLocal
	}
	for ; t <= tierSilent; t++ {
		if i, j := t.pair(q, v, r); i >= 0 {
			choose(v, t, i, j, d)
			return
		}
	}
	queueOrReject(q, v, d)
}

// choose ranks the pair. The pair comes in random order, so keeping the first of equals is a uniform
// tie-break.
func choose(v *View, t tier, i, j int, d *Decision) {
	if j < 0 {
		routeTo(d, t, &v.Ranks[i], ReasonOnlyCandidate)
		explainOngoing(&v.Ranks[i], d)
		return
	}
	if v.Ranks[j].ongoing() < v.Ranks[i].ongoing() {
		i, j = j, i
	}
	routeTo(d, t, &v.Ranks[i], ReasonFewerOngoing)
	d.Ranked = append(d.Ranked, v.Ranks[j].ID)
	explainOngoing(&v.Ranks[i], d)
	explainOngoing(&v.Ranks[j], d)
}

func explainOngoing(rk *Rank, d *Decision) {
	if d.Explain {
		d.Terms = append(d.Terms, newTerm(rk.ID, label{"ongoing", "requests"}, float64(rk.ongoing()), 1))
	}
}

// Direct sends each request where its caller says (x-dpserve-rank) and never reroutes in silence: it routes
// or rejects, it does not queue. No parameters.
type Direct struct{}

// directState remembers every rank that ever served, so that a dead one is unavailable (503) and not unknown
// (400).
type directState map[RankID]struct{}

func (Direct) Name() string { return nameDirect }

// NewState knows the ranks of the view.
func (Direct) NewState(v *View, _ *rand.Rand) State {
	st := make(directState, len(v.Ranks))
	for i := range v.Ranks {
		st[v.Ranks[i].ID] = struct{}{}
	}
	return st
}

func (Direct) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(directState); ok && e.Kind == EvRankUp {
		st[e.Rank] = struct{}{}
	}
}

// Decide takes the named rank or says why not. A rank that was never seen while units are on their way may be
// one of those: unavailable, try again; only with nothing on its way it is the caller's mistake.
func (Direct) Decide(q *Request, v *View, s State, _ *rand.Rand, d *Decision) {
	resetDecision(d)
	if !q.HasDirect {
		d.Reason = ReasonNoRankGiven
		return
	}
	st, _ := s.(directState)
	_, known := st[q.Direct]
	decideDirect(q, v, known, d)
}

// decideDirect takes the rank that the request names; known says that it served before.
func decideDirect(q *Request, v *View, known bool, d *Decision) {
	i, ok := v.Find(q.Direct)
	switch {
	case !ok && (known || v.OnTheWay > 0):
		d.Reason = ReasonRankUnavailable
	case !ok:
		d.Reason = ReasonUnknownRank
	default:
		decideNamed(q, &v.Ranks[i], d)
	}
}

// decideNamed takes the rank that a request names, also one that is left out: a name is how one tries it.
func decideNamed(q *Request, rk *Rank, d *Decision) {
	named := *rk
	named.LeftOut = false
	rk = &named
	switch {
	case slices.Contains(q.Tried, rk.ID):
		d.Reason = ReasonAllTried
	case tierOpen.has(q, rk):
		routeTo(d, tierOpen, rk, ReasonNamedByCaller)
	case tierSilent.has(q, rk):
		routeTo(d, tierSilent, rk, ReasonNamedByCaller)
	default:
		d.Reason = ReasonRankUnavailable
	}
	if d.Kind == Route && d.Explain {
		d.Terms = append(d.Terms, newTerm(rk.ID, label{"named", "none"}, 0, 0))
	}
}
