package tracesim

import (
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

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
