package ingress

import (
	"sync"

	"github.com/dpserve/dpserve/routing/kvindex"
)

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
func (q *kvQueue) poke() {
	select {
	case q.wake <- struct{}{}:
	default: // a wake-up is already pending
	}
}
