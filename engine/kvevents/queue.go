package kvevents

import "sync"

// Bounds of the queue between the socket and the tracker. The reader takes messages as fast as the socket
// delivers them, because the engine's publisher drops batches without notice when a subscriber is slow. A
// message that does not fit here becomes a gap in the sequence, which the tracker repairs by a replay.
const (
	maxQueued      = 8192
	maxQueuedBytes = 64 << 20
)

// itemKind is what an item of the queue says.
type itemKind uint8

const (
	itemMessage itemKind = iota
	itemConnect
	itemDisconnect
	itemOverflow
	itemBadFrames
)

type item struct {
	kind itemKind
	conn uint64 // which connection it is of
	msg  message
}

// queue is bounded in messages and bytes. Safe for concurrent use.
type queue struct {
	kick chan struct{}

	mu    sync.Mutex
	items []item
	bytes int
}

func newQueue() *queue { return &queue{kick: make(chan struct{}, 1)} }

// push never blocks: beyond the bound a message becomes one overflow item.
func (q *queue) push(it item) {
	q.mu.Lock()
	full := len(q.items) >= maxQueued || q.bytes+len(it.msg.payload) > maxQueuedBytes
	switch {
	case !full || it.kind == itemConnect || it.kind == itemDisconnect:
		q.items = append(q.items, it)
		q.bytes += len(it.msg.payload)
	case q.items[len(q.items)-1].kind != itemOverflow:
		q.items = append(q.items, item{kind: itemOverflow, conn: it.conn})
	}
	q.mu.Unlock()
	select {
	case q.kick <- struct{}{}:
	default:
	}
}

// take is everything there is; spare is a buffer for what comes next.
func (q *queue) take(spare []item) []item {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := q.items
	q.items, q.bytes = spare[:0], 0
	return out
}
