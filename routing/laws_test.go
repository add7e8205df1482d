package routing

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// decideTwice decides on the same view, state and generator with and without Explain.
func decideTwice(t *rapid.T, p Policy, q *Request, v *View) (plain, explained Decision) {
	seed := rapid.Uint64().Draw(t, "seed")
	state := p.NewState(v, seeded(seed))
	if rapid.Bool().Draw(t, "warm") && len(v.Ranks) > 0 {
		last := v.Ranks[rapid.IntRange(0, len(v.Ranks)-1).Draw(t, "last")].ID
		before := drawRequest(t, v)
		p.Observe(state, v, &Event{Kind: EvDispatched, Rank: last, Request: &before, Tokens: before.Tokens})
		p.Observe(state, v, &Event{
			Kind: EvOpened, Rank: last, ReqID: 7, Request: &before,
			Tokens: before.Tokens,
		})
	}
	explained.Explain = true
	p.Decide(q, v, state, seeded(seed), &plain)
	p.Decide(q, v, state, seeded(seed), &explained)
	return plain, explained
}

func TestLawExplainChangesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		q := drawRequest(t, &v)
		plain, explained := decideTwice(t, drawPolicy(t), &q, &v)
		assert.Equal(t, plain.Kind, explained.Kind)
		assert.Equal(t, plain.Ranked, explained.Ranked)
		assert.Equal(t, plain.Reason, explained.Reason)
		assert.Empty(t, plain.Terms)
	})
}

func TestLawTermsSumToTheScore(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		q := drawRequest(t, &v)
		p := drawPolicy(t)
		_, d := decideTwice(t, p, &q, &v)
		if d.Kind != Route {
			assert.Empty(t, d.Terms)
			return
		}
		score := map[RankID]float64{}
		for _, term := range d.Terms {
			assert.InDelta(t, term.Raw*term.Weight, term.Value, 0)
			score[term.Rank] += term.Value
		}
		best, sign := math.Inf(1), 1.0
		if _, ok := p.(Scoring); ok {
			sign = -1
		}
		for id, s := range score {
			best = min(best, sign*s)
			checkScore(t, p, &v, &q, id, s)
		}
		require.Contains(t, score, d.Ranked[0])
		if kv, ok := p.(KV); ok && kv.Temperature > 0 {
			return
		}
		assert.InDelta(t, best, sign*score[d.Ranked[0]], 0, "the best score wins")
	})
}

// checkScore compares with the formula as the paper writes it.
func checkScore(t *rapid.T, p Policy, v *View, q *Request, id RankID, got float64) {
	i, _ := v.Find(id)
	rk := &v.Ranks[i]
	l, u := rk.Load, float64(q.Tokens)
	for _, h := range q.Hits {
		if h.Rank == id && !v.PrefixCachingOff {
			u -= max(0, min(float64(h.Tokens), float64(q.Tokens-1)))
		}
	}
	want := math.NaN()
	switch p.(type) {
	case PowerOfTwo:
		want = float64(l.O())
	case LeastLoaded:
		want = float64(4*l.W + (l.F + l.R))
	case LPWL:
		want = float64(l.Q) + u
	case LMetric:
		want = (float64(l.Q) + u) * float64(l.O()+1)
	}
	if !math.IsNaN(want) {
		assert.InDelta(t, want, got, 0)
	}
}

// candidates is the dumb oracle: who may be chosen, tier by tier.
func candidates(p Policy, q *Request, v *View) []RankID {
	var local, open, silent []RankID
	_, isDirect := p.(Direct) // a rank that is left out gets the requests that name it
	for _, rk := range v.Ranks {
		switch {
		case !rk.Ready || rk.LeftOut && !isDirect || rk.Busy || slices.Contains(q.Tried, rk.ID):
		case rk.Silent:
			silent = append(silent, rk.ID)
		case rk.Load.W+rk.Load.F+rk.Load.R < rk.MaxOngoing:
			open = append(open, rk.ID)
			if rk.Local {
				local = append(local, rk.ID)
			}
		}
	}
	if isDirect {
		all := append(open, silent...)
		return slices.DeleteFunc(all, func(id RankID) bool { return !q.HasDirect || id != q.Direct })
	}
	if pow2, ok := p.(PowerOfTwo); ok && pow2.PreferLocal && len(local) > 0 {
		return local
	}
	if len(open) > 0 {
		return open
	}
	return silent
}

func TestLawOnlyCandidatesAreRanked(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		q := drawRequest(t, &v)
		p := drawPolicy(t)
		d, _ := decideTwice(t, p, &q, &v)
		may := candidates(p, &q, &v)
		if len(may) == 0 {
			assert.NotEqual(t, Route, d.Kind)
			assert.Empty(t, d.Ranked)
			return
		}
		require.Equal(t, Route, d.Kind, d.Reason)
		require.NotEmpty(t, d.Ranked)
		assert.Subset(t, may, d.Ranked)
	})
}

func TestLawQueueAndReject(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		q := drawRequest(t, &v)
		p := drawPolicy(t)
		d, _ := decideTwice(t, p, &q, &v)
		d.scratch = scratch{}
		assert.NotEmpty(t, d.Reason)
		if d.Kind == Route {
			return
		}
		if _, ok := p.(Direct); ok {
			assert.Equal(t, Reject, d.Kind, "direct never waits and never reroutes")
			return
		}
		ready, eligible, busy := 0, 0, 0
		for _, rk := range v.Ranks {
			if rk.Ready && !rk.LeftOut {
				ready++
				switch {
				case slices.Contains(q.Tried, rk.ID):
				case rk.Busy:
					busy++
				default:
					eligible++
				}
			}
		}
		switch {
		case eligible > 0:
			assert.Equal(t, Decision{Kind: Queue, Reason: ReasonNoRoom}, d)
		case v.OnTheWay > 0:
			assert.Equal(t, Decision{Kind: Queue, Reason: ReasonOnTheWay}, d)
		case busy > 0:
			assert.Equal(t, Decision{Kind: Reject, Reason: ReasonAllBusy}, d)
		case ready > 0:
			assert.Equal(t, Decision{Kind: Reject, Reason: ReasonAllTried}, d)
		default:
			assert.Equal(t, Decision{Kind: Reject, Reason: ReasonNoReadyRank}, d)
		}
	})
}

// Relabelling that keeps the order keeps every decision. (An order-changing one permutes only the
// distribution, which TestTiesAreUniform watches.)
func TestLawRelabellingPermutesTheResult(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		q := drawRequest(t, &v)
		p := drawPolicy(t)
		rename := func(id RankID) RankID { return ID(3*id.Group()+2, 5*id.Rank()+1) }
		v2, q2 := v, q
		v2.Ranks = slices.Clone(v.Ranks)
		for i := range v2.Ranks {
			v2.Ranks[i].ID = rename(v2.Ranks[i].ID)
		}
		q2.Direct, q2.Tried = rename(q.Direct), nil
		for _, id := range q.Tried {
			q2.Tried = append(q2.Tried, rename(id))
		}
		q2.Hits = slices.Clone(q.Hits)
		for i := range q2.Hits {
			q2.Hits[i].Rank = rename(q2.Hits[i].Rank)
		}
		seed := rapid.Uint64().Draw(t, "seed")
		var d, d2 Decision
		p.Decide(&q, &v, p.NewState(&v, seeded(seed)), seeded(seed), &d)
		p.Decide(&q2, &v2, p.NewState(&v2, seeded(seed)), seeded(seed), &d2)
		assert.Equal(t, d.Kind, d2.Kind)
		require.Len(t, d2.Ranked, len(d.Ranked))
		for i := range d.Ranked {
			assert.Equal(t, rename(d.Ranked[i]), d2.Ranked[i])
		}
	})
}

// chiSquare99 is the 99.99 % quantile of chi-squared with 5 degrees of freedom.
const chiSquare9999 = 25.7

func TestTiesAreUniform(t *testing.T) {
	const ranks, draws = 6, 12000
	shapes := map[string]func(rk *Rank, i int){
		"all open":     func(*Rank, int) {},
		"one in three": func(rk *Rank, i int) { rk.Ready = i%3 == 0 }, // forces the counted draw now and then
	}
	for _, p := range []Policy{Random{}, PowerOfTwo{}, PowerOfTwo{PreferLocal: true}} {
		for name, shape := range shapes {
			t.Run(p.Name()+"/"+name, func(t *testing.T) {
				v := View{}
				for i := range 3 * ranks {
					rk := Rank{ID: ID(0, i), Ready: i < ranks, Local: true, MaxOngoing: 5}
					if name != "all open" {
						shape(&rk, i)
					}
					v.Ranks = append(v.Ranks, rk)
				}
				counts, r := map[RankID]int{}, seeded(3)
				var d Decision
				for range draws {
					p.Decide(&Request{}, &v, nil, r, &d)
					counts[d.Ranked[0]]++
				}
				require.Len(t, counts, ranks)
				chi := 0.0
				for _, n := range counts {
					diff := float64(n) - draws/ranks
					chi += diff * diff / (draws / ranks)
				}
				assert.Less(t, chi, chiSquare9999)
			})
		}
	}
}

// A pair is uniform over the pairs of candidates, whichever of its two ways it was drawn.
func TestPairIsUniform(t *testing.T) {
	const draws = 12000
	v := View{}
	for i := range 12 {
		// 4 candidates, 12 ordered pairs
		v.Ranks = append(v.Ranks, Rank{ID: ID(0, i), Ready: i%3 == 0, MaxOngoing: 9})
	}
	counts, r := map[[2]int]int{}, seeded(5)
	for range draws {
		i, j := tierOpen.pair(&Request{}, &v, r)
		require.NotEqual(t, i, j)
		counts[[2]int{i, j}]++
	}
	require.Len(t, counts, 12)
	for pair, n := range counts {
		assert.InDelta(t, draws/12, n, 160, "%v", pair) // five standard deviations
	}
}

func TestLeastLoadedTiesRotate(t *testing.T) {
	r := routerWith(LeastLoaded{}, 4, 100)
	seen := map[RankID]int{}
	for i := range 8 {
		seen[pick(r, Request{ID: uint64(i)}).Ranked[0]]++
	}
	assert.Equal(t, map[RankID]int{ID(0, 0): 2, ID(0, 1): 2, ID(0, 2): 2, ID(0, 3): 2}, seen)
}
