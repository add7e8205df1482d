package ingress

import "sync"

// fifo is the queue of one application: requests that found no rank with room, in order of arrival. Only its head may
// pick; a wake-up that finds the head asleep is kept for it, so none is lost, and nothing polls. Safe for concurrent use.
type fifo struct {
	onChange func(n int, tokens int64) // called under mu: must be short; may be nil

	mu         sync.Mutex
	head, tail *waiter
	n          int
	tokens     int64
}

// waiter is a request's place in a fifo. Reusable once it has left.
type waiter struct {
	wake       chan struct{} // one slot; only the head is woken
	tokens     int64
	prev, next *waiter
	queued     bool
}

func newWaiter() *waiter { return &waiter{wake: make(chan struct{}, 1)} }

// empty says that nobody waits. A request that arrives then may pick at once.
func (f *fifo) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n == 0
}

// size is the queue's length in requests and tokens.
func (f *fifo) size() (n int, tokens int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n, f.tokens
}

// join puts w at the end; false if the queue would hold more than maxN requests or maxTokens tokens.
func (f *fifo) join(w *waiter, maxN int, maxTokens int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n >= maxN || f.tokens+w.tokens > maxTokens {
		return false
	}
	w.prev, w.next, w.queued = f.tail, nil, true
	if f.tail != nil {
		f.tail.next = w
	} else {
		f.head = w
	}
	f.tail = w
	f.changed(1, w.tokens)
	return true
}

// rejoin puts w at the front: it was the head already, and its rank turned out to be full. Over no bound: these requests
// were taken in before, and there are never more of them than places on the ranks.
func (f *fifo) rejoin(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.prev, w.next, w.queued = nil, f.head, true
	if f.head != nil {
		f.head.prev = w
	} else {
		f.tail = w
	}
	f.head = w
	f.changed(1, w.tokens)
}

// isHead says that w may pick.
func (f *fifo) isHead(w *waiter) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.head == w
}

// leave takes w out, wherever it stands, and wakes the new head if there is one. Safe to call twice.
func (f *fifo) leave(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !w.queued {
		return
	}
	wasHead := f.head == w
	f.unlink(w)
	f.changed(-1, -w.tokens)
	if wasHead {
		f.wakeHead()
	}
}

func (f *fifo) unlink(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		f.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		f.tail = w.prev
	}
	w.prev, w.next, w.queued = nil, nil, false
	select { // a wake-up for the place it has left
	case <-w.wake:
	default:
	}
}

// room wakes the head: a rank may have room, or the hope for one is gone. Never blocks.
func (f *fifo) room() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wakeHead()
}

func (f *fifo) wakeHead() {
	if f.head == nil {
		return
	}
	select {
	case f.head.wake <- struct{}{}:
	default: // it has not seen the last one yet
	}
}

func (f *fifo) changed(n int, tokens int64) {
	f.n += n
	f.tokens += tokens
	if f.onChange != nil {
		f.onChange(f.n, f.tokens)
	}
}
