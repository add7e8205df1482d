package routing

import (
	"math/rand/v2"
	"time"
)

// State is a policy's own memory. Only Observe changes it.
type State any

// Policy decides. Implementations are pure in Decide and need no locking: one Router serializes them.
type Policy interface {
	Name() string
	NewState(v *View, r *rand.Rand) State
	Observe(s State, v *View, e *Event)
	Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision)
}

// Needs is what a policy reads of a request beyond its length. The ingress leaves out what is not needed: for
// a policy that does not read them, it builds no index, subscribes to no KV events and canonicalizes no text.
type Needs struct {
	Hits    bool // Request.Hits: the KV index
	Blocks  bool // Request.Blocks: chain hashes of the prompt, also of what no rank holds
	Text    bool // Request.Text
	Session bool // Request.Session
	Usage   bool // Rank.Usage: the engines' own report of their KV cache

	// Approximate: do not use the engines' KV events; a routed prompt's blocks count as cached on that rank
	// for ApproximateTTL, renewed by each routing (kv with no_kv_events, policies with a text tree).
	Approximate    bool
	ApproximateTTL time.Duration

	// attempts on a rank before it is taken out (cache-aware, documented: 3); 0 = not the policy's business
	AttemptsPerRank int
	// attempts of a request in place of the application's (cache-aware, documented: 6); 0 = the application's
	AttemptsPerRequest int
}

// NeedsOf returns what p reads of a request.
func NeedsOf(p Policy) Needs {
	if n, ok := p.(interface{ needs() Needs }); ok {
		return n.needs()
	}
	return Needs{}
}

// The closed list of Decision.Reason. Route reasons say why that rank, Queue and Reject reasons why none.
const (
	// ReasonNextInTurn: round-robin's next live rank.
	ReasonNextInTurn = "next_in_turn"
	// ReasonUniform: random drew it.
	ReasonUniform = "uniform"
	// ReasonFewerOngoing: the less busy of power-of-two's pair.
	ReasonFewerOngoing = "fewer_ongoing"
	// ReasonOnlyCandidate: one rank was left to choose from.
	ReasonOnlyCandidate = "only_candidate"
	// ReasonLowestScore: the minimum of a cost, as of least-loaded, kv, lmetric.
	ReasonLowestScore = "lowest_score"
	// ReasonNearTie: mex took the longest hit among costs that differ by less than what other ingresses may
	// have sent unseen.
	ReasonNearTie = "near_tie"
	// ReasonNamedByCaller: direct took the rank of x-dpserve-rank.
	ReasonNamedByCaller = "named_by_caller"
	// ReasonSilentFallback: only ranks with a silent stream were left; their load is old news and admission
	// has the last word.
	ReasonSilentFallback = "silent_fallback"

	// ReasonHighestScore: scoring's maximum.
	ReasonHighestScore = "highest_score"
	// ReasonPrefixCachingOff: scoring's maximum under the load profile, because the engines cache no
	// prefixes.
	ReasonPrefixCachingOff = "prefix_caching_off"
	// ReasonSampled: kv drew it, router_temperature is above 0.
	ReasonSampled = "sampled"
	// ReasonPrefixMatch: the least busy of the ranks that hold the longest known prefix.
	ReasonPrefixMatch = "prefix_match"
	// ReasonLowMatch: no rank holds enough of the prompt; the one with the smallest tree, or the least busy.
	ReasonLowMatch = "low_match"
	// ReasonImbalanced: the ranks are too unevenly loaded to look at caches; the shortest queue.
	ReasonImbalanced = "imbalanced"
	// ReasonFallbackPow2: prefix-aware without usable text or with uneven queues; the less busy of a pair.
	ReasonFallbackPow2 = "fallback_pow2"
	// ReasonNoPrefix: the prompt is too short to be cached; the shortest queue.
	ReasonNoPrefix = "no_prefix"
	// ReasonWarm: sticky kept to the ranks that hold most of the prompt.
	ReasonWarm = "warm"
	// ReasonSpilled: sticky left the warm ranks, they are too far behind.
	ReasonSpilled = "spilled"
	// ReasonRing: the first rank on the hash ring that may take it.
	ReasonRing = "ring"
	// ReasonRingFallback: the ring's rank and its fallbacks cannot take it; the shortest queue.
	ReasonRingFallback = "ring_fallback"
	// ReasonSession: the rank that had this session last.
	ReasonSession = "session"
	// ReasonNewSession: no rank had this session lately; the shortest queue.
	ReasonNewSession = "new_session"

	// ReasonNoRoom (Queue): every eligible rank holds max_ongoing_requests.
	ReasonNoRoom = "no_room"
	// ReasonOnTheWay (Queue): nothing eligible yet, a unit is starting, fenced, killing or in backoff.
	ReasonOnTheWay = "on_the_way"

	// ReasonNoReadyRank (Reject): nothing ready and nothing on its way.
	ReasonNoReadyRank = "no_ready_rank"
	// ReasonAllTried (Reject): every ready rank was tried for this request already.
	ReasonAllTried = "all_tried"
	// ReasonAllBusy (Reject): every rank left is above busy_threshold (503 with Retry-After).
	ReasonAllBusy = "all_busy"
	// ReasonBadScore (Reject): no candidate had a score that is a number; a fault of the rank reports.
	ReasonBadScore = "bad_score"
	// ReasonUnknownRank (Reject, direct): no such rank; the caller's fault (400).
	ReasonUnknownRank = "unknown_rank"
	// ReasonRankUnavailable (Reject, direct): the rank exists but is not live or is full (503).
	ReasonRankUnavailable = "rank_unavailable"
	// ReasonNoRankGiven (Reject, direct): policy direct needs x-dpserve-rank (400).
	ReasonNoRankGiven = "no_rank_given"
)
