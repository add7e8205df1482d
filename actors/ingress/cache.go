package ingress

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Times of a cache.
const (
	cacheTick    = 250 * time.Millisecond // between two looks at the time while somebody asks or tells
	loadPatience = 2 * time.Second        // without a part of a column's snapshot, until it counts as lost
	sweepSlots   = 1 << 13                // slots swept at once: about 80 µs
)

// cache is an ingress's picture of what the ranks of one application hold: an index, and the goroutine that alone writes to it.
// Records wait in a bounded queue, so that Deliver is short; requests ask the index without a lock. newCache starts the
// goroutine, close ends it.
type cache struct {
	index   *kvindex.Index
	columns int
	lane    *lane
	clock   func() time.Duration
	queue   kvQueue
	jobs    chan func(held []*column)
	quit    chan struct{}
	once    sync.Once // closes quit
	done    chan struct{}

	ticked atomic.Int64 // clock of the last Advance, in ns

	mu     sync.Mutex
	status msg.IndexStatus

	held map[place]*column // the writer's, as all below
	deaf map[uint32]bool   // ranks that are asked for a snapshot: nothing else of them is believed
}

// place is what at most one column is for.
type place struct {
	rank uint32
	tier kvindex.Tier
}

// column is one column of the index with its state.
type column struct {
	*kvindex.Column
	loading bool          // its snapshot is not whole yet
	heard   time.Duration // the last part of it came
	given   uint64        // what the index had given up for want of memory when it began
}

func (in *Ingress) newCache(l *lane, columns int) (*cache, error) {
	index, err := kvindex.New(kvindex.Config{Columns: columns, Bytes: in.limits.IndexBytes})
	if err != nil {
		return nil, err
	}
	c := &cache{
		index: index, columns: columns, lane: l, clock: in.clock, jobs: make(chan func([]*column)),
		quit: make(chan struct{}), done: make(chan struct{}), held: map[place]*column{}, deaf: map[uint32]bool{},
	}
	c.queue.wake = make(chan struct{}, 1)
	c.report()
	in.running.Go(c.run)
	return c, nil
}

// close ends the writer and waits for it. Look-ups go on to find what was there last.
func (c *cache) close() {
	c.once.Do(func() { close(c.quit) })
	<-c.done
}

// touch keeps the index's clock going while requests ask. Safe for concurrent use.
func (c *cache) touch(now time.Duration) {
	if now-time.Duration(c.ticked.Load()) > cacheTick {
		c.queue.poke()
	}
}

// run is the writer: it applies what waits, then tidies up piece by piece as long as nothing waits.
func (c *cache) run() {
	defer close(c.done)
	for !c.ended() {
		for b := c.queue.take(); b != nil && !c.ended(); b = c.queue.take() {
			c.write(b)
			c.queue.release(b)
		}
		if more := c.tidy(); !more {
			c.wait()
		}
	}
}

func (c *cache) ended() bool {
	select {
	case <-c.quit:
		return true
	default:
		return false
	}
}

// wait sleeps until there is something to do, or the end.
func (c *cache) wait() {
	var due <-chan time.Time
	if c.pending() {
		t := time.NewTimer(cacheTick)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-c.quit:
	case <-c.queue.wake:
	case <-due:
	case f := <-c.jobs:
		f(c.list())
	}
}

// pending says that time alone brings something to do.
func (c *cache) pending() bool {
	for _, col := range c.held {
		if col.loading {
			return true
		}
	}
	return c.queue.hasLost()
}

// tidy is what the writer does besides applying; more: it should come again at once.
func (c *cache) tidy() (more bool) {
	now := c.clock()
	if now-time.Duration(c.ticked.Load()) > cacheTick {
		c.index.Advance(now)
		c.ticked.Store(int64(now))
	}
	for _, col := range c.held {
		if col.loading && now-col.heard > loadPatience {
			c.miss(col.Owner())
		}
	}
	if owner, ok := c.queue.nextLost(); ok {
		c.lane.missed(owner)
	}
	c.report()
	return c.index.Sweep(sweepSlots)
}

// report makes the writer's numbers readable.
func (c *cache) report() {
	s := c.index.Stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status = msg.IndexStatus{Blocks: s.Blocks, Bytes: s.Bytes, Cap: s.Cap, Orphans: s.Orphans, Evicted: s.Evicted + s.Refused}
}

// list is every open column.
func (c *cache) list() []*column {
	out := make([]*column, 0, len(c.held))
	for _, col := range c.held {
		out = append(out, col)
	}
	return out
}

// inspect runs f on the writer's goroutine, which alone may look into columns; false if ctx or the cache ended first.
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
