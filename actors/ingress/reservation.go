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

// reservation is a place on a rank for a request that the caller sends to the engine itself: a ticket of a
// real admission without a stream. It ends by Free, by its timer, or with its application.
type reservation struct {
	rank   *rank
	ticket msg.Ticket
	start  time.Time
	first  time.Duration // from start to the first token; 0: not reported
	// ends the admission's context, by which the DPServer would take back the ticket
	cancel  context.CancelFunc
	timer   *time.Timer
	prefill *prefillPlace // nil: none, or released
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

// release returns the ticket. The use of the place says nothing about the engine, so it counts as cancelled.
func (r *reservation) release(cause string) {
	r.timer.Stop()
	r.releasePrefill(cause)
	r.rank.Mailbox.Send(&msg.Done{
		TicketID: r.ticket.ID, Outcome: msg.Cancelled, Cause: cause,
		FirstToken: r.first,
	})
	r.cancel()
}

// releasePrefill returns the place on a prefill rank, if there is one. The caller holds the mutex of the
// reservations, or has taken r out of them.
func (r *reservation) releasePrefill(cause string) {
	if r.prefill != nil {
		r.prefill.release(msg.Cancelled, cause)
		r.prefill = nil
	}
}

func goingAway(app string) error {
	return problem.New(problem.Unavailable, "app %s is going away", app).WithHint(
		"`dpserve status` lists the applications")
}

// hold claims id, lets admit get a place under it, and keeps the place until it is freed or expires. The
// place's tickets live as long as life. name is the application's for its users.
func hold(ctx context.Context, ar *appRouter, name, id string,
	admit func(life context.Context) (*reservation, error),
) (*reservation, error) {
	if err := validReservation(id); err != nil {
		return nil, err
	}
	if err := ar.reservations.claim(name, id); err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r, err := admit(life)
	if err != nil {
		cancel()
		ar.reservations.settle(id, nil)
		return nil, err
	}
	r.cancel = cancel
	r.timer = time.AfterFunc(ar.in.timers.Reservation, func() {
		if ar.reservations.take(id, r) != nil {
			r.release("reservation_expired")
		}
	})
	if !ar.reservations.settle(id, r) {
		r.release("drained")
		return nil, goingAway(name)
	}
	return r, nil
}

// validReservation checks a request id of the router's own API.
func validReservation(id string) error {
	if !validRequestID(id) {
		return problem.New(problem.InvalidArgument, "the request id cannot be used").WithHint(
			"it is 1 to %d printable ASCII characters without spaces", maxRequestID)
	}
	return nil
}

// reserve picks a rank for k and is admitted there: the decision, admission and account are those of a
// request, without its stream. ctx bounds the wait for admission, not the reservation.
func reserve(ctx context.Context, ar *appRouter, query *routeQuery, id string) (client.Worker, error) {
	req := newRequest(ar.in) // not from the pool: an actor may still read its blocks after a late reply
	req.app, req.prompt, req.query = &appRoute{appRevision: ar.revision.Load(), router: ar}, query.prompt,
		query.query
	r, err := hold(ctx, ar, ar.name, id, func(life context.Context) (*reservation, error) {
		return admitReservation(ctx, life, ar, req)
	})
	if err != nil {
		return client.Worker{}, err
	}
	query.prompt, query.query = req.prompt, req.query
	w := query.worker(r.rank, req.choice.Reason)
	w.RequestID, w.ExpiresS = id, ar.in.timers.Reservation.Seconds()
	return w, nil
}

// admitReservation tries ranks until one admits, as many as a request may try.
func admitReservation(ctx, life context.Context, ar *appRouter, req *request) (*reservation, error) {
	req.beginPlan()
	ev, refused := dispatch.Event{Kind: dispatch.EvStart}, dispatch.Gone
	for {
		next := req.carryOut(req.plan.Step(req.instant(), &ev))
		switch {
		case next != nil && next.Kind == dispatch.CmdPick:
			rk, _, _ := search{req}.decide()
			if rk == nil {
				return nil, refusal(req.app.app.Name, ar, &routeQuery{query: req.query}, &req.choice)
			}
			req.attempt.rank = rk
			ev = dispatch.Event{Kind: dispatch.EvPicked, Number: next.Number, Decode: rk.ref()}
		case next != nil && next.Kind == dispatch.CmdAsk:
			if refused = reserveAt(ctx, life, req, req.attempt.rank); refused == dispatch.OK {
				a := &req.attempt
				return &reservation{rank: a.rank, ticket: a.ticket, start: a.start}, nil
			}
			req.number = next.Number
			ev = req.eventOf(dispatch.EvRefused, &result{cause: refused})
		default:
			return nil, problem.New(problem.Unavailable, "rank %s of app %s did not admit it: %s",
				req.attempt.rank.ID, ar.name, refused).WithHint("try again later")
		}
	}
}

// reserveAt asks rk for a ticket without a request, which lives as long as life. ctx bounds the wait for it.
func reserveAt(ctx, life context.Context, req *request, rk *rank) dispatch.Cause {
	ctx, cancel := context.WithTimeoutCause(ctx, req.in.timers.Admit, errAdmitSlow)
	defer cancel()
	a := &req.attempt
	a.rank, a.start, a.ticket = rk, time.Now(), msg.Ticket{}
	q := req.newAsk(life, rk)
	q.OnTicket = req.recordTicket
	reply, err := rk.asker.Reserve(ctx, q)
	req.prompt.shared = req.prompt.shared || q.IsAdmitPending
	switch {
	case err == nil && reply.Refusal == msg.Granted:
		return dispatch.OK
	case err == nil:
		return req.endRefused(ctx, ctx, reply)
	default:
		why := failedAsk(ctx, err).cause
		req.app.router.metrics.Load().Refusal(why.String())
		req.undoPick()
		return why
	}
}

func noReservation(app, id string) error {
	return problem.New(problem.NotFound, "app %s has no reservation %q", app,
		id[:min(len(id), maxRequestID)]).
		WithHint("it was freed, or has expired; best_worker with a request_id makes one")
}

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
	ar, s := q.pair.decode, q.newSplit()
	s.prompt = q.prefill.prompt
	r, err := hold(ctx, ar, q.pair.name, id, func(life context.Context) (*reservation, error) {
		return admitPair(ctx, life, q, s)
	})
	if err != nil {
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
		s.way = dispatch.WayLocal
		return admitReservation(ctx, life, q.pair.decode, req)
	}
	var refused dispatch.Cause
	var unlike [2]routing.RankRef
	for range maxPairTries {
		s.way = dispatch.WayNone
		rk, f, wait := s.decideUnlike(unlike)
		if rk == nil || f != nil || wait {
			return nil, q.noPlace(s)
		}
		var prefill *prefillPlace
		if s.isRemote() {
			if prefill, refused = admitPrefill(ctx, life, s); refused != dispatch.OK {
				unlike[dispatch.Prefill] = s.rank.ref()
				b := s.takePending(dispatch.Decode)
				s.undo(&b)
				continue
			}
		}
		r := &reservation{rank: rk, start: time.Now(), prefill: prefill}
		if r.ticket, refused = admitDecode(ctx, life, s, rk); refused == dispatch.OK {
			return r, nil
		}
		if prefill != nil {
			prefill.release(msg.Refused, "unused")
		}
		if unlike[dispatch.Decode] = rk.ref(); refused.Row().Again == dispatch.Nobody {
			break
		}
	}
	return nil, problem.New(problem.Unavailable, "the ranks of app %s did not admit it: %s", q.pair.name,
		refused).WithHint("try again later")
}

// admitPrefill asks the chosen prefill rank for a place.
func admitPrefill(ctx, life context.Context, s *split) (*prefillPlace, dispatch.Cause) {
	life, cancel := context.WithCancel(life)
	b := s.takePending(dispatch.Prefill)
	ticket, refused := admitSide(ctx, life, s, dispatch.Prefill, s.rank, &b)
	if refused != dispatch.OK {
		cancel()
		return nil, refused
	}
	p := &prefillPlace{
		rank: s.rank, ticket: ticket, router: s.pair.router, tokens: s.query.Tokens, cancel: cancel,
	}
	p.router.Update(func(t *routing.PairTable) { t.Lease(p.rank.ref(), p.tokens) })
	return p, dispatch.OK
}

// admitDecode asks the chosen decode rank for a place.
func admitDecode(ctx, life context.Context, s *split, rk *rank) (msg.Ticket, dispatch.Cause) {
	b := s.takePending(dispatch.Decode)
	if b.router == nil { // the decode rank alone: the request counts there, and nothing else is pending
		b = bump{s.req.attempt.router, rk.ID, s.req.query.ID, false}
	}
	return admitSide(ctx, life, s, dispatch.Decode, rk, &b)
}

// admitSide asks a rank for the ticket of one side, which lives as long as life.
func admitSide(ctx, life context.Context, s *split, side dispatch.Side, rk *rank, b *bump) (msg.Ticket,
	dispatch.Cause,
) {
	leg := &pairLeg{side: side, pool: s.pair.pool(side), rank: rk, life: life}
	leg.tracked = &leg.own
	refused := s.askTicket(ctx, leg, b)
	if refused != dispatch.OK {
		s.undo(b)
	}
	return leg.own.ticket, refused
}
