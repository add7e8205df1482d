package ingress

import (
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// Intervals at which the ranks are told that requests wait here.
const (
	demandRepeat = time.Second           // while requests wait; a rank forgets it after 3 s
	demandPause  = 50 * time.Millisecond // least time between two announcements
)

// queueDemand tells the ranks of an application whether requests wait here, so that a rank with free room
// gives it to each ingress in turn.
type queueDemand struct {
	mu          sync.Mutex
	announced   bool      // the ranks know that requests wait
	announcedAt time.Time // when they were last told so
	timer       *time.Timer
	closed      bool
	boxes       []msg.Mailbox // reused
}

// updateDemand tells the ranks whether requests wait here, if that has changed. The caller calls it after a
// request has joined or left the queue.
func (ar *appRouter) updateDemand() {
	d := &ar.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	waits := !ar.queue.empty()
	if waits == d.announced || d.closed {
		return
	}
	if left := demandPause - time.Since(d.announcedAt); waits && left > 0 {
		ar.setDemandTimer(left)
		return
	}
	ar.sendDemand(waits)
}

// repeatDemand repeats that requests wait, if they do.
func (ar *appRouter) repeatDemand() {
	d := &ar.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	if waits := !ar.queue.empty(); !d.closed && (waits || d.announced) {
		ar.sendDemand(waits)
	}
}

// sendDemand posts to every rank. The caller holds queueDemand.mu, and never appRouter.mu.
func (ar *appRouter) sendDemand(waits bool) {
	d := &ar.demand
	d.announced = waits
	if waits {
		d.announcedAt = time.Now()
		ar.setDemandTimer(demandRepeat)
	}
	ar.mu.Lock()
	for _, r := range ar.ranks {
		d.boxes = append(d.boxes, r.mailbox)
	}
	ar.mu.Unlock()
	for _, box := range d.boxes {
		// a rank that misses it gets the next one
		_ = box.TrySend(msg.Demand{Ingress: ar.in.node, Waits: waits})
	}
	clear(d.boxes)
	d.boxes = d.boxes[:0]
}

func (ar *appRouter) setDemandTimer(after time.Duration) {
	d := &ar.demand
	if d.timer == nil {
		d.timer = time.AfterFunc(after, ar.repeatDemand)
		return
	}
	d.timer.Reset(after)
}

// endDemand tells the ranks that no request waits, for good.
func (ar *appRouter) endDemand() {
	d := &ar.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	if d.announced {
		ar.sendDemand(false)
	}
	if d.timer != nil {
		d.timer.Stop()
	}
}

// applyTurn marks a rank as full before the Router learns of room that is for another ingress. Room that was
// offered to this ingress before stays its own.
func (ar *appRouter) applyTurn(r *rank, turn string) {
	if r.turn = turn; turn == "" || turn == ar.in.node || r.offered > 0 {
		return
	}
	ar.setFull(r)
	ar.publish(r)
}

// openForTurn removes a rank's full mark if the room of a record is for this ingress.
func (ar *appRouter) openForTurn(r *rank) {
	if r.turn == ar.in.node {
		r.offered++
	} else if r.turn != "" {
		return
	}
	if r.full {
		ar.clearFull(r)
		ar.publish(r)
	}
}

// useOffer records that this ingress has used the room that it was offered; other free room may be for
// another ingress.
func (ar *appRouter) useOffer(r *rank) {
	if r.offered == 0 {
		return
	}
	r.offered--
	if r.offered == 0 && r.turn != "" && r.turn != ar.in.node {
		ar.setFull(r)
		ar.publish(r)
	}
}

// setFull makes a rank count as full until its stream reports room for this ingress, at most for FullRecheck.
// The caller publishes the rank.
func (ar *appRouter) setFull(r *rank) {
	if ar.closed || r.full || r.lost {
		return
	}
	r.full = true
	ar.fullTimers[r] = time.AfterFunc(ar.in.timers.FullRecheck, func() { ar.expireFull(r) })
}

// applyDone tells the Router that a request has ended, and opens the rank if its room is for this ingress.
func (ar *appRouter) applyDone(r *rank, e routing.Event, turn string) {
	ar.applyTurn(r, turn)
	ar.observe(e)
	ar.openForTurn(r)
}
