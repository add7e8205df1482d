package ingress

import (
	"fmt"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// appQueues are where the requests of an application wait.
type appQueues struct {
	queue  requestQueue
	groups groupQueue // before lockstep groups: most requests wait here then
	demand queueDemand
}

// requestQueue is the queue of one application: requests that found no rank with room. Its order is round
// robin between clients, and the order of arrival for the requests of each: a client with a thousand requests
// delays the one request of another client by one place. When all places are taken, a client that holds fewer
// than another one gets a place of that one. One waiter at a time has the turn and asks the Router. Free room
// gives the turn to the first waiter. A waiter that still finds no rank passes the turn on:
//
//   - An unrestricted waiter may use every rank. If it finds none, no waiter behind it finds one: the turn
//     ends until there is room again.
//   - A restricted waiter may use only some ranks: others have failed it, or it names one. If it finds
//     none, the turn goes to the next waiter with another restriction, so a request that waits for one rank
//     never blocks requests that could use another.
//
// So whenever a rank has room and a waiter may use it, a request is routed. Nothing polls. Safe for
// concurrent use.
type requestQueue struct {
	onChange func(n int, tokens int64) // called under mu: must be short; may be nil

	mu         sync.Mutex
	head, tail *waiter
	n          int
	tokens     int64
	round      int                   // the highest one of which a waiter was served
	clients    map[uint64]clientTurn // of the clients that have waiters

	turn    *waiter             // woken, and has not answered yet; nil: no waiter has the turn
	freed   bool                // room came while turn was asking: its result may be outdated
	refused map[uint64]struct{} // restrictions that have found no rank since there was room
	closed  bool                // an unrestricted waiter has found no rank since there was room
}

// unrestricted is the restriction of a waiter that may use every rank.
const unrestricted = 0

// waiter is a request's place in a requestQueue. It can be used again once it has left.
type waiter struct {
	wake        chan struct{} // one slot; only the waiter that has the turn is woken
	tokens      int64
	restriction uint64 // waiters with equal restrictions may use the same ranks
	client      uint64 // equal for the requests of one client
	round       int    // the queue is in the order of rounds; each has one request of a client
	prev, next  *waiter
	queued      bool
	ousted      string // the bound for which its place went to another client; "": it did not
}

// clientTurn is what the queue knows of a client.
type clientTurn struct {
	n    int // waiters
	last int // the highest round of them
}

func newWaiter() *waiter { return &waiter{wake: make(chan struct{}, 1)} }

// empty reports whether no request waits for its turn. A request that arrives then may pick at once.
func (f *requestQueue) empty() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.head == nil
}

// size is the queue's length in requests and tokens.
func (f *requestQueue) size() (n int, tokens int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n, f.tokens
}

// queueBounds are the bounds of a queue.
type queueBounds struct {
	requests int
	tokens   int64
}

// join puts w behind the waiters of its round. If the queue would hold more than its bounds allow, it returns
// the bound by its key in the file. An empty queue accepts one request of any size, which would otherwise be
// refused for ever. If all places are taken, w may get that of another client's waiter, which is woken.
func (f *requestQueue) join(w *waiter, most queueBounds) (full string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	w.ousted = ""
	n, tokens, loser := f.n, f.tokens, (*waiter)(nil)
	if n >= most.requests {
		full = fmt.Sprintf("max_queued_requests: %d", most.requests)
		if loser = f.newestOfLargest(f.clients[w.client].n + 2); loser == nil {
			return full
		}
		n, tokens = n-1, tokens-loser.tokens
	}
	if n > 0 && tokens+w.tokens > most.tokens {
		return fmt.Sprintf("max_queued_tokens: %d", most.tokens)
	}
	if loser != nil {
		f.unlink(loser)
		loser.ousted = full
		signal(loser.wake)
	}
	w.round = f.round + 1
	if c := f.clients[w.client]; c.n > 0 {
		w.round = max(w.round, c.last+1)
	}
	f.link(f.lastOfRound(w.round), w)
	f.pass()
	return ""
}

// newestOfLargest is the newest waiter of the client that has most, if that has least or more; nil: none has.
// A waiter that asks the Router keeps its place.
func (f *requestQueue) newestOfLargest(least int) *waiter {
	most := 0
	for _, c := range f.clients {
		most = max(most, c.n)
	}
	if most < least {
		return nil
	}
	w := f.tail // in the last round, or near it
	for w != nil && (f.clients[w.client].n < most || w == f.turn) {
		w = w.prev
	}
	return w
}

// hold counts w, which waits for a lockstep group and not in this queue, under the same bounds.
func (f *requestQueue) hold(w *waiter, most queueBounds) (full string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.n >= most.requests:
		return fmt.Sprintf("max_queued_requests: %d", most.requests)
	case f.n > 0 && f.tokens+w.tokens > most.tokens:
		return fmt.Sprintf("max_queued_tokens: %d", most.tokens)
	}
	f.changed(1, w.tokens)
	return ""
}

// unhold ends hold.
func (f *requestQueue) unhold(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changed(-1, -w.tokens)
}

// lostPlace is the bound for which w has lost its place to another client; "": it has not.
func (f *requestQueue) lostPlace(w *waiter) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return w.ousted
}

// lastOfRound is the last waiter up to a round; nil: there is none. It searches from the nearer end.
func (f *requestQueue) lastOfRound(round int) *waiter {
	if f.tail == nil || f.tail.round <= round {
		return f.tail
	}
	if f.tail.round-round < round-f.head.round {
		w := f.tail
		for ; w != nil && w.round > round; w = w.prev {
		}
		return w
	}
	next := f.head
	for ; next.round <= round; next = next.next {
	}
	return next.prev
}

// link puts w behind another waiter; nil: at the front.
func (f *requestQueue) link(before, w *waiter) {
	next := f.head
	if before != nil {
		next = before.next
		before.next = w
	} else {
		f.head = w
	}
	if next != nil {
		next.prev = w
	} else {
		f.tail = w
	}
	w.prev, w.next, w.queued = before, next, true
	if f.clients == nil {
		f.clients = map[uint64]clientTurn{}
	}
	c := f.clients[w.client]
	f.clients[w.client] = clientTurn{n: c.n + 1, last: max(c.last, w.round)}
	f.changed(1, w.tokens)
}

// rejoin puts w at the front: it had its turn already, and its rank turned out to be full. The bounds do not
// apply, because these requests were accepted before, and there are never more of them than places on the
// ranks.
func (f *requestQueue) rejoin(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.head != nil {
		w.round = min(w.round, f.head.round)
	}
	f.link(nil, w)
	f.pass()
}

// hasTurn reports whether w may ask the Router now.
func (f *requestQueue) hasTurn(w *waiter) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.turn == w
}

// yield passes the turn on: w has asked the Router and there is no rank for it. restriction is w's by now:
// ranks may have got or lost what it needs while it waited.
func (f *requestQueue) yield(w *waiter, restriction uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.turn != w {
		return
	}
	f.turn, w.restriction = nil, restriction
	if f.freed {
		f.reopen()
	} else if w.restriction == unrestricted {
		f.closed = true
	} else {
		if f.refused == nil {
			f.refused = make(map[uint64]struct{})
		}
		f.refused[w.restriction] = struct{}{}
	}
	f.pass()
}

// leave removes w from the queue and passes its turn on if it has it. Safe to call twice.
func (f *requestQueue) leave(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !w.queued {
		w.dropWake()
		return
	}
	f.unlink(w)
	if f.turn == w {
		f.turn, f.round = nil, max(f.round, w.round)
		if f.freed {
			f.reopen()
		}
	}
	f.pass()
}

func (f *requestQueue) unlink(w *waiter) {
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
	if c := f.clients[w.client]; c.n > 1 {
		f.clients[w.client] = clientTurn{n: c.n - 1, last: c.last}
	} else {
		delete(f.clients, w.client)
	}
	f.changed(-1, -w.tokens)
	w.dropWake()
}

// dropWake drops a wake-up for the place that w has left.
func (w *waiter) dropWake() {
	select {
	case <-w.wake:
	default:
	}
}

// room reports that a rank may have room, or that no further rank will become ready. It never blocks.
func (f *requestQueue) room() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.turn != nil {
		f.freed = true
		return
	}
	f.reopen()
	f.pass()
}

// reopen forgets which restrictions have found no rank.
func (f *requestQueue) reopen() {
	f.freed, f.closed = false, false
	clear(f.refused)
}

// pass gives the turn to the first waiter whose restriction has not been tried since there was room.
func (f *requestQueue) pass() {
	if f.turn != nil || f.closed {
		return
	}
	for w := f.head; w != nil; w = w.next {
		if _, is := f.refused[w.restriction]; is {
			continue
		}
		f.turn = w
		signal(w.wake)
		return
	}
}

func (f *requestQueue) changed(n int, tokens int64) {
	f.n += n
	f.tokens += tokens
	if f.onChange != nil {
		f.onChange(f.n, f.tokens)
	}
}

// Intervals at which the ranks are told that requests wait here.
const (
	demandRepeat = time.Second           // while requests wait; a rank forgets it after 3 s
	demandPause  = 50 * time.Millisecond // least time between two announcements
)

// queueDemand tells the ranks of an application whether requests wait here, so that a rank with free room
// gives it to each ingress in turn.
type queueDemand struct {
	ar *appRouter

	mu          sync.Mutex
	announced   bool      // the ranks know that requests wait
	announcedAt time.Time // when they were last told so
	timer       *time.Timer
	closed      bool
	boxes       []msg.Mailbox // reused
}

// update tells the ranks whether requests wait here, if that has changed. The caller calls it after a request
// has joined or left the queue.
func (d *queueDemand) update() {
	d.mu.Lock()
	defer d.mu.Unlock()
	waits := !d.ar.queue.empty()
	if waits == d.announced || d.closed {
		return
	}
	if left := demandPause - time.Since(d.announcedAt); waits && left > 0 {
		d.setTimer(left)
		return
	}
	d.send(waits)
}

// repeat repeats that requests wait, if they do.
func (d *queueDemand) repeat() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if waits := !d.ar.queue.empty(); !d.closed && (waits || d.announced) {
		d.send(waits)
	}
}

// send posts to every rank. The caller holds queueDemand.mu, and never appRouter.mu.
func (d *queueDemand) send(waits bool) {
	d.announced = waits
	if waits {
		d.announcedAt = time.Now()
		d.setTimer(demandRepeat)
	}
	d.ar.mu.Lock()
	for _, r := range d.ar.ranks {
		d.boxes = append(d.boxes, r.Mailbox)
	}
	d.ar.mu.Unlock()
	for _, box := range d.boxes {
		// a rank that misses it gets the next one
		_ = box.TrySend(msg.Demand{Ingress: d.ar.in.node, Waits: waits})
	}
	clear(d.boxes)
	d.boxes = d.boxes[:0]
}

func (d *queueDemand) setTimer(after time.Duration) {
	if d.timer == nil {
		d.timer = time.AfterFunc(after, d.repeat)
		return
	}
	d.timer.Reset(after)
}

// end tells the ranks that no request waits, for good.
func (d *queueDemand) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.announced {
		d.send(false)
	}
	if d.timer != nil {
		d.timer.Stop()
	}
}
