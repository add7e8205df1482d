package routing

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The vector of the profile page: hit 50 % and load 8000 against hit 10 % and load 0, max load 20000,
// balanced ⇒ 0.545 against 0.505.
func TestScoringVector(t *testing.T) {
	v := View{Ranks: []Rank{
		{ID: ID(0, 0), Ready: true, MaxOngoing: 9, Load: Load{R: 1, K: 6000, W: 1, Kq: 2000}},
		{ID: ID(0, 1), Ready: true, MaxOngoing: 9},
		// full, and still the largest load
		{ID: ID(0, 2), Ready: true, MaxOngoing: 1, Load: Load{R: 1, K: 20000}},
		{ID: ID(0, 3), MaxOngoing: 9, Load: Load{R: 1, K: 90000}}, // not live
	}}
	q := Request{Tokens: 1000, Hits: []Hit{{Rank: ID(0, 0), Tokens: 500}, {Rank: ID(0, 1), Tokens: 100}}}
	ask := func(p Policy) (Decision, []float64) {
		d := Decision{Explain: true}
		p.Decide(&q, &v, nil, seeded(1), &d)
		var scores []float64
		for i := 0; i < len(d.Terms); i += 2 {
			scores = append(scores, d.Terms[i].Value+d.Terms[i+1].Value)
		}
		return d, scores
	}
	d, scores := ask(newPolicy(t, "scoring"))
	assert.InDeltaSlice(t, []float64{0.545, 0.505}, scores, 1e-12)
	assert.Equal(t, []RankID{ID(0, 0)}, d.Ranked)
	assert.Equal(t, ReasonHighestScore, d.Reason)
	_, scores = ask(Scoring{Profile: profileLocality})
	assert.InDeltaSlice(t, []float64{0.9*0.5 + 0.1*0.6, 0.9*0.1 + 0.1}, scores, 1e-12)
	d, scores = ask(Scoring{Profile: profileLoad})
	assert.InDeltaSlice(t, []float64{0.1*0.5 + 0.9*0.6, 0.1*0.1 + 0.9}, scores, 1e-12)
	assert.Equal(t, []RankID{ID(0, 1)}, d.Ranked)
	v.Ranks[1].Load = Load{R: 1, K: 4000}
	_, scores = ask(Scoring{Spread: true})
	assert.InDeltaSlice(t, []float64{0.55*0.5 + 0.45*0.75, 0.55*0.1 + 0.45}, scores, 1e-12)
}

// Without prefix caching the load profile holds, whatever was asked, and hits count for nothing.
func TestScoringWithoutPrefixCachingIsTheLoadProfile(t *testing.T) {
	r := routerWith(Scoring{Profile: profileLocality}, 2, 9)
	q := Request{ID: 1, Tokens: 1000, Hits: []Hit{{Rank: ID(0, 1), Tokens: 900}}}
	assert.Equal(t, ID(0, 1), r.Explain(&q).Ranked[0])
	r.Observe(&Event{Kind: EvConfigured, Config: &Config{PrefixCachingOff: true}})
	d := r.Explain(&q)
	assert.Equal(t, ReasonPrefixCachingOff, d.Reason)
	assert.Equal(t, []float64{0, 0.1, 1, 0.9},
		[]float64{d.Terms[2].Raw, d.Terms[2].Weight, d.Terms[3].Raw, d.Terms[3].Weight})
	assert.Equal(t, ID(0, 0), d.Ranked[0], "exact ties keep the first live rank")
	pick(r, q)
	assert.Equal(t, int64(1000), loadOf(r, ID(0, 0)).Q, "and nothing counts as cached")
}

// A rank whose term is no number is left out and counted; none left is a rejection, not a panic.
func TestLawNotANumberDisqualifies(t *testing.T) {
	for _, p := range allPolicies(t) {
		if _, ok := p.(formula); !ok {
			continue
		}
		r := routerWith(p, 3, 9)
		poison := func(i int) {
			r.view.Ranks[i].KVUsage, r.view.Ranks[i].HasKVUsage = math.NaN(), true
			r.view.Ranks[i].Load.W = 1
		}
		poison(0)
		d := pick(r, Request{ID: 1, Tokens: 10})
		require.Equal(t, Route, d.Kind, "%+v", p)
		if l, ok := p.(LeastLoaded); ok && l.Variant == variantKV {
			assert.NotEqual(t, ID(0, 0), d.Ranked[0])
			assert.Equal(t, uint64(1), r.spoiled)
			poison(1)
			poison(2)
			d = pick(r, Request{ID: 2, Tokens: 10})
			assert.Equal(t, Reject, d.Kind)
			assert.Equal(t, ReasonBadScore, d.Reason)
			assert.Equal(t, uint64(4), r.spoiled)
		}
	}
}

func TestOverrideThatIsNoNumberRoutesNowhere(t *testing.T) {
	r := routerWith(KV{Weight: 1}, 2, 9)
	q := Request{Tokens: 10, Override: &Override{OverlapScoreWeight: math.NaN(), HasOverlapScoreWeight: true}}
	assert.Equal(t, ReasonBadScore, pick(r, q).Reason)
	assert.Empty(t, r.Explain(&q).Terms)
}
