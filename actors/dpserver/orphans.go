package dpserver

import (
	"slices"
	"sync"
	"time"
)

// orphans are tickets whose admission's context has ended. The Done of nearly every one waits in the mailbox
// already, because a request's context ends right after its answer. So they share one timer and one message:
// a timer for each request would wake the actor each time.
type orphans struct {
	post func(m any) // to the replica

	mu         sync.Mutex
	queue      []orphan // by due
	isTimerSet bool     // a lapseTimer runs
}

type orphan struct {
	ticket uint64
	due    time.Time
}

// maxOrphans is how many may wait before the actor drops those whose ticket has ended, ahead of the timer.
const maxOrphans = 4096

// add notes that the context of a ticket's admission has ended: without a Done the ticket lapses after wait,
// which is the same for all tickets.
func (o *orphans) add(ticket uint64, wait time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, orphan{ticket, time.Now().Add(wait)})
	if !o.isTimerSet {
		o.setTimer(wait)
	}
	if len(o.queue)%maxOrphans == 0 {
		o.post(pruneRequest{})
	}
}

func (o *orphans) setTimer(d time.Duration) {
	o.isTimerSet = true
	time.AfterFunc(d, func() { o.post(lapseTimer{}) })
}

// prune drops the orphans whose ticket has ended.
func (o *orphans) prune(open map[uint64]*ticket) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropEnded(open)
}

func (o *orphans) dropEnded(open map[uint64]*ticket) {
	o.queue = slices.DeleteFunc(o.queue, func(e orphan) bool { return open[e.ticket] == nil })
}

// takeDue takes the open tickets that are due, and sets the timer for the next.
func (o *orphans) takeDue(now time.Time, open map[uint64]*ticket) (due []uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.dropEnded(open)
	n := 0
	for n < len(o.queue) && !now.Before(o.queue[n].due) {
		due = append(due, o.queue[n].ticket)
		n++
	}
	o.queue = slices.Delete(o.queue, 0, n)
	if o.isTimerSet = len(o.queue) > 0; o.isTimerSet {
		o.setTimer(o.queue[0].due.Sub(now))
	}
	return due
}
