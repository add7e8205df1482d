package ingress

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// errGivenUp is the cause with which the flight of a request cancels a leg, a choice or a reservation.
var errGivenUp = errors.New("the request goes another way")

// run leads the request over a prefill rank and a decode rank, which decide has chosen. It returns nil if the
// client has its answer.
func (s *split) run(ctx context.Context) *failure {
	req, cfg := s.req, s.pair.config
	s.ctx, s.first = ctx, true
	cfg.DecodeLimit, cfg.LocalLimit = req.firstTokenLimit(), req.firstTokenLimit()
	s.flight = s.pair.proxy.Begin(cfg, s)
	defer s.flight.End() // also after a panic
	s.tell(pdproxy.Event{Kind: pdproxy.EvStart, Whole: !req.scan.Stream})
	for {
		cmd, ok := s.flight.Next(ctx, s.isLate)
		if !ok {
			break
		}
		switch cmd.Kind {
		case pdproxy.CmdChoose:
			s.tell(s.choose(&cmd)) //nolint:contextcheck // it is s.ctx
		case pdproxy.CmdReserve:
			s.tell(s.reserve(&cmd))
		case pdproxy.CmdStartPrefill:
			if ev, ok := s.RunPrefill(cmd); ok {
				s.tell(ev)
			}
		default:
			if ev, ok := (legRunner{s}).runDecode(&cmd); ok {
				s.tell(ev)
			}
		}
	}
	s.flight.End()
	return s.finish() //nolint:contextcheck // it is s.ctx
}

// isLate reports whether the request's own deadline has ended it, and not its client.
func (s *split) isLate() bool { return contextCause(s.ctx) == causeDeadline }

// tell tells the flight an event; first that the request is over, if that is so.
func (s *split) tell(ev pdproxy.Event) {
	switch {
	case s.ctx.Err() == nil:
	case s.isLate():
		s.flight.Tell(pdproxy.Event{Kind: pdproxy.EvDeadline})
	default:
		s.flight.Tell(pdproxy.Event{Kind: pdproxy.EvClientGone})
	}
	s.flight.Tell(ev)
}

// finish answers the client as the flight has ended.
func (s *split) finish() *failure {
	req := s.req
	if req.status != 0 || req.cutConn {
		req.finishAnswered(s.served)
		return nil
	}
	switch s.answer {
	case pdproxy.AnswerPassOn:
		leg := s.findLeg(s.answered)
		if leg == nil || leg.held == nil {
			break
		}
		res := relay{req}.sendWhole(s.ctx, leg.held.status, leg.held.header, leg.held.body, *s.lastResult())
		req.finishAnswered(&res)
		return nil
	case pdproxy.AnswerNoPrefill:
		return s.noPrefillFailure()
	case pdproxy.AnswerTwoDied:
		f := s.lastFailure()
		f.message, f.cause = "two ranks died while they had this request; it is not sent to a third one",
			"killed_two_ranks"
		return f
	case pdproxy.AnswerDeadline:
		return finalFailure(&result{cause: causeDeadline})
	case pdproxy.AnswerNone:
		return finalFailure(&result{cause: contextCause(s.ctx)})
	default:
	}
	if s.failure != nil {
		return s.failure
	}
	return s.lastFailure()
}

// lastResult is how the last leg failed, nil if none has.
func (s *split) lastResult() *result {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

// lastFailure is the answer that says how the last leg failed.
func (s *split) lastFailure() *failure {
	if last := s.lastResult(); last != nil {
		return finalFailure(last)
	}
	return finalFailure(&result{cause: causeGone})
}

var _ pdproxy.Shell = (*split)(nil)

// Do implements pdproxy.Shell. It takes no lock that is held while a flight is told something.
func (s *split) Do(cmd *pdproxy.Command) {
	switch cmd.Kind {
	case pdproxy.CmdUndoChoice:
		s.undoPending(cmd)
	case pdproxy.CmdPassOn:
		s.mu.Lock()
		if l := s.legOf(cmd.Number); l != nil {
			l.isPassed = true
		}
		s.mu.Unlock()
	case pdproxy.CmdCancel:
		s.cancelWork(cmd.Number)
	case pdproxy.CmdRelease:
		legRunner{s}.releaseLeg(cmd)
	case pdproxy.CmdDiscard:
		if l := s.findLeg(uint32(cmd.Params)); l != nil && l.params != nil { //nolint:gosec // a leg's number
			l.params.Discard()
		}
	case pdproxy.CmdAlarm:
		s.pair.proxy.Alarm(cmd.Rank)
	case pdproxy.CmdAnswer:
		s.mu.Lock()
		s.answer, s.answered = cmd.Answer, cmd.Number
		s.mu.Unlock()
	case pdproxy.CmdCount:
		s.pair.metrics.Request(wayNames[cmd.Way], outcomeNames[cmd.Outcome])
	case pdproxy.CmdNote:
		s.pair.metrics.Note(noteNames[cmd.Note])
	default:
	}
}

// RunPrefill implements pdproxy.Shell.
func (s *split) RunPrefill(cmd pdproxy.Command) (pdproxy.Event, bool) {
	return legRunner{s}.runPrefill(cmd)
}

// undoPending takes back what a choice has counted, or the part of it for one reservation.
func (s *split) undoPending(cmd *pdproxy.Command) {
	isOne := cmd.Rank != (routing.RankRef{})
	for side := pdproxy.Prefill; side <= pdproxy.Decode; side++ {
		if !isOne || side == cmd.Side {
			b := s.takePending(side)
			s.undo(&b)
		}
	}
}

// cancelWork ends a choice, a reservation or a leg.
func (s *split) cancelWork(number uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if number == s.choosing && s.cancel != nil {
		s.cancel(errGivenUp)
	}
	if l := s.legOf(number); l != nil {
		l.cancel(errGivenUp)
	}
}

// legOf returns the leg with a number, nil if there is none. The caller holds mu.
func (s *split) legOf(number uint32) *pairLeg {
	if i := slices.IndexFunc(s.legs, func(l *pairLeg) bool { return l.number == number }); i >= 0 {
		return s.legs[i]
	}
	return nil
}

func (s *split) findLeg(number uint32) *pairLeg {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.legOf(number)
}

// choose chooses ranks of the sides that the command wants.
func (s *split) choose(cmd *pdproxy.Command) pdproxy.Event {
	if s.first { // decide has chosen already
		s.first = false
		return pdproxy.Event{
			Kind: pdproxy.EvChosen, Number: cmd.Number, Remote: true, Prefill: s.rank.ref(),
			Decode: s.req.attempt.rank.ref(),
		}
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(errOver)
	s.setChoice(cmd.Number, cancel)
	defer s.setChoice(0, nil)
	ev := pdproxy.Event{Kind: pdproxy.EvNoRank, Number: cmd.Number}
	if s.failure = s.payForRetry(); s.failure != nil {
		return ev
	}
	s.req.hadTurn = true // no later request may overtake it
	switch {
	case !cmd.WantDecode:
		return s.choosePrefill(cmd)
	case cmd.WantPrefill:
		s.chooseBoth(ctx, cmd, &ev)
	default:
		s.chooseDecode(ctx, cmd, &ev)
	}
	return ev
}

func (s *split) setChoice(number uint32, cancel context.CancelCauseFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.choosing, s.cancel = number, cancel
}

// payForRetry draws the retry after the last failure from the budget, if it costs any.
func (s *split) payForRetry() *failure {
	s.mu.Lock()
	last, isUnpaid := s.last, s.unpaid
	s.unpaid = false
	s.mu.Unlock()
	if !isUnpaid {
		return nil
	}
	s.req.attempts++
	budget := "free"
	if !causePolicies[last.cause].free {
		budget = "drawn"
		if !s.pair.decode.retryBudget.draw(s.req.in.clock()) {
			return s.req.giveUp(last, "empty")
		}
	}
	s.req.countRetry(last, budget)
	return nil
}

// chooseBoth chooses a pair, or a decode rank alone.
func (s *split) chooseBoth(ctx context.Context, cmd *pdproxy.Command, ev *pdproxy.Event) {
	rk, f := s.req.pickBy(ctx, s.lastResult(), func(last *result) (*rank, *failure, bool) {
		return s.decideUnlike(last, cmd.Unlike)
	})
	if s.failure = f; f != nil {
		return
	}
	ev.Kind, ev.Decode, ev.Remote = pdproxy.EvChosen, rk.ref(), s.choice.Remote
	ev.Fallback = s.choice.IsFallback()
	if ev.Remote {
		ev.Prefill = s.rank.ref()
	}
}

// choosePrefill chooses another prefill rank for a decode rank that stays.
func (s *split) choosePrefill(cmd *pdproxy.Command) pdproxy.Event {
	ev := pdproxy.Event{Kind: pdproxy.EvChosen, Number: cmd.Number, Fallback: true}
	p := s.pair
	router, _ := p.router.Routers()
	for unlike := cmd.Unlike[pdproxy.Prefill]; ; unlike = (routing.RankRef{}) {
		s.describePrefill(unlike)
		p.router.PickPrefill(&s.query, cmd.Decode, &s.alone)
		if s.alone.Kind != routing.Route {
			if unlike == (routing.RankRef{}) {
				return ev
			}
			continue
		}
		b := bump{router, s.alone.Ranked[0], s.query.ID, true}
		rk := p.prefill.findRank(b.id)
		if rk == nil { // it is gone since the decision
			s.undo(&b)
			return ev
		}
		s.setPending(pdproxy.Prefill, b)
		s.rank, ev.Remote, ev.Fallback, ev.Prefill = rk, true, false, rk.ref()
		return ev
	}
}

// chooseDecode chooses another decode rank: for the prompt of a prefill rank that stays, or one that computes
// the prompt itself.
func (s *split) chooseDecode(ctx context.Context, cmd *pdproxy.Command, ev *pdproxy.Event) {
	req, decide := s.req, s.req.decide
	isRemote := cmd.Prefill != (routing.RankRef{})
	if isRemote {
		decide = func(last *result) (*rank, *failure, bool) {
			return s.decideDecode(last, cmd.Prefill, cmd.Unlike[pdproxy.Decode])
		}
	} else {
		s.way = pdproxy.WayFallback
	}
	rk, f := req.pickBy(ctx, s.lastResult(), decide)
	if s.failure = f; f != nil {
		return
	}
	s.setPending(pdproxy.Decode, bump{req.attempt.router, rk.ID, req.query.ID, isRemote})
	ev.Kind, ev.Decode, ev.Remote = pdproxy.EvChosen, rk.ref(), isRemote
}

// decideDecode asks for a decode rank that has met the prefill rank, and takes unlike only if there is no
// other.
func (s *split) decideDecode(
	last *result, prefill, unlike routing.RankRef,
) (rk *rank, f *failure, wait bool) {
	req, p := s.req, s.pair
	_, router := p.router.Routers()
	for {
		req.excludeTried()
		if unlike != (routing.RankRef{}) {
			req.query.Tried = append(req.query.Tried, unlike.ID)
		}
		req.query.ID = req.in.requestID()
		p.decode.describeRequest(&req.query, &req.prompt)
		p.router.PickDecode(&req.query, prefill, &req.choice)
		switch {
		case req.choice.Kind == routing.Route:
		case unlike != (routing.RankRef{}):
			unlike = routing.RankRef{}
			continue
		case req.choice.Kind == routing.Queue:
			return nil, nil, true
		default:
			return nil, req.pickFailure(last), false
		}
		id := req.choice.Ranked[0]
		req.attempt.router = router
		if rk := p.decode.findRank(id); rk != nil {
			return rk, nil, false
		}
		s.undo(&bump{router, id, req.query.ID, true})
	}
}

// reserve asks for a ticket of the rank that was chosen.
func (s *split) reserve(cmd *pdproxy.Command) pdproxy.Event {
	refused := pdproxy.Event{Kind: pdproxy.EvRefused, Number: cmd.Number}
	ar, b := s.pair.pool(cmd.Side), s.takePending(cmd.Side)
	rk := ar.findRef(cmd.Rank)
	if rk == nil {
		s.undo(&b)
		return refused
	}
	leg := legRunner{s}.newLeg(cmd, ar, rk, b)
	if !ar.trackAttempt(rk, leg.tracked) {
		s.undo(&b)
		return refused
	}
	s.mu.Lock()
	s.legs = append(s.legs, leg)
	s.mu.Unlock()
	switch s.askTicket(leg.ctx, leg, &b) {
	case causeOK:
		return pdproxy.Event{Kind: pdproxy.EvReserved, Number: cmd.Number}
	case causeUnreachable:
		ar.suspectNode(rk.Node)
	default:
	}
	ar.untrackAttempt(rk, leg.tracked)
	leg.end()
	s.undo(&b)
	return refused
}

// askTicket asks the leg's rank for its ticket, which lives as long as leg.life. If it is refused, b still
// counts.
func (s *split) askTicket(ctx context.Context, leg *pairLeg, b *bump) (refused cause) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.req.in.timers.Admit, errAdmitSlow)
	defer cancel()
	q := &rankleg.Request{Rank: leg.rank.Rank, Admit: s.newAdmit(leg, b), OnTicket: leg.take}
	reply, err := leg.rank.asker.Reserve(ctx, q)
	if q.IsAdmitPending { // an actor may still read the blocks
		s.req.prompt.shared, s.prompt.shared = true, true
	}
	if err == nil && reply.Refusal == msg.Granted {
		s.req.in.observeTicket(b.router, leg.rank.ID, b.reqID, &leg.tracked.ticket)
		return causeOK
	}
	refused = refusedAs(reply.Refusal)
	if err != nil {
		refused = s.req.askFailure(ctx, err).cause
	}
	leg.pool.metrics.Load().Refusal(causePolicies[refused].name)
	if refused == causeFull { // before the undo, so that it wakes no request without reason
		leg.pool.markFull(leg.rank, reply.Seq)
	}
	return refused
}

// newAdmit is the message that asks for the leg's ticket. A decode rank that gets a prompt which a prefill
// rank computes has nothing of it to compute itself.
func (s *split) newAdmit(leg *pairLeg, b *bump) *msg.Admit {
	req := s.req
	if leg.side == pdproxy.Decode {
		m := req.newAdmit(leg.life, leg.rank)
		if m.ReqID = b.reqID; b.isRemote {
			m.Hit = m.Tokens
		}
		return m
	}
	m := &msg.Admit{
		Ctx: leg.life, ReqID: b.reqID, Epoch: leg.rank.Epoch, Tokens: s.query.Tokens,
		Estimated: s.query.Estimated, Deadline: req.deadline, Ingress: req.in.node,
		Session: routing.SessionKey(s.query.Session),
	}
	if s.prompt.lookedUp {
		m.Hit, m.Blocks, m.HitBlocks = s.query.HitOn(leg.rank.ID), s.prompt.blocks,
			s.prompt.cachedPrefix(leg.rank.ID)
	}
	return m
}

// heldAnswer is an answer of a prefill engine that may go to the client as it is.
type heldAnswer struct {
	status int
	header http.Header
	body   []byte
}
