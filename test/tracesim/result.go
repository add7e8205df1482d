package tracesim

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// Goals are what a request must meet to count as good.
type Goals struct {
	TTFT time.Duration // from its arrival to its first token, at most
	TPOT time.Duration // per token behind the first, at most
}

// Result is what a run came to.
type Result struct {
	Offered  int
	Refused  int             // of these: longer than a rank holds
	Goodput  float64         // share of the offered requests that met the goals
	TTFT     []time.Duration // ascending, of the requests that got a token
	TPOT     []time.Duration // ascending, of the requests with more than one
	Hit      float64         // prompt tokens that came from a cache, over all
	Tokens   int             // of all answers
	Span     time.Duration   // until the last token
	Requests []int           // by rank
	Work     []float64       // by rank: ms of prefill, by the cost model
	Chosen   []Choice        // in the order of arrival
}

// Choice is where a request went.
type Choice struct {
	At   time.Duration
	Rank int // -1: no rank took it
}

func (s *sim) result() *Result {
	r := &Result{
		Offered: len(s.calls), Requests: make([]int, len(s.ranks)),
		Work: make([]float64, len(s.ranks)),
	}
	law := s.cfg.engine().Law
	good, prompt, cached := 0, 0, 0
	for i := range s.calls {
		c := &s.calls[i]
		r.Chosen = append(r.Chosen, Choice{c.At, c.rank})
		if !s.cfg.fits(c.Request) {
			r.Refused++
		}
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
		if ttft <= s.cfg.Goals.TTFT && tpot <= s.cfg.Goals.TPOT {
			good++
		}
		prompt, cached = prompt+c.Prompt, cached+c.sent.Cached()
		r.Work[c.rank] += law.Prefill(c.Prompt-c.sent.Cached(), c.sent.Cached())
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

// MaxMean is the largest of the ranks' values over their mean; 1 is even, and so is nothing.
func MaxMean[T int | float64](values []T) float64 {
	var most, sum T
	for _, v := range values {
		most, sum = max(most, v), sum+v
	}
	if sum == 0 {
		return 1
	}
	return float64(most) * float64(len(values)) / float64(sum)
}

// BurstMaxMean is MaxMean of the requests of each burst: the mean over the bursts, and the worst; 0 if there
// is none. A burst is requests that came at one instant, at least two per rank.
func (r *Result) BurstMaxMean() (mean, worst float64) {
	bursts := 0
	for i := 0; i < len(r.Chosen); {
		at, ranks, n := r.Chosen[i].At, make([]int, len(r.Requests)), 0
		for ; i < len(r.Chosen) && r.Chosen[i].At == at; i++ {
			if rank := r.Chosen[i].Rank; rank >= 0 {
				ranks[rank]++
				n++
			}
		}
		if n >= 2*len(ranks) {
			bursts++
			mean, worst = mean+MaxMean(ranks), max(worst, MaxMean(ranks))
		}
	}
	return mean / float64(max(bursts, 1)), worst
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

// Bound is what a workload allows under any routing.
type Bound struct {
	// share of the prompt tokens that a cache without limit holds, which has seen every prompt before
	Hit     float64
	Goodput float64 // share of the requests that meet the goals alone on a rank with such a cache
}

// Bound looks at a workload that is in the order of time.
func (c Config) Bound(work []Request) Bound {
	engine := c.engine()
	seen := make(map[uint64]struct{})
	good, prompt, cached := 0, 0, 0
	for i := range work {
		r := &work[i]
		hit := 0
		for hit < min(len(r.Blocks), (r.Prompt-1)/BlockSize) {
			if _, ok := seen[r.Blocks[hit]]; !ok {
				break
			}
			hit++
		}
		for _, block := range r.Blocks[hit:] {
			seen[block] = struct{}{}
		}
		hit *= BlockSize
		prompt, cached = prompt+r.Prompt, cached+hit
		ttft := 0.0 // ms
		for done := hit; done < r.Prompt; {
			n := min(engine.MaxBatchedTokens, r.Prompt-done)
			ttft += engine.Law.Step(n, 0, 0, steptime.Pairs(n, done))
			done += n
		}
		tpot := 0.0
		if r.Output > 1 {
			tpot = engine.Law.Step(1, 1, r.Prompt, 0)
		}
		if c.fits(r) && ttft <= ms(c.Goals.TTFT) && tpot <= ms(c.Goals.TPOT) {
			good++
		}
	}
	return Bound{
		Hit:     float64(cached) / float64(max(prompt, 1)),
		Goodput: float64(good) / float64(max(len(work), 1)),
	}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
