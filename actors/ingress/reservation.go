package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/routing"
)

// held is the plan of a reservation: it ends with its tickets.
type held struct {
	life   context.Context     //nolint:containedctx // of the tickets: their ranks take them back at its end
	answer dispatch.AnswerKind // how the plan has ended
	why    dispatch.Cause      // likewise
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
	if err := ar.reservations.Claim(name, id); err != nil {
		return client.Worker{}, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	h := &held{life: life}
	req.hold, req.why, req.id, req.start = h, nil, id, time.Now()
	_ = req.dispatch() //nolint:contextcheck // it is in req.r; what went wrong is in h
	if h.answer != dispatch.AnswerTickets {
		cancel()
		ar.reservations.Drop(id)
		return client.Worker{}, q.notReserved(name)
	}
	r := &routerapi.Reservation{Start: req.start, End: cancel}
	w := q.handOver(r)
	w.RequestID, w.ExpiresS = id, ar.in.timers.Reservation.Seconds()
	return w, ar.reservations.Settle(name, id, r, ar.in.timers.Reservation)
}

// holder is a request that ends with its tickets.
type holder struct{ *request }

// reserve asks the picked rank for the ticket of a reservation.
func (req holder) reserve(ctx context.Context, number uint32) dispatch.Event {
	a := &req.attempt
	req.number, a.ticket = number, msg.Ticket{}
	q := req.newAsk(req.hold.life, a.rank) //nolint:contextcheck // the ticket outlives the call
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
func (q *inquiry) handOver(r *routerapi.Reservation) client.Worker {
	s, a := q.split, &q.attempt
	if !s.isUnderWay() {
		r.Decode = &routerapi.Place{Rank: a.rank.Rank, Ticket: a.ticket}
		return q.worker(a.rank, nil)
	}
	var prefill *rank
	for _, l := range s.legs {
		if !l.hasTicket() { // it went back
			continue
		}
		l.pool.untrackAttempt(l.rank, l.tracked)
		p := &routerapi.Place{Rank: l.rank.Rank, Ticket: l.tracked.ticket, End: l.end}
		if l.side == dispatch.Decode {
			r.Decode = p
			continue
		}
		r.Prefill, prefill = p, l.rank
		p.Router, p.Tokens = s.pair.router, l.tokens
		p.Router.Update(func(t *routing.PairTable) { t.Lease(l.rank.ref(), l.tokens) })
	}
	return q.worker(a.rank, prefill)
}
