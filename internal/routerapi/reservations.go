// Package routerapi is what the Router offers to programs and people beside the requests that it routes:
// reservations, explanations, and generations from token ids. It has the part that needs no ingress.
package routerapi

import (
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// MaxReservations bounds the reservations of an application.
const MaxReservations = 4096

// Reservation is a place on a rank, or on a rank of each pool, for a request that the caller sends to the
// engines itself: tickets without a stream. It ends by Free, by its timer, or with its application.
type Reservation struct {
	Prefill, Decode *Place // Prefill nil: none, or released
	Start           time.Time
	End             func() // ends the context of its tickets

	first time.Duration // from Start to the first token; 0: not reported
	timer *time.Timer
}

// Place is a ticket of a Reservation. Its owner releases it once.
type Place struct {
	Rank   *rankleg.Rank
	Ticket msg.Ticket
	End    func()              // ends a context of the ticket's own; nil: it has none
	Router *routing.PairRouter // that counts the tokens; nil: a decode rank's
	Tokens int
}

// release returns the ticket. The use of the place says nothing about the engine, so it counts as cancelled.
func (p *Place) release(cause string, first time.Duration) {
	p.Rank.Mailbox.Send(&msg.Done{
		TicketID: p.Ticket.ID, Outcome: msg.Cancelled, Cause: cause, FirstToken: first,
	})
	if p.Router != nil {
		ref := routing.RankRef{ID: p.Rank.ID, Incarnation: p.Rank.Incarnation}
		p.Router.Update(func(t *routing.PairTable) { t.Release(ref, p.Tokens) })
	}
	if p.End != nil {
		p.End()
	}
}

// Reservations are those of one application, by request id. A nil entry is being admitted. The zero value is
// ready; safe for concurrent use.
type Reservations struct {
	mu    sync.Mutex
	byID  map[string]*Reservation
	ended bool
}

// Len is their number.
func (s *Reservations) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.byID)
}

// Claim reserves an id, so that no second call admits under it. Settle or Drop follows.
func (s *Reservations) Claim(app, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, taken := s.byID[id]
	switch {
	case taken:
		return problem.New(problem.Conflict, "request id %q is reserved already", id).WithHint(
			"free it, or use another id")
	case len(s.byID) >= MaxReservations:
		return problem.New(problem.Overloaded, "app %s has %d reservations", app, MaxReservations).WithHint(
			"free some: they expire by themselves")
	case s.ended:
		return goingAway(app)
	}
	if s.byID == nil {
		s.byID = map[string]*Reservation{}
	}
	s.byID[id] = nil
	return nil
}

// Drop removes a claim.
func (s *Reservations) Drop(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, id)
}

// Settle replaces the claim by the admitted reservation, which lives until it is freed, for life at most. An
// error: the application was closed meanwhile, and the places are back.
func (s *Reservations) Settle(app, id string, r *Reservation, life time.Duration) error {
	if !s.keep(id, r, life) {
		r.release("drained")
		return goingAway(app)
	}
	return nil
}

// keep is Settle without the release.
func (s *Reservations) keep(id string, r *Reservation, life time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		delete(s.byID, id)
		return false
	}
	s.byID[id] = r
	r.timer = time.AfterFunc(life, func() {
		if s.take(id, r) != nil {
			r.release("reservation_expired")
		}
	})
	return true
}

// take removes a reservation, so that exactly one caller ends it; nil if there is none. If only is set, take
// removes no other reservation.
func (s *Reservations) take(id string, only *Reservation) *Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[id]
	if r == nil || only != nil && r != only {
		return nil
	}
	delete(s.byID, id)
	return r
}

// Free ends a reservation.
func (s *Reservations) Free(app, id string) error {
	r := s.take(id, nil)
	if r == nil {
		return noReservation(app, id)
	}
	r.release("freed")
	return nil
}

// MarkPrefillComplete records that the request has its first token. Safe to call twice.
func (s *Reservations) MarkPrefillComplete(app, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.byID[id]
	if r == nil {
		return noReservation(app, id)
	}
	now := time.Now()
	if r.first == 0 {
		r.first = max(now.Sub(r.Start), 1)
		r.Decode.Rank.Mailbox.Send(&msg.FirstToken{TicketID: r.Decode.Ticket.ID, At: now})
		r.releasePrefill("prefill_complete")
	}
	return nil
}

// End releases all reservations and refuses new ones.
func (s *Reservations) End() {
	s.mu.Lock()
	s.ended = true
	var all []*Reservation
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
func (r *Reservation) release(cause string) {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.releasePrefill(cause)
	r.Decode.release(cause, r.first)
	r.End()
}

// releasePrefill returns the place on a prefill rank, if there is one. The caller holds the mutex of the
// Reservations, or has taken r out of them.
func (r *Reservation) releasePrefill(cause string) {
	if p := r.Prefill; p != nil {
		p.release(cause, 0)
		r.Prefill = nil
	}
}

func goingAway(app string) error {
	return problem.New(problem.Unavailable, "app %s is going away", app).WithHint(
		"`dpserve status` lists the applications")
}

func noReservation(app, id string) error {
	return problem.New(problem.NotFound, "app %s has no reservation %q", app, id[:min(len(id), maxShown)]).
		WithHint("it was freed, or has expired; best_worker with a request_id makes one")
}
