package ingress

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/internal/dispatch"
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
	cfg.IsHeld = req.hold != nil
	s.flight = s.pair.proxy.Begin(&cfg, !req.scan.Stream, s)
	defer s.flight.End() // also after a panic
	s.tell(dispatch.Event{Kind: dispatch.EvStart})
	for {
		req.timer.await(time.Now())
		cmd, ok := s.flight.Next(ctx, s.isLate)
		if !ok {
			break
		}
		run := legRunner{s}.runDecode
		switch {
		case cmd.Kind == dispatch.CmdPick:
			s.tell(s.choose(&cmd)) //nolint:contextcheck // it is s.ctx
			continue
		case cmd.Kind == dispatch.CmdReserve:
			s.tell(s.reserve(&cmd))
			continue
		case cmd.Side == dispatch.Prefill:
			run = legRunner{s}.runPrefill
		}
		if ev, ok := run(&cmd); ok {
			s.tell(ev)
		}
	}
	s.flight.End()
	req.timer.pause()
	if s.warm != nil {
		return nil // nobody waits for an answer
	}
	return req.finish(ctx, s.answer, s.why)
}

// isLate reports whether the request's own deadline has ended it, and not its client.
func (s *split) isLate() bool { return contextCause(s.ctx) == dispatch.Deadline }

// tell tells the flight an event; first that the request is over, if that is so.
func (s *split) tell(ev dispatch.Event) {
	switch {
	case s.ctx.Err() == nil:
	case s.isLate():
		s.flight.Tell(dispatch.Event{Kind: dispatch.EvDeadline})
	default:
		s.flight.Tell(dispatch.Event{Kind: dispatch.EvClientGone})
	}
	s.flight.Tell(ev)
}

var _ pdproxy.Shell = (*split)(nil)

// Do implements pdproxy.Shell. It takes no lock that is held while a flight is told something.
func (s *split) Do(cmd *dispatch.Command) {
	switch cmd.Kind {
	case dispatch.CmdUndo:
		s.undoPending(cmd)
	case dispatch.CmdRelay:
		s.mu.Lock()
		if l := s.legOf(cmd.Number); l != nil {
			l.isPassed = true
		}
		s.mu.Unlock()
	case dispatch.CmdCancel:
		s.cancelWork(cmd.Number)
	case dispatch.CmdRelease:
		legRunner{s}.releaseLeg(cmd)
	case dispatch.CmdSuspect:
		if ar := s.pair.pool(cmd.Side); ar.findRef(cmd.Rank) != nil {
			ar.suspectNode(ar.findRef(cmd.Rank).Node)
		}
	case dispatch.CmdPardon:
		s.pair.pool(cmd.Side).pardon(cmd.Rank)
	case dispatch.CmdPairFailed:
		s.endPair(cmd.Prefill, cmd.Rank)
	case dispatch.CmdDiscard:
		if l := s.findLeg(uint32(cmd.Params)); l != nil && l.params != nil {
			l.params.Discard()
		}
	case dispatch.CmdAlarm:
		s.pair.proxy.Alarm(cmd.Rank)
	case dispatch.CmdAnswer:
		s.mu.Lock()
		s.answer, s.why = cmd.Answer, cmd.Cause
		s.mu.Unlock()
	case dispatch.CmdCount:
		if s.req.hold == nil {
			s.pair.metrics.Request(wayNames[cmd.Way], resultNames[cmd.Result])
		}
		if s.warm != nil {
			s.warm.result = cmd.Result
		}
	case dispatch.CmdNote:
		s.note(cmd.Note)
	default:
	}
}

// endPair counts a failure of a pair. The table ends the pair after a few in a row.
func (s *split) endPair(prefill, decode routing.RankRef) {
	isOver := false
	s.pair.router.Update(func(t *routing.PairTable) { isOver = t.Failed(prefill, decode) })
	if isOver {
		s.pair.proxy.PairFailed(prefill, decode)
	}
}

// passed is the decode rank whose answer the client gets; zero for none.
func (s *split) passed() (decode routing.RankRef) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.legs {
		if l.isPassed {
			decode = l.rank.ref()
		}
	}
	return decode
}

// RunPrefill implements pdproxy.Shell.
func (s *split) RunPrefill(cmd dispatch.Command) (dispatch.Event, bool) {
	return legRunner{s}.runPrefill(&cmd)
}

// undoPending takes back what a choice has counted, or the part of it for one reservation.
func (s *split) undoPending(cmd *dispatch.Command) {
	isOne := cmd.Rank != (routing.RankRef{})
	for side := dispatch.Prefill; side <= dispatch.Decode; side++ {
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
func (s *split) choose(cmd *dispatch.Command) dispatch.Event {
	if s.first { // decide has chosen already
		s.first = false
		return dispatch.Event{
			Kind: dispatch.EvPicked, Number: cmd.Number, IsRemote: true, Prefill: s.rank.ref(),
			Decode: s.req.attempt.rank.ref(),
		}
	}
	if !s.req.resume(s.ctx) {
		return dispatch.Event{Kind: dispatch.EvNoRank, Number: cmd.Number}
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	defer cancel(errOver)
	s.setChoice(cmd.Number, cancel)
	defer s.setChoice(0, nil)
	ev := dispatch.Event{Kind: dispatch.EvNoRank, Number: cmd.Number}
	switch {
	case s.warm != nil: // these two ranks have not met
	case !cmd.Want[dispatch.Decode]:
		return s.choosePrefill(cmd)
	case cmd.Want[dispatch.Prefill]:
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

// chooseBoth chooses a pair, or a decode rank alone.
func (s *split) chooseBoth(ctx context.Context, cmd *dispatch.Command, ev *dispatch.Event) {
	rk, hasWaited := search{s.req}.pickBy(ctx, cmd.Pays, func() (*rank, *failure, bool) {
		return s.decideUnlike(cmd.Unlike)
	})
	if ev.HasWaited = hasWaited; rk == nil {
		return
	}
	ev.Kind, ev.Decode, ev.IsRemote = dispatch.EvPicked, rk.ref(), s.choice.Remote
	ev.Fallback = s.choice.IsFallback()
	if ev.IsRemote {
		ev.Prefill = s.rank.ref()
	}
}

// choosePrefill chooses another prefill rank for a decode rank that stays.
func (s *split) choosePrefill(cmd *dispatch.Command) dispatch.Event {
	ev := dispatch.Event{Kind: dispatch.EvPicked, Number: cmd.Number, Fallback: true}
	s.req.countRetry(s.req.ends.takeUnpaid(), "free")
	p := s.pair
	router, _ := p.router.Routers()
	for unlike := cmd.Unlike[dispatch.Prefill]; ; unlike = (routing.RankRef{}) {
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
		s.setPending(dispatch.Prefill, b)
		s.rank, ev.IsRemote, ev.Fallback, ev.Prefill = rk, true, false, rk.ref()
		return ev
	}
}

// chooseDecode chooses another decode rank: for the prompt of a prefill rank that stays, or one that computes
// the prompt itself.
func (s *split) chooseDecode(ctx context.Context, cmd *dispatch.Command, ev *dispatch.Event) {
	req, isRemote := s.req, cmd.Prefill != (routing.RankRef{})
	if !isRemote {
		s.way = dispatch.WayFallback
	}
	req.mate, req.avoid = cmd.Prefill, cmd.Unlike[dispatch.Decode]
	rk, hasWaited := search{req}.pickBy(ctx, cmd.Pays, search{req}.decide)
	req.mate, req.avoid = routing.RankRef{}, routing.RankRef{}
	if ev.HasWaited = hasWaited; rk == nil {
		return
	}
	req.attempt.isCounted = false // it is pending
	s.setPending(dispatch.Decode, bump{req.attempt.router, rk.ID, req.query.ID, isRemote})
	ev.Kind, ev.Decode, ev.IsRemote = dispatch.EvPicked, rk.ref(), isRemote
}

// awaitPrefill waits in the queue of the prefill pool, if its groups hold requests and a prefill rank would
// compute the prompt. The next decision takes the rank that the queue names, if that can be paired. It
// returns false if req.failure is the answer.
func (s *split) awaitPrefill(ctx context.Context) (goesOn bool) {
	if !s.decides() {
		return true
	}
	held := poolWait{s.req, s.pair.prefill, &s.held, &s.prompt, &s.query}
	if !held.isWanted() || !s.req.app.router.queue.empty() || !s.wantsPrefill() {
		return true
	}
	if s.held.answered == nil {
		s.held.answered = make(chan groupAnswer, 1)
	}
	isTaken, isHeld := held.await(ctx, func(id routing.RankID) bool {
		s.prompt.direct, s.prompt.hasDirect, s.prompt.isReleased = id, true, true
		return true
	})
	return isTaken || !isHeld
}

// wantsPrefill reports whether the request is one for a prefill rank, now or when there is room.
func (s *split) wantsPrefill() bool {
	req := s.req
	search{req}.excludeTried()
	req.query.Tried = append(req.query.Tried, s.pair.plainOnly...)
	s.pair.decode.describeRequest(&req.query, &req.prompt)
	s.describePrefill(routing.RankRef{})
	return s.pair.router.WantsPrefill(&s.query, &req.query)
}

// dropRelease gives back the prefill rank that the queue has named, if no decision has taken it: the next
// decision is between all ranks.
func (s *split) dropRelease() {
	if s != nil && s.prompt.isReleased {
		s.pair.prefill.groups.finish(&s.held, s.prompt.direct, 0, true)
		s.takeRelease()
	}
}

// takeRelease says that a decision has taken the rank of the release.
func (s *split) takeRelease() {
	if s.prompt.isReleased {
		s.prompt.direct, s.prompt.hasDirect, s.prompt.isReleased = 0, false, false
	}
}

// reserve asks for a ticket of the rank that was chosen.
func (s *split) reserve(cmd *dispatch.Command) dispatch.Event {
	ar, b := s.pair.pool(cmd.Side), s.takePending(cmd.Side)
	ev := dispatch.Event{
		Kind: dispatch.EvRefused, Side: cmd.Side, Number: cmd.Number, Rank: cmd.Rank, Cause: dispatch.Gone,
	}
	rk := ar.findRef(cmd.Rank)
	if rk == nil {
		s.undo(&b)
		return ev
	}
	ev.Unit = rk.unitKey
	leg := legRunner{s}.newLeg(cmd, ar, rk, b)
	if !ar.trackAttempt(rk, leg.tracked) {
		s.undo(&b)
		return ev
	}
	s.mu.Lock()
	s.legs = append(s.legs, leg)
	s.mu.Unlock()
	if s.warm != nil { // it must not wait for room
		ev.Kind, ev.Cause = dispatch.EvReserved, dispatch.OK
		return ev
	}
	q := &rankleg.Request{Rank: rk.Rank, Admit: s.newAdmit(leg, &b), OnTicket: leg.take}
	if ev.Cause = s.req.askTicket(leg.ctx, ar, rk, q); ev.Cause == dispatch.OK {
		s.req.in.observeTicket(b.router, rk.ID, b.reqID, &leg.tracked.ticket)
		ev.Kind = dispatch.EvReserved
		return ev
	}
	s.req.ends.note(&result{cause: ev.Cause})
	ar.untrackAttempt(rk, leg.tracked)
	leg.end()
	s.undo(&b)
	return ev
}

// newAdmit is the message that asks for the leg's ticket. A decode rank that gets a prompt which a prefill
// rank computes has nothing of it to compute itself.
func (s *split) newAdmit(leg *pairLeg, b *bump) *msg.Admit {
	req := s.req
	if leg.side == dispatch.Decode {
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
