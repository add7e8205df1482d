package simulate_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/routing"
)

// measuringPolicies are those whose scores go by what the Router measures of the ranks.
func measuringPolicies() []setting {
	return []setting{{name: "mex"}, {name: "lmetric-1"}}
}

// leastShare is the smallest share that a rank had of the requests, over the mean.
func leastShare(r *simulate.Result) float64 {
	least, sum := math.MaxInt, 0
	for _, n := range r.Requests {
		least, sum = min(least, n), sum+n
	}
	return float64(least*len(r.Requests)) / float64(sum)
}

// Clocks of ranks that differ, jump or are not told, and reports without sense, cost at most a point of
// goodput, and no rank starves.
func TestWhatRanksTellWrongDoesNoHarm(t *testing.T) {
	skipShort(t)
	const second, minute, hour = time.Second, time.Minute, time.Hour
	skew := []time.Duration{0, hour, -30 * minute, 1000 * hour, -59 * minute, second, 0, -second}
	jump := []time.Duration{hour, -hour, 0, -30 * minute, second, -second, 0, minute}
	cases := map[string]func(cfg *simulate.Config){
		"clocks that differ": func(cfg *simulate.Config) { cfg.ClockSkew = skew },
		"clocks that jump": func(cfg *simulate.Config) {
			cfg.ClockSkew, cfg.ClockJump, cfg.ClockJumpAt = skew, jump, time.Minute
		},
		"no clocks": func(cfg *simulate.Config) { cfg.Report = func(e *routing.Event) { e.At = 0 } },
		"clocks without sense": func(cfg *simulate.Config) {
			rnd := rand.New(rand.NewPCG(3, 3))
			cfg.Report = func(e *routing.Event) {
				if e.At != 0 {
					e.At = time.Duration(rnd.Uint64())
				}
			}
		},
		"no capacity, block size or usage": func(cfg *simulate.Config) {
			cfg.Report = func(e *routing.Event) {
				e.Capacity, e.BlockSize = 0, 0
				if e.Kind == routing.EvStatus {
					e.KVUsage = math.NaN()
				}
			}
		},
		"reports without sense": func(cfg *simulate.Config) {
			cfg.Report = func(e *routing.Event) {
				switch e.Kind {
				case routing.EvStatus, routing.EvRankUp:
					e.Capacity, e.BlockSize, e.KVUsage = -7, -1, math.Inf(1)
				case routing.EvFinished:
					e.Out = -1
				default:
				}
			}
		},
	}
	const seeds = uint64(3)
	for _, p := range measuringPolicies() {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			undisturbed, disturbed, least := 0.0, map[string]float64{}, map[string]float64{}
			for seed := range seeds {
				cfg := simulate.Default()
				cfg.Ingresses, cfg.Lag, cfg.Seed = 2, 50*time.Millisecond, seed
				work := simulate.Chats(2000, 5, seed)
				undisturbed += p.run(t, cfg, work).Goodput / float64(seeds)
				for name, disturb := range cases {
					cfg := cfg
					disturb(&cfg)
					r := p.run(t, cfg, work)
					disturbed[name] += r.Goodput / float64(seeds)
					least[name] += leastShare(r) / float64(seeds)
				}
			}
			for name, goodput := range disturbed {
				assert.GreaterOrEqual(t, goodput, undisturbed-.01, name)
				assert.GreaterOrEqual(t, least[name], .4, name)
				t.Logf("%s: goodput %.1f %%, undisturbed %.1f %%, least share %.2f", name, 100*goodput,
					100*undisturbed, least[name])
			}
		})
	}
}

// A load that never changes and three samples teach no law; every request is served in time all the same.
func TestLoadsThatTeachNothing(t *testing.T) {
	constant := simulate.Uniform(1200, 2048, 100, 20, 1)
	for i := range constant {
		constant[i].At = time.Duration(i) * 50 * time.Millisecond
	}
	few := simulate.Uniform(1200, 400, 60, 20, 1) // a prompt of less than 50 ms is no sample
	for _, i := range []int{100, 101, 102} {
		few[i].Prompt = 20_000
	}
	for _, p := range measuringPolicies() {
		for name, work := range map[string][]simulate.Request{
			"a constant load": constant,
			"three samples":   few,
		} {
			r := p.run(t, simulate.Default(), work)
			least := run(t, simulate.Default(), work, "least-loaded")
			assert.GreaterOrEqual(t, r.Goodput, least.Goodput-.01, "%s, %s", p.name, name)
			assert.GreaterOrEqual(t, leastShare(r), .4, "%s, %s", p.name, name)
			t.Logf("%s, %s: goodput %.1f %%, least-loaded %.1f %%, least share %.2f",
				p.name, name, 100*r.Goodput, 100*least.Goodput, leastShare(r))
		}
	}
}

// Ranks whose caches are unknown are used beside ranks whose caches are known.
func TestRanksWithoutHitsAreUsed(t *testing.T) {
	work := simulate.Chats(1500, 6, 5)
	for _, p := range measuringPolicies() {
		known := p.run(t, simulate.Default(), work)
		for _, without := range []int{1, 4, 8} {
			cfg := simulate.Default()
			cfg.WithoutHits = without
			r := p.run(t, cfg, work)
			assert.GreaterOrEqual(t, leastShare(r), .4, "%s, %d ranks", p.name, without)
			t.Logf("%s, %d ranks without hits: goodput %.1f %%, with all hits %.1f %%, least share %.2f",
				p.name, without, 100*r.Goodput, 100*known.Goodput, leastShare(r))
		}
	}
}
