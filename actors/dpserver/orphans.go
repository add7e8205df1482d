package dpserver

import (
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// orphans are tickets whose admission's context has ended. The Done of nearly every one waits in the mailbox
// already, because a request's context ends right after its answer. So they share one timer and one message:
// a timer for each request would wake the actor each time.
type orphans struct {
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

// addOrphan notes that the context of a ticket's admission has ended: without a Done the ticket lapses after
// TicketLapse.
func (s *Server) addOrphan(ticket uint64) {
	o := &s.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, orphan{ticket, time.Now().Add(s.timers.TicketLapse)})
	if !o.isTimerSet {
		o.isTimerSet = true
		s.sendAfter(s.timers.TicketLapse, lapseTimer{})
	}
	if len(o.queue)%maxOrphans == 0 {
		s.box.Send(pruneRequest{})
	}
}

// pruneOrphans drops the orphans whose ticket has ended.
func (r *replica) pruneOrphans() {
	r.orphans.mu.Lock()
	defer r.orphans.mu.Unlock()
	r.orphans.queue = slices.DeleteFunc(r.orphans.queue,
		func(o orphan) bool { return r.account.tickets[o.ticket] == nil })
}

// lapseTickets ends the open tickets that are due, and sets the timer for the next.
func (r *replica) lapseTickets() {
	r.pruneOrphans()
	for _, ticket := range r.takeDueOrphans(time.Now()) {
		r.endTicket(&msg.Done{TicketID: ticket, Outcome: msg.Cancelled, Cause: "ticket_lapsed"})
	}
}

func (r *replica) takeDueOrphans(now time.Time) (due []uint64) {
	o := &r.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	n := 0
	for n < len(o.queue) && !now.Before(o.queue[n].due) {
		due = append(due, o.queue[n].ticket)
		n++
	}
	o.queue = slices.Delete(o.queue, 0, n)
	if o.isTimerSet = len(o.queue) > 0; o.isTimerSet {
		r.sendAfter(o.queue[0].due.Sub(now), lapseTimer{})
	}
	return due
}
