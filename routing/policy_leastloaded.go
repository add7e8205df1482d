package routing

import "math/rand/v2"

var _ Policy = LeastLoaded{}

// waitingWeight is what a waiting request weighs beside a running one in vLLM's DP load balancer.
const waitingWeight = 4

// LeastLoaded is the count form of vLLM's DP load balancer:
//
//	score = waitingWeight * W + (F + R)
//
// argmin scanning from a start that moves on by one rank per dispatch, so ties rotate. Its limits are known: it counts
// requests, not tokens. Parameter variant: count (the only one so far; kv and tokens need the cache's data).
type LeastLoaded struct{}

type leastLoadedState struct{ start uint32 }

func newLeastLoaded(p *params) Policy {
	p.oneOf("variant", "count")
	return LeastLoaded{}
}

// Name is "least-loaded".
func (LeastLoaded) Name() string { return nameLeastLoaded }

// NewState draws the first start, or every front-end would begin with the same rank.
func (LeastLoaded) NewState(_ *View, r *rand.Rand) State { return &leastLoadedState{start: r.Uint32()} }

// Observe moves the start on.
func (LeastLoaded) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*leastLoadedState); ok && e.Kind == EvDispatched {
		st.start++
	}
}

// Decide takes the candidate with the lowest score, the first of equals from the start on.
func (LeastLoaded) Decide(q *Request, v *View, s State, _ *rand.Rand, d *Decision) {
	begin(d)
	t, ok := openTier(q, v)
	if !ok {
		none(q, v, d)
		return
	}
	best := scanLowest(t, q, v, start(s, len(v.Ranks)), d)
	routeTo(d, t, &v.Ranks[best], ReasonLowestScore)
}

func start(s State, n int) int {
	if st, ok := s.(*leastLoadedState); ok {
		return int(st.start % uint32(n)) //nolint:gosec // n is a number of ranks, far below 2^32
	}
	return 0
}

// scanLowest is the index of the best candidate; the tier is not empty.
func scanLowest(t tier, q *Request, v *View, from int, d *Decision) int {
	best, lowest := -1, 0
	for k := range v.Ranks {
		i := from + k
		if i >= len(v.Ranks) {
			i -= len(v.Ranks)
		}
		rk := &v.Ranks[i]
		if !t.has(q, rk) {
			continue
		}
		if score := waitingWeight*rk.Load.W + rk.Load.F + rk.Load.R; best < 0 || score < lowest {
			best, lowest = i, score
		}
		explainCounts(rk, d)
	}
	return best
}

func explainCounts(rk *Rank, d *Decision) {
	if !d.Explain {
		return
	}
	w, run := float64(rk.Load.W), float64(rk.Load.F+rk.Load.R)
	d.Terms = append(d.Terms,
		Term{Rank: rk.ID, Name: "waiting", Unit: "requests", Raw: w, Weight: waitingWeight, Value: waitingWeight * w},
		Term{Rank: rk.ID, Name: "running", Unit: "requests", Raw: run, Weight: 1, Value: run})
}
