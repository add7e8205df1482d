package routing

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// alone is the traffic of a Router that sends all requests itself.
func alone() *traffic { return &traffic{answer: firstAnswer, answers: firstAnswers} }

// costOf is what a request of tokens costs on one rank of an application whose prefill takes rk.Rho, by term.
func costOf(p Policy, st State, tokens int, rk Rank, hit int32) map[string]float64 {
	rk.ID, rk.Ready, rk.MaxOngoing = ID(0, 0), true, 1<<20
	d := Decision{Explain: true}
	p.Decide(&Request{Tokens: tokens, Hits: []Hit{{Rank: rk.ID, Tokens: hit}}},
		&View{Ranks: []Rank{rk}, Rho: rk.Rho}, st, seeded(1), &d)
	out := map[string]float64{}
	for _, t := range d.Terms {
		out[t.Name] = t.Value
		out["score"] += t.Value
	}
	return out
}

// The worked example of docs/routing-reference.md: a rank that holds two thirds of the prompt and decodes for
// twelve others, and one that is nearly idle and holds nothing. While prefill takes 80 % of the ranks' time
// the hit is worth more; while it takes none the idle rank is.
func TestMexCosts(t *testing.T) {
	p := newPolicy(t, "mex")
	warm := Rank{Load: Load{W: 1, R: 12, Q: 6383, K: 140_000, Kq: 6000}, Capacity: 699_392, Rho: .6}
	idle := Rank{Load: Load{R: 2, K: 20_000}, Capacity: 699_392, Rho: .6}
	a := costOf(p, alone(), 12_000, warm, 8192)
	for name, want := range map[string]float64{
		"queue": 306.19, "prefill": 243.09, "later_arrivals": 357.27, "own_tokens": 1357.96,
		"others_tokens": 770.38, "memory": 0, "beyond_goal": 0,
	} {
		assert.InDelta(t, want, a[name], .5, name)
	}
	warm.Rho, idle.Rho = .8, .8
	a, b := costOf(p, alone(), 12_000, warm, 8192), costOf(p, alone(), 12_000, idle, 0)
	assert.Less(t, a["score"], b["score"])
	warm.Rho, idle.Rho = 0, 0
	a, b = costOf(p, alone(), 12_000, warm, 8192), costOf(p, alone(), 12_000, idle, 0)
	assert.Greater(t, a["score"], b["score"])
}

// A first token that comes too late anyway costs little more by being later still; with goal latency every
// millisecond counts.
func TestMexGoals(t *testing.T) {
	goodput, latency := newPolicy(t, "mex"), Policy(Mex{Latency: true, TTFT: 2000, TPOT: 50})
	queued := func(p Policy, tokens int64) map[string]float64 {
		return costOf(p, alone(), 500, Rank{Load: Load{W: 1, Q: tokens}}, 0)
	}
	near, far := queued(goodput, 200_000), queued(goodput, 400_000)
	x := (far["queue"] + far["prefill"]) / 2000
	assert.InDelta(t, 2000*(1+math.Log(x)), far["queue"]+far["prefill"]+far["beyond_goal"], 1e-6)
	assert.InDelta(t, 2000*math.Ln2, far["score"]-near["score"], 20)
	assert.InDelta(t, 9700, queued(latency, 400_000)["score"]-queued(latency, 200_000)["score"], 300)
	assert.Zero(t, queued(goodput, 20_000)["beyond_goal"])
}

// Goals that nobody can mean are refused with the parameter's name; those that somebody may mean make scores
// that are numbers.
func TestMexParameters(t *testing.T) {
	for _, bad := range []map[string]any{
		{"ttft_s": 0},
		{"ttft_s": -1},
		{"ttft_s": 1e9},
		{"ttft_s": math.NaN()},
		{"ttft_s": "2s"},
		{"tpot_s": 0},
		{"tpot_s": -0.05},
		{"tpot_s": 1e6},
		{"goal": "speed"},
		{"goal": 3},
		{"cost_model": "sparse"},
		{"mode": "goodput"},
	} {
		_, err := New("mex", "", bad)
		require.Error(t, err, bad)
		for name := range bad {
			require.ErrorContains(t, err, "params."+name, bad)
		}
	}
	for _, goals := range [][2]float64{{0.001, 60}, {3600, 0.0001}, {2, 0.05}} {
		p, err := New("mex", "", map[string]any{"ttft_s": goals[0], "tpot_s": goals[1]})
		require.NoError(t, err)
		full := Load{W: 1 << 20, R: 1 << 20, Q: 1 << 50, K: 1 << 50, Kq: 1 << 50}
		for _, c := range costOf(p, alone(), math.MaxInt32, Rank{Rho: maxRho, Load: full, Capacity: 1}, 0) {
			assert.False(t, math.IsNaN(c) || math.IsInf(c, 0), goals)
		}
	}
}

// Whatever a view holds, ranks without capacity, hits, speed or lag included, every cost is a number.
func TestMexCostsAreNumbers(t *testing.T) {
	p := newPolicy(t, "mex")
	rapid.Check(t, func(t *rapid.T) {
		v := drawView(t)
		for i := range v.Ranks {
			v.Ranks[i].Slow = rapid.SampledFrom([]float64{0, 0.25, 1, 8}).Draw(t, "slow")
			v.Ranks[i].Rho = rapid.Float64Range(0, maxRho).Draw(t, "rho")
			v.Ranks[i].Lag = time.Duration(rapid.Int64Range(0, int64(oldestRecord)).Draw(t, "lag"))
		}
		q := drawRequest(t, &v)
		st := &traffic{
			own:    rapid.Float64Range(0, 9).Draw(t, "own"),
			others: rapid.Float64Range(0, 9).Draw(t, "others"),
			answer: rapid.Float64Range(1, 1e5).Draw(t, "answer"),
		}
		d := Decision{Explain: true}
		p.Decide(&q, &v, st, seeded(1), &d)
		assert.NotEqual(t, ReasonBadScore, d.Reason)
		for _, term := range d.Terms {
			assert.False(t, math.IsNaN(term.Value) || math.IsInf(term.Value, 0), term)
		}
	})
}

// Behind several ingresses costs that differ by less than what may have come unseen count as equal: the
// longest hit wins then. A Router that sends all requests itself takes the lowest cost.
func TestMexNearTies(t *testing.T) {
	p := newPolicy(t, "mex")
	v := View{Rho: .5, Ranks: []Rank{
		{ID: ID(0, 0), Ready: true, MaxOngoing: 99, Lag: 500 * time.Millisecond},
		{
			ID: ID(0, 1), Ready: true, MaxOngoing: 99, Lag: 500 * time.Millisecond,
			Load: Load{W: 1, F: 1, Q: 9000, Kq: 9000},
		},
	}}
	q := Request{Tokens: 4000, Hits: []Hit{{Rank: ID(0, 1), Tokens: 3584}}}
	decide := func(own, others float64) Decision {
		d, st := Decision{Explain: true}, alone()
		st.own, st.others = own, others
		p.Decide(&q, &v, st, seeded(1), &d)
		return d
	}
	alone, beside := decide(1, 0), decide(1, 3)
	assert.Equal(t, []RankID{ID(0, 0)}, alone.Ranked)
	assert.Equal(t, ReasonLowestScore, alone.Reason)
	assert.Equal(t, []RankID{ID(0, 1)}, beside.Ranked)
	assert.Equal(t, ReasonNearTie, beside.Reason)
	v.Ranks[0].Lag, v.Ranks[1].Lag = time.Millisecond, time.Millisecond
	assert.Equal(t, []RankID{ID(0, 0)}, decide(1, 3).Ranked, "records that come at once leave nothing unseen")
}

// An own dispatch that no record has named stands for those that other ingresses have sent meanwhile.
func TestMexOwnDispatchesStandForOthers(t *testing.T) {
	r := routerWith(newPolicy(t, "mex"), 2, 1000)
	now := time.Duration(0)
	for key := uint64(1); key <= 40; key++ { // three of four come from elsewhere
		now += time.Millisecond
		if q := (Request{ID: key, Tokens: 100, Now: now}); key%4 == 0 {
			d := pick(r, q)
			r.Observe(&Event{Kind: EvUndo, Rank: d.Ranked[0], ReqID: key, Now: now})
			continue
		}
		r.Observe(&Event{
			Kind: EvAdmitted, Rank: ID(0, 0), ReqID: key, Tokens: 100, Incarnation: 7, Seq: key,
			Now: now,
		})
		r.Observe(&Event{Kind: EvFinished, Rank: ID(0, 0), ReqID: key, Incarnation: 7, Seq: key, Now: now})
	}
	d := pick(r, Request{ID: 99, Tokens: 10_000, Now: now})
	_, v := r.Why(&Request{ID: 100, Tokens: 100, Now: now})
	i, _ := v.Find(d.Ranked[0])
	require.Equal(t, Bumps{N: 1, Q: 10_000, Kq: 10_000, Pairs: attention(10_000, 0)}, v.Ranks[i].Bumps)
	st := r.state.(*traffic)
	require.InDelta(t, .25, st.share(), .02)
	once := costOf(r.policy, alone(), 100, Rank{Load: v.Ranks[i].Load, Pairs: v.Ranks[i].Pairs}, 0)
	more := costOf(r.policy, st, 100, v.Ranks[i], 0)
	assert.InEpsilon(t, 1/st.share(), more["queue"]/once["queue"], .01)
	r.Observe(&Event{
		Kind: EvAdmitted, Rank: d.Ranked[0], ReqID: 99, Tokens: 10_000, Incarnation: 7, Seq: 50,
		Now: now,
	})
	_, v = r.Why(&Request{ID: 100, Tokens: 100, Now: now})
	assert.Equal(t, Bumps{}, v.Ranks[i].Bumps, "its record has named it")
}

// clocked is a Router and one rank whose clock is ahead, and whose records take their time.
type clocked struct {
	*told
	ahead, lag time.Duration
	key        uint64
}

// serve plays one request of this router: dispatched at now, admitted and first token on the rank, and heard
// of later.
func (c *clocked) serve(tokens int, takes time.Duration) {
	c.key++
	begun := c.now
	d := pick(c.r, Request{ID: c.key, Tokens: tokens, Now: begun})
	c.seq++
	c.r.Observe(&Event{
		Kind: EvTicket, Rank: d.Ranked[0], ReqID: c.key, Seq: c.seq, Incarnation: 7,
		Now: begun,
	})
	c.record(EvAdmitted, tokens, begun)
	c.seq++
	c.record(EvFirstToken, 0, begun+takes)
	c.seq++
	c.record(EvFinished, 0, begun+takes)
}

func (c *clocked) record(kind EventKind, tokens int, at time.Duration) {
	c.now = max(c.now, at+c.lag)
	c.r.Observe(&Event{
		Kind: kind, Rank: c.rank, ReqID: c.key, Tokens: tokens, Out: 1, Incarnation: 7, Seq: c.seq,
		Now: c.now, At: max(1, at+c.ahead),
	})
}

// How old a rank's records are is known whatever its clock says, and known again soon after the clock has
// jumped either way.
func TestLagOfARanksRecords(t *testing.T) {
	for _, ahead := range []time.Duration{0, time.Hour, 3 * time.Millisecond} {
		c := &clocked{told: newTold(newPolicy(t, "mex")), ahead: ahead, lag: 100 * time.Millisecond}
		c.now = time.Hour
		for range 40 {
			c.serve(1000, 50*time.Millisecond)
		}
		assert.InDelta(t, 100, float64(c.r.Snapshot().Ranks[0].Lag.Milliseconds()), 5, ahead)
		for _, jump := range []time.Duration{
			time.Minute, -2 * time.Minute, 300 * time.Millisecond,
			-time.Second,
		} {
			c.ahead += jump
			for range 60 {
				c.serve(1000, 50*time.Millisecond)
				lag := c.r.Snapshot().Ranks[0].Lag
				require.GreaterOrEqual(t, lag, time.Duration(0))
				require.LessOrEqual(t, lag, oldestRecord)
			}
			assert.InDelta(t, 100, float64(c.r.Snapshot().Ranks[0].Lag.Milliseconds()), 5,
				"%s after a jump of %s", ahead, jump)
		}
	}
}

// Records that come late say nothing wrong of a rank's speed.
func TestSpeedIsOfTheRanksOwnTime(t *testing.T) {
	c := &clocked{told: newTold(newPolicy(t, "mex")), ahead: time.Minute}
	c.now = time.Second
	for i := range 60 {
		c.lag = time.Duration(i%3) * 400 * time.Millisecond
		c.serve(8000, modelOf(8000, 0, 2))
		c.now += 2 * time.Second
	}
	info, ok := c.r.CostModel()
	require.True(t, ok)
	assert.InEpsilon(t, 2, info.Prefill, .05)
	assert.Equal(t, uint64(60), info.PrefillSamples)
	assert.Less(t, info.Error, .2)
	assert.Equal(t, "dense", info.Preset)
}

// The cost model is the median of the ranks; a rank that is slower than it has costs as much higher, until it
// has shown nothing for a while.
func TestASlowRankCostsMore(t *testing.T) {
	r := routerWith(newPolicy(t, "mex"), 3, 1000)
	now, seq := time.Second, uint64(0)
	for range 40 {
		for i, slow := range []float64{2, 10, 2} {
			seq++
			r.Observe(&Event{
				Kind: EvAdmitted, Rank: ID(0, i), ReqID: seq, Tokens: 8000, Incarnation: 7,
				Seq: seq, Now: now,
			})
			now += modelOf(8000, 0, slow)
			r.Observe(&Event{
				Kind: EvFirstToken, Rank: ID(0, i), ReqID: seq, Incarnation: 7, Seq: seq,
				Now: now,
			})
			r.Observe(&Event{
				Kind: EvFinished, Rank: ID(0, i), ReqID: seq, Incarnation: 7, Seq: seq,
				Now: now,
			})
		}
	}
	slow := func(later time.Duration) float64 {
		_, v := r.Why(&Request{Now: now + later})
		return v.Ranks[1].Slow
	}
	info, _ := r.CostModel()
	assert.InEpsilon(t, 2, info.Prefill, .1)
	assert.InEpsilon(t, 5, slow(0), .15)
	assert.InEpsilon(t, 3, slow(slowMemory), .15, "half of it is forgotten")
	assert.InDelta(t, 1, slow(time.Hour), .01)
	d := r.Explain(&Request{Tokens: 8000, Now: now})
	assert.NotEqual(t, ID(0, 1), d.Ranked[0])
}

// What a step takes without prefill is learned from the reports of answers, and only while there is no prompt
// to compute.
func TestDecodingSpeedIsLearned(t *testing.T) {
	for _, slow := range []float64{0.5, 1, 3} {
		t.Run(fmt.Sprint(slow), func(t *testing.T) {
			s := newTold(newPolicy(t, "mex"))
			s.now = time.Second
			s.tell(EvAdmitted, 1, 1000, 0)
			s.tell(EvFirstToken, 1, 0, 0)
			base := newCostModel(s.r.policy).base
			ms, tokens := 0.0, 0
			for n := range 100 {
				at := s.now + 500*time.Millisecond
				for ; ms < 500; tokens++ {
					ms += slow * base.Step(0, 1, 1000+tokens, 0)
				}
				ms -= 500
				s.now = at
				s.seq++
				if n%10 == 5 { // a prompt is computed meanwhile, and nobody decodes
					s.tell(EvAdmitted, 2, 20_000, 0)
					s.now += 5 * time.Second
					s.tell(EvFirstToken, 2, 0, 0)
					s.tell(EvFinished, 2, 0, 0)
				}
				s.r.Observe(&Event{
					Kind: EvProgress, Rank: s.rank, ReqID: 1, Out: tokens + 1, Incarnation: 7, Seq: s.seq,
					Now: s.now, At: s.now + time.Hour,
				})
			}
			info, _ := s.r.CostModel()
			assert.InEpsilon(t, slow, info.Decode, .1)
			assert.Greater(t, info.DecodeSamples, uint64(70))
		})
	}
}

// Explaining changes neither the next decision nor what is measured, also when much time has passed.
func TestExplainLeavesTheLawAlone(t *testing.T) {
	play := func(explain bool) (ranked []RankID) {
		c := &clocked{told: newTold(newPolicy(t, "mex")), lag: 30 * time.Millisecond}
		c.r.Observe(up(ID(0, 1), 1000))
		for i := range 50 {
			c.key++
			c.now += 700 * time.Millisecond
			q := Request{ID: c.key, Tokens: 3000 + 500*(i%7), Now: c.now}
			if explain {
				later := q
				later.Now += time.Duration(i) * time.Second
				c.r.Explain(&later)
			}
			d := pick(c.r, q)
			ranked = append(ranked, d.Ranked[0])
			c.rank = d.Ranked[0]
			c.seq++
			c.record(EvAdmitted, q.Tokens, c.now)
			c.record(EvFirstToken, 0, c.now+time.Duration(i)*40*time.Millisecond)
		}
		return ranked
	}
	assert.True(t, slices.Equal(play(false), play(true)))
}

// The mean of answers begins with a guess and goes by the application's own soon.
func TestMeanAnswer(t *testing.T) {
	s := newTold(newPolicy(t, "mex"))
	st := s.r.state.(*traffic)
	assert.InDelta(t, firstAnswer, st.answer, 0)
	for key := range uint64(1000) {
		s.seq++
		s.r.Observe(&Event{Kind: EvFinished, Rank: s.rank, ReqID: key, Out: 40, Incarnation: 7, Seq: s.seq})
		s.r.Observe(&Event{Kind: EvFinished, Rank: s.rank, ReqID: key, Incarnation: 7, Seq: s.seq})
	}
	assert.InDelta(t, 40, st.answer, 20)
}

// Equal ranks whose prompts happen to take longer or shorter than predicted count as equal; a rank that is
// five times slower is recognised after a few prompts.
func TestSlownessWithinItsErrorIsNone(t *testing.T) {
	play := func(slow float64, prompts int) View {
		r := routerWith(newPolicy(t, "mex"), 4, 1000)
		now, seq, rnd := time.Second, uint64(0), seeded(3)
		for range prompts {
			for i := range 4 {
				takes := modelOf(4000, 0, math.Exp(0.8*rnd.NormFloat64()))
				if i == 1 {
					takes = time.Duration(float64(takes) * slow)
				}
				for _, kind := range []EventKind{EvAdmitted, EvFirstToken, EvFinished} {
					if seq++; kind == EvFirstToken {
						now += takes
					}
					r.Observe(&Event{
						Kind: kind, Rank: ID(0, i), ReqID: (seq + 2) / 3, Tokens: 4000, Incarnation: 7,
						Seq: seq, Now: now,
					})
				}
			}
		}
		_, v := r.Why(&Request{Now: now})
		return v
	}
	for _, rk := range play(1, 40).Ranks {
		assert.InDelta(t, 1, rk.Slow, 0, rk.ID)
		assert.Greater(t, rk.SlowSpread, leastSpread, rk.ID)
	}
	assert.Greater(t, play(5, 6).Ranks[1].Slow, 2.5)
}

// Tokens cost little far below their goal and little more beyond it; on a rank that prefills for most of its
// time they come later. With goal latency every millisecond counts alike.
func TestMexPace(t *testing.T) {
	own := func(p Policy, rho float64, decodes int) float64 {
		return costOf(p, alone(), 100, Rank{Rho: rho, Load: Load{R: decodes}}, 0)["own_tokens"]
	}
	goodput, latency := newPolicy(t, "mex"), Policy(Mex{Latency: true, TTFT: 2000, TPOT: 50})
	y := own(latency, 0, 10) / 2000
	assert.InDelta(t, 2000*y*y, own(goodput, 0, 10), 1e-9)
	assert.InDelta(t, 2*2000*y, own(latency, .5, 10), 1e-9, "half of the time goes to prefill")
	assert.InDelta(t, 4*2000*y*y, own(goodput, .5, 10), 1e-9)
	late := y / (1 - maxRho)
	assert.InDelta(t, 2000*(1+2*math.Log(late)), own(goodput, maxRho, 10), 1e-9)
	assert.Greater(t, late, 1.0)
}
