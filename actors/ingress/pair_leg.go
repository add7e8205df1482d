package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/tracing"
	"github.com/dpserve/dpserve/routing"
)

// pairLeg is a reservation on a rank, and the leg that uses it.
type pairLeg struct {
	side    dispatch.Side
	number  uint32
	pool    *appRouter
	rank    *rank
	tokens  int
	reqID   uint64          // in the pool's Router
	ctx     context.Context //nolint:containedctx // of the leg; life is that of its ticket
	cancel  context.CancelCauseFunc
	life    context.Context //nolint:containedctx // see ctx
	end     func()          // ends life
	tracked *attempt        // the request's own for a decode rank, which the relay uses
	own     attempt         // of a prefill rank

	started  time.Time       // of the leg
	answer   transfer.Answer // of a prefill rank
	params   *transfer.Params
	isLeased bool

	trace *tracing.Leg   // nil: traces are off
	cause dispatch.Cause // of its end

	legState
}

// legState is the part of a leg that events change. splitState.mu guards it.
type legState struct {
	isRunning bool
	isPassed  bool              // the client gets its answer
	done      *msg.Done         // of a leg that has ended: what it has shown
	release   *dispatch.Command // came while the leg was running
}

// legRunner is a split request that runs its legs.
type legRunner struct{ *split }

// newLeg is a reservation that is asked for.
func (s legRunner) newLeg(cmd *dispatch.Command, ar *appRouter, rk *rank, b bump) *pairLeg {
	l := &pairLeg{side: cmd.Side, number: cmd.Number, pool: ar, rank: rk, reqID: b.reqID}
	l.life, l.end = s.ctx, func() {}
	l.ctx, l.cancel = context.WithCancelCause(s.ctx)
	switch h := s.req.hold; {
	case h != nil:
		l.life, l.end = context.WithCancel(h.life)
	case !rk.local: // a far ticket has a stream of its own, which ends with it
		l.life, l.end = context.WithCancel(s.ctx)
	}
	if l.tracked, l.tokens = &l.own, s.query.Tokens; cmd.Side == dispatch.Decode {
		l.tracked, l.tokens = &s.req.attempt, s.req.query.Tokens
	}
	flight := s.flight
	lost := dispatch.Event{Kind: dispatch.EvFenced, Side: cmd.Side, Rank: cmd.Rank, Unit: rk.unitKey}
	*l.tracked = attempt{router: b.router, rank: rk, start: time.Now(), cancel: func(cause error) {
		l.cancel(cause)
		if errors.Is(cause, errUnitLost) { // the caller holds the lock of the pool
			told := lost
			told.EngineFailed = rk.engineFailed
			flight.Later(told)
		}
	}}
	return l
}

// take stores the ticket.
func (l *pairLeg) take(t *msg.Ticket) { l.tracked.ticket = *t }

// beginLeg begins to use a reservation; nil if it was given up.
func (s legRunner) beginLeg(number uint32) *pairLeg {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.legOf(number)
	if l == nil || l.ctx.Err() != nil {
		return nil
	}
	l.isRunning, l.started, l.cause = true, time.Now(), dispatch.GivenUp
	l.trace = s.req.spans.BeginLeg(sideNames[l.side]+" leg", l.started)
	if l.side == dispatch.Prefill {
		s.computed = time.Time{}
	}
	return l
}

// endLeg notes what the leg has shown of its engine, and returns its ticket if that was asked for meanwhile.
func (s legRunner) endLeg(l *pairLeg, done *msg.Done) {
	s.mu.Lock()
	l.isRunning, l.done = false, done
	cmd := l.release
	s.mu.Unlock()
	s.req.endLeg(l.trace, l.pool, l.tracked, l.number, l.cause)
	if cmd != nil {
		s.returnLeg(l, cmd)
	}
}

// releaseLeg returns a ticket, at once or when its leg has ended.
func (s legRunner) releaseLeg(cmd *dispatch.Command) {
	s.mu.Lock()
	l := s.legOf(cmd.Number)
	isRunning := l != nil && l.isRunning
	if isRunning {
		c := *cmd
		l.release = &c
	}
	s.mu.Unlock()
	if l != nil && !isRunning {
		s.returnLeg(l, cmd)
	}
}

// returnLeg returns the ticket as the flight says, and what the prefill rank holds.
func (s legRunner) returnLeg(l *pairLeg, cmd *dispatch.Command) {
	l.pool.untrackAttempt(l.rank, l.tracked)
	s.pair.metrics.Leg(sideNames[l.side], endingOf(cmd.Cause))
	if id := l.tracked.ticket.ID; id != 0 {
		d := l.done
		if d == nil {
			d = &msg.Done{}
		}
		d.TicketID, l.tracked.ticket.ID = id, 0
		l.tracked.judge(d, cmd)
		l.pool.groups.observe(routing.EvFinished, l.rank.ID, l.reqID, d.CompletionTokens)
		l.rank.Mailbox.Send(d)
	}
	if l.isLeased {
		if cmd.HeldUntil > 0 {
			s.pair.proxy.Hold(l.rank.ref(), l.tokens, cmd.HeldUntil)
		} else {
			decode := s.passed()
			s.pair.router.Update(func(t *routing.PairTable) {
				t.Release(l.rank.ref(), l.tokens)
				t.Worked(l.rank.ref(), decode)
			})
		}
	}
	l.end()
}

// endingOf groups causes for the metric of legs.
func endingOf(c dispatch.Cause) string {
	switch what := c.Row(); {
	case c == dispatch.Unused:
		return "unused"
	case c == dispatch.ConnRefused:
		return "dial"
	case c == dispatch.FirstToken:
		return "late"
	case what.Busy:
		return "busy"
	case what.Done == dispatch.DoneOK:
		return "ok"
	case what.Done != dispatch.DoneFailed:
		return "cancelled"
	case what.Death, c == dispatch.UpstreamLost:
		return "cut"
	default:
		return "error"
	}
}

// fieldsFor are the fields of both legs of an attempt, made once for each.
func (s legRunner) fieldsFor(number uint32, prefill routing.RankRef) (*transfer.Attempt, []string, error) {
	a := &s.made
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.number == number {
		return &a.fields, a.header, nil
	}
	peer, _ := s.pair.backend.peers.get(prefill)
	fields, err := s.pair.transfer.Begin(&s.body, s.newAttemptID(), peer, rand.Uint64N)
	if err != nil {
		return nil, nil, err
	}
	a.number, a.fields = number, fields
	if a.header = s.req.idHeader; s.pair.traits.FreshRequestID {
		a.header = []string{fields.ID}
	}
	return &a.fields, a.header, nil
}

// engineHeader is the header of a leg with the attempt's request id.
func (s legRunner) engineHeader(side dispatch.Side, id []string) http.Header {
	switch {
	case s.warm != nil:
		return s.ownHeader(side, id)
	case len(id) > 0 && id[0] != s.req.id:
		return rankleg.EngineHeader(s.req.r.Header, id, s.req.in.via)
	}
	return s.req.header
}

// runPrefill runs a prefill leg to its end. ok is false if nobody waits for what it has to say.
func (s legRunner) runPrefill(cmd *dispatch.Command) (ev dispatch.Event, ok bool) {
	l := s.beginLeg(cmd.Number)
	if l == nil {
		return ev, false
	}
	done := &msg.Done{} // if the leg panics
	defer func() { s.endLeg(l, done) }()
	res, params := s.prefillLeg(l, cmd)
	if n := l.answer.PromptTokens; n > 0 && l.hasTicket() {
		done.PromptTokens, done.CompletionTokens, done.FirstToken = n, 1, l.own.firstToken.Sub(l.started)
		done.CachedTokens, done.HasCached = max(l.answer.CachedTokens, 0), l.answer.CachedTokens >= 0
		l.pool.metrics.Load().Tokens(n, done.CachedTokens, 1)
	}
	if ev, ok = s.endOf(l, &res); ok {
		s.noteEnd(l, &res)
	}
	ev.Params = params
	return ev, ok
}

// hasTicket reports whether the leg counts on its rank: those of a warm-up do not.
func (l *pairLeg) hasTicket() bool { return l.tracked.ticket.ID != 0 }

// noteEnd keeps the end of a leg that has brought no answer.
func (s legRunner) noteEnd(l *pairLeg, res *result) {
	switch {
	case s.warm != nil:
		s.mu.Lock()
		s.warm.failed(l.side, res)
		s.mu.Unlock()
	case res.cause != dispatch.OK || l.side == dispatch.Decode:
		s.req.ends.note(res)
	}
}

// endOf is what the flight is told of a leg that has ended; ok is false if the flight has given it up.
func (s legRunner) endOf(l *pairLeg, res *result) (ev dispatch.Event, ok bool) {
	l.cause = res.cause
	ev = dispatch.Event{
		Kind: dispatch.EvEnded, Side: l.side, Number: l.number, Rank: l.rank.ref(), Unit: l.rank.unitKey,
		Cause: res.cause, Text: res.text,
	}
	if res.cause != dispatch.OK {
		ev.IsLost, ev.EngineFailed = l.pool.lossOf(l.rank)
	}
	return ev, !errors.Is(context.Cause(l.ctx), errGivenUp)
}

// prefillLeg sends the leg and reads its whole answer. params is the handle of its parameters, 0 for none.
func (s legRunner) prefillLeg(l *pairLeg, cmd *dispatch.Command) (res result, params uint64) {
	fields, id, err := s.fieldsFor(cmd.Attempt, l.rank.ref())
	if err != nil {
		return result{cause: dispatch.NoPeer, err: err}, 0
	}
	mem := s.req.in.bodies.take(len(s.body.Body) + legBytes)
	if mem == nil {
		return result{cause: dispatch.NoMemory, err: errNoBodyMemory}, 0
	}
	body := fields.AppendPrefill(mem.b, &s.body)
	q := &rankleg.Request{
		Rank: l.rank.Rank, Route: s.req.route, Header: l.trace.Header(s.engineHeader(l.side, id)), Body: body,
		IsHeld:     true,
		FirstToken: s.pair.config.PrefillLimit, Model: s.req.prompt.engineName,
	}
	if s.pair.config.Order != dispatch.PrefillFirst {
		q.Guard = &rankleg.Guard{} // an engine must not meet its fields twice
	}
	defer s.req.in.bodies.give(mem, true)
	if l.isLeased = l.hasTicket(); l.isLeased {
		s.pair.router.Update(func(t *routing.PairTable) { t.Lease(l.rank.ref(), l.tokens) })
	}
	s.pair.metrics.Part("queue", l.started.Sub(s.req.start))
	resp, reply, err := l.rank.asker.Ask(l.ctx, q)
	switch {
	case err != nil:
		return failedAsk(l.ctx, err), 0
	case reply.Refusal != msg.Granted:
		return result{cause: dispatch.UnitLost}, 0
	}
	defer closeBody(resp)
	answer, err := io.ReadAll(io.LimitReader(resp.Body, transfer.MaxAnswer+1))
	if err != nil {
		return failedRead(l.ctx, err, false), 0
	}
	if resp.StatusCode >= http.StatusMultipleChoices {
		return s.readPrefillError(l, resp, answer), 0
	}
	a, failed := transfer.ReadPrefill(s.pair.transfer, &s.body, answer)
	l.own.firstToken = time.Now()
	s.noteComputed(l.own.firstToken)
	l.pool.groups.observe(routing.EvFirstToken, l.rank.ID, l.reqID, 0)
	l.pool.estimates.answers.note(s.req.scan.Model, l.rank.ref(), s.req.in.clock())
	l.answer, l.answer.Params = a, nil
	s.pair.metrics.Part("prefill", l.own.firstToken.Sub(l.started))
	if failed != transfer.NoFailure {
		res := result{cause: dispatch.Malformed, nameOverride: failed.String(), err: fmt.Errorf("its answer "+
			"cannot be used (%s): is its engine started for transfer %s?", failed, s.pair.traits.Name)}
		if failed == transfer.PrefillNoParams || failed == transfer.PrefillUnfit {
			res.cause = dispatch.OK
		}
		return res, 0
	}
	if l.hasTicket() {
		l.rank.Mailbox.Send(&msg.FirstToken{TicketID: l.own.ticket.ID, At: l.own.firstToken})
	}
	if peer, ok := transfer.PeerOfAnswer(a.Params); ok {
		s.pair.backend.peers.set(l.rank.ref(), peer)
	}
	if s.pair.traits.HasParams {
		l.params = transfer.NewParams(a.Params, paramsSource(l.rank), l.own.firstToken, s.pair.config.Lease)
		params = uint64(l.number)
	}
	return result{cause: dispatch.OK}, params
}

// noteComputed notes when a prefill rank had computed the prompt: the rest is its transfer.
func (s legRunner) noteComputed(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.computed = at
}

// legBytes is the memory of a leg's body beyond that of the client's body.
const legBytes = 4 << 10

// paramsSource names the engine process that parameters point into.
func paramsSource(rk *rank) transfer.Source {
	return transfer.Source{Rank: rk.App + "/" + rk.ID.String(), Incarnation: rk.Incarnation}
}

// readPrefillError reads an answer that is not 2xx. Its words are kept for the client: the decode rank may
// say the same.
func (s legRunner) readPrefillError(l *pairLeg, resp *http.Response, body []byte) result {
	e := openai.ParseError(body)
	res := judgeAnswer(resp.StatusCode, &e, relay{s.req}.rankFault(l.pool, l.rank))
	l.own.busyFor = readRetryAfter(resp.Header)
	if res.cause.Row().Words {
		s.req.ends.keepWords(heldWords{res, resp.Header, body})
	}
	return res
}

// runDecode runs a decode leg: its answer goes to the client.
func (s legRunner) runDecode(cmd *dispatch.Command) (ev dispatch.Event, ok bool) {
	l, req := s.beginLeg(cmd.Number), s.req
	if l == nil {
		return ev, false
	}
	done := &msg.Done{} // if the leg panics
	defer func() { s.endLeg(l, done) }()
	req.attempt.start, req.number = l.started, l.number
	req.usage, req.countedTokens, req.stream.tokens = openai.Usage{}, 0, 0
	req.timer.attach(l.cancel)
	defer req.timer.detach()
	s.leg = l
	res := s.decodeLeg(l, cmd)
	s.leg = nil
	if l.hasTicket() {
		done = s.decodeDone(l)
	}
	ev, ok = s.endOf(l, &res)
	if l.isPassed {
		req.result = res
		ev.CanContinue = req.noteBreak(s.ctx, &res)
	} else if ok {
		s.noteEnd(l, &res)
	}
	return ev, ok
}

// decodeDone is what a decode leg has shown. The engine reports how much of the prompt the prefill rank had
// cached: of this rank's cache that says nothing.
func (s legRunner) decodeDone(l *pairLeg) *msg.Done {
	req := s.req
	d := &msg.Done{PromptTokens: req.usage.PromptTokens, CompletionTokens: req.outputTokens()}
	if !req.attempt.firstToken.IsZero() {
		d.FirstToken = req.attempt.firstToken.Sub(l.started)
	}
	if s.way == dispatch.WayRemote {
		req.usage.CachedTokens = 0
	} else {
		d.CachedTokens, d.HasCached = req.usage.CachedTokens, req.usage.HasCached
	}
	req.recordTokens()
	return d
}

// decodeLeg asks the decode rank and relays its answer.
func (s legRunner) decodeLeg(l *pairLeg, cmd *dispatch.Command) result {
	req := s.req
	q := &rankleg.Request{
		Rank: l.rank.Rank, Route: req.route, Header: req.header, Body: req.engineBody, IsHeld: true,
		Model: req.prompt.engineName,
	}
	if !cmd.IsRemote {
		s.way = dispatch.WayFallback
	} else {
		fields, id, err := s.fieldsFor(cmd.Attempt, cmd.Prefill)
		if err != nil {
			return result{cause: dispatch.NoPeer, err: err}
		}
		params, err := s.takeParams(cmd)
		if err != nil {
			return result{cause: dispatch.TooLate, err: err}
		}
		mem := req.in.bodies.take(len(s.body.Body) + len(params) + legBytes)
		if mem == nil {
			return result{cause: dispatch.NoMemory, err: errNoBodyMemory}
		}
		defer req.in.bodies.give(mem, true)
		q.Header, q.Body = s.engineHeader(l.side, id), fields.AppendDecode(mem.b, &s.body, params)
		q.Guard = s.guard(cmd)
	}
	q.Header = l.trace.Header(q.Header)
	req.armFirstToken(l.rank, q)
	resp, reply, err := l.rank.asker.Ask(l.ctx, q)
	req.timer.pause()
	req.countResend(q)
	switch {
	case err != nil:
		res := failedAsk(l.ctx, err)
		if res.cause == dispatch.ConnRefused { // no engine has seen the parameters

			if p := s.findLeg(uint32(cmd.Params)); p != nil && p.params != nil {
				p.params.PutBack()
			}
		}
		return res
	case reply.Refusal != msg.Granted:
		return result{cause: dispatch.UnitLost}
	}
	defer closeBody(resp)
	if s.warm != nil {
		return s.takeAnswer(l, resp)
	}
	return relay{req}.answer(l.ctx, resp)
}

// takeParams takes the parameters of the prefill leg, once.
func (s legRunner) takeParams(cmd *dispatch.Command) ([]byte, error) {
	if cmd.Params == 0 {
		return nil, nil
	}
	p := s.findLeg(uint32(cmd.Params))
	if p == nil || p.params == nil {
		return nil, transfer.ErrDead
	}
	var current transfer.Source
	if s.pair.prefill.findRef(cmd.Prefill) != nil {
		current = paramsSource(p.rank)
	}
	return p.params.Take(time.Now(), current)
}

// guard watches the sending of a decode leg with a prefill.
func (s legRunner) guard(cmd *dispatch.Command) *rankleg.Guard {
	fence, number, flight := cmd.Fence, cmd.Number, s.flight
	g := &rankleg.Guard{
		OnWritten: func() { flight.Tell(dispatch.Event{Kind: dispatch.EvSent, Number: number}) },
	}
	if cmd.Params != 0 {
		g.IsUsable = func() bool { return flight.IsUsable(&fence) }
		g.TimeLeft = func() time.Duration { return flight.TimeLeft(&fence) }
	}
	return g
}
