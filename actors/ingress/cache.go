package ingress

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Intervals of a cache.
const (
	advanceInterval = 250 * time.Millisecond // between two updates of the index's clock while it is in use
	// a column's snapshot counts as lost after this time without a part
	snapshotTimeout = 2 * time.Second
	sweepSlots      = 1 << 13 // slots swept at once: about 80 µs
)

// cache is the ingress's picture of the KV blocks that the ranks of one application hold: an index and the
// one goroutine that writes it. Records wait in a bounded queue, so that Deliver returns quickly. Requests
// read the index without a lock. newCache starts the goroutine; close ends it.
type cache struct {
	index      *kvindex.Index
	maxColumns int
	router     *appRouter
	clock      func() time.Duration
	queue      kvQueue
	jobs       chan func(open []*column)
	quit       chan struct{}
	once       sync.Once // closes quit
	done       chan struct{}

	advancedAt atomic.Int64 // clock of the last Advance, in ns

	mu     sync.Mutex
	status msg.IndexStatus

	// Only the writer uses the fields below.
	open      map[columnKey]*column
	resyncing map[uint32]bool // ranks that are asked for a snapshot: everything before it is ignored
}

// columnKey identifies a column: a rank has at most one per tier.
type columnKey struct {
	rank uint32
	tier kvindex.Tier
}

// column is one column of the index with its loading state.
type column struct {
	*kvindex.Column
	loading         bool          // its snapshot is not complete yet
	lastPart        time.Duration // when the last part of the snapshot arrived
	discardedAtOpen uint64        // value of cache.discarded when the column was opened
}

func (in *Ingress) newCache(ar *appRouter, columns int) (*cache, error) {
	index, err := kvindex.New(kvindex.Config{Columns: columns, Bytes: in.limits.IndexBytes})
	if err != nil {
		return nil, err
	}
	c := &cache{
		index: index, maxColumns: columns, router: ar, clock: in.clock, jobs: make(chan func([]*column)),
		quit: make(chan struct{}), done: make(chan struct{}), open: map[columnKey]*column{},
		resyncing: map[uint32]bool{},
	}
	c.queue.wake = make(chan struct{}, 1)
	c.publishStatus()
	in.background.Go(c.run)
	return c, nil
}

// close ends the writer and waits for it. Later look-ups see the last state.
func (c *cache) close() {
	c.once.Do(func() { close(c.quit) })
	<-c.done
}

// touch keeps the index's clock running while requests look up prompts. Safe for concurrent use.
func (c *cache) touch(now time.Duration) {
	if now-time.Duration(c.advancedAt.Load()) > advanceInterval {
		c.queue.poke()
	}
}

// run is the writer: it applies queued batches, and does its periodic work while the queue is empty.
func (c *cache) run() {
	defer close(c.done)
	for !c.isClosed() {
		for b := c.queue.take(); b != nil && !c.isClosed(); b = c.queue.take() {
			c.applyBatch(b)
			c.queue.release(b)
		}
		if more := c.tidy(); !more {
			c.waitForWork()
		}
	}
}

func (c *cache) isClosed() bool {
	select {
	case <-c.quit:
		return true
	default:
		return false
	}
}

// waitForWork sleeps until there is work, or the cache is closed.
func (c *cache) waitForWork() {
	var due <-chan time.Time
	if c.hasTimedWork() {
		t := time.NewTimer(advanceInterval)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-c.quit:
	case <-c.queue.wake:
	case <-due:
	case f := <-c.jobs:
		f(c.openColumns())
	}
}

// hasTimedWork reports whether there is work that only needs time to pass.
func (c *cache) hasTimedWork() bool {
	for _, col := range c.open {
		if col.loading {
			return true
		}
	}
	return c.queue.hasLost()
}

// tidy is the writer's work besides applying batches; more asks for another call at once.
func (c *cache) tidy() (more bool) {
	now := c.clock()
	if now-time.Duration(c.advancedAt.Load()) > advanceInterval {
		c.index.Advance(now)
		c.advancedAt.Store(int64(now))
	}
	for _, col := range c.open {
		if col.loading && now-col.lastPart > snapshotTimeout {
			c.resyncRank(col.Owner())
		}
	}
	if owner, ok := c.queue.nextLost(); ok {
		c.router.resyncOwner(owner)
	}
	c.publishStatus()
	return c.index.Sweep(sweepSlots)
}

// publishStatus copies the index's numbers to where other goroutines can read them.
func (c *cache) publishStatus() {
	s := c.index.Stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status = msg.IndexStatus{Blocks: s.Blocks, Bytes: s.Bytes, Cap: s.Cap, Orphans: s.Orphans,
		Evicted: s.Evicted + s.Refused}
}

// openColumns lists the open columns.
func (c *cache) openColumns() []*column {
	out := make([]*column, 0, len(c.open))
	for _, col := range c.open {
		out = append(out, col)
	}
	return out
}

// inspect runs f on the writer's goroutine, the only one that may read columns. It returns false if ctx or
// the cache ended first.
func (c *cache) inspect(ctx context.Context, f func(held []*column)) bool {
	ran := make(chan struct{})
	select {
	case c.jobs <- func(held []*column) { defer close(ran); f(held) }:
		<-ran
		return true
	case <-c.done:
	case <-ctx.Done():
	}
	return false
}
