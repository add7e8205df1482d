package routing

import (
	"math"
	"math/rand/v2"
	"time"
)

const (
	// matchRateThreshold is Ray's match_rate_threshold.
	matchRateThreshold = 0.1
	// imbalancedTuned is imbalanced_threshold of preset tuned, in requests. The documented one is infinite.
	imbalancedTuned = 64
	// evictionThresholdChars, evictionTargetChars, evictionInterval: Ray's, once do_eviction is on.
	evictionThresholdChars, evictionTargetChars = 400_000, 360_000
	evictionInterval                            = 10
	// evictionShare is target over threshold where the threshold follows the rank's capacity.
	evictionShare = 0.9
	// charsPerToken turns a KV capacity into characters (preset tuned).
	charsPerToken = 4
	// maxSeconds bounds intervals and times to live.
	maxSeconds = 86_400
)

// PrefixAware is Ray Serve's PrefixCacheAffinityRouter:
//
//  1. draw a power-of-two pair as fallback; no usable text ⇒ fallback
//  2. max − min open requests > Imbalanced ⇒ fallback
//  3. longest match in the tree of the texts sent to each rank, rate = matched / prompt characters:
//     rate ≥ MatchRate ⇒ the ranks that own the deepest matched node, else those with the fewest characters
//  4. among them the shortest queue, ties drawn
//  5. the prompt, never the answer, is inserted for the chosen rank; a removed rank loses its marks
//
// Ray's routers share one tree; here every ingress has its own, which textState completes. A prompt below one
// KV block is no usable text. Parameters: imbalanced_threshold, match_rate_threshold, do_eviction,
// eviction_threshold_chars, eviction_target_chars, eviction_interval_s. Evictions are per rank.
type PrefixAware struct {
	Imbalanced float64 // open requests; +Inf = never
	MatchRate  float64 // 0 to 1
	Evict      bool
	High, Low  int // characters per rank; 0 = charsPerToken × the rank's capacity
	Interval   time.Duration
}

func newPrefixAware(p *params) Policy {
	high, low := p.choose(evictionThresholdChars, 0), p.choose(evictionTargetChars, 0)
	made := PrefixAware{
		Imbalanced: p.number("imbalanced_threshold", p.choose(math.Inf(1), imbalancedTuned), 0, math.Inf(1)),
		MatchRate:  p.number("match_rate_threshold", matchRateThreshold, 0, 1),
		Evict:      p.boolean("do_eviction", false),
		High:       p.integer("eviction_threshold_chars", int(high), 1, maxTreeChars),
		Low:        p.integer("eviction_target_chars", int(low), 1, maxTreeChars),
		Interval:   p.seconds("eviction_interval_s", evictionInterval),
	}
	if made.High > 0 && made.Low == 0 {
		made.Low = int(evictionShare * float64(made.High))
	}
	if made.Low > made.High && made.High > 0 {
		p.fault("params.eviction_target_chars: above eviction_threshold_chars",
			"write a target at or below the threshold")
	}
	return made
}

// Name is "prefix-aware".
func (PrefixAware) Name() string { return namePrefixAware }

func (PrefixAware) needs() Needs { return needsText() }

// NewState has an empty tree.
func (PrefixAware) NewState(v *View, _ *rand.Rand) State { return newTextState(v) }

// Observe inserts what was dispatched and evicts.
func (p PrefixAware) Observe(s State, v *View, e *Event) {
	if st, ok := s.(*textState); ok {
		st.observe(v, e, p.sweep())
	}
}

func (p PrefixAware) sweep() sweep {
	if !p.Evict {
		return sweep{}
	}
	return sweep{interval: p.Interval, high: p.high, low: p.low}
}

func (p PrefixAware) high(v *View, id RankID) int { return p.limit(v, id, p.High, 1) }

func (p PrefixAware) low(v *View, id RankID) int { return p.limit(v, id, p.Low, evictionShare) }

// limit is given, or follows the rank's capacity; without a capacity Ray's threshold stands in.
func (p PrefixAware) limit(v *View, id RankID, given int, share float64) int {
	if given > 0 {
		return given
	}
	chars := float64(evictionThresholdChars)
	if i, ok := v.Find(id); ok && v.Ranks[i].Capacity > 0 {
		chars = charsPerToken * float64(v.Ranks[i].Capacity)
	}
	return int(min(maxTreeChars, share*chars))
}

// Decide takes the least busy rank of those that know the prompt best, or falls back to power-of-two.
func (p PrefixAware) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	t, ok := gather(q, v, &d.scratch)
	if !ok {
		queueOrReject(q, v, d)
		return
	}
	i, j := t.pair(q, v, r)
	most, least := spreadOpen(q, v)
	if _, known := s.(*textState); !known || !anyCacheable(q, v) || float64(most-least) > p.Imbalanced {
		choose(v, t, i, j, d)
		if t == tierOpen {
			d.Reason = ReasonFallbackPow2
		}
		return
	}
	decideAmong(p, t, q, v, s, r, d)
}

// prepare: extra is 0 for the ranks of step 3, 1 for the others; x[0] is the match rate.
func (p PrefixAware) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	a := aggregate{why: ReasonPrefixMatch}
	st, ok := s.(*textState)
	if !ok {
		return a
	}
	a.x[0] = st.longestMatch(q, v, c)
	if a.x[0] < p.MatchRate || a.x[0] == 0 {
		a.why = ReasonLowMatch
		st.smallest(v, c)
	}
	return a
}

func (PrefixAware) summands(_ *Request, rk *Rank, _, extra int64, a *aggregate) sums {
	return three(float64(extra), notPreferredCost, float64(rk.ongoing()), 1, a.x[0], 0)
}

func (p PrefixAware) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (PrefixAware) labels(a *aggregate) []label {
	first := label{"not_longest_match", "none"}
	if a.why == ReasonLowMatch {
		first.name = "not_smallest_tree"
	}
	return []label{first, {"open", "requests"}, {"best_match_rate", "share"}}
}

func (PrefixAware) rule(*aggregate) rule { return rule{} }
