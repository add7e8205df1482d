package tracesim

import (
	"slices"
	"time"
)

// What a request must meet to count as good.
const (
	GoodTTFT = 2000 * time.Millisecond
	GoodTPOT = 50 * time.Millisecond
)

// Result is what a run came to.
type Result struct {
	Offered  int
	Goodput  float64         // share of the offered requests that met GoodTTFT and GoodTPOT
	TTFT     []time.Duration // ascending, of the requests that got a token
	TPOT     []time.Duration // ascending, of the requests with more than one
	Hit      float64         // prompt tokens that came from a cache, over all
	Tokens   int             // of all answers
	Span     time.Duration   // until the last token
	Requests []int           // by rank
	Chosen   []Choice        // in the order of arrival
}

// Choice is where a request went.
type Choice struct {
	At   time.Duration
	Rank int // -1: no rank took it
}

func (s *sim) result() *Result {
	r := &Result{Offered: len(s.calls), Requests: make([]int, len(s.ranks))}
	good, prompt, cached := 0, 0, 0
	for i := range s.calls {
		c := &s.calls[i]
		r.Chosen = append(r.Chosen, Choice{c.At, c.rank})
		if c.rank < 0 {
			continue
		}
		r.Requests[c.rank]++
		if !c.finished {
			continue
		}
		t := c.sent.Times()
		ttft, tpot := t.First-c.At, time.Duration(0)
		if c.Output > 1 {
			tpot = (t.Last - t.First) / time.Duration(c.Output-1)
			r.TPOT = append(r.TPOT, tpot)
		}
		r.TTFT = append(r.TTFT, ttft)
		if ttft <= GoodTTFT && tpot <= GoodTPOT {
			good++
		}
		prompt, cached = prompt+c.Prompt, cached+c.sent.Cached()
		r.Tokens += c.sent.Produced()
		r.Span = max(r.Span, t.Last)
	}
	r.Goodput = float64(good) / float64(max(r.Offered, 1))
	r.Hit = float64(cached) / float64(max(prompt, 1))
	slices.Sort(r.TTFT)
	slices.Sort(r.TPOT)
	return r
}

// Percentile is the value at share p of ascending values, 0 of none.
func Percentile(values []time.Duration, p float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	return values[int(p*float64(len(values)-1))]
}

// TokensPerSecond is the output of all ranks together.
func (r *Result) TokensPerSecond() float64 { return float64(r.Tokens) / max(r.Span.Seconds(), 1e-9) }

// MaxMean is the requests of the busiest rank over the mean.
func (r *Result) MaxMean() float64 {
	most, sum := 0, 0
	for _, n := range r.Requests {
		most, sum = max(most, n), sum+n
	}
	return float64(most*len(r.Requests)) / float64(max(sum, 1))
}

// Share is the share of the requests that arrived from one instant on, before another, and went to a rank.
func (r *Result) Share(rank int, from, to time.Duration) float64 {
	n, all := 0, 0
	for _, c := range r.Chosen {
		if c.At >= from && c.At < to {
			if all++; c.Rank == rank {
				n++
			}
		}
	}
	return float64(n) / float64(max(all, 1))
}

// Mean of values, 0 of none.
func Mean(values []time.Duration) time.Duration {
	sum := time.Duration(0)
	for _, v := range values {
		sum += v
	}
	return sum / time.Duration(max(len(values), 1))
}
