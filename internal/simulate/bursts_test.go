package simulate_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/simulate"
)

// Bursts through 16 ingresses that hear of each other's requests late are spread over the ranks.
func TestRT11BurstsAreSpread(t *testing.T) {
	skipShort(t)
	for _, lag := range []time.Duration{100 * time.Millisecond, 500 * time.Millisecond} {
		for _, shared := range []int{4, 0} { // blocks
			cfg := simulate.Default()
			cfg.Ingresses, cfg.Lag = 16, lag
			work := simulate.Bursts(8, 512, shared, 11)
			policies := []string{"mex"}
			if accepting() { // to compare with
				policies = append(policies, "lmetric-1", "least-loaded")
			}
			for _, name := range policies {
				mean, worst := run(t, cfg, work, name).BurstMaxMean()
				if name == "mex" {
					assert.LessOrEqual(t, mean, 1.5, "%s old, %d shared blocks", lag, shared)
				}
				t.Logf("%s old, %d shared blocks, %s: max/mean %.2f, worst %.2f", lag, shared, name, mean,
					worst)
			}
		}
	}
}
