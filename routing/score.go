package routing

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// formula is a policy that gives every candidate a score and takes the best: most of them. decideByScore is
// the one loop that all of them share, with and without Explain, so an explanation cannot differ from the
// decision.
type formula interface {
	// prepare looks at all ranks once. It may fill c.extra, aligned with v.Ranks.
	prepare(q *Request, v *View, s State, c *scratch) aggregate
	// summands are the parts of rank rk's score, in the order of labels. hit is in tokens.
	summands(q *Request, rk *Rank, hit, extra int64, a *aggregate) sums
	// fill gives every candidate its score. Each policy has the same three lines, because a call through the
	// interface per rank would be half of a decision over a thousand ranks.
	fill(q *Request, v *View, c *scratch)
	// labels name the summands that count in this decision.
	labels(a *aggregate) []label
}

// byHits is embedded by formulas that read what ranks hold of a prompt and keep no state of their own.
type byHits struct{ stateless }

func (byHits) needs() Needs { return Needs{Hits: true} }

// rotatingTies is embedded by formulas whose ties may rotate (tieRotate). The state is the rank from which
// the search for the best candidate starts.
type rotatingTies struct{ byHits }

// NewState draws the first start.
func (rotatingTies) NewState(_ *View, r *rand.Rand) State {
	st := newRotation(r)
	return &st
}

// Observe advances the start by one rank per dispatch.
func (rotatingTies) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*rotation); ok {
		st.observe(e)
	}
}

// aggregate holds what a formula computes over all ranks before it scores each; every formula documents its
// own numbers.
type aggregate struct {
	mode int8
	x    [4]float64
	why  string // the reason of the decision
	rule rule
}

// summand is one term before it is named: it adds raw × weight.
type summand struct{ raw, weight float64 }

// sums are up to three terms. A struct, not an array, because Go passes structs in registers: an array would
// be a third of a decision.
type sums struct{ a, b, c summand }

func one(raw, weight float64) sums { return sums{a: summand{raw, weight}} }

func two(raw, weight, raw2, weight2 float64) sums {
	return sums{a: summand{raw, weight}, b: summand{raw2, weight2}}
}

func three(raw, weight, raw2, weight2, raw3, weight3 float64) sums {
	return sums{a: summand{raw, weight}, b: summand{raw2, weight2}, c: summand{raw3, weight3}}
}

// total adds the terms in their printed order. The conversions keep compilers from fusing the products into
// the sum, so that the printed values add up to the score bit for bit everywhere.
func total(s sums) float64 {
	return float64(s.a.raw*s.a.weight) + float64(s.b.raw*s.b.weight) + float64(s.c.raw*s.c.weight)
}

// label names a term.
type label struct{ name, unit string }

type tie uint8

const (
	tieUniform tie = iota // drawn among exact equals
	tieFirst              // the smallest rank id
	tieRotate             // the first from a start that moves on by one rank per dispatch
)

// second is what decides between equal scores before tie does; smaller is better.
type second uint8

const (
	secondNone     second = iota
	secondOpen            // open requests
	secondUncached        // prompt tokens to compute
)

// rule says which score is best and how ties end.
type rule struct {
	highest bool
	tie     tie
	second  second
	near    float64 // costs up to so far above the lowest count as equal to it
}

// notPreferredCost is added to the cost of a rank that a staged policy (warm ranks first, longest match
// first) does not prefer: far above any cost in requests or tokens, and small enough that both add up exactly
// in a float64.
const notPreferredCost = 1 << 45

// staged is embedded by policies that take the shortest queue among the ranks that they prefer. extra is 0
// for those, 1 for the others; x[0] is shown and counts for nothing.
type staged struct{}

func (staged) summands(_ *Request, rk *Rank, _, extra int64, a *aggregate) sums {
	return three(float64(extra), notPreferredCost, float64(rk.ongoing()), 1, a.x[0], 0)
}

func (p staged) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

// decideByScore routes to the best candidate of the first tier that has one. It is generic so that the
// policy, a small struct, is not boxed for every decision.
func decideByScore[F formula](f F, q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	t, ok := gather(q, v, &d.scratch)
	if !ok {
		queueOrReject(q, v, d)
		return
	}
	decideAmong(f, t, q, v, s, r, d)
}

// decideAmong routes to the best of the gathered candidates.
func decideAmong[F formula](f F, t tier, q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	c := &d.scratch
	alignHits(q, v, c)
	clear(resize(&c.extra, len(v.Ranks)))
	resize(&c.scores, len(c.candidates))
	c.all = f.prepare(q, v, s, c)
	f.fill(q, v, c)
	best := c.all.rule.best(q, v, s, r, d)
	if best < 0 {
		d.Reason = ReasonBadScore
		return
	}
	if d.Explain {
		explainScores(f, q, v, d)
	}
	routeTo(d, t, &v.Ranks[best], c.all.why)
}

// best is the row of the best candidate, -1 if none has a finite score.
func (u rule) best(q *Request, v *View, s State, r *rand.Rand, d *Decision) int {
	if u.near > 0 {
		u.level(&d.scratch)
	}
	c, from := &d.scratch, 0
	if u.tie == tieRotate {
		from, _ = slices.BinarySearch(c.candidates, int32(start(s, len(v.Ranks))))
	}
	best, least, leastSecond, equals := -1, 0.0, int64(0), 0
	for n := range c.candidates {
		k := from + n
		if k >= len(c.candidates) {
			k -= len(c.candidates)
		}
		cost := c.scores[k]
		if u.highest {
			cost = -cost
		}
		if cost-cost != 0 { // NaN or infinite
			d.Disqualified++
			continue
		}
		if best >= 0 && cost > least {
			continue
		}
		row := int(c.candidates[k])
		next := u.second.of(q, &v.Ranks[row], c.hits[row])
		switch {
		case best < 0 || cost < least || next < leastSecond:
			best, least, leastSecond, equals = row, cost, next, 1
		case next == leastSecond && u.tie == tieUniform:
			if equals++; r.IntN(equals) == 0 { // each of n equals ends up here with probability 1/n
				best = row
			}
		}
	}
	return best
}

// level sets every cost that is within near of the lowest to the lowest.
func (u rule) level(c *scratch) {
	least := math.Inf(1)
	for _, cost := range c.scores {
		if cost < least {
			least = cost
		}
	}
	for k, cost := range c.scores {
		if cost <= least+u.near {
			c.scores[k] = least
		}
	}
}

// explainScores adds one row per candidate and term.
func explainScores[F formula](f F, q *Request, v *View, d *Decision) {
	c := &d.scratch
	labels := f.labels(&c.all)
	for k, i := range c.candidates {
		if c.scores[k]-c.scores[k] != 0 {
			continue
		}
		rk := &v.Ranks[i]
		s := f.summands(q, rk, c.hits[i], c.extra[i], &c.all)
		parts := [...]summand{s.a, s.b, s.c}
		for n, l := range labels {
			d.Terms = append(d.Terms, newTerm(rk.ID, l, parts[n].raw, parts[n].weight))
		}
	}
}

func (s second) of(q *Request, rk *Rank, hit int64) int64 {
	switch s {
	case secondOpen:
		return int64(rk.ongoing())
	case secondUncached:
		return int64(q.Tokens) - hit
	case secondNone:
	}
	return 0
}

// rotation is the state of policies whose ties rotate.
type rotation struct{ start uint32 }

// newRotation draws the first start; otherwise every ingress would begin with the same rank.
func newRotation(r *rand.Rand) rotation { return rotation{start: r.Uint32()} }

func (s *rotation) observe(e *Event) {
	if e.Kind == EvDispatched {
		s.start++
	}
}

func (s *rotation) rotated() uint32 { return s.start }

func start(s State, n int) int {
	if st, ok := s.(interface{ rotated() uint32 }); ok {
		return int(st.rotated() % uint32(n))
	}
	return 0
}

// ceilDiv is a/b rounded up, for a ≥ 0 and b > 0.
func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

// mex weighs a rank by the prefill that its cache spares, so a rank that starts with an empty cache next to
// serving ranks loses every comparison: it gets no request, and its cache stays empty. For a while such a
// rank counts as new: a prompt of which no rank holds most is scored as if the new rank held as much as the
// rank with the longest match.
const (
	// newRankTime is how long a rank may count as new. A session of an agent lasts about as long.
	newRankTime = 2 * time.Minute
	// newRankLead is how much later than another candidate a new rank must have started: ranks that started
	// together have equally empty caches.
	newRankLead = 10 * time.Second
	// homeShare is the share of its prompt that a request finds on the rank that served its conversation.
	homeShare = 0.8
)

// creditNewRanks gives the new candidates the longest hit of all candidates, if that is below homeShare of
// the prompt. A rank is no longer new when it has as many open requests as
// the candidates' mean. Its queued work counts in full, so the credit moves few requests at a time.
func (c *scratch) creditNewRanks(q *Request, v *View) {
	longest := c.longestHit()
	if float64(longest) >= homeShare*float64(q.Tokens) {
		return
	}
	oldest, newest, open := v.Now, time.Duration(0), 0
	for _, i := range c.candidates {
		oldest, newest = min(oldest, v.Ranks[i].Since), max(newest, v.Ranks[i].Since)
		open += v.Ranks[i].ongoing()
	}
	if newest-oldest < newRankLead || v.Now-newest >= newRankTime {
		return
	}
	for _, i := range c.candidates {
		rk := &v.Ranks[i]
		if v.Now-rk.Since < newRankTime && rk.Since-oldest >= newRankLead &&
			rk.ongoing()*len(c.candidates) < open {
			c.hits[i] = longest
		}
	}
}
