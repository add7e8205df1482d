package vllm

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// goodShare of the requests must be predicted to the token.
const goodShare = 0.99

// maxMisses are told one by one.
const maxMisses = 20

// tally compares predictions with reports.
type tally struct {
	requests, exact, under, over int
	prompt, cached, predicted    int // tokens
	misses                       []string
}

func (y *tally) add(a answer, predicted int) {
	y.requests, y.prompt, y.cached, y.predicted = y.requests+1, y.prompt+a.Prompt, y.cached+a.Cached,
		y.predicted+predicted
	switch {
	case predicted == a.Cached:
		y.exact++
		return
	case predicted < a.Cached:
		y.under++
	default:
		y.over++
	}
	if len(y.misses) < maxMisses {
		y.misses = append(y.misses, fmt.Sprintf("%s predicted %d, reported %d of %d", a.Rank, predicted,
			a.Cached, a.Prompt))
	}
}

func (y *tally) share() float64 { return float64(y.exact) / float64(max(1, y.requests)) }

func (y *tally) cachedShare() float64 { return float64(y.cached) / float64(max(1, y.prompt)) }

func (y *tally) String() string {
	text := fmt.Sprintf("%d requests, %d exact (%.1f %%), %d under, %d over; "+
		"prompt tokens %d, predicted %d, reported %d (%.0f %%)",
		y.requests, y.exact, 100*y.share(), y.under, y.over, y.prompt, y.predicted, y.cached,
		100*y.cachedShare())
	return strings.Join(append([]string{text}, y.misses...), "; ")
}

// runDirect sends n requests to a rank one after the other and compares.
func runDirect(ctx context.Context, r *rank, f *follower, traffic *families, n int) (tally, error) {
	var y tally
	for range n {
		q := traffic.next()
		predicted := f.predict(q.ids, q.salt)
		a, err := complete(ctx, r.addr, q.ids, q.maxTokens, q.salt)
		if err != nil {
			return y, err
		}
		y.add(a, predicted)
		traffic.answered(q, a.IDs)
		f.settle(ctx)
	}
	return y, nil
}

// both runs f for each rank, side by side.
func both(ranks []*rank, f func(i int, r *rank) (tally, error)) ([]tally, []error) {
	tallies, errs := make([]tally, len(ranks)), make([]error, len(ranks))
	var all sync.WaitGroup
	for i, r := range ranks {
		all.Go(func() { tallies[i], errs[i] = f(i, r) })
	}
	all.Wait()
	return tallies, errs
}

// testEvents: what a rank's events say is what the rank then reports, request by request, under evictions,
// salts and repeats; who joins late gets the same picture by replay.
func testEvents(t *testing.T, ranks []*rank) {
	const requests = 250 // of a rank
	followers := []*follower{follow(t, ranks[0]), follow(t, ranks[1])}
	tallies, errs := both(ranks, func(i int, r *rank) (tally, error) {
		return runDirect(t.Context(), r, followers[i], newFamilies(uint64(i)), requests)
	})
	for i, f := range followers {
		require.NoError(t, errs[i])
		t.Logf("rank %d: %v", i, &tallies[i])
		s := f.sub.Stats()
		held, sum := f.content()
		t.Logf("rank %d: %d batches, %d blocks stored, %d removals, %d held of %d, %d replays", i, s.Batches,
			s.Blocks, s.Removed, held, blocks, s.Replays)
		assert.GreaterOrEqual(t, tallies[i].share(), goodShare, "rank %d", i)
		assert.Positive(t, tallies[i].cached)
		assert.Positive(t, s.Removed, "blocks are evicted")
		assert.Zero(t, s.Unknown+s.Malformed+s.BadBatches+s.BadFrames+s.Skipped+s.Gaps+s.Resets-1, "%+v", s)
		assert.Equal(t, kvindex.Counters{}, f.faults())
		assert.Zero(t, f.salts)

		require.NoError(t, f.sub.Close()) // the engine's publisher dials: there is one place to listen
		late := follow(t, ranks[i])
		lateHeld, lateSum := late.content()
		assert.Equal(t, []uint64{uint64(held), sum}, []uint64{uint64(lateHeld), lateSum},
			"joined late: the same blocks")
		require.NoError(t, late.sub.Close())
	}
}

// testCleared (KV5 with a real engine): a rank that drops its cache loses its blocks, the other keeps its
// own.
func testCleared(t *testing.T, ranks []*rank) {
	kept, cleared := follow(t, ranks[0]), follow(t, ranks[1])
	held, sum := kept.content()
	before, _ := cleared.content()
	require.Positive(t, held)
	require.Positive(t, before)
	require.NoError(t, ranks[1].resetCache(t.Context()))

	ids := randomIDs(newFamilies(77).rng, 100)
	a, err := complete(t.Context(), ranks[1].addr, ids, 1, "") // the engine tells with its next step
	require.NoError(t, err)
	assert.Zero(t, a.Cached)
	cleared.wait(t, "hears of the reset", func(s kvevents.Stats) bool { return s.Cleared > 0 })
	cleared.settle(t.Context())
	after, _ := cleared.content()
	assert.Equal(t, len(ids)/blockSize, after, "only the new prompt's blocks")
	heldNow, sumNow := kept.content()
	assert.Equal(t, []uint64{uint64(held), sum}, []uint64{uint64(heldNow), sumNow},
		"the other rank is untouched")
	t.Logf("reset_prefix_cache on rank 1: %d blocks before, %d after its next request; rank 0: %d and %d",
		before, after, held, heldNow)
}

// testRestart (KV4 with a real engine): a rank that starts anew on its ports begins at 0, the other keeps its
// blocks.
func testRestart(t *testing.T, ranks []*rank) {
	followers := []*follower{follow(t, ranks[0]), follow(t, ranks[1])}
	held, sum := followers[0].content()
	before, _ := followers[1].content()
	require.Positive(t, before)
	ranks[1].crash()
	ranks[1].start()
	ranks[1].ready()
	followers[1].wait(t, "sees the new engine", func(s kvevents.Stats) bool {
		return s.Restarts > 0 || s.Resets > 1
	})
	tallies, errs := both(ranks[1:], func(_ int, r *rank) (tally, error) {
		return runDirect(t.Context(), r, followers[1], newFamilies(5), 50)
	})
	require.NoError(t, errs[0])
	t.Logf("rank 1 after a restart in place: %v", &tallies[0])
	assert.GreaterOrEqual(t, tallies[0].share(), goodShare)
	heldNow, sumNow := followers[0].content()
	assert.Equal(t, []uint64{uint64(held), sum}, []uint64{uint64(heldNow), sumNow},
		"the other rank is untouched")
}
