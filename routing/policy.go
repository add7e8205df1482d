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

// stateless is embedded by policies that remember nothing: the view has all that they read.
type stateless struct{}

// NewState is nil.
func (stateless) NewState(*View, *rand.Rand) State { return nil }

// Observe does nothing.
func (stateless) Observe(State, *View, *Event) {}

// Needs is what a policy reads of a request beyond its length. The ingress leaves out what is not needed: for
// a policy that does not read them, it builds no index, subscribes to no KV events and canonicalizes no text.
type Needs struct {
	Hits    bool // Request.Hits: the KV index
	Blocks  bool // Request.Blocks: chain hashes of the prompt, also of what no rank holds
	Text    bool // Request.Text
	Session bool // Request.Session

	// Approximate: do not use the engines' KV events; a routed prompt's blocks count as cached on that rank
	// for kvindex.DefaultRecord, renewed by each routing (kv with no_kv_events, policies with a text tree).
	Approximate bool

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

// Goals are what a request must meet to count as good.
type Goals struct {
	TTFT time.Duration // to its first token
	TPOT time.Duration // mean time per token after that
}

// Met says whether a request with these times is good.
func (g Goals) Met(ttft, tpot time.Duration) bool { return ttft <= g.TTFT && tpot <= g.TPOT }

// DefaultGoals are the goals under a policy that has no parameters for them.
func DefaultGoals() Goals { return Goals{TTFT: 2 * time.Second, TPOT: 50 * time.Millisecond} }

// GoalsOf returns the goals that a policy has.
func GoalsOf(p Policy) Goals {
	if g, ok := p.(interface{ goals() Goals }); ok {
		return g.goals()
	}
	return DefaultGoals()
}

// The closed list of Decision.Reason. Route reasons say why that rank, Queue and Reject reasons why none.
const (
	ReasonNextInTurn    = "next_in_turn"   // round-robin's next live rank
	ReasonUniform       = "uniform"        // random drew it
	ReasonFewerOngoing  = "fewer_ongoing"  // the less busy of power-of-two's pair
	ReasonOnlyCandidate = "only_candidate" // one rank was left to choose from
	ReasonLowestScore   = "lowest_score"   // the minimum of a cost, as of least-loaded, kv, lmetric-1
	// ReasonNearTie: mex took the longest hit among costs that differ by less than what other ingresses may
	// have sent unseen.
	ReasonNearTie       = "near_tie"
	ReasonNamedByCaller = "named_by_caller" // direct took the rank of x-dpserve-rank
	ReasonReleased      = "released"        // cohorts: the queue of the lockstep group has named the rank
	// ReasonSilentFallback: only ranks with a silent stream were left; their load is old news and admission
	// has the last word.
	ReasonSilentFallback = "silent_fallback"

	ReasonHighestScore = "highest_score" // scoring's maximum
	// ReasonPrefixCachingOff: scoring's maximum under the load profile, because the engines cache no
	// prefixes.
	ReasonPrefixCachingOff = "prefix_caching_off"
	ReasonSampled          = "sampled"      // kv drew it, router_temperature is above 0
	ReasonPrefixMatch      = "prefix_match" // the least busy of the ranks that hold the longest known prefix
	// ReasonLowMatch: no rank holds enough of the prompt; the one with the smallest tree, or the least busy.
	ReasonLowMatch = "low_match"
	// ReasonImbalanced: the ranks are too unevenly loaded to look at caches; the shortest queue.
	ReasonImbalanced = "imbalanced"
	// ReasonFallbackPow2: prefix-aware without usable text or with uneven queues; the less busy of a pair.
	ReasonFallbackPow2 = "fallback_pow2"
	ReasonNoPrefix     = "no_prefix"   // the prompt is too short to be cached; the shortest queue
	ReasonSession      = "session"     // the rank that had this session last
	ReasonNewSession   = "new_session" // no rank had this session lately; the shortest queue

	ReasonNoRoom = "no_room" // Queue: every eligible rank holds max_ongoing_requests
	// ReasonOnTheWay (Queue): nothing eligible yet, a unit is starting, fenced, killing or in backoff.
	ReasonOnTheWay = "on_the_way"

	ReasonNoReadyRank = "no_ready_rank" // Reject: nothing ready and nothing on its way
	ReasonAllTried    = "all_tried"     // Reject: every ready rank was tried for this request already
	ReasonAllBusy     = "all_busy"      // Reject: every rank left is above busy_threshold (503, Retry-After)
	// ReasonBadScore (Reject): no candidate had a score that is a number; a fault of the rank reports.
	ReasonBadScore    = "bad_score"
	ReasonUnknownRank = "unknown_rank" // Reject by direct: no such rank; the caller's fault (400)
	// ReasonRankUnavailable (Reject, direct): the rank exists but is not live or is full (503).
	ReasonRankUnavailable = "rank_unavailable"
	ReasonNoRankGiven     = "no_rank_given" // Reject by direct: policy direct needs x-dpserve-rank (400)
)
