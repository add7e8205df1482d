package ingress

import (
	"context"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

// maxReservations bounds the reservations of an application.
const maxReservations = 4096

// reservation is a place on a rank that somebody else's request holds: a ticket of real admission without a stream. It ends by
// Free, by its timer, or with its lane.
type reservation struct {
	rank   *rank
	ticket msg.Ticket
	start  time.Time
	first  time.Duration      // from start to the first token; 0: none was told
	cancel context.CancelFunc // of the admission's context: the DPServer's own net under a ticket
	timer  *time.Timer
}

// reservations are those of one application, by request id. nil entries are being admitted. The zero value is ready; safe for
// concurrent use.
type reservations struct {
	mu    sync.Mutex
	byID  map[string]*reservation
	ended bool
}

func (s *reservations) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// claim takes an id, so that no second call admits under it.
func (s *reservations) claim(app, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, taken := s.byID[id]
	switch {
	case taken:
		return problem.New(problem.Conflict, "request id %q is reserved already", id).WithHint("free it, or use another id")
	case len(s.byID) >= maxReservations:
		return problem.New(problem.Overloaded, "app %s has %d reservations", app, maxReservations).WithHint("free some: they expire by themselves")
	case s.ended:
		return problem.New(problem.Unavailable, "app %s is going away", app).WithHint("`dpserve status` lists the applications")
	}
	if s.byID == nil {
		s.byID = map[string]*reservation{}
	}
	s.byID[id] = nil
	return nil
}

// settle puts the admitted reservation in place of its claim, or (nil) gives the claim up. false: the lane has ended meanwhile.
func (s *reservations) settle(id string, r *reservation) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r == nil || s.ended {
		delete(s.byID, id)
		return false
	}
	s.byID[id] = r
	return true
}

// take removes a reservation, so that exactly one caller ends it; nil if there is none. only, if set, is the one that is meant.
func (s *reservations) take(id string, only *reservation) *reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[id]
	if r == nil || only != nil && r != only {
		return nil
	}
	delete(s.byID, id)
	return r
}

// end takes all reservations and lets none in again.
func (s *reservations) end() {
	s.mu.Lock()
	s.ended = true
	var all []*reservation
	for id, r := range s.byID {
		if r != nil {
			all = append(all, r)
			delete(s.byID, id)
		}
	}
	s.mu.Unlock()
	for _, r := range all {
		r.release("drained")
	}
}

// release gives the ticket back. What the outside did with the place says nothing about the engine, so it counts as cancelled.
func (r *reservation) release(cause string) {
	r.timer.Stop()
	r.rank.mailbox.Send(&msg.Done{TicketID: r.ticket.ID, Outcome: msg.Cancelled, Cause: cause, FirstToken: r.first})
	r.cancel()
}

// validReservation checks a request id of the service.
func validReservation(id string) error {
	if !validRequestID(id) {
		return problem.New(problem.InvalidArgument, "the request id cannot be used").WithHint("it is 1 to %d printable ASCII characters without spaces", maxRequestID)
	}
	return nil
}

// reserve picks for k and is admitted there: the same decision, admission and account as a request's, without its stream. ctx
// ends the waiting for admission, not the reservation.
func (l *lane) reserve(ctx context.Context, k *question, id string) (msg.Worker, error) {
	if err := validReservation(id); err != nil {
		return msg.Worker{}, err
	}
	if err := l.reservations.claim(l.name, id); err != nil {
		return msg.Worker{}, err
	}
	c := newCall(l.in) // not from the pool: blocks may be read behind a late answer
	c.entry, c.prompt, c.query = &entry{served: l.spec.Load(), lane: l}, k.prompt, k.query
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r, err := l.admitReservation(ctx, life, c)
	if err != nil {
		cancel()
		l.reservations.settle(id, nil)
		return msg.Worker{}, err
	}
	k.prompt, k.query = c.prompt, c.query
	r.cancel = cancel
	r.timer = time.AfterFunc(l.in.timers.Reservation, func() { l.expire(id, r) })
	if !l.reservations.settle(id, r) {
		r.release("drained")
		return msg.Worker{}, problem.New(problem.Unavailable, "app %s is going away", l.name).WithHint("`dpserve status` lists the applications")
	}
	w := k.worker(r.rank, c.choice.Reason)
	w.RequestID, w.ExpiresS = id, l.in.timers.Reservation.Seconds()
	return w, nil
}

// admitReservation tries ranks until one admits, as many as a request may try.
func (l *lane) admitReservation(ctx, life context.Context, c *call) (*reservation, error) {
	for {
		rk, f, wait := c.decide(nil)
		if rk == nil {
			return nil, c.notReserved(f, wait)
		}
		c.attempt.rank, c.attempt.start = rk, time.Now()
		rep, refused := c.admitWithin(ctx, life, rk)
		if refused == causeOK {
			c.granted(&rep.Ticket)
			return &reservation{rank: rk, ticket: rep.Ticket, start: c.attempt.start}, nil
		}
		c.refused(rep, refused)
		c.tried, c.attempts = append(c.tried, rk), c.attempts+1
		if !rows[refused].retry || c.attempts >= c.maxAttempts() {
			return nil, problem.New(problem.Unavailable, "rank %s of app %s did not admit it: %s", rk.id, l.name, refused).WithHint("try again later")
		}
	}
}

// admitWithin is admit with a bound: the mailbox may hold others' messages.
func (c *call) admitWithin(ctx, life context.Context, rk *rank) (msg.AdmitReply, cause) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.in.timers.Admit, errAdmitSlow)
	defer cancel()
	if !rk.local {
		return c.hold(ctx, life, rk)
	}
	return c.admit(ctx, life, rk)
}

// notReserved says why no rank was picked.
func (c *call) notReserved(f *failure, wait bool) error {
	k := &question{query: c.query}
	if wait || f != nil {
		return refusal(c.entry.app.Name, k, &c.choice)
	}
	return problem.New(problem.Internal, "no decision was made")
}

// expire ends a reservation that nobody freed.
func (l *lane) expire(id string, r *reservation) {
	if l.reservations.take(id, r) != nil {
		r.release("reservation_expired")
	}
}

// MarkPrefillComplete says that a reservation's request has its first token. Safe to call twice. Errors are *problem.Error.
func (in *Ingress) MarkPrefillComplete(app, id string) error {
	l, _, err := in.router(app)
	if err != nil {
		return err
	}
	s := &l.reservations
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[id]
	if r == nil {
		return noReservation(app, id)
	}
	now := time.Now()
	if r.first == 0 {
		r.first = max(now.Sub(r.start), 1)
		r.rank.mailbox.Send(&msg.FirstToken{TicketID: r.ticket.ID, At: now})
	}
	return nil
}

// Free ends a reservation. Errors are *problem.Error: NotFound if it has ended.
func (in *Ingress) Free(app, id string) error {
	l, _, err := in.router(app)
	if err != nil {
		return err
	}
	r := l.reservations.take(id, nil)
	if r == nil {
		return noReservation(app, id)
	}
	r.release("freed")
	return nil
}

func noReservation(app, id string) error {
	return problem.New(problem.NotFound, "app %s has no reservation %q", app, id[:min(len(id), maxRequestID)]).
		WithHint("it was freed, or has expired; best_worker with a request_id makes one")
}
