package routing

import (
	"math"
	"math/rand/v2"
	"time"
)

// The variants of CacheAware.
const (
	// variantPage is SGLang's router page: what the name means.
	variantPage = "page"
	// variantGateway is the newer CLI's defaults.
	variantGateway = "gateway"
)

// cacheAwareDefaults are one set of parameter values.
type cacheAwareDefaults struct {
	threshold, rel      float64
	abs, interval, size int
	lowMatch, matches   string
	perRank, perRequest int
	sizeInNodes         bool
}

// CacheAware is SGLang's cache-aware router:
//
//	imbalanced ⇔ max − min > Abs and max > Rel · min, on open requests per rank
//	imbalanced ⇒ the shortest queue
//	balanced   ⇒ match rate > Threshold: the ranks with the longest match, among them the shortest queue
//	             else: the rank with the smallest tree (page), or the shortest queue (gateway, tuned)
//
// Matches are characters in the tree of the texts sent to each rank (textState), which does not see the
// engines' evictions. With KVMatches and a look-up in the request they are cached tokens, and the tree is the
// fallback. The prompt is inserted for the chosen rank, imbalanced or not; a removed rank leaves tree and
// queues. Ties: shortest queue, then drawn. A prompt below one KV block goes to the shortest queue.
//
// Parameters: variant (page, gateway), cache_threshold, balance_abs_threshold, balance_rel_threshold,
// eviction_interval_s, max_tree_size, low_match (smallest-tree, least-pending), matches (text, kv),
// kv_usage_spread, kv_usage_ceiling, max_worker_retries, max_total_retries.
type CacheAware struct {
	Threshold    float64 // 0 to 1
	Abs          int     // requests
	Rel          float64
	LeastPending bool // on a low match: shortest queue instead of smallest tree
	KVMatches    bool

	Interval    time.Duration // between evictions
	MaxTree     int           // per rank: characters, or nodes
	SizeInNodes bool

	UsageSpread  float64 // also imbalanced if max − min KV usage is above it; 0 = off
	UsageCeiling float64 // also imbalanced if some KV usage is above it; 0 = off

	RetriesPerRank, RetriesPerRequest int // attempts; 0 = the application's
}

func newCacheAware(p *params) Policy {
	def := p.cacheAwareDefaults(p.word("variant", variantPage, variantPage, variantGateway))
	return CacheAware{
		Threshold: p.number("cache_threshold", def.threshold, 0, 1),
		Abs:       p.integer("balance_abs_threshold", def.abs, 0, math.MaxInt32),
		Rel:       p.number("balance_rel_threshold", def.rel, 1, maxWeight),
		LeastPending: p.word("low_match", def.lowMatch, "smallest-tree", "least-pending") ==
			"least-pending",
		KVMatches:         p.word("matches", def.matches, "text", "kv") == "kv",
		Interval:          p.seconds("eviction_interval_s", float64(def.interval)),
		MaxTree:           p.integer("max_tree_size", def.size, 1, math.MaxInt32),
		SizeInNodes:       def.sizeInNodes,
		UsageSpread:       p.number("kv_usage_spread", 0, 0, 1),
		UsageCeiling:      p.number("kv_usage_ceiling", 0, 0, 1),
		RetriesPerRank:    p.integer("max_worker_retries", def.perRank, 1, maxRetries),
		RetriesPerRequest: p.integer("max_total_retries", def.perRequest, 1, maxRetries),
	}
}

// maxRetries bounds attempts.
const maxRetries = 100

// Name is "cache-aware".
func (CacheAware) Name() string { return nameCacheAware }

func (p CacheAware) needs() Needs {
	n := needsText()
	n.Usage, n.AttemptsPerRank, n.AttemptsPerRequest = p.UsageSpread > 0 || p.UsageCeiling > 0,
		p.RetriesPerRank, p.RetriesPerRequest
	if p.KVMatches {
		n.Approximate, n.ApproximateTTL = false, 0
	}
	return n
}

// NewState has an empty tree.
func (CacheAware) NewState(v *View, _ *rand.Rand) State { return newTextState(v) }

// Observe inserts what was dispatched and evicts.
func (p CacheAware) Observe(s State, v *View, e *Event) {
	if st, ok := s.(*textState); ok {
		size := func(*View, RankID) int { return p.MaxTree }
		st.observe(v, e, sweep{interval: p.Interval, high: size, low: size, nodes: p.SizeInNodes})
	}
}

// Decide takes the shortest queue while the queues are uneven, and the longest match otherwise.
func (p CacheAware) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// The modes of a CacheAware decision.
const (
	modeQueue = iota // the shortest queue of all
	modeMatch        // extra 0: the longest match
	modeTree         // extra 0: the smallest tree
)

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
	if most-least > p.Abs && float64(most) > p.Rel*float64(least) {
		return true
	}
	if p.UsageSpread == 0 && p.UsageCeiling == 0 {
		return false
	}
	high, low := 0.0, 1.0
	for i := range v.Ranks {
		if rk := &v.Ranks[i]; isEligible(q, rk) && !rk.Silent {
			high, low = max(high, rk.Usage()), min(low, rk.Usage())
		}
	}
	return p.UsageSpread > 0 && high-low > p.UsageSpread || p.UsageCeiling > 0 && high > p.UsageCeiling
}

func (CacheAware) summands(_ *Request, rk *Rank, _, extra int64, a *aggregate) sums {
	return three(float64(extra), notPreferredCost, float64(rk.ongoing()), 1, a.x[0], 0)
}

func (p CacheAware) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (CacheAware) labels(a *aggregate) []label {
	first := label{"not_preferred", "none"}
	switch a.mode {
	case modeMatch:
		first.name = "not_longest_match"
	case modeTree:
		first.name = "not_smallest_tree"
	}
	return []label{first, {"open", "requests"}, {"best_match_rate", "share"}}
}

func (CacheAware) rule(*aggregate) rule { return rule{} }
