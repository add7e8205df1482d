package sim

import "sort"

// histogram counts observations in buckets with fixed upper bounds. Guarded by the rank's mutex.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds: the last is +Inf
	sum    float64
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(x float64) {
	h.counts[sort.SearchFloat64s(h.bounds, x)]++
	h.sum += x
}

// Bucket bounds of the imitated engine.
//
//nolint:gochecknoglobals // constant tables
var (
	secondsFirst = []float64{
		0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
			640, 2560,
	}
	secondsToken   = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
		10, 20, 40, 80}
	secondsRequest = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
		960, 1920, 7680}
	stepTokens     = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	smallCounts    = []float64{1, 2, 5, 10, 20}
)

// tokenBounds are 1, 2, 5, 10, … up to the model length.
func tokenBounds(maxLen int) []float64 {
	var out []float64
	for decade := 1; ; decade *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*decade > maxLen {
				return out
			}
			out = append(out, float64(m*decade))
		}
	}
}
