package client

// Traffic counts an application's requests at the ingresses of all nodes, each since its dpserve started. A
// count falls when a node leaves or its dpserve is started again.
type Traffic struct {
	Requests  uint64    `json:"requests"` // ended, whatever their status
	Failed    uint64    `json:"failed"`   // of Requests: a status of 500 or above
	Prompt    uint64    `json:"prompt_tokens"`
	Cached    uint64    `json:"cached_tokens"` // of Prompt, found in the caches of ranks
	Generated uint64    `json:"generated_tokens"`
	Goodput   Goodput   `json:"goodput"`
	TTFT      Histogram `json:"ttft"` // of streams, as dpserve_ttft_seconds counts them
	ITL       Histogram `json:"itl"`  // of streams, as dpserve_itl_seconds counts them
}

// Goodput counts the streams that ended, without those of which the client is the end: their first token and
// their mean time per token met the goals, or one of them did not, or the stream failed.
type Goodput struct {
	Met    uint64  `json:"met"`
	Missed uint64  `json:"missed"`
	TTFT   float64 `json:"ttft_goal_s"`
	TPOT   float64 `json:"tpot_goal_s"`
}

// Histogram counts times by buckets.
type Histogram struct {
	Bounds []float64 `json:"bounds_s,omitempty"` // the longest time of each bucket but the last, in seconds
	Counts []uint64  `json:"counts,omitempty"`   // of each bucket: one more than Bounds
}

// Add adds the counts of another node. The goals are those of either: all nodes have the same.
func (t *Traffic) Add(o *Traffic) {
	t.Requests, t.Failed = t.Requests+o.Requests, t.Failed+o.Failed
	t.Prompt, t.Cached, t.Generated = t.Prompt+o.Prompt, t.Cached+o.Cached, t.Generated+o.Generated
	t.Goodput.Met, t.Goodput.Missed = t.Goodput.Met+o.Goodput.Met, t.Goodput.Missed+o.Goodput.Missed
	t.Goodput.TTFT = max(t.Goodput.TTFT, o.Goodput.TTFT)
	t.Goodput.TPOT = max(t.Goodput.TPOT, o.Goodput.TPOT)
	t.TTFT.Add(o.TTFT)
	t.ITL.Add(o.ITL)
}

// Add adds the counts of a histogram with the same bounds. One with other bounds, of another version, is left
// out.
func (h *Histogram) Add(o Histogram) {
	switch {
	case len(h.Counts) == 0:
		h.Bounds, h.Counts = o.Bounds, append([]uint64(nil), o.Counts...)
	case len(h.Counts) == len(o.Counts):
		for i, n := range o.Counts {
			h.Counts[i] += n
		}
	}
}
