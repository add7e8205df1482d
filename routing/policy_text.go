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
	staged
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
		Evict:      p.boolean("do_eviction"),
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

func (PrefixAware) Name() string { return namePrefixAware }

func (PrefixAware) needs() Needs { return needsText() }

func (PrefixAware) NewState(v *View, _ *rand.Rand) State { return newTextState(v) }

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
	a := aggregate{why: ReasonPrefixMatch, mode: modeMatch}
	st, ok := s.(*textState)
	if !ok {
		return a
	}
	a.x[0] = st.longestMatch(q, v, c)
	if a.x[0] < p.MatchRate || a.x[0] == 0 {
		a.why, a.mode = ReasonLowMatch, modeTree
		st.smallest(v, c)
	}
	return a
}

func (PrefixAware) labels(a *aggregate) []label { return treeLabels(a) }

// CacheAware is SGLang's cache-aware router:
//
//	imbalanced ⇔ max − min > Abs and max > Rel · min, on open requests per rank
//	imbalanced ⇒ the shortest queue
//	balanced   ⇒ match rate > Threshold: the ranks with the longest match, among them the shortest queue
//	             else: the rank with the smallest tree, or the shortest queue (preset tuned)
//
// Matches are characters in the tree of the texts sent to each rank (textState), which does not see the
// engines' evictions. With KVMatches and a look-up in the request they are cached tokens, and the tree is the
// fallback. The prompt is inserted for the chosen rank, imbalanced or not; a removed rank leaves tree and
// queues. Ties: shortest queue, then drawn. A prompt below one KV block goes to the shortest queue.
//
// Parameters: cache_threshold, balance_abs_threshold, balance_rel_threshold, eviction_interval_s,
// max_tree_size, low_match (smallest-tree, least-pending), matches (text, kv), max_worker_retries,
// max_total_retries.
type CacheAware struct {
	staged
	Threshold    float64 // 0 to 1
	Abs          int     // requests
	Rel          float64
	LeastPending bool // on a low match: shortest queue instead of smallest tree
	KVMatches    bool

	Interval time.Duration // between evictions
	MaxTree  int           // nodes per rank

	RetriesPerRank, RetriesPerRequest int // attempts; 0 = the application's
}

func newCacheAware(p *params) Policy {
	threshold, rel := p.choose(0.5, 0.3), p.choose(1.0001, 1.1)
	lowMatch, matches, perRank, perRequest := "smallest-tree", "text", 3, 6
	if p.tuned {
		lowMatch, matches, perRank, perRequest = "least-pending", "kv", 0, 0
	}
	return CacheAware{
		Threshold: p.number("cache_threshold", threshold, 0, 1),
		Abs:       p.integer("balance_abs_threshold", 32, 0, math.MaxInt32),
		Rel:       p.number("balance_rel_threshold", rel, 1, maxWeight),
		Interval:  p.seconds("eviction_interval_s", 60),
		MaxTree:   p.integer("max_tree_size", 16_777_216, 1, math.MaxInt32),
		LeastPending: p.word("low_match", lowMatch, "smallest-tree", "least-pending") ==
			"least-pending",
		KVMatches:         p.word("matches", matches, "text", "kv") == "kv",
		RetriesPerRank:    p.integer("max_worker_retries", perRank, 1, maxRetries),
		RetriesPerRequest: p.integer("max_total_retries", perRequest, 1, maxRetries),
	}
}

// maxRetries bounds attempts.
const maxRetries = 100

func (CacheAware) Name() string { return nameCacheAware }

func (p CacheAware) needs() Needs {
	n := needsText()
	n.AttemptsPerRank, n.AttemptsPerRequest = p.RetriesPerRank, p.RetriesPerRequest
	if p.KVMatches {
		n.Approximate = false
	}
	return n
}

func (CacheAware) NewState(v *View, _ *rand.Rand) State { return newTextState(v) }

func (p CacheAware) Observe(s State, v *View, e *Event) {
	if st, ok := s.(*textState); ok {
		size := func(*View, RankID) int { return p.MaxTree }
		st.observe(v, e, sweep{interval: p.Interval, high: size, low: size, nodes: true})
	}
}

// Decide takes the shortest queue while the queues are uneven, and the longest match otherwise.
func (p CacheAware) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: extra is 0 for the ranks to choose from, 1 for the others; x[0] is the best match rate.
func (p CacheAware) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	st, ok := s.(*textState)
	if p.imbalanced(q, v) {
		return aggregate{why: ReasonImbalanced}
	}
	if !ok || !p.usable(q, v) {
		return aggregate{why: ReasonNoPrefix}
	}
	if rate := p.longest(st, q, v, c); rate > p.Threshold {
		return aggregate{why: ReasonPrefixMatch, mode: modeMatch, x: [4]float64{rate}}
	}
	if clear(c.extra); p.LeastPending {
		return aggregate{why: ReasonLowMatch}
	}
	st.smallest(v, c)
	return aggregate{why: ReasonLowMatch, mode: modeTree}
}

// usable reports whether there is something to match: a look-up, or text.
func (p CacheAware) usable(q *Request, v *View) bool {
	return p.KVMatches && q.Hits != nil && q.Tokens > 0 || anyCacheable(q, v)
}

// longest finds the longest match of a candidate, marks the candidates that have it, and returns its rate.
func (p CacheAware) longest(st *textState, q *Request, v *View, c *scratch) float64 {
	if !p.KVMatches || q.Hits == nil || q.Tokens == 0 {
		return st.longestMatch(q, v, c)
	}
	best := c.longestHit()
	c.exclude()
	c.preferHolders(best)
	return float64(best) / float64(q.Tokens)
}

func (p CacheAware) imbalanced(q *Request, v *View) bool {
	most, least := spreadOpen(q, v)
	return most-least > p.Abs && float64(most) > p.Rel*float64(least)
}

func (CacheAware) labels(a *aggregate) []label { return treeLabels(a) }

// The modes of a PrefixAware or CacheAware decision.
const (
	modeQueue = iota // the shortest queue of all
	modeMatch        // extra 0: the longest match
	modeTree         // extra 0: the smallest tree
)

func treeLabels(a *aggregate) []label {
	first := label{"not_preferred", "none"}
	switch a.mode {
	case modeMatch:
		first.name = "not_longest_match"
	case modeTree:
		first.name = "not_smallest_tree"
	}
	return []label{first, {"open", "requests"}, {"best_match_rate", "share"}}
}
