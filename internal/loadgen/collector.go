package loadgen

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

const (
	maxGaps  = 4 << 20 // gaps kept exactly (32 MiB); a larger number is sampled uniformly
	maxTimes = 4 << 20 // requests, likewise
	maxKinds = 64      // kinds of errors
	maxRanks = 4096    // ranks with a count of their own
)

// collector gathers samples. Safe for concurrent use.
type collector struct {
	slo SLO

	mu      sync.Mutex
	ttft    times
	itl     times
	tpot    times
	e2e     times
	lag     times
	offered int
	ok      int
	good    int
	errors  map[string]int
	ranks   map[string]int
	usage   totals
	end     time.Time // of the last measured request
	total   counts    // warm-up included
}

// counts are the divisors of CPU time.
type counts struct{ requests, chunks int }

// totals are sums over good requests.
type totals struct{ prompt, completion, cached, reusable int }

func newCollector(cfg Config) *collector {
	c := &collector{slo: cfg.SLO, errors: map[string]int{}, ranks: map[string]int{}}
	for i, t := range []*times{&c.ttft, &c.itl, &c.tpot, &c.e2e, &c.lag} {
		t.r = rand.New(rand.NewPCG(cfg.Seed, uint64(i)))
		t.limit = maxTimes
	}
	c.itl.limit = maxGaps
	return c
}

func (c *collector) add(s *sample, measured bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total.requests++
	c.total.chunks += s.chunks
	if !measured || s.failure == failureStopped {
		return
	}
	c.offered++
	if s.end.After(c.end) {
		c.end = s.end
	}
	if s.rank != "" && (len(c.ranks) < maxRanks || c.ranks[s.rank] > 0) {
		c.ranks[s.rank]++
	}
	c.lag.add(s.sent.Sub(s.intended))
	if s.failure != "" {
		if len(c.errors) < maxKinds || c.errors[s.failure] > 0 {
			c.errors[s.failure]++
		} else {
			c.errors["other"]++
		}
		return
	}
	c.addGood(s)
}

func (c *collector) addGood(s *sample) {
	c.ok++
	c.usage.prompt += s.usage.Prompt
	c.usage.completion += s.tokens()
	c.usage.cached += s.usage.cached()
	c.usage.reusable += s.reusable
	c.e2e.add(s.end.Sub(s.intended))
	met := true
	if !s.first.IsZero() {
		c.ttft.add(s.first.Sub(s.intended))
		met = s.first.Sub(s.intended) <= c.slo.TTFT
	}
	if tpot, ok := s.tpot(); ok {
		c.tpot.add(tpot)
		met = met && tpot <= c.slo.TPOT
	}
	for _, gap := range s.gaps {
		c.itl.add(gap)
	}
	if met {
		c.good++
	}
}

func (c *collector) all() counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.total
}

// answered returns the times to the first token, or to the end for whole answers.
func (c *collector) answered() *Percentiles {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.ttft.percentiles(); p != nil {
		return p
	}
	return c.e2e.percentiles()
}

// report returns the results of a run that began at start.
func (c *collector) report(cfg Config, start time.Time) *Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &Report{
		APIVersion: APIVersion, Kind: "BenchReport",
		Load: Load{
			URL: cfg.URL, Model: cfg.Model, Route: cfg.Route, Stream: cfg.Stream, Mode: cfg.Mode,
			Concurrency: cfg.Concurrency,
			PromptBytes: cfg.PromptBytes, MaxTokens: cfg.MaxTokens, Seed: cfg.Seed,
		},
		Results: Results{
			Offered: c.offered, OK: c.ok, Failed: c.offered - c.ok, Errors: maps.Clone(c.errors),
			PromptTokens: c.usage.prompt, OutputTokens: c.usage.completion, CachedTokens: c.usage.cached,
		},
		Latencies: Latencies{
			TTFT: c.ttft.percentiles(), ITL: c.itl.percentiles(), TPOT: c.tpot.percentiles(),
			E2E: c.e2e.percentiles(),
		},
		Goodput: Goodput{TTFTMs: toMillis(cfg.SLO.TTFT), TPOTMs: toMillis(cfg.SLO.TPOT)},
		Ranks:   maps.Clone(c.ranks),
	}
	if cfg.Mode == Open {
		r.Rate, r.Arrivals, r.Lag = cfg.Rate, cfg.Arrivals, c.lag.percentiles()
	}
	if c.usage.prompt > 0 {
		r.HitShare = float64(c.usage.cached) / float64(c.usage.prompt)
	}
	r.Busiest = maxOverMean(r.Ranks)
	if c.offered > 0 {
		r.Goodput.Share = float64(c.good) / float64(c.offered)
	}
	if seconds := c.end.Sub(start).Seconds(); c.offered > 0 && seconds > 0 {
		r.DurationS = seconds
		r.RequestsPerS = float64(c.ok) / seconds
		r.OutputTokensPerS = float64(c.usage.completion) / seconds
		r.Goodput.PerS = float64(c.good) / seconds
	}
	return r
}

// tokens returns the engine's count, or the number of chunks if the engine reports none.
func (s *sample) tokens() int {
	if s.usage.Completion > 0 {
		return s.usage.Completion
	}
	return s.chunks
}

// tpot is (last − first) / (n − 1); undefined for one token.
func (s *sample) tpot() (time.Duration, bool) {
	n := s.tokens()
	if n < 2 || s.first.IsZero() {
		return 0, false
	}
	return s.last.Sub(s.first) / time.Duration(n-1), true
}

// times holds measured durations: all of them up to limit, then a uniform sample of that size (algorithm R).
// Sum, count and maximum stay exact.
type times struct {
	r     *rand.Rand
	limit int
	kept  []time.Duration
	n     int
	sum   float64
	max   time.Duration
}

func (t *times) add(d time.Duration) {
	t.n++
	t.sum += float64(d)
	t.max = max(t.max, d)
	if len(t.kept) < t.limit {
		t.kept = append(t.kept, d)
		return
	}
	if i := t.r.IntN(t.n); i < t.limit {
		t.kept[i] = d
	}
}

// Percentiles of a quantity, in milliseconds. The p-th is the value of rank ⌊p·(n−1)⌋ in ascending order.
type Percentiles struct {
	Count int     `json:"count"`
	Mean  float64 `json:"mean_ms"`
	P50   float64 `json:"p50_ms"`
	P90   float64 `json:"p90_ms"`
	P95   float64 `json:"p95_ms"`
	P99   float64 `json:"p99_ms"`
	Max   float64 `json:"max_ms"`
}

// percentiles sorts the kept durations; nil if there are none.
func (t *times) percentiles() *Percentiles {
	if t.n == 0 {
		return nil
	}
	slices.Sort(t.kept)
	return &Percentiles{
		Count: t.n, Mean: toMillis(time.Duration(t.sum / float64(t.n))),
		P50: toMillis(rankOfShare(t.kept, 0.5)), P90: toMillis(rankOfShare(t.kept, 0.9)),
		P95: toMillis(rankOfShare(t.kept, 0.95)),
		P99: toMillis(rankOfShare(t.kept, 0.99)), Max: toMillis(t.max),
	}
}

// rankOfShare returns the value of rank ⌊p·(n−1)⌋ of sorted, which is not empty.
func rankOfShare(sorted []time.Duration, p float64) time.Duration {
	return sorted[int(math.Floor(p*float64(len(sorted)-1)))]
}

// toMillis returns d in milliseconds, rounded to the microsecond.
func toMillis(d time.Duration) float64 { return math.Round(float64(d)/1e3) / 1e3 }
