package cluster_test

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// How many seeds are played.
const (
	seedsShort  = 50
	seedsChange = 100 // .ci/run plays 1,000
	shownLines  = 80
)

// seeds are those to play: DPSERVE_SEED=n for one, DPSERVE_SEEDS=n for so many.
func seeds(t *testing.T) (from, to uint64) {
	number := func(name string) (uint64, bool) {
		text, set := os.LookupEnv(name)
		if !set {
			return 0, false
		}
		n, err := strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, name)
		return n, true
	}
	if n, ok := number("DPSERVE_SEED"); ok {
		return n, n + 1
	}
	if n, ok := number("DPSERVE_SEEDS"); ok {
		return 0, n
	}
	if testing.Short() || raced {
		return 0, seedsShort
	}
	return 0, seedsChange
}

// TestSeeds: SK7, MB2, MB5, MB9, and RG3 on many nodes. Whatever the network, the machines and the people do,
// no rule is broken, and in the end what runs is what is wanted.
func TestSeeds(t *testing.T) {
	from, to := seeds(t)
	var next atomic.Uint64
	next.Store(from)
	var mu sync.Mutex
	var work sync.WaitGroup
	var sum outcome
	failed := 0
	for range runtime.GOMAXPROCS(0) {
		work.Go(func() {
			for seed := next.Add(1) - 1; seed < to; seed = next.Add(1) - 1 {
				o := play(seed, draw(seed, noMutant), false)
				mu.Lock()
				sum.events, sum.lost, sum.grants, sum.tickets, sum.ops = sum.events+o.events, sum.lost+o.lost,
					sum.grants+o.grants, sum.tickets+o.tickets, sum.ops+o.ops
				if o.err != "" {
					if failed++; failed <= 10 {
						t.Errorf("%s\nDPSERVE_SEED=%d go test ./test/cluster -run TestSeeds -v", o.err, seed)
					}
				}
				mu.Unlock()
			}
		})
	}
	work.Wait()
	t.Logf("%d seeds: %d events, %d grants, %d nodes lost, %d requests, %d operations of clients, %d failed",
		to-from, sum.events, sum.grants, sum.lost, sum.tickets, sum.ops, failed)
	if to == from+1 && testing.Verbose() {
		o := play(from, draw(from, noMutant), true)
		t.Log("\n" + strings.Join(o.lines[max(0, len(o.lines)-shown(t)):], "\n"))
	}
}

// shown is how many lines of a single seed's trace are printed: DPSERVE_LINES.
func shown(t *testing.T) int {
	if text, set := os.LookupEnv("DPSERVE_LINES"); set {
		n, err := strconv.Atoi(text)
		require.NoError(t, err)
		return n
	}
	return shownLines
}

// TestReplay: a seed is a run, event for event.
func TestReplay(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			cfg := draw(seed, noMutant)
			one, two := play(seed, cfg, false), play(seed, cfg, false)
			require.Equal(t, one.hash, two.hash)
			require.Equal(t, one.events, two.events)
			require.Equal(t, one.err, two.err)
		})
	}
}
