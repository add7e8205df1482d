package ingress

import (
	"context"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
)

// maxReservations bounds the reservations of an application.
const maxReservations = 4096

// reservation is a place on a rank, or on a rank of each pool, for a request that the caller sends to the
// engines itself: tickets without a stream. It ends by Free, by its timer, or with its application.
type reservation struct {
	life   context.Context //nolint:containedctx // of its tickets: the DPServers take them back at its end
	cancel context.CancelFunc
	answer dispatch.AnswerKind // how its plan has ended
	why    dispatch.Cause      // likewise
	places [2]*place           // by side; Prefill nil: none, or released
	start  time.Time
	first  time.Duration // from start to the first token; 0: not reported
	timer  *time.Timer
}

// place is a ticket of a reservation. Its owner releases it once.
type place struct {
	rank   *rank
	ticket msg.Ticket
	end    func()              // ends the context of the ticket
	router *routing.PairRouter // that counts the tokens; nil: a decode rank's
	tokens int
}

// release returns the ticket. The use of the place says nothing about the engine, so it counts as cancelled.
func (p *place) release(cause string, first time.Duration) {
	p.rank.Mailbox.Send(&msg.Done{
		TicketID: p.ticket.ID, Outcome: msg.Cancelled, Cause: cause, FirstToken: first,
	})
	if p.router != nil {
		p.router.Update(func(t *routing.PairTable) { t.Release(p.rank.ref(), p.tokens) })
	}
	p.end()
}

// reservations are those of one application, by request id. A nil entry is being admitted. The zero value is
// ready; safe for concurrent use.
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

// claim reserves an id, so that no second call admits under it.
func (s *reservations) claim(app, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, taken := s.byID[id]
	switch {
	case taken:
		return problem.New(problem.Conflict, "request id %q is reserved already", id).WithHint(
			"free it, or use another id")
	case len(s.byID) >= maxReservations:
		return problem.New(problem.Overloaded, "app %s has %d reservations", app, maxReservations).WithHint(
			"free some: they expire by themselves")
	case s.ended:
		return goingAway(app)
	}
	if s.byID == nil {
		s.byID = map[string]*reservation{}
	}
	s.byID[id] = nil
	return nil
}

// settle replaces the claim by the admitted reservation, or removes the claim if r is nil. false: the
// application was closed meanwhile.
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

// take removes a reservation, so that exactly one caller ends it; nil if there is none. If only is set, take
// removes no other reservation.
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

// end releases all reservations and refuses new ones.
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

// release returns the tickets.
func (r *reservation) release(cause string) {
	r.timer.Stop()
	r.releasePrefill(cause)
	r.places[dispatch.Decode].release(cause, r.first)
	r.cancel()
}

// releasePrefill returns the place on a prefill rank, if there is one. The caller holds the mutex of the
// reservations, or has taken r out of them.
func (r *reservation) releasePrefill(cause string) {
	if p := r.places[dispatch.Prefill]; p != nil {
		p.release(cause, 0)
		r.places[dispatch.Prefill] = nil
	}
}

func goingAway(app string) error {
	return problem.New(problem.Unavailable, "app %s is going away", app).WithHint(
		"`dpserve status` lists the applications")
}

// validReservation checks a request id of the router's own API.
func validReservation(id string) error {
	if !validRequestID(id) {
		return problem.New(problem.InvalidArgument, "the request id cannot be used").WithHint(
			"it is 1 to %d printable ASCII characters without spaces", maxRequestID)
	}
	return nil
}

// reserve makes a question a reservation under an id: the decisions, admissions and accounts are those of a
// request, without its legs. ctx bounds the wait for tickets, not the reservation.
func reserve(ctx context.Context, q *inquiry, name, id string) (client.Worker, error) {
	req, ar := q.request, q.app.router
	if err := validReservation(id); err != nil {
		return client.Worker{}, err
	}
	if err := ar.reservations.claim(name, id); err != nil {
		return client.Worker{}, err
	}
	r := &reservation{start: time.Now()}
	r.life, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	req.hold, req.why, req.id, req.start = r, nil, id, r.start
	_ = req.dispatch() //nolint:contextcheck // it is in req.r; what went wrong is in r
	if r.answer != dispatch.AnswerTickets {
		r.cancel()
		ar.reservations.settle(id, nil)
		return client.Worker{}, q.notReserved(name)
	}
	w := q.handOver(r)
	w.RequestID, w.ExpiresS = id, ar.in.timers.Reservation.Seconds()
	r.timer = time.AfterFunc(ar.in.timers.Reservation, func() {
		if ar.reservations.take(id, r) != nil {
			r.release("reservation_expired")
		}
	})
	if !ar.reservations.settle(id, r) {
		r.release("drained")
		return client.Worker{}, goingAway(name)
	}
	return w, nil
}

// holder is a request that ends with its tickets.
type holder struct{ *request }

// reserve asks the picked rank for the ticket of a reservation.
func (req holder) reserve(ctx context.Context, number uint32) dispatch.Event {
	a := &req.attempt
	req.number, a.ticket = number, msg.Ticket{}
	q := req.newAsk(req.hold.life, a.rank)
	q.OnTicket = req.recordTicket
	res := result{cause: req.askTicket(ctx, req.app.router, a.rank, q)}
	if res.cause == dispatch.OK {
		return req.eventOf(dispatch.EvReserved, &res)
	}
	req.undoPick()
	req.ends.note(&res)
	return req.eventOf(dispatch.EvRefused, &res)
}

// handOver gives the tickets to the reservation, and says where they are.
func (q *inquiry) handOver(r *reservation) client.Worker {
	s := q.split
	if !s.isUnderWay() {
		a := &q.attempt
		r.places[dispatch.Decode] = &place{rank: a.rank, ticket: a.ticket, end: r.cancel}
		return q.worker(a.rank, nil)
	}
	var ranks [2]*rank
	for _, l := range s.legs {
		if l.tracked.ticket.ID == 0 { // it went back
			continue
		}
		l.pool.untrackAttempt(l.rank, l.tracked)
		p := &place{rank: l.rank, ticket: l.tracked.ticket, end: l.end}
		if l.side == dispatch.Prefill {
			p.router, p.tokens = s.pair.router, l.tokens
			p.router.Update(func(t *routing.PairTable) { t.Lease(p.rank.ref(), p.tokens) })
		}
		r.places[l.side], ranks[l.side] = p, l.rank
	}
	return q.worker(ranks[dispatch.Decode], ranks[dispatch.Prefill])
}

func noReservation(app, id string) error {
	return problem.New(problem.NotFound, "app %s has no reservation %q", app,
		id[:min(len(id), maxRequestID)]).
		WithHint("it was freed, or has expired; best_worker with a request_id makes one")
}
