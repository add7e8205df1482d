package routing

import (
	"math/rand/v2"
	"slices"
)

var _ Policy = Direct{}

// Direct sends each request where its caller says (x-dpserve-rank) and never reroutes in silence: it routes
// or rejects, it does not queue. No parameters.
type Direct struct{}

// directState remembers every rank that ever served, so that a dead one is unavailable (503) and not unknown
// (400).
type directState struct{ known map[RankID]struct{} }

// Name is "direct".
func (Direct) Name() string { return nameDirect }

// NewState knows the ranks of the view.
func (Direct) NewState(v *View, _ *rand.Rand) State {
	st := &directState{known: make(map[RankID]struct{}, len(v.Ranks))}
	for i := range v.Ranks {
		st.known[v.Ranks[i].ID] = struct{}{}
	}
	return st
}

// Observe learns new ranks.
func (Direct) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*directState); ok && e.Kind == EvRankUp {
		st.known[e.Rank] = struct{}{}
	}
}

// Decide takes the named rank or says why not. A rank that was never seen while units are on their way may be
// one of those: unavailable, try again; only with nothing on its way it is the caller's mistake.
func (Direct) Decide(q *Request, v *View, s State, _ *rand.Rand, d *Decision) {
	begin(d)
	if !q.HasDirect {
		d.Reason = ReasonNoRankGiven
		return
	}
	decideDirect(q, v, knows(s, q.Direct), d)
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

func knows(s State, id RankID) bool {
	st, ok := s.(*directState)
	if !ok {
		return false
	}
	_, ok = st.known[id]
	return ok
}

func decideNamed(q *Request, rk *Rank, d *Decision) {
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
		d.Terms = append(d.Terms, Term{Rank: rk.ID, Name: "named", Unit: "none"})
	}
}
