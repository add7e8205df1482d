package dpserver

import (
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// orphans are tickets whose admission's context has ended. Nearly all of them have a Done that the actor has not read yet: a
// request's context ends right behind its answer. So they share one timer and one message, instead of a timer, and a wake-up of
// the actor, for every request.
type orphans struct {
	mu    sync.Mutex
	queue []orphan // by due
	armed bool     // a lapse is on its way
}

type orphan struct {
	ticket uint64
	due    time.Time
}

// maxOrphans is how many wait before the actor is asked to sort out those that are done, ahead of the timer.
const maxOrphans = 4096

// orphaned notes that a ticket's admission has nobody behind it: without a Done it lapses in TicketLapse.
func (s *Server) orphaned(ticket uint64) {
	o := &s.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	o.queue = append(o.queue, orphan{ticket, time.Now().Add(s.timers.TicketLapse)})
	if !o.armed {
		o.armed = true
		s.after(s.timers.TicketLapse, lapse{})
	}
	if len(o.queue)%maxOrphans == 0 {
		s.box.Send(sortOut{})
	}
}

// sortOrphans drops the orphans whose ticket is not open any more.
func (r *replica) sortOrphans() {
	r.orphans.mu.Lock()
	defer r.orphans.mu.Unlock()
	r.orphans.queue = slices.DeleteFunc(r.orphans.queue, func(o orphan) bool { return r.account.tickets[o.ticket] == nil })
}

// lapse ends the open tickets whose time is over, and sets the timer for the next.
func (r *replica) lapse() {
	r.sortOrphans()
	for _, ticket := range r.dueOrphans(time.Now()) {
		r.done(&msg.Done{TicketID: ticket, Outcome: msg.Cancelled, Cause: "ticket_lapsed"})
	}
}

func (r *replica) dueOrphans(now time.Time) (due []uint64) {
	o := &r.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	n := 0
	for n < len(o.queue) && !now.Before(o.queue[n].due) {
		due = append(due, o.queue[n].ticket)
		n++
	}
	o.queue = slices.Delete(o.queue, 0, n)
	if o.armed = len(o.queue) > 0; o.armed {
		r.after(o.queue[0].due.Sub(now), lapse{})
	}
	return due
}
