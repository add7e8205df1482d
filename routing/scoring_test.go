package routing

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
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

func TestOverrideThatIsNoNumberRoutesNowhere(t *testing.T) {
	r := routerWith(KV{Weight: 1}, 2, 9)
	q := Request{Tokens: 10, Override: &Override{OverlapScoreWeight: math.NaN(), HasOverlapScoreWeight: true}}
	assert.Equal(t, ReasonBadScore, pick(r, q).Reason)
	assert.Empty(t, r.Explain(&q).Terms)
}
