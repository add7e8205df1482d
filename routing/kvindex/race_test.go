package kvindex

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// One writer churns while readers look. Rank 0 never changes; rank 1 breathes between 40 and 100 blocks from
// its end; rank 2 gets holes, rank 3 restarts and clears; rank 4 is hidden.
// Evictions run all the time.
func TestReadersBesideTheWriter(t *testing.T) {
	ix := newIndex(t, Config{})
	small(ix, 2)
	var c [5]*BlockSet
	for i := range c {
		c[i] = open(t, ix, uint32(i), FromDeltas)
	}
	var err error
	c[4], err = ix.Open(c[4].Owner(), Options{Feed: FromDeltas}) // hidden
	require.NoError(t, err)
	p := chain(count(100), 1)
	for i := range c {
		c[i].Apply(Delta{Change: Stored, Hashes: p})
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			var out []Hit
			for !stop.Load() {
				out = ix.Match(p, out[:0])
				checkRead(t, out)
			}
		})
	}
	rounds := 8_000
	if testing.Short() || scale > 1 {
		rounds = 8_000 / (10 * scale)
	}
	churn(t, ix, &c, p, rounds)
	stop.Store(true)
	wg.Wait()
	verify(t, ix)
	assert.Positive(t, ix.Stats().Evicted)
}

func checkRead(t *testing.T, out []Hit) {
	for _, h := range out {
		ok := true
		switch h.Rank {
		case 0:
			ok = h.Blocks == 100
		case 1:
			ok = h.Blocks >= 40
		case 2: // a hole at 30 hides what is behind it
			ok = h.Blocks == 30 || h.Blocks == 31 || h.Blocks == 100
		case 4:
			ok = false // masked
		}
		if !ok {
			assert.Fail(t, "wrong answer", "rank %d: %d blocks", h.Rank, h.Blocks)
		}
	}
}

func churn(t *testing.T, ix *Index, c *[5]*BlockSet, p []uint64, rounds int) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range rounds {
		ix.Advance(time.Duration(i+1) * time.Second)
		n := 40 + r.IntN(60)
		c[1].Apply(Delta{Change: Removed, Hashes: p[n:]})
		c[1].Apply(Delta{Change: Stored, Parent: p[n-1], Hashes: p[n:]})
		c[2].Apply(Delta{Change: Removed, Hashes: p[30:31]})
		c[2].Apply(Delta{Change: Stored, Parent: p[29], Hashes: p[30:31]})
		switch i % 8 {
		case 0:
			c[3].Clear()
		case 4:
			c[3] = open(t, ix, 3, FromDeltas)
		}
		c[3].Apply(Delta{Change: Stored, Hashes: p[:n]})
		ix.Match(p, nil) // keeps the prompt young
		cold := make([]uint64, 0, 50)
		for range 50 {
			cold = append(cold, r.Uint64()|1)
		}
		c[0].Apply(Delta{Change: Stored, Hashes: cold})
		ix.Sweep(300)
	}
}
