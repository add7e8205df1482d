package simulate

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// Result is what a run came to.
type Result struct {
	Offered int
	Refused int             // of these: longer than a rank holds
	Failed  int             // of these: answered with an error, or not to the end
	Goodput float64         // share of the offered requests that met the goals
	TTFT    []time.Duration // ascending, of the requests that got all their tokens
	TPOT    []time.Duration // ascending, of those with more than one
	Hit     float64         // prompt tokens that came from a cache, over all
	Tokens  int             // of all answers
	Span    time.Duration   // until the last token
	Counts
	Prefill Counts   // of the prefill pool
	Chosen  []Choice // in the order of arrival
}

// Counts are what the ranks of a pool had to do.
type Counts struct {
	Requests []int     // by rank
	Work     []float64 // by rank: ms of prefill, by the cost model
}

func newCounts(p Pool) Counts {
	return Counts{Requests: make([]int, p.Ranks), Work: make([]float64, p.Ranks)}
}

// Choice is where a request went.
type Choice struct {
	At   time.Duration
	Rank int // -1: no rank took it
}

func (s *sim) result() *Result {
	r := &Result{Offered: len(s.calls), Counts: newCounts(s.cfg.Pool), Prefill: newCounts(s.cfg.Prefill)}
	law := s.cfg.Engine.Law
	good, prompt, cached := 0, 0, 0
	for i := range s.calls {
		c := &s.calls[i]
		r.Chosen = append(r.Chosen, Choice{c.At, c.rank})
		if !s.cfg.fits(c.Request) {
			r.Refused++
			continue
		}
		computed, by := &r.Counts, c.rank // who computed the prompt
		if c.rank >= 0 {
			r.Requests[c.rank]++
		}
		if c.prefill >= 0 {
			computed, by = &r.Prefill, c.prefill
			computed.Requests[by]++
		}
		if !c.finished {
			r.Failed++
			continue
		}
		ttft, tpot := c.latency()
		if c.Output > 1 {
			r.TPOT = append(r.TPOT, tpot)
		}
		r.TTFT = append(r.TTFT, ttft)
		if s.cfg.Goals.Met(ttft, tpot) {
			good++
		}
		prompt, cached = prompt+c.Prompt, cached+c.hit
		computed.Work[by] += law.Prefill(c.Prompt-c.hit, c.hit)
		r.Tokens += c.done
		r.Span = max(r.Span, c.times.Last)
	}
	r.Goodput = float64(good) / float64(max(r.Offered, 1))
	r.Hit = float64(cached) / float64(max(prompt, 1))
	slices.Sort(r.TTFT)
	slices.Sort(r.TPOT)
	return r
}

// latency is the time to the first token of a request that got all, and per token behind it.
func (c *call) latency() (ttft, tpot time.Duration) {
	if c.Output > 1 {
		tpot = (c.times.Last - c.times.First) / time.Duration(c.Output-1)
	}
	return c.times.First - c.At, tpot
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

// Bound is what a workload allows under any routing: each request alone on an idle rank, whose cache holds
// all prompts before it. The workload is in the order of time.
func (c Config) Bound(work []Request) *Result {
	seen := make(map[uint64]struct{})
	good, prompt, cached := 0, 0, 0
	out := &Result{Offered: len(work)}
	for i := range work {
		r := &work[i]
		if !c.fits(r) {
			out.Refused++
			continue
		}
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
		ttft, tpot := c.alone(r, hit)
		out.TTFT = append(out.TTFT, ttft)
		if r.Output > 1 {
			out.TPOT = append(out.TPOT, tpot)
		}
		if c.Goals.Met(ttft, tpot) {
			good++
		}
	}
	out.Hit = float64(cached) / float64(max(prompt, 1))
	out.Goodput = float64(good) / float64(max(len(work), 1))
	slices.Sort(out.TTFT)
	slices.Sort(out.TPOT)
	return out
}

// alone is what a request takes on an idle rank that holds hit tokens of it.
func (c Config) alone(r *Request, hit int) (ttft, tpot time.Duration) {
	e := &c.Engine
	step := func(tokens, decodes, kv int, pairs float64) float64 {
		if e.Fixed {
			return ms(e.FixedStep)
		}
		return (e.Law.Step(tokens, decodes, kv, pairs) + c.Shared.Step(tokens, tokens)) / e.Speed
	}
	first := 0.0
	for done := hit; done < r.Prompt; {
		n := min(e.MaxBatchedTokens, r.Prompt-done)
		first += step(n, 0, 0, steptime.Pairs(n, done))
		done += n
	}
	if r.Output > 1 {
		tpot = milliseconds(step(1, 1, r.Prompt, 0))
	}
	return milliseconds(first), tpot
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func milliseconds(x float64) time.Duration { return time.Duration(x * float64(time.Millisecond)) }
