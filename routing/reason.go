package routing

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
	// ReasonLowestScore: least-loaded's minimum.
	ReasonLowestScore = "lowest_score"
	// ReasonNamedByCaller: direct took the rank of x-dpserve-rank.
	ReasonNamedByCaller = "named_by_caller"
	// ReasonSilentFallback: only ranks with a silent stream were left; their load is old news and admission has the last word.
	ReasonSilentFallback = "silent_fallback"

	// ReasonNoRoom (Queue): every eligible rank holds max_ongoing_requests.
	ReasonNoRoom = "no_room"
	// ReasonOnTheWay (Queue): nothing eligible yet, a unit is starting, fenced, killing or in backoff.
	ReasonOnTheWay = "on_the_way"

	// ReasonNoReadyRank (Reject): nothing ready and nothing on its way.
	ReasonNoReadyRank = "no_ready_rank"
	// ReasonAllTried (Reject): every ready rank was tried for this request already.
	ReasonAllTried = "all_tried"
	// ReasonUnknownRank (Reject, direct): no such rank; the caller's fault (400).
	ReasonUnknownRank = "unknown_rank"
	// ReasonRankUnavailable (Reject, direct): the rank exists but is not live or is full (503).
	ReasonRankUnavailable = "rank_unavailable"
	// ReasonNoRankGiven (Reject, direct): policy direct needs x-dpserve-rank (400).
	ReasonNoRankGiven = "no_rank_given"
)
