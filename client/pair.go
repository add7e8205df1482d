package client

// PDStatus is how an application with a prefill and a decode pool works.
type PDStatus struct {
	Transfer string `json:"transfer"` // nixl | nixl-push | mooncake | sglang | sim
	Decide   string `json:"decide"`   // isl | prefill-load | uncached>=N | always | mex
	Fallback string `json:"fallback"` // local | fail
	Pairs    string `json:"pairs"`    // PairsOn, or "off: " and why no prefill rank can be used
	Met      int    `json:"met"`      // of All: pairs that may have a client's request
	All      int    `json:"all"`      // pairs of a ready prefill rank and a ready decode rank
	// requests that ended, by what computed their prompt: a prefill rank, or the decode rank as decided, or
	// the decode rank because no prefill rank could
	Remote    uint64 `json:"remote"`
	Local     uint64 `json:"local"`
	Fallbacks uint64 `json:"fallbacks"`
	// what the decode ranks' engines count since their start; 0: they do not say
	TransferMs    float64 `json:"transfer_ms"`    // mean of one transfer
	TransferBytes uint64  `json:"transfer_bytes"` // sum
}

// PairsOn is PDStatus.Pairs while requests may use prefill ranks.
const PairsOn = "on"

// PairExplanation is the decision of an application with a prefill and a decode pool. The Explanation that
// holds it describes the decode pool.
type PairExplanation struct {
	Decide string `json:"decide"` // isl | prefill-load | uncached>=N | always | mex
	// remote: a prefill rank computes the prompt; local: the decode rank does; fallback: the decode rank does
	// because no prefill rank can; none: no rank is taken
	Way     string `json:"way"`
	Prefill string `json:"prefill,omitempty"` // GROUP/RANK in the prefill pool, if Way is remote
	Reason  string `json:"reason"`            // long_prefill, decode_holds …
	Why     string `json:"why"`               // Reason in words, for people
	// tokens of the prompt that the decode rank does not hold
	UncachedTokens int `json:"uncached_tokens"`
	// the pairs that were compared, then the decode rank alone
	Candidates []PairCandidate `json:"candidates"`
	// the prefill pool: its Pick is Prefill, its Reason that of its own policy
	PrefillPool *Explanation `json:"prefill_pool"`
}

// PairCandidate is a pair, or a decode rank alone, with every term of its cost.
type PairCandidate struct {
	Prefill string  `json:"prefill,omitempty"` // GROUP/RANK; "": the decode rank alone
	Decode  string  `json:"decode"`            // GROUP/RANK
	Skip    string  `json:"skip,omitempty"`    // why the pair could not be taken: leases_full, not_prewarmed
	Terms   []Term  `json:"terms"`
	CostMs  float64 `json:"cost_ms"` // sum of the terms' values, in their order
	Picked  bool    `json:"picked,omitempty"`
}

// PairInfo is how the Router of an application decides between its prefill and its decode pool. The Info that
// holds it describes the decode pool.
type PairInfo struct {
	Decide   string `json:"decide"`
	Transfer string `json:"transfer"`
	Fallback string `json:"fallback"` // local | fail
	Pairs    string `json:"pairs"`    // PairsOn, or "off: " and why
	Met      int    `json:"met"`      // of All
	All      int    `json:"all"`      // pairs of ready ranks
	// decisions so far by reason
	Decisions map[string]uint64 `json:"decisions"`
	Prefill   *Info             `json:"prefill"` // of the prefill pool
}

// PairReplay is the pair decision of a past request.
type PairReplay struct {
	Way     string `json:"way"`               // remote | local | fallback
	Prefill string `json:"prefill,omitempty"` // GROUP/RANK, if Way is remote
}
