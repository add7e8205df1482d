package loadgen

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// times are measured durations: all of them up to limit, then a uniform sample of that many (algorithm R). Sum, count
// and maximum stay exact.
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

// percentiles sorts what was kept; nil if nothing was measured.
func (t *times) percentiles() *Percentiles {
	if t.n == 0 {
		return nil
	}
	slices.Sort(t.kept)
	return &Percentiles{
		Count: t.n, Mean: ms(time.Duration(t.sum / float64(t.n))),
		P50: ms(rankOfShare(t.kept, 0.5)), P90: ms(rankOfShare(t.kept, 0.9)), P95: ms(rankOfShare(t.kept, 0.95)),
		P99: ms(rankOfShare(t.kept, 0.99)), Max: ms(t.max),
	}
}

// rankOfShare is the value of rank ⌊p·(n−1)⌋ of sorted, which is not empty.
func rankOfShare(sorted []time.Duration, p float64) time.Duration {
	return sorted[int(math.Floor(p*float64(len(sorted)-1)))]
}

// ms is d in milliseconds, to the microsecond.
func ms(d time.Duration) float64 { return math.Round(float64(d)/1e3) / 1e3 }
