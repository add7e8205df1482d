package ingress

import (
	"context"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// prefillPlace is the part of a reservation that is on a prefill rank. Its owner releases it once.
type prefillPlace struct {
	rank   *rank
	ticket msg.Ticket
	router *routing.PairRouter // that counts the lease
	tokens int
	cancel context.CancelFunc // as reservation.cancel
}

// release returns the ticket, and ends the lease: the caller reports that the prompt was read, or gives up.
func (p *prefillPlace) release(outcome msg.Outcome, cause string) {
	p.rank.Mailbox.Send(&msg.Done{TicketID: p.ticket.ID, Outcome: outcome, Cause: cause})
	p.router.Update(func(t *routing.PairTable) { t.Release(p.rank.ref(), p.tokens) })
	p.cancel()
}

// reservePair is reserve for an application with two pools.
func reservePair(ctx context.Context, q *pairQuery, id string) (client.Worker, error) {
	if err := validReservation(id); err != nil {
		return client.Worker{}, err
	}
	ar := q.pair.decode
	if err := ar.reservations.claim(q.pair.name, id); err != nil {
		return client.Worker{}, err
	}
	s := q.newSplit()
	s.prompt = q.prefill.prompt
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r, err := admitPair(ctx, life, q, s)
	if err != nil {
		cancel()
		ar.reservations.settle(id, nil)
		return client.Worker{}, err
	}
	r.cancel = cancel
	if err := r.keep(ar, id); err != nil {
		return client.Worker{}, err
	}
	q.decode.prompt, q.decode.query = s.req.prompt, s.req.query
	q.prefill.prompt, q.prefill.query = s.prompt, s.query
	reason, prefill := s.choice.Reason, (*rank)(nil)
	if r.prefill != nil {
		prefill = r.prefill.rank
	}
	if q.goesToOne() {
		reason = s.req.choice.Reason
	}
	w := q.worker(r.rank, prefill, reason)
	w.RequestID, w.ExpiresS = id, ar.in.timers.Reservation.Seconds()
	return w, nil
}

// maxPairTries bounds the choices of one reservation.
const maxPairTries = 3

// admitPair chooses ranks until they admit. What cannot be split is admitted by one decode rank.
func admitPair(ctx, life context.Context, q *pairQuery, s *split) (*reservation, error) {
	req := s.req
	if q.goesToOne() {
		s.way = pdproxy.WayLocal
		return admitReservation(ctx, life, q.pair.decode, req)
	}
	var refused cause
	var unlike routing.RankRef
	for range maxPairTries {
		s.way = pdproxy.WayNone
		rk, f, wait := s.decideUnlike(nil, unlike)
		if rk == nil || f != nil || wait {
			return nil, q.noPlace(s)
		}
		var prefill *prefillPlace
		if s.isRemote() {
			if prefill, refused = admitPrefill(ctx, life, s); refused != causeOK {
				unlike = s.rank.ref()
				b := s.takePending(pdproxy.Decode)
				s.undo(&b)
				continue
			}
		}
		r := &reservation{rank: rk, start: time.Now(), prefill: prefill}
		if r.ticket, refused = admitDecode(ctx, life, s, rk); refused == causeOK {
			return r, nil
		}
		if prefill != nil {
			prefill.release(msg.Refused, "unused")
		}
		if more := req.recordFailure(rk, refused); !more || !causePolicies[refused].retry {
			break
		}
	}
	return nil, problem.New(problem.Unavailable, "the ranks of app %s did not admit it: %s", q.pair.name,
		refused).WithHint("try again later")
}

// admitPrefill asks the chosen prefill rank for a place.
func admitPrefill(ctx, life context.Context, s *split) (*prefillPlace, cause) {
	life, cancel := context.WithCancel(life)
	b := s.takePending(pdproxy.Prefill)
	ticket, refused := admitSide(ctx, s, &pairLeg{side: pdproxy.Prefill, rank: s.rank, life: life}, &b)
	if refused != causeOK {
		cancel()
		return nil, refused
	}
	p := &prefillPlace{
		rank: s.rank, ticket: ticket, router: s.pair.router, tokens: s.query.Tokens, cancel: cancel,
	}
	p.router.Update(func(t *routing.PairTable) { t.Lease(p.rank.ref(), p.tokens) })
	return p, causeOK
}

// admitDecode asks the chosen decode rank for a place.
func admitDecode(ctx, life context.Context, s *split, rk *rank) (msg.Ticket, cause) {
	b := s.takePending(pdproxy.Decode)
	if b.router == nil { // the decode rank alone: the request counts there, and nothing else is pending
		b = bump{s.req.attempt.router, rk.ID, s.req.query.ID, false}
	}
	return admitSide(ctx, s, &pairLeg{side: pdproxy.Decode, rank: rk, life: life}, &b)
}

// admitSide asks a rank for the ticket of one side, which lives as long as leg.life.
func admitSide(ctx context.Context, s *split, leg *pairLeg, b *bump) (ticket msg.Ticket, refused cause) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.req.in.timers.Admit, errAdmitSlow)
	defer cancel()
	q := &rankleg.Request{
		Rank: leg.rank.Rank, Admit: s.newAdmit(leg, b), OnTicket: func(t *msg.Ticket) { ticket = *t },
	}
	reply, err := leg.rank.asker.Reserve(ctx, q)
	if err == nil && reply.Refusal == msg.Granted {
		b.router.Observe(&routing.Event{
			Kind: routing.EvTicket, Rank: leg.rank.ID, ReqID: b.reqID, Seq: ticket.Seq,
			Incarnation: ticket.Incarnation, Now: s.req.in.clock(),
		})
		return ticket, causeOK
	}
	refused = refusedAs(reply.Refusal)
	if err != nil {
		refused = s.req.askFailure(ctx, err).cause
	}
	ar := s.pair.pool(leg.side)
	ar.metrics.Load().Refusal(causePolicies[refused].name)
	if refused == causeFull {
		ar.markFull(leg.rank, reply.Seq)
	}
	s.undo(b)
	return ticket, refused
}
