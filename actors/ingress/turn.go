package ingress

import (
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/routing"
)

// How often the ranks are told that requests wait here.
const (
	demandAgain = time.Second           // while they wait: a rank forgets it after 3 s
	demandPause = 50 * time.Millisecond // at least, between two times that the waiting begins
)

// demand tells the ranks of an application whether requests wait here, so that a rank that frees room keeps it for each ingress in turn.
type demand struct {
	mu    sync.Mutex
	told  bool      // the ranks know that requests wait
	last  time.Time // when they were told so last
	timer *time.Timer
	over  bool
	boxes []msg.Mailbox // scratch
}

// tellDemand tells the ranks what has changed of it. Call it after a request has joined or left the queue.
func (l *lane) tellDemand() {
	d := &l.queueDemand
	d.mu.Lock()
	defer d.mu.Unlock()
	waits := !l.queue.empty()
	if waits == d.told || d.over {
		return
	}
	if left := demandPause - time.Since(d.last); waits && left > 0 {
		l.setDemandTimer(left)
		return
	}
	l.sendDemand(waits)
}

// repeatDemand says again that requests wait, if they do.
func (l *lane) repeatDemand() {
	d := &l.queueDemand
	d.mu.Lock()
	defer d.mu.Unlock()
	if waits := !l.queue.empty(); !d.over && (waits || d.told) {
		l.sendDemand(waits)
	}
}

// sendDemand posts to every rank. Call it with demand.mu held, and never with lane.mu.
func (l *lane) sendDemand(waits bool) {
	d := &l.queueDemand
	d.told = waits
	if waits {
		d.last = time.Now()
		l.setDemandTimer(demandAgain)
	}
	l.mu.Lock()
	for _, r := range l.ranks {
		d.boxes = append(d.boxes, r.mailbox)
	}
	l.mu.Unlock()
	for _, box := range d.boxes {
		_ = box.TrySend(msg.Demand{Ingress: l.in.node, Waits: waits}) // a rank that does not hear it hears the next one
	}
	clear(d.boxes)
	d.boxes = d.boxes[:0]
}

func (l *lane) setDemandTimer(after time.Duration) {
	d := &l.queueDemand
	if d.timer == nil {
		d.timer = time.AfterFunc(after, l.repeatDemand)
		return
	}
	d.timer.Reset(after)
}

// endDemand says that nobody waits any more, for good.
func (l *lane) endDemand() {
	d := &l.queueDemand
	d.mu.Lock()
	defer d.mu.Unlock()
	d.over = true
	if d.told {
		l.sendDemand(false)
	}
	if d.timer != nil {
		d.timer.Stop()
	}
}

// closeToOthers makes a rank count as full before the Router hears of room that is for another ingress. What this ingress was offered
// before stays its own.
func (l *lane) closeToOthers(r *rank, turn string) {
	if r.turn = turn; turn == "" || turn == l.in.node || r.offered > 0 {
		return
	}
	l.fill(r)
	l.show(r)
}

// openTurn makes a rank count as open again, if the room that a record speaks of is for this ingress.
func (l *lane) openTurn(r *rank) {
	if r.turn == l.in.node {
		r.offered++
	} else if r.turn != "" {
		return
	}
	if r.full {
		l.forgetFull(r)
		l.show(r)
	}
}

// tookTurn notes that this ingress has used what it was offered; what else is free may be for another.
func (l *lane) tookTurn(r *rank) {
	if r.offered == 0 {
		return
	}
	r.offered--
	if r.offered == 0 && r.turn != "" && r.turn != l.in.node {
		l.fill(r)
		l.show(r)
	}
}

// fill makes a rank count as full until its stream says that there is room for this ingress, at most for FullRecheck. It calls no
// Router: show does.
func (l *lane) fill(r *rank) {
	if l.ended || r.full || r.lost {
		return
	}
	r.full = true
	l.timers[r] = time.AfterFunc(l.in.timers.FullRecheck, func() { l.unmark(r) })
}

// finished tells the Router that a request has ended, and opens the rank if its room is for this ingress.
func (l *lane) finished(r *rank, e routing.Event, turn string) {
	l.closeToOthers(r, turn)
	l.observe(e)
	l.openTurn(r)
}
