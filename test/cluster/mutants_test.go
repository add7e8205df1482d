package cluster_test

import (
	"sync/atomic"
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

// hunt is the first seed that notices.
func hunt(m mutant) (seed uint64, why string) {
	var found atomic.Pointer[outcome]
	for seed = range uint64(mutantSeeds) {
		if o := play(seed, draw(seed, m), false); o.err != "" {
			found.Store(&o)
			break
		}
	}
	if o := found.Load(); o != nil {
		why = o.err
	}
	return seed, why
}

func TestX(t *testing.T) {
	o := play(330, draw(330, noConfirm), true)
	for _, l := range o.lines {
		t.Log(l)
	}
}
