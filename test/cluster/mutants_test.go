package cluster_test

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// mutantSeeds is how many seeds a broken rule has to show itself.
const mutantSeeds = 600

var mutants = []mutant{
	noSupersede, noFence, noGrace, noConfirm, noBarrier, noFsync, sendsOn, impatient, forgets, early,
	skips, losesEpochs, noWriteLimit, hasty, innocent, ignoresStop, forgivesDeath, forgetsReady,
	hidesFound, adoptsUnasked,
}

// How many seeds of a mutant's runs are played without the mutant.
const (
	controlSeedsChange = 4
	controlSeeds       = 12 // with DPSERVE_SEEDS, as in .ci/run
)

// TestMutantsRunsAreSilentWithoutThem: what is noticed in the runs of a mutant is the mutant.
func TestMutantsRunsAreSilentWithoutThem(t *testing.T) {
	count := uint64(controlSeedsChange)
	if _, set := os.LookupEnv("DPSERVE_SEEDS"); set {
		count = controlSeeds
	}
	for _, m := range mutants {
		t.Run(string(m), func(t *testing.T) {
			t.Parallel()
			for seed := range count {
				cfg := draw(seed, m)
				tweak(&cfg)
				cfg.mutant = noMutant
				require.Empty(t, play(seed, cfg, false).err, "seed %d", seed)
			}
		})
	}
}

// TestMutants: each rule that is broken on purpose is noticed. Without this the silence of TestSeeds would
// say nothing.
func TestMutants(t *testing.T) {
	for _, m := range mutants {
		t.Run(string(m), func(t *testing.T) {
			if m == noConfirm && (testing.Short() || raced) {
				t.Skip("it takes a hundred seeds to show itself")
			}
			t.Parallel()
			seed, why := hunt(m)
			require.NotEmpty(t, why, "no seed noticed")
			t.Logf("seed %d: %.300s", seed, why)
		})
	}
}

// tweak makes runs in which a mutant has more to do.
func tweak(cfg *config) {
	switch cfg.mutant {
	case noFence, noGrace:
		cfg.fence, cfg.gentle = true, false
		cfg.controls, cfg.full, cfg.workers = 0, 3, 0
	case noConfirm:
		// seen only by a request in the moment between the thaw and the first word of the next leader
		cfg.fence, cfg.gentle, cfg.rush, cfg.only = true, false, true, "freeze the leader"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 0
	case noSupersede: // seen only where the state comes through, and the leader's orders do not
		cfg.fence, cfg.gentle, cfg.only = false, false, "bridge"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 2
	case impatient:
		cfg.gentle, cfg.fence, cfg.controls, cfg.full, cfg.workers = true, false, 3, 0, 3
	case sendsOn:
		cfg.gentle, cfg.only = false, "freeze the leader"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 0
	case noFsync:
		cfg.gentle, cfg.only = false, "crash"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 0
	case noBarrier, forgets:
		cfg.gentle, cfg.only = false, "crash the leader"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 0
	case noWriteLimit:
		cfg.gentle, cfg.fence, cfg.only = true, false, "the leader's disk hangs"
		cfg.controls, cfg.full, cfg.workers = 3, 0, 3
	case innocent:
		cfg.gentle, cfg.fence, cfg.only = true, false, "the leader hears nobody"
		cfg.controls, cfg.full, cfg.workers = 3, 0, 3
	case ignoresStop:
		cfg.gentle, cfg.steady, cfg.only = false, true, "a machine is told to stop"
		cfg.controls, cfg.full, cfg.workers = 0, 3, 2
	case forgivesDeath:
		cfg.gentle, cfg.steady, cfg.only = false, true, deadlyFault
		cfg.controls, cfg.full, cfg.workers = 0, 3, 2
	case hidesFound, adoptsUnasked:
		cfg.gentle, cfg.fence, cfg.only = false, false, fallFault
		cfg.controls, cfg.full, cfg.workers = 0, 3, 2
	default:
	}
}

// noticedBy are seeds that noticed the mutants which few seeds notice, when this was written.
var noticedBy = map[mutant]uint64{
	impatient: 19, noBarrier: 20, forgivesDeath: 31, forgetsReady: 63, noFence: 63, noSupersede: 71,
	noGrace: 379,
}

// hunt finds a seed that notices. It begins with the one that is known, if there is one: a change of the code
// may make others notice.
func hunt(m mutant) (seed uint64, why string) {
	for i := range uint64(mutantSeeds) {
		seed = (noticedBy[m] + i) % mutantSeeds
		cfg := draw(seed, m)
		tweak(&cfg)
		if o := play(seed, cfg, false); o.err != "" {
			return seed, o.err
		}
	}
	return 0, ""
}
