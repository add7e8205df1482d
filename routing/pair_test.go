package routing

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// pairCase is any pair decision.
type pairCase struct {
	p, d        View
	pq, dq      Request
	pc, dc      Decision
	pp, dp      Policy
	ps, ds      State
	table       *PairTable
	rule        PairRule
	cannotSplit bool
	seed        uint64
}

func (c *pairCase) input() *PairInput {
	return &PairInput{
		Prefill:     PairPool{View: &c.p, Query: &c.pq, Choice: &c.pc, Policy: c.pp, State: c.ps},
		Decode:      PairPool{View: &c.d, Query: &c.dq, Choice: &c.dc, Policy: c.dp, State: c.ds},
		Table:       c.table,
		CannotSplit: c.cannotSplit,
	}
}

func drawPairCase(t *rapid.T) *pairCase {
	c := &pairCase{p: drawView(t), d: drawView(t), seed: rapid.Uint64().Draw(t, "seed")}
	c.pq = drawRequest(t, &c.p)
	c.dq = c.pq
	other := drawRequest(t, &c.d)
	c.dq.Hits, c.dq.Tried = other.Hits, other.Tried
	c.dq.HasDirect, c.dq.Direct = other.HasDirect, other.Direct
	tokens := rapid.SampledFrom([]int{1, 100, 300, 1000, 5000, 50000}).Draw(t, "length")
	c.pq.Tokens, c.dq.Tokens = tokens, tokens
	for _, hits := range [...][]Hit{c.pq.Hits, c.dq.Hits} {
		for i := range hits {
			hits[i].Tokens = int32(tokens * rapid.IntRange(0, 10).Draw(t, "tenths") / 10)
		}
	}
	for _, v := range [...]*View{&c.p, &c.d} {
		for i := range v.Ranks {
			rk := &v.Ranks[i]
			rk.Incarnation = uint64(rapid.IntRange(1, 2).Draw(t, "incarnation"))
			rk.Capacity = rapid.SampledFrom([]int64{0, 60000, 400000}).Draw(t, "cache")
			rk.Load.Q *= rapid.SampledFrom([]int64{1, 100}).Draw(t, "work")
		}
	}
	c.pp, c.dp = drawPolicy(t), drawPolicy(t)
	c.ps, c.ds = c.pp.NewState(&c.p, seeded(c.seed)), c.dp.NewState(&c.d, seeded(c.seed))
	c.pp.Decide(&c.pq, &c.p, c.ps, seeded(c.seed), &c.pc)
	c.dp.Decide(&c.dq, &c.d, c.ds, seeded(c.seed), &c.dc)
	c.table = NewPairTable(rapid.Bool().Draw(t, "prewarm"))
	for i := range c.p.Ranks {
		for k := range c.d.Ranks {
			if rapid.IntRange(0, 3).Draw(t, "met") > 0 {
				c.table.SetMet(RefOf(&c.p.Ranks[i]), RefOf(&c.d.Ranks[k]))
			}
		}
		c.table.Lease(RefOf(&c.p.Ranks[i]), rapid.SampledFrom([]int{0, 0, 100, 30000}).Draw(t, "leased"))
	}
	decide := rapid.SampledFrom([]string{"isl", "prefill-load", "uncached>=512", "always", "mex", "mex"})
	var err error
	c.rule, err = ParsePairRule(decide.Draw(t, "decider"))
	require.NoError(t, err)
	c.cannotSplit = rapid.IntRange(0, 9).Draw(t, "whole") == 0
	return c
}

// naivePair is the rule as its documentation says it, over all pairs.
func naivePair(c *pairCase) (remote bool, cost float64, reason string) {
	in := c.input()
	local, _ := c.d.Find(c.dc.Ranked[0])
	hit := c.d.hitOn(&c.dq, c.dc.Ranked[0])
	uncached := c.dq.Tokens - hit
	decider, pinned := c.rule.Decider, in.Prefill.isPinned()
	switch {
	case c.cannotSplit:
		return false, 0, PairCannotSplit
	case pinned:
		decider = DecideAlways
	case (decider == DecideISL || decider == DecidePrefillLoad) && uncached <= heldTokens:
		if hit > 0 {
			return false, 0, PairDecodeHolds
		}
		return false, 0, PairShortPrefill
	case decider == DecideISL && (uncached < islTokens || float64(uncached) < islShare*float64(c.dq.Tokens)),
		decider == DecideUncached && uncached < c.rule.Least:
		return false, 0, PairShortPrefill
	}
	if c.pc.Kind != Route {
		reason := map[string]string{
			ReasonNoRoom: PairPrefillFull, ReasonAllBusy: PairPrefillBusy,
		}[c.pc.Reason]
		if reason == "" {
			reason = PairNoPrefill
		}
		return false, 0, reason
	}
	pm, dm := in.Prefill.costs(), in.Decode.costs()
	least := math.Inf(1)
	why := PairNoPrefill
	usable := 0
	var s scratch
	gather(&c.pq, &c.p, &s)
	alignHits(&c.pq, &c.p, &s)
	s.creditNewRanks(&c.pq, &c.p)
	prefills := slices.Clone(s.candidates)
	i, _ := c.p.Find(c.pc.Ranked[0])
	if decider != DecideMex && !slices.Contains(prefills, int32(i)) {
		prefills = append(prefills, int32(i)) // direct takes a rank that load policies would not
	}
	phits := slices.Clone(s.hits)
	gather(&c.dq, &c.d, &s)
	alignHits(&c.dq, &c.d, &s)
	decodes := s.candidates
	if decider != DecideMex || in.Decode.isPinned() {
		decodes = []int32{int32(local)}
	}
	chosen, queue := false, 0.0
	for _, i := range prefills {
		p := &c.p.Ranks[i]
		if pinned && p.ID != c.pc.Ranked[0] {
			continue
		}
		if why2 := c.table.skipPrefill(p, c.pq.Tokens); why2 != "" {
			why = why2
			continue
		}
		usable++
		var a mexTerms
		pm.of(p, phits[i], &a)
		for _, k := range decodes {
			d := &c.d.Ranks[k]
			if !c.table.HasMet(RefOf(p), RefOf(d)) {
				why = PairNotPrewarmed
				continue
			}
			if decider != DecideMex {
				if wait := a[0] + a[1]; !chosen && (p.ID == c.pc.Ranked[0] || wait < least) {
					least, queue, chosen = wait, a[0], p.ID == c.pc.Ranked[0]
				}
				continue
			}
			var b mexTerms
			dm.of(d, int64(c.dq.Tokens), &b)
			m := pairModel{prefill: pm, decode: dm}
			row := pairRow{rank: p}
			m.addPrefillTerms(&row, phits[i], c.table.Leased(p))
			x := c.table.transfers.ms(p, d, int64(c.dq.Tokens-c.d.hitOn(&c.dq, d.ID)), c.d.Now)
			sum := a[0] + a[1] + x + a[2] + b[3] + b[4] + row.cost[termPrefillMemory] + b[5]
			if first := a[0] + a[1] + x; dm.late && first > dm.goal {
				sum += dm.goal*(1+math.Log(first/dm.goal)) - first
			}
			least = min(least, sum)
		}
	}
	switch {
	case math.IsInf(least, 1) && decider == DecideMex && usable > 0:
		return false, 0, PairNotPrewarmed
	case math.IsInf(least, 1):
		return false, 0, why
	}
	var own mexTerms
	ownCost := dm.of(&c.d.Ranks[local], int64(hit), &own)
	switch decider {
	case DecideMex:
		if least > remoteGain*ownCost {
			return false, least, PairLocalCheaper
		}
		return true, least, PairRemoteCheaper
	case DecideAlways:
		return true, least, PairAlways
	case DecidePrefillLoad:
		return true, queue, PairPrefillHasRoom
	case DecideISL, DecideUncached:
	}
	return true, queue, PairLongPrefill
}

// TestPairAgainstNaive: over all pairs the naive rule finds the same way at the same cost.
func TestPairAgainstNaive(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawPairCase(t)
		in := c.input()
		d := PairDecision{Explain: true}
		c.rule.Decide(in, seeded(c.seed), &d)
		if c.dc.Kind != Route || in.Prefill.isPinned() && c.pc.Kind != Route {
			assert.NotEqual(t, Route, d.Kind)
			assert.Empty(t, d.Candidates)
			return
		}
		remote, cost, reason := naivePair(c)
		if d.Kind != Route {
			assert.True(t, in.Prefill.isPinned() && !remote, "only a named prefill rank refuses a request")
			return
		}
		// the compared pairs are the best ones; all of them if both pools are small
		isSmall := len(c.p.Ranks) <= mostPrefills && len(c.d.Ranks) <= mostDecodes
		if isSmall && d.Reason == PairRemoteCheaper && reason == d.Reason {
			assert.InDelta(t, cost, explainedCost(t, &d), 1e-9*math.Abs(cost))
		}
		switch reason {
		case PairLongPrefill, PairPrefillHasRoom: // the rules about the prefill rank's load come on top
			assert.Contains(t, []string{reason, PairPrefillQueue, PairPrefillBusy}, d.Reason)
		case PairLeasesFull, PairNotPrewarmed, PairNoPrefill: // ranks may be left out for several reasons
			assert.Contains(t, []string{PairLeasesFull, PairNotPrewarmed, PairNoPrefill}, d.Reason)
		default:
			if isSmall {
				assert.Equal(t, reason, d.Reason)
				assert.Equal(t, remote, d.Remote)
			}
		}
	})
}

// mayTake reports whether a request may go to a rank: a named one may be left out.
func mayTake(side *PairPool, q *Request, rk *Rank) bool {
	taken := *rk
	taken.LeftOut = rk.LeftOut && !side.isPinned()
	return isEligible(q, &taken)
}

// explainedCost is the explained cost of the decision.
func explainedCost(t require.TestingT, d *PairDecision) float64 {
	for i := range d.Candidates {
		if c := &d.Candidates[i]; c.Remote == d.Remote && c.Decode == d.Decode && c.Prefill == d.Prefill {
			return c.Cost
		}
	}
	require.Fail(t, "the decision is not among its candidates")
	return 0
}

// TestPairLaws: only candidates of both pools that may be paired; the same with and without Explain; the
// terms add up; the cheapest pair wins.
func TestPairLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawPairCase(t)
		plain, explained := PairDecision{}, PairDecision{Explain: true}
		c.rule.Decide(c.input(), seeded(c.seed), &plain)
		c.rule.Decide(c.input(), seeded(c.seed), &explained)
		assert.Empty(t, plain.Candidates)
		for _, same := range [][2]any{
			{plain.Kind, explained.Kind},
			{plain.Remote, explained.Remote},
			{plain.Prefill, explained.Prefill},
			{plain.Decode, explained.Decode},
			{plain.Reason, explained.Reason},
		} {
			assert.Equal(t, same[0], same[1])
		}
		if plain.Kind != Route {
			return
		}
		i, ok := c.d.Find(plain.Decode)
		require.True(t, ok)
		d := &c.d.Ranks[i]
		in := c.input()
		assert.True(t, mayTake(&in.Decode, &c.dq, d), "decode rank")
		if !plain.Remote {
			assert.Equal(t, c.dc.Ranked[0], plain.Decode)
			assert.Zero(t, plain.Prefill)
		} else {
			k, ok := c.p.Find(plain.Prefill)
			require.True(t, ok)
			p := &c.p.Ranks[k]
			assert.True(t, mayTake(&in.Prefill, &c.pq, p), "prefill rank")
			assert.Empty(t, c.table.skipPrefill(p, c.pq.Tokens))
			assert.Empty(t, c.table.skipPair(p, d))
			assert.False(t, c.cannotSplit)
		}
		cost := explainedCost(t, &explained)
		for _, candidate := range explained.Candidates {
			sum := 0.0
			for _, term := range candidate.Terms {
				assert.InDelta(t, term.Raw*term.Weight, term.Value, 0)
				sum += term.Value
			}
			assert.InDelta(t, candidate.Cost, sum, 0)
			if plain.Reason == PairRemoteCheaper && candidate.Remote && candidate.Skip == "" {
				assert.LessOrEqual(t, cost, candidate.Cost)
			}
		}
	})
}

// pairPools are two Routers of ready ranks.
func pairPools(t require.TestingT, prefills, decodes int, pp, dp string) (p, d *Router) {
	p, d = NewRouter(newPolicy(t, pp), 1), NewRouter(newPolicy(t, dp), 2)
	for i := range prefills {
		p.Observe(upWith(ID(0, i)))
	}
	for i := range decodes {
		d.Observe(upWith(ID(0, i)))
	}
	return p, d
}

func upWith(id RankID) *Event {
	e := up(id, 256)
	e.Capacity = 699_392
	return e
}

func pairRule(t require.TestingT, decide string) PairRule {
	r, err := ParsePairRule(decide)
	require.NoError(t, err)
	return r
}

func decidePair(t require.TestingT, decide string, tokens int, change func(c *pairCase)) PairDecision {
	c := &pairCase{rule: pairRule(t, decide), table: NewPairTable(false), pp: Mex{TTFT: 2000, TPOT: 50}}
	c.dp = c.pp
	for i := range 2 {
		c.p.Ranks = append(c.p.Ranks, Rank{ID: ID(0, i), Ready: true, MaxOngoing: 64, Capacity: 500_000})
	}
	for i := range 4 {
		c.d.Ranks = append(c.d.Ranks, Rank{
			ID: ID(0, i), Ready: true, MaxOngoing: 64, Capacity: 500_000, Load: Load{R: 40, K: 100_000},
		})
	}
	c.pq, c.dq = Request{ID: 1, Tokens: tokens}, Request{ID: 1, Tokens: tokens}
	if change != nil {
		change(c)
	}
	c.pp.Decide(&c.pq, &c.p, nil, seeded(1), &c.pc)
	c.dp.Decide(&c.dq, &c.d, nil, seeded(1), &c.dc)
	var d PairDecision
	c.rule.Decide(c.input(), seeded(1), &d)
	return d
}

// LG49: a pair decision with a prefill rank that a queue names: a long prompt, by cost, a short prompt, a
// rank that has met no decode rank: that rank, though others have less to do; the decode rank alone for the
// short prompt; `not_prewarmed`.
func TestPairReasons(t *testing.T) {
	holds := func(share int) func(*pairCase) { // every decode rank holds share percent
		return func(c *pairCase) {
			for i := range c.d.Ranks {
				c.dq.Hits = append(c.dq.Hits, Hit{
					Rank: c.d.Ranks[i].ID, Tokens: int32(c.dq.Tokens * share / 100),
				})
			}
		}
	}
	prefills := func(change func(rk *Rank)) func(*pairCase) {
		return func(c *pairCase) {
			for i := range c.p.Ranks {
				change(&c.p.Ranks[i])
			}
		}
	}
	released := func(c *pairCase) { // a rank that no policy would take
		c.pq.HasDirect, c.pq.Force, c.pq.Released, c.pq.Direct, c.pp = true, true, true, ID(0, 1), Direct{}
		c.p.Ranks[1].Load = Load{R: 1, K: 1000}
	}
	for _, x := range []struct {
		name, decide string
		tokens       int
		change       func(*pairCase)
		want         string
	}{
		{"a long prompt", "isl", 20_000, nil, PairLongPrefill},
		{"100 tokens", "isl", 100, nil, PairShortPrefill},
		{"100 tokens, prefill-load", "prefill-load", 100, nil, PairShortPrefill},
		{"less than 2,048 tokens", "isl", 2047, nil, PairShortPrefill},
		{"2,048 tokens", "isl", 2048, nil, PairLongPrefill},
		{"100 tokens of which all but 20 are held", "isl", 100, holds(80), PairDecodeHolds},
		{"a short rest of a long prompt", "isl", 6000, holds(80), PairShortPrefill},
		{"a long rest that is a fifth of the prompt", "isl", 20_000, holds(80), PairShortPrefill},
		{"a long rest that is two fifths of it", "isl", 20_000, holds(60), PairLongPrefill},
		{"all but a block", "prefill-load", 20_000, holds(99), PairDecodeHolds},
		{"N tokens", "uncached>=512", 512, nil, PairLongPrefill},
		{"less than N tokens", "uncached>=512", 511, nil, PairShortPrefill},
		{"N below the floor of isl", "uncached>=16", 20, nil, PairLongPrefill},
		{"always", "always", 1, nil, PairAlways},
		{"several sequences", "always", 20_000, func(c *pairCase) { c.cannotSplit = true }, PairCannotSplit},
		{"an empty prefill pool", "always", 20_000, func(c *pairCase) { c.p.Ranks = nil }, PairNoPrefill},
		{"none ready", "mex", 20_000, prefills(func(rk *Rank) { rk.Ready = false }), PairNoPrefill},
		{"all tried", "isl", 20_000, func(c *pairCase) {
			c.pq.Tried = []RankID{ID(0, 0), ID(0, 1)}
		}, PairNoPrefill},
		{"no room", "isl", 20_000, prefills(func(rk *Rank) { rk.Load.R = 64 }), PairPrefillFull},
		{
			"above the pool's threshold", "isl", 20_000, prefills(func(rk *Rank) { rk.Busy = true }),
			PairPrefillBusy,
		},
		{"prefill-load: usage above 0.9", "prefill-load", 20_000, prefills(func(rk *Rank) {
			rk.HasKVUsage, rk.KVUsage = true, 0.95
		}), PairPrefillBusy},
		{"prefill-load: usage below", "prefill-load", 20_000, prefills(func(rk *Rank) {
			rk.HasKVUsage, rk.KVUsage = true, 0.85
		}), PairPrefillHasRoom},
		{"a long queue", "isl", 20_000, prefills(func(rk *Rank) {
			rk.Load.W, rk.Load.Q, rk.Load.Kq = 2, 60_000, 60_000
		}), PairPrefillQueue},
		{"a long queue, always", "always", 20_000, prefills(func(rk *Rank) {
			rk.Load.W, rk.Load.Q, rk.Load.Kq = 2, 60_000, 60_000
		}), PairAlways},
		{"leases hold half of the caches", "always", 20_000, func(c *pairCase) {
			for i := range c.p.Ranks {
				c.table.Lease(RefOf(&c.p.Ranks[i]), 240_000)
			}
		}, PairLeasesFull},
		{"pairs that have not met", "always", 20_000, func(c *pairCase) {
			c.table = NewPairTable(true)
		}, PairNotPrewarmed},
		{"one pair has met, by cost", "mex", 20_000, func(c *pairCase) {
			c.table = NewPairTable(true)
			c.table.SetMet(RefOf(&c.p.Ranks[1]), RefOf(&c.d.Ranks[3]))
		}, PairRemoteCheaper},
		{"it met another incarnation", "mex", 20_000, func(c *pairCase) {
			c.table = NewPairTable(true)
			c.table.SetMet(RankRef{ID(0, 1), 5}, RefOf(&c.d.Ranks[3]))
		}, PairNotPrewarmed},
		{"a long prompt beside many decodes", "mex", 20_000, nil, PairRemoteCheaper},
		{"a cached prompt", "mex", 20_000, holds(99), PairLocalCheaper},
		{"no decode rank", "always", 20_000, func(c *pairCase) { c.d.Ranks = nil }, ReasonNoReadyRank},
		{"a named prefill rank", "isl", 100, func(c *pairCase) {
			c.pq.HasDirect, c.pq.Force, c.pq.Direct = true, true, ID(0, 1)
			c.pp = Direct{}
		}, PairAlways},
		{"a named prefill rank that is not there", "isl", 20_000, func(c *pairCase) {
			c.pq.HasDirect, c.pq.Direct, c.pp = true, ID(0, 7), Direct{}
		}, ReasonUnknownRank},
		{"a queue names a prefill rank", "isl", 20_000, released, PairLongPrefill},
		{"a queue names one, by cost", "mex", 20_000, released, PairRemoteCheaper},
		{"a queue names one for a short prompt", "isl", 100, released, PairShortPrefill},
		{"a queue names one that has met none", "mex", 20_000, func(c *pairCase) {
			released(c)
			c.table = NewPairTable(true)
			c.table.SetMet(RefOf(&c.p.Ranks[0]), RefOf(&c.d.Ranks[3]))
		}, PairNotPrewarmed},
	} {
		t.Run(x.name, func(t *testing.T) {
			d := decidePair(t, x.decide, x.tokens, x.change)
			if d.Remote && strings.HasPrefix(x.name, "a queue names") {
				assert.Equal(t, ID(0, 1), d.Prefill)
			}
			assert.Equal(t, x.want, d.Reason)
			assert.Equal(t, slices.Contains([]string{
				PairLongPrefill, PairPrefillHasRoom, PairAlways, PairRemoteCheaper,
			}, x.want), d.Remote)
			assert.Equal(t, slices.Contains([]string{
				PairNoPrefill, PairPrefillFull, PairLeasesFull, PairNotPrewarmed,
			}, x.want), d.IsFallback())
		})
	}
}

func TestParsePairRule(t *testing.T) {
	for text, want := range map[string]PairRule{
		"": {}, "isl": {}, "always": {Decider: DecideAlways}, "mex": {Decider: DecideMex},
		"prefill-load": {Decider: DecidePrefillLoad}, "uncached>=16": {Decider: DecideUncached, Least: 16},
	} {
		assert.Equal(t, want, pairRule(t, text), text)
	}
	for text, want := range map[string]string{
		"isel": `unknown decider "isel"`, "uncached>=": "want a number of tokens",
		"uncached>=-1": "from 1 to", "uncached>=1e9": "want a number",
		"uncached>=99999999999999999999": "want a number", "uncached>512": "unknown decider",
	} {
		_, err := ParsePairRule(text)
		require.ErrorContains(t, err, want, text)
	}
}

func TestPairTable(t *testing.T) {
	table := NewPairTable(true)
	p, d := RankRef{ID(0, 0), 1}, RankRef{ID(0, 0), 1} // of two pools: the numbers may be equal
	table.SetMet(p, d)
	table.SetMet(p, d)
	table.SetMet(p, RankRef{ID(0, 1), 1})
	assert.True(t, table.HasMet(p, d))
	assert.False(t, table.HasMet(p, RankRef{ID(0, 0), 2}), "another incarnation")
	table.ForgetDecode(d)
	assert.False(t, table.HasMet(p, d))
	assert.True(t, table.HasMet(p, RankRef{ID(0, 1), 1}))
	table.ForgetPrefill(p)
	assert.Empty(t, table.met)
	assert.Empty(t, table.prefills)
	assert.Empty(t, table.decodes)

	rk := &Rank{ID: p.ID, Incarnation: 1, Capacity: 1000}
	table = NewPairTable(false)
	assert.Empty(t, table.skipPrefill(rk, 5000), "a rank that holds nothing takes any prompt")
	table.Lease(p, 300)
	assert.Equal(t, PairLeasesFull, table.skipPrefill(rk, 201))
	assert.Empty(t, table.skipPrefill(rk, 200))
	table.Release(RankRef{p.ID, 2}, 300)
	assert.EqualValues(t, 300, table.Leased(rk))
	table.Release(p, 400)
	assert.Empty(t, table.leased, "a count does not go below zero")
}

// TestPairRouter: a pair counts on both ranks, and is explained as it is picked.
func TestPairRouter(t *testing.T) {
	for _, policy := range []string{"mex", "power-of-two", "least-loaded", "kv"} {
		for _, decide := range []string{"isl", "mex", "always", "uncached>=512"} {
			t.Run(policy+" "+decide, func(t *testing.T) {
				p, d := pairPools(t, 3, 5, policy, policy)
				r, rnd, remotes := NewPairRouter(p, d, pairRule(t, decide), false, 3), seeded(4), 0
				for i := range 300 {
					now := time.Duration(i) * time.Millisecond
					tokens := 1 + int(4000*rnd.ExpFloat64())
					pq := Request{ID: uint64(i), Tokens: tokens, Now: now}
					dq := pq
					if rnd.IntN(2) == 0 {
						dq.Hits = []Hit{{Rank: ID(0, rnd.IntN(5)), Tokens: int32(rnd.IntN(tokens))}}
					}
					why := r.Explain(&pq, &dq, false).Pair
					before, open := loadOf(p, why.Prefill).O(), loadOf(d, why.Decode)
					var got PairDecision
					r.Pick(&pq, &dq, false, &got)
					for _, same := range [][2]any{
						{why.Kind, got.Kind},
						{why.Remote, got.Remote},
						{why.Prefill, got.Prefill},
						{why.Decode, got.Decode},
						{why.Reason, got.Reason},
					} {
						require.Equal(t, same[0], same[1])
					}
					if got.Remote {
						remotes++
						require.Equal(t, before+1, loadOf(p, got.Prefill).O())
						require.Less(t, loadOf(d, got.Decode).Q-open.Q, int64(2), "it computes nothing")
					}
					require.Equal(t, open.O()+1, loadOf(d, got.Decode).O())
				}
				sum := uint64(0)
				for _, n := range r.Counts() {
					sum += n
				}
				assert.EqualValues(t, 300, sum)
				assert.Positive(t, remotes)
			})
		}
	}
}

// TestPairRouterIsConcurrent: picks, explanations, events and updates may come at once (run it with -race).
func TestPairRouterIsConcurrent(t *testing.T) {
	p, d := pairPools(t, 2, 4, "mex", "mex")
	r := NewPairRouter(p, d, pairRule(t, "mex"), false, 3)
	var all sync.WaitGroup
	for worker := range uint64(4) {
		all.Go(func() {
			var got PairDecision
			for i := range uint64(200) {
				q := Request{ID: worker<<32 | i, Tokens: 5000}
				other := q
				r.Pick(&q, &other, false, &got)
				r.Explain(&q, &other, false)
				r.Update(func(table *PairTable) { table.Lease(RankRef{got.Prefill, 7}, 10) })
				d.Observe(&Event{Kind: EvUndo, Rank: got.Decode, ReqID: q.ID})
				if got.Remote {
					p.Observe(&Event{Kind: EvUndo, Rank: got.Prefill, ReqID: q.ID})
				}
			}
		})
	}
	all.Wait()
	for _, pool := range []*Router{p, d} {
		for _, rk := range pool.Snapshot().Ranks {
			assert.Zero(t, rk.Load.O())
		}
	}
}

// PD4: decode ranks that come first change nothing.
func TestPairOrderOfRegistration(t *testing.T) {
	decide := func(decodeFirst bool) (out []string) {
		p, d := NewRouter(newPolicy(t, "mex"), 1), NewRouter(newPolicy(t, "mex"), 2)
		r := NewPairRouter(p, d, pairRule(t, "always"), false, 3)
		for n := range 2 {
			for i := range 4 {
				if decodeFirst == (n == 0) {
					d.Observe(upWith(ID(0, i)))
				} else {
					p.Observe(upWith(ID(0, i)))
				}
			}
		}
		for i := range 40 {
			q := Request{ID: uint64(i), Tokens: 1000}
			var got PairDecision
			r.Pick(&q, &q, false, &got)
			out = append(out, fmt.Sprint(got.Prefill, got.Decode, got.Remote))
		}
		return out
	}
	assert.Equal(t, decide(true), decide(false))
}

// TestPairRouterDoesNotAllocate: not with any policy and decider.
func TestPairRouterDoesNotAllocate(t *testing.T) {
	for _, decide := range []string{"isl", "mex", "prefill-load"} {
		forEachPolicy(t, func(t *testing.T, p Policy) {
			b, live := newPairBench(t, p.Name(), decide, 2, 4), 0
			step := func() {
				b.pick()
				if live++; live > 64 {
					b.undo()
				}
			}
			for range 500 {
				step()
			}
			assert.InDelta(t, 0, testing.AllocsPerRun(500, step), 0, decide)
		})
	}
}

// pairBench is two pools in the middle of their day and a PairRouter over them.
type pairBench struct {
	p, d     *Router
	r        *PairRouter
	pq, dq   Request
	out      PairDecision
	e        Event
	id       uint64
	prefills int
	decodes  int
}

func newPairBench(t require.TestingT, policy, decide string, prefills, decodes int) *pairBench {
	p, d := pairPools(t, prefills, decodes, policy, policy)
	r := NewPairRouter(p, d, pairRule(t, decide), true, 3)
	r.Update(func(table *PairTable) {
		for i := range prefills {
			for k := range decodes {
				table.SetMet(RankRef{ID(0, i), 7}, RankRef{ID(0, k), 7})
			}
		}
	})
	return &pairBench{p: p, d: d, r: r, prefills: prefills, decodes: decodes}
}

// pick decides for a request of 10,000 tokens.
func (b *pairBench) pick() {
	b.id++
	b.pq = Request{ID: b.id, Tokens: 10_000, HasDirect: true, Direct: ID(0, int(b.id)%b.prefills)}
	b.dq = Request{ID: b.id, Tokens: 10_000, HasDirect: true, Direct: ID(0, int(b.id)%b.decodes)}
	b.r.Pick(&b.pq, &b.dq, false, &b.out)
}

// undo takes back the request that was picked last.
func (b *pairBench) undo() {
	b.e = Event{Kind: EvUndo, Rank: b.out.Decode, ReqID: b.id}
	b.d.Observe(&b.e)
	if b.out.Remote {
		b.e.Rank = b.out.Prefill
		b.p.Observe(&b.e)
	}
}

func BenchmarkPair(b *testing.B) {
	for _, x := range []struct {
		policy, decide string
		p, d           int
	}{
		{"mex", "isl", 2, 4},
		{"mex", "mex", 2, 4},
		{"power-of-two", "isl", 2, 4},
		{"mex", "isl", 64, 128},
		{"mex", "mex", 64, 128},
		{"power-of-two", "isl", 64, 128},
	} {
		b.Run(fmt.Sprintf("%s/%s/%dx%d", x.policy, x.decide, x.p, x.d), func(b *testing.B) {
			bench := newPairBench(b, x.policy, x.decide, x.p, x.d)
			for range 4 * (x.p + x.d) {
				bench.pick()
			}
			b.ReportAllocs()
			spent := time.Duration(0)
			for b.Loop() {
				begun := time.Now()
				bench.pick()
				spent += time.Since(begun)
				bench.undo()
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/pick")
		})
	}
}
