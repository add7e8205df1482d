package ingress

import (
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing/kvindex"
)

const (
	advanceInterval = 250 * time.Millisecond // between two updates of the index's clock while it is in use
	sweepSlots      = 1 << 13                // slots swept at once: about 80 µs
)

// cache is the ingress's picture of the KV blocks that the ranks of one application hold. The goroutine that
// brings a rank's record applies it: a source that brings more than the index can take is slowed, and nothing
// is lost. Requests read the index without a lock.
type cache struct {
	index      *kvindex.Index
	maxSets    int
	log        *slog.Logger
	clock      func() time.Duration
	advancedAt atomic.Int64 // clock of the last Advance, in ns

	mu         sync.Mutex // guards the writer's side of the index, and what follows
	ranks      map[uint32]kvindex.Owner
	open       map[blockSetKey]*kvindex.BlockSet
	isSweeping bool
	closed     bool
}

// blockSetKey identifies a block set: a rank has at most one per tier.
type blockSetKey struct {
	rank uint32
	tier kvindex.Tier
}

func newCache(ar *appRouter, sets int) (*cache, error) {
	index, err := kvindex.New(kvindex.Config{Sets: sets, Bytes: ar.in.limits.IndexBytes})
	if err != nil {
		return nil, err
	}
	return &cache{
		index: index, maxSets: sets, log: ar.in.log.With(slog.String("app", ar.name)),
		clock: ar.in.clock, ranks: map[uint32]kvindex.Owner{}, open: map[blockSetKey]*kvindex.BlockSet{},
	}, nil
}

// close ends the writing. Later look-ups see the last state.
func (c *cache) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// touch keeps the index's clock running while requests look up prompts.
func (c *cache) touch(now time.Duration) {
	before := c.advancedAt.Load()
	if now-time.Duration(before) <= advanceInterval || !c.advancedAt.CompareAndSwap(before, int64(now)) {
		return
	}
	if c.mu.TryLock() { // else a record is being applied: the next request tries again
		defer c.mu.Unlock()
		c.index.Advance(now)
	}
}

// beginRank drops what the rank's block sets hold: those of this incarnation follow. Records of any other
// incarnation are ignored from now on.
func (c *cache) beginRank(owner kvindex.Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closeSets(owner.Rank)
	c.ranks[owner.Rank] = owner
}

// endRank drops a rank's block sets.
func (c *cache) endRank(owner kvindex.Owner) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ranks[owner.Rank] == owner {
		c.closeSets(owner.Rank)
		delete(c.ranks, owner.Rank)
	}
}

// clear drops every block set, until the ranks are listed again.
func (c *cache) clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for rank := range c.ranks {
		c.closeSets(rank)
	}
	clear(c.ranks)
}

func (c *cache) closeSets(rank uint32) {
	for tier := range kvindex.Sent + 1 {
		if col := c.open[blockSetKey{rank, tier}]; col != nil {
			col.Close()
			delete(c.open, blockSetKey{rank, tier})
		}
	}
	if !c.isSweeping {
		c.isSweeping = true
		time.AfterFunc(0, c.sweep)
	}
}

// sweep frees what closed block sets held, step by step.
func (c *cache) sweep() {
	for more := true; more; {
		c.mu.Lock()
		more = !c.closed && c.index.Sweep(sweepSlots)
		c.isSweeping = more
		c.mu.Unlock()
	}
}

// apply applies a KV record of a rank.
func (c *cache) apply(owner kvindex.Owner, rec *msg.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	rank := owner
	rank.Tier = 0
	if c.closed || c.ranks[owner.Rank] != rank || owner.Tier > kvindex.Sent {
		return
	}
	at := blockSetKey{owner.Rank, owner.Tier}
	col := c.open[at]
	switch {
	case rec.Kind == msg.RecKVBegin:
		delete(c.open, at) // Open closes it
		opt := kvindex.Options{Feed: kvindex.FromDeltas, BlockSize: rec.KV.BlockSize}
		col, err := c.index.Open(owner, opt)
		switch {
		case errors.Is(err, kvindex.ErrFenced): // the index counts these
		case err != nil:
			c.log.Error("what a rank has cached is not followed", slog.Uint64("epoch", owner.Epoch),
				slog.Any("err", err))
		default:
			c.open[at] = col
		}
	case col == nil: // the index had no room for it
	case rec.Kind == msg.RecKV:
		col.Apply(rec.KV.Delta)
	default:
		col.Show()
	}
}

// inspect runs f while no record is applied.
func (c *cache) inspect(f func(held []*kvindex.BlockSet)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(slices.Collect(maps.Values(c.open)))
}

// status is the index in numbers.
func (c *cache) status() *client.Index {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.index.Stats()
	return &client.Index{
		Blocks: s.Blocks, Bytes: s.Bytes, Cap: s.Cap, Orphans: s.Orphans, Evicted: s.Evicted + s.Refused,
	}
}
