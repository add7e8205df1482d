package ingress

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/client"
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
	status client.Index

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

func newCache(ar *appRouter, columns int) (*cache, error) {
	in := ar.in
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
	c.status = client.Index{
		Blocks: s.Blocks, Bytes: s.Bytes, Cap: s.Cap, Orphans: s.Orphans,
		Evicted: s.Evicted + s.Refused,
	}
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

// applyBatch applies a batch to the index.
func (c *cache) applyBatch(b *kvBatch) {
	hashes := b.hashes
	for i := range b.ops {
		op := &b.ops[i]
		var mine []uint64
		if op.kind == opDelta {
			mine, hashes = hashes[:op.n], hashes[op.n:]
		}
		switch {
		case op.kind == opDrop:
			c.closeColumns(op.owner.Rank)
		case op.kind == opMask:
			c.maskColumns(op.owner.Rank)
		case c.resyncing[op.owner.Rank]: // records before the requested snapshot
		case op.kind == opBegin:
			c.openColumn(op)
		case op.kind == opDelta:
			c.applyDelta(op, mine)
		case op.kind == opEnd:
			c.showColumn(op)
		}
	}
}

// closeColumns closes a rank's columns: a snapshot follows, or the rank is gone.
func (c *cache) closeColumns(rank uint32) {
	delete(c.resyncing, rank)
	for tier := range kvindex.Sent + 1 {
		if col := c.open[columnKey{rank, tier}]; col != nil {
			col.Close()
			delete(c.open, columnKey{rank, tier})
		}
	}
}

// maskColumns hides a rank's columns until its next snapshot.
func (c *cache) maskColumns(rank uint32) {
	c.resyncing[rank] = true
	for tier := range kvindex.Sent + 1 {
		if col := c.open[columnKey{rank, tier}]; col != nil {
			col.Mask()
			col.loading = false
		}
	}
}

// openColumn opens a column, which stays hidden until its snapshot is complete.
func (c *cache) openColumn(op *kvOp) {
	at := columnKey{op.owner.Rank, op.owner.Tier}
	delete(c.open, at) // Open closes it
	col, err := c.index.Open(op.owner, kvindex.Options{Feed: kvindex.FromDeltas, BlockSize: op.size})
	switch {
	case errors.Is(err, kvindex.ErrFenced): // the index counts these
	case err != nil:
		c.router.in.log.Error("what a rank has cached is not followed", slog.String("app", c.router.name),
			slog.Uint64("epoch", op.owner.Epoch), slog.Any("err", err))
	default:
		c.open[at] = &column{Column: col, loading: true, lastPart: c.clock(), discardedAtOpen: c.discarded()}
	}
}

// discarded counts the blocks that the index dropped or refused because its memory limit was reached.
func (c *cache) discarded() uint64 {
	s := c.index.Stats()
	return s.Evicted + s.Refused
}

// findColumn returns the column of exactly this owner. If the column never began, a record was lost and the
// rank is asked for a snapshot.
func (c *cache) findColumn(op *kvOp) *column {
	col := c.open[columnKey{op.owner.Rank, op.owner.Tier}]
	if col == nil || col.Owner() != op.owner {
		c.resyncRank(op.owner)
		return nil
	}
	return col
}

// applyDelta applies one change to a column.
func (c *cache) applyDelta(op *kvOp, hashes []uint64) {
	col := c.findColumn(op)
	if col == nil {
		return
	}
	if col.loading {
		col.lastPart = c.clock()
	}
	col.Apply(kvindex.Delta{Change: op.change, Parent: op.parent, Hashes: hashes})
}

// showColumn makes a column visible if it equals the replica's. A column that lost blocks to the index's
// memory limit is shown too: the blocks that it holds are correct, and another snapshot would not fit either.
func (c *cache) showColumn(op *kvOp) {
	col := c.findColumn(op)
	if col == nil {
		return
	}
	if equal := col.Len() == op.n && col.Sum() == op.sum; !equal && col.discardedAtOpen == c.discarded() {
		c.resyncRank(op.owner)
		return
	}
	col.loading = false
	col.Show()
}

// resyncRank hides a rank's columns, because they differ from the replica's, and asks the rank for a
// snapshot.
func (c *cache) resyncRank(owner kvindex.Owner) {
	c.maskColumns(owner.Rank)
	c.router.resyncOwner(owner)
}

// Sizes of a queue of KV records.
const (
	batchHashes = 4096 // the most that a replica puts into one record
	batchOps    = 128
	opBytes     = 96 // of a kvOp
	batchBytes  = 8*batchHashes + opBytes*batchOps
	maxKVQueue  = 32 << 20 // bytes; above it a rank's records are dropped, and a snapshot is asked for
	maxBatches  = maxKVQueue / batchBytes
)

// opKind is the operation of a kvOp.
type opKind uint8

const (
	opDrop  opKind = iota // close every column of the rank: a snapshot begins, or the rank is gone
	opMask                // hide every column of the rank: a record is missing
	opBegin               // a column begins
	opDelta               // a column changes
	opEnd                 // a column's snapshot should be complete
)

// kvOp is a copy of one KV record.
type kvOp struct {
	kind   opKind
	change kvindex.Change
	owner  kvindex.Owner
	size   int // of a block
	parent uint64
	n      int    // opDelta: hashes in the batch; opEnd: blocks in the column
	sum    uint64 // opEnd
}

// kvBatch is a sequence of operations with their hashes.
type kvBatch struct {
	ops    []kvOp
	hashes []uint64
}

// kvQueue carries records from the ranks' goroutines to the cache's writer. It is bounded and safe for
// concurrent use.
type kvQueue struct {
	wake chan struct{} // one slot

	mu    sync.Mutex
	list  []*kvBatch
	head  int        // index of the first batch in list that is not taken
	spare []*kvBatch // at most two: what a steady stream needs
	size  int        // batches waiting or being applied
	lost  map[kvindex.Owner]struct{}
}

// push queues a copy of one operation; it returns false if there is no room. Operations that mask or close
// columns always have room: there is one per snapshot or gap.
func (q *kvQueue) push(op kvOp, hashes []uint64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	op.n = max(op.n, len(hashes))
	b := q.lastBatch()
	if b == nil || len(b.ops) == cap(b.ops) || len(b.hashes)+len(hashes) > cap(b.hashes) {
		if q.size >= maxBatches && op.kind > opMask {
			return false
		}
		b = q.addBatch(len(hashes))
	}
	b.ops, b.hashes = append(b.ops, op), append(b.hashes, hashes...)
	q.poke()
	return true
}

func (q *kvQueue) lastBatch() *kvBatch {
	if q.head == len(q.list) {
		return nil
	}
	return q.list[len(q.list)-1]
}

// addBatch appends a batch with room for n hashes.
func (q *kvQueue) addBatch(n int) *kvBatch {
	b := &kvBatch{}
	if k := len(q.spare); k > 0 {
		b, q.spare = q.spare[k-1], q.spare[:k-1]
	}
	if cap(b.hashes) < n || b.hashes == nil {
		b.ops, b.hashes = make([]kvOp, 0, batchOps), make([]uint64, 0, max(n, batchHashes))
	}
	q.size += 1 + (n-1)/batchHashes
	if len(q.list) == cap(q.list) { // before it grows: the writer may never find the queue empty
		q.list, q.head = slices.Delete(q.list, 0, q.head), 0
	}
	q.list = append(q.list, b)
	return b
}

// take returns the oldest batch, or nil. The batch counts as waiting until release.
func (q *kvQueue) take() *kvBatch {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head == len(q.list) {
		return nil
	}
	b := q.list[q.head]
	q.list[q.head] = nil
	if q.head++; q.head == len(q.list) {
		q.list, q.head = q.list[:0], 0
	}
	return b
}

// release returns a batch for reuse.
func (q *kvQueue) release(b *kvBatch) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.size -= 1 + (cap(b.hashes)-1)/batchHashes
	if cap(b.hashes) == batchHashes && len(q.spare) < 2 {
		b.ops, b.hashes = b.ops[:0], b.hashes[:0]
		q.spare = append(q.spare, b)
	}
}

// addLost stores a rank whose records were dropped. The writer asks such ranks for snapshots one at a time
// once the queue is empty; otherwise their snapshots would fill the queue again.
func (q *kvQueue) addLost(owner kvindex.Owner) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.lost == nil {
		q.lost = map[kvindex.Owner]struct{}{}
	}
	q.lost[owner] = struct{}{}
}

func (q *kvQueue) hasLost() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.lost) > 0
}

// nextLost returns one of the ranks that lost records, if the queue is empty.
func (q *kvQueue) nextLost() (owner kvindex.Owner, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head < len(q.list) {
		return owner, false
	}
	for owner = range q.lost {
		delete(q.lost, owner)
		return owner, true
	}
	return owner, false
}

// poke wakes the writer.
func (q *kvQueue) poke() { signal(q.wake) }
