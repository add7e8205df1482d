package routing

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// PD33: the time of a transfer is learned per pair of machines: of few samples, of one that is far off and of
// an engine whose answers do not tell it.
func TestTransferTimes(t *testing.T) {
	a, b := machinePair{"p", "near"}, machinePair{"p", "far"}
	const day = 24 * time.Hour
	repeat := func(n int, factor float64) (out []float64) {
		for range n {
			out = append(out, factor)
		}
		return out
	}
	usual := repeat(60, 1)
	for _, x := range []struct {
		name    string
		samples []float64 // of pair a: the factor on the reference
		others  []float64 // of pair b, before them
		tokens  int
		after   time.Duration // the last sample
		low     float64       // bounds of a's factor
		high    float64
	}{
		{name: "no sample", low: 1, high: 1},
		{name: "few", samples: repeat(leastTransfers-1, 8), low: 1, high: 1},
		{name: "few, others fast", samples: repeat(1, 8), others: repeat(60, 0.1), low: 0.1, high: 0.11},
		{name: "a link of 8 times the reference's speed", samples: repeat(20, 0.125), low: 0.12, high: 0.2},
		{name: "of an eighth", samples: repeat(20, 8), low: 6, high: 8.1},
		{name: "constant load", samples: repeat(2000, 0.5), low: 0.499, high: 0.501},
		{name: "of short prompts", samples: repeat(2000, 0.5), tokens: leastMoved, low: 0.499, high: 0.501},
		{name: "too short", samples: repeat(100, 0.5), tokens: leastMoved - 1, low: 1, high: 1},
		{name: "one far off at first", samples: append([]float64{1000}, repeat(9, 1)...), low: 1, high: 1.5},
		{name: "and later", samples: append(repeat(30, 1), 1000), low: 1, high: 1.5},
		{name: "beside a usual link", samples: append(repeat(30, 1), 1000), others: usual, low: 1, high: 1},
		{name: "noise", samples: []float64{.8, 1.2, 1, .8, 1.2, 1, 1.2}, others: usual, low: 1, high: 1},
		{name: "answers at once", samples: repeat(2000, 0), low: 1.0 / maxSlowness, high: 1.0 / maxSlowness},
		{name: "before the prompt is there", samples: repeat(2000, -3), low: 1.0 / maxSlowness, high: 0.02},
		{name: "hangs", samples: repeat(2000, 1e9), low: maxSlowness, high: maxSlowness},
		{name: "no number", samples: repeat(50, math.NaN()), low: 1, high: 1},
		{name: "a slow link", samples: repeat(30, 10), others: usual, low: 9, high: 10.1},
		{name: "a while ago", samples: repeat(30, 10), others: usual, after: linkMemory, low: 4, high: 6},
		{name: "a day ago", samples: repeat(30, 10), others: usual, after: day, low: 1, high: 1.01},
	} {
		if x.tokens == 0 {
			x.tokens = 8000
		}
		times, now := transferTimes{}, time.Duration(0)
		learn := func(pair machinePair, factors []float64) {
			for _, f := range factors {
				now += time.Second
				times.learn(pair, x.tokens, f*transferTokenMS*float64(x.tokens), now)
			}
		}
		learn(b, x.others)
		learn(a, x.samples)
		got, _ := times.factor(a, now+x.after)
		assert.GreaterOrEqual(t, got, x.low-1e-9, x.name)
		assert.LessOrEqual(t, got, x.high+1e-9, x.name)
		copied := times.clone()
		learn(a, repeat(100, 3))
		same, _ := copied.factor(a, now+x.after)
		assert.LessOrEqual(t, same, x.high+1e-9, "%s: a copy is independent", x.name)
	}

	times := transferTimes{}
	for i := range mostLinks + 10 {
		for range leastTransfers {
			times.learn(machinePair{"p", fmt.Sprint(i)}, 8000, 100, time.Duration(i)*time.Second)
		}
	}
	assert.Len(t, times.links, mostLinks)
	assert.NotContains(t, times.links, machinePair{"p", "9"}, "used least recently")
	assert.Contains(t, times.links, machinePair{"p", "10"})
}

// PD33: mex charges a pair for its own link.
func TestPairsOfAFastLink(t *testing.T) {
	prefill, decode := NewRouter(newPolicy(t, "mex"), 1), NewRouter(newPolicy(t, "mex"), 2)
	r := NewPairRouter(prefill, decode, pairRule(t, "mex"), false, 3)
	refs := [2][2]RankRef{}
	for side, pool := range [...]*Router{prefill, decode} {
		for i := range 2 {
			e := upWith(ID(0, i))
			e.Machine = fmt.Sprint("machine ", i)
			pool.Observe(e)
			refs[side][i] = RankRef{ID(0, i), e.Incarnation}
		}
	}
	const tokens = 20_000
	read := func(p, d int, factor float64) {
		ms := handOffMS + factor*transferTokenMS*tokens
		r.Transferred(refs[0][p], refs[1][d], tokens, time.Duration(ms*float64(time.Millisecond)))
	}
	for range 30 {
		for p := range 2 {
			for d := range 2 {
				if p == d {
					read(p, d, 0.05) // of one machine
				} else {
					read(p, d, 2)
				}
			}
		}
	}
	q := Request{ID: 1, Tokens: tokens}
	other := q
	pairs, costs := r.Explain(&q, &other, false).Pair.Candidates, map[bool][]float64{}
	for _, c := range pairs[:len(pairs)-1] {
		isNear := c.Prefill == c.Decode
		factor := 2.0
		if isNear {
			factor = 0.05
		}
		assert.InEpsilon(t, handOffMS+factor*transferTokenMS*tokens, c.Terms[termTransfer].Value, 0.25)
		costs[isNear] = append(costs[isNear], c.Cost)
	}
	assert.Less(t, slices.Max(costs[true]), slices.Min(costs[false]), "both ranks are on one machine")
	usual, links := r.TransferTimes(0)
	assert.Len(t, links, 4)
	assert.InEpsilon(t, transferTokenMS*0.05, usual, 0.25, "the faster one of two")
	assert.Equal(t, 30, links[0].Transfers)
	read(0, 0, 1)
	r.Transferred(RankRef{ID(0, 0), 99}, refs[1][0], tokens, time.Hour) // of an incarnation that is gone
	assert.Equal(t, 31, r.table.transfers.links[machinePair{"machine 0", "machine 0"}].transfers)
	next := r.Next(prefill, decode, pairRule(t, "isl"), 9)
	_, links = next.TransferTimes(0)
	assert.Len(t, links, 4, "another rule knows them")
}
