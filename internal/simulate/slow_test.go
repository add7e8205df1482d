package simulate_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/simulate"
)

// RA3, RT8: A rank that becomes five times slower gets at most half of its share, and what it gets does not
// spoil the first tokens.
func TestRT8ASlowRankGetsHalfOfItsShare(t *testing.T) {
	skipShort(t)
	const from = time.Minute
	for _, rate := range []float64{30, 42} {
		cfg := simulate.Default()
		cfg.Lag, cfg.Faults = 100*time.Millisecond, []simulate.Fault{{At: from, Rank: 3, Factor: 5}}
		work := simulate.Uniform(int(rate*180), 2048, 150, rate, 11)
		base := run(t, cfg, work, "least-loaded")
		ttft := simulate.Percentile(base.TTFT, .99)
		for _, name := range []string{"mex", "lmetric-1"} {
			r := run(t, cfg, work, name)
			later := r.Share(3, from+20*time.Second, time.Hour)
			for _, share := range []float64{
				r.Share(3, from, from+10*time.Second), r.Share(3, from+10*time.Second, from+20*time.Second),
				later,
			} {
				assert.LessOrEqual(t, share, .0625, "%s at %v/s", name, rate)
			}
			p99 := simulate.Percentile(r.TTFT, .99)
			assert.LessOrEqual(t, p99.Seconds(), 1.1*ttft.Seconds(), "%s at %v/s", name, rate)
			assert.GreaterOrEqual(t, r.TokensPerSecond(), .98*base.TokensPerSecond(), "%s at %v/s", name,
				rate)
			t.Logf("%s at %v/s: TTFT p99 %s, least-loaded %s; share later %.3f", name, rate, p99, ttft, later)
		}
	}
}
