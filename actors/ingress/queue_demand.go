package ingress

import (
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

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
