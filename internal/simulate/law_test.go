package simulate_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/internal/steptime"
)

// Engines that mex expects to be much faster or slower than they are, in prefill, in decoding or in both, and
// engines of the other preset: from the first request on it gets no less goodput than lmetric-1, which
// expects nothing (half a point is noise).
func TestMexIsNoWorseWhileItLearns(t *testing.T) {
	skipShort(t)
	scaled := func(c steptime.Coefficients, prefill, decode float64) steptime.Coefficients {
		c.TokenMS, c.PairMS = c.TokenMS*prefill, c.PairMS*prefill
		c.WeightMS, c.FixedMS, c.DecodeMS, c.ContextMS = c.WeightMS*decode, c.FixedMS*decode,
			c.DecodeMS*decode, c.ContextMS*decode
		return c
	}
	dense := steptime.Reference()
	for name, c := range map[string]struct {
		law  steptime.Coefficients
		rate float64 // requests per second: near what the ranks can do
	}{
		"all twice as fast":     {scaled(dense, .5, .5), 12},
		"all twice as slow":     {scaled(dense, 2, 2), 3},
		"prefill twice as fast": {scaled(dense, .5, 1), 8},
		"prefill twice as slow": {scaled(dense, 2, 1), 3.5},
		"decoding half as fast": {scaled(dense, 1, 1.5), 5},
		"mixture of experts":    {steptime.MoE(), 15},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const seeds = 3
			mex, base := 0.0, 0.0
			for seed := range uint64(seeds) {
				cfg, work := simulate.Default(), simulate.Chats(1500, c.rate, seed)
				cfg.Engine.Law, cfg.Seed = c.law, seed
				mex += 100 * run(t, cfg, work, "mex").Goodput / seeds
				base += 100 * run(t, cfg, work, "lmetric-1").Goodput / seeds
			}
			t.Logf("goodput %.1f %%, lmetric-1 %.1f %%", mex, base)
			assert.GreaterOrEqual(t, mex, base-.5)
		})
	}
}
