package simulate_test

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/routing"
)

// accepting says that the tests take their full size (make acceptance).
func accepting() bool { return os.Getenv("DPSERVE_ACCEPTANCE") != "" }

// seedsOf is over how many seeds a test takes its means: every day, and under make acceptance.
func seedsOf(daily, accepted uint64) uint64 {
	if accepting() {
		return accepted
	}
	return daily
}

// rivals are the settings that mex is compared with: strong ones, and all policies, documented and tuned,
// under make acceptance.
func rivals() map[string]setting {
	all := map[string]setting{
		"kv tuned":  {name: "kv", preset: routing.PresetTuned},
		"lmetric-1": {name: "lmetric-1"},
		"lpwl":      {name: "lpwl"},
		"scoring":   {name: "scoring"},
	}
	if accepting() {
		all["scoring locality"] = setting{name: "scoring", params: map[string]any{"profile": "locality"}}
		for _, name := range routing.Names() {
			if name != "direct" && name != "mex" {
				all[name], all[name+" tuned"] = setting{name: name}, setting{
					name:   name,
					preset: routing.PresetTuned,
				}
			}
		}
	}
	return all
}

// weighsPrefill says whether a policy goes by the prefill work of the ranks.
func weighsPrefill(policy string) bool {
	return slices.Contains([]string{"kv", "lmetric-1", "lpwl"}, policy)
}

// figures of a setting are means over the seeds.
type figures struct {
	goodput float64 // %
	p99     float64 // of TTFT, s
}

func (f *figures) add(r *simulate.Result, seeds uint64) {
	f.goodput += 100 * r.Goodput / float64(seeds)
	f.p99 += simulate.Percentile(r.TTFT, .99).Seconds() / float64(seeds)
}

// No policy answers more requests in time than mex, on conversations and on agent sessions, by more than half
// a point; on short prompts that share nothing, by more than one. With the goal latency the first tokens of
// conversations come nearly as early as under the policies that go by prefill work alone. Short of make
// acceptance, one load of each of two workloads is the sample.
func TestRT15NoPolicyBeatsMex(t *testing.T) {
	skipShort(t)
	seeds, requests, sessions := seedsOf(3, 5), 2000, 150
	if accepting() {
		requests, sessions = 3000, 700
	}
	chats := func(rate float64) func(seed uint64) []simulate.Request {
		return func(seed uint64) []simulate.Request { return simulate.Chats(requests, rate, seed) }
	}
	for name, c := range map[string]struct {
		workload func(seed uint64) []simulate.Request
		early    bool    // below the ranks' capacity: the first tokens are compared as well
		off      float64 // by how many points another policy may be ahead
	}{
		"chats at 5 per s": {chats(5), true, .5},
		"chats at 6 per s": {chats(6), true, .5},
		"chats at 7 per s": {chats(7), false, .5},
		"short prompts": {func(seed uint64) []simulate.Request {
			return simulate.Lengths(3*requests, 75, seed, simulate.Short)
		}, false, 1},
		"agents at 1 per s": {func(seed uint64) []simulate.Request {
			return simulate.Agents(sessions, 1, seed)
		}, false, .5},
	} {
		if !accepting() && name != "chats at 6 per s" && name != "short prompts" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mex, latency figures
			others, all := map[string]*figures{}, rivals()
			for seed := range seeds {
				cfg, work := simulate.Default(), c.workload(seed)
				cfg.Seed = seed
				mex.add(run(t, cfg, work, "mex"), seeds)
				latency.add(setting{name: "mex", params: map[string]any{"goal": "latency"}}.run(t, cfg, work),
					seeds)
				for rival, s := range all {
					if others[rival] == nil {
						others[rival] = &figures{}
					}
					others[rival].add(s.run(t, cfg, work), seeds)
				}
			}
			best, earliest := "", ""
			for _, rival := range slices.Sorted(maps.Keys(others)) {
				if best == "" || others[rival].goodput > others[best].goodput {
					best = rival
				}
				if weighsPrefill(all[rival].name) && (earliest == "" ||
					others[rival].p99 < others[earliest].p99) {
					earliest = rival
				}
			}
			t.Logf("goodput %.1f %%, goal latency %.1f %%, %s %.1f %%", mex.goodput, latency.goodput, best,
				others[best].goodput)
			t.Logf("TTFT p99 %.2f s, goal latency %.2f s, %s %.2f s", mex.p99, latency.p99, earliest,
				others[earliest].p99)
			assert.GreaterOrEqual(t, mex.goodput, others[best].goodput-c.off, best)
			if c.early {
				assert.LessOrEqual(t, latency.p99, 1.15*others[earliest].p99, earliest)
			}
		})
	}
}
