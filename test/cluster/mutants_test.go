package cluster_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// mutantSeeds is how many seeds a broken rule has to show itself.
const mutantSeeds = 600

// TestMutants: each rule that is broken on purpose is noticed. Without this the silence of TestSeeds would say nothing.
func TestMutants(t *testing.T) {
	for _, m := range []mutant{noSupersede, noFence, noGrace, noConfirm, noBarrier, noFsync, sendsOn, forgets, early} {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			seed, why := hunt(m)
			require.NotEmpty(t, why, "no seed noticed")
			t.Logf("seed %d: %.300s", seed, why)
		})
	}
}

// hunt is the first seed that notices. Rules of nodes that must not serve without a lease are looked for in runs with fence.
func hunt(m mutant) (seed uint64, why string) {
	for seed = range uint64(mutantSeeds) {
		cfg := draw(seed, m)
		switch m {
		case noFence, noGrace, noConfirm:
			cfg.fence, cfg.gentle = true, false
			cfg.controls, cfg.full, cfg.workers = 0, 3, 0
			if m == noConfirm { // seen only by a request in the moment between the thaw and the first word of the next leader
				cfg.rush, cfg.only = true, "freeze the leader"
			}
		default:
		}
		if o := play(seed, cfg, false); o.err != "" {
			return seed, o.err
		}
	}
	return 0, ""
}
