// Package dispatch decides the life of one request: which ranks it may ask, when it asks another one, what
// counts against a rank, and whose words the client gets. A Plan has one leg, or two: a prefill rank computes
// the prompt, and a decode rank takes the KV blocks over and answers. The package does no IO.
package dispatch

import (
	"time"

	"github.com/dpserve/dpserve/routing"
)

// Order is when the two legs of a request start.
type Order uint8

// The orders.
const (
	PrefillFirst Order = iota // the decode leg needs what the prefill leg answered
	DecodeFirst               // the prefill leg starts once the decode leg has been written
	Together                  // both legs start at once
)

// Config is what an application sets for all its requests.
type Config struct {
	IsAlone  bool // one pool: a request has one leg, which takes its ticket and sends at once
	IsHeld   bool // a reservation: it ends with its tickets, and nothing is sent
	Attempts int  // legs that may fail; a first fallback is always allowed
	PerRank  int  // of them on one rank; below 1 counts as 1
	Refusals int  // ranks that may refuse

	// of an application with two pools

	Order         Order
	FallbackFails bool          // disaggregation.fallback: fail
	Lease         time.Duration // how long a prefill engine keeps a prompt that no decode engine has read
	PrefillLimit  time.Duration // of a prefill leg
	DecodeLimit   time.Duration // of a decode leg with a prefill, to its first byte
	LocalLimit    time.Duration // of a decode leg without, to its first byte
}

// assumedRead is how long after the start of its leg a decode rank counts as having read the prompt if its
// answer comes as a whole. Only the count of what the prefill rank holds depends on it: from its arrival on,
// an engine renews the lease itself.
const assumedRead = 2 * time.Second

// lastWords is how long an engine that has a request may take to die of it: so long a leg goes on when the
// engine of the other one has died, and so long the next decode leg is alone at its engine.
const lastWords = time.Second

// Plan decides everything about one request. It is pure: the same events at the same instants give the same
// commands. DESIGN.md has its states. Begin makes it ready, and may be called again.
type Plan struct {
	cfg Config
	at  Instant
	out []Command

	legs   [2]leg
	want   [2]bool // of the pick under way
	pick   uint32  // number of it; 0 = none
	asked  uint32  // number of the leg of an Ask that is not answered; 0 = none
	issued uint32  // the last number
	open   int     // picks, reservations and asks that are not answered

	whole   bool // the answer comes as a whole
	remote  bool // a prefill rank computes the prompt
	bereft  bool // the engine of one leg has died, and the other leg is heard for a moment: lastWords
	way     Way
	read    bool               // the decode rank has the prompt
	begun   bool               // the client has the beginning of the answer
	attempt uint32             // of a pair
	params  uint64             // of the prefill leg that is done; 0 = none
	fence   Fence              // of params
	unlike  [2]routing.RankRef // of a pair that failed, to be picked again only if there is no other

	history
	ended bool
}

// leg is one side: a rank, its ticket, and the one leg that uses it.
type leg struct {
	rank    routing.RankRef
	number  uint32 // of the reservation and its leg
	ticket  ticketState
	state   legState
	isError bool          // passed: the engine's error goes to the client
	started time.Duration // the leg; of a prefill leg that is answered, the answer
	limit   time.Duration // when the leg is given up; 0: the shell knows
}

type ticketState uint8

const (
	ticketNone ticketState = iota
	ticketAsked
	ticketHeld // or to be taken by an Ask
)

type legState uint8

const (
	legIdle     legState = iota
	legStarted           // decode: perhaps not written yet
	legSent              // decode: written
	legPassed            // decode: the client gets its bytes
	legAnswered          // prefill: the prompt is computed
	legOver              // the engine's answer or connection has ended
)

// Begin makes the plan of a new request. whole: its answer comes as a whole, so its first byte comes with its
// last.
func (p *Plan) Begin(cfg *Config, whole bool) {
	p.reset()
	*p = Plan{cfg: *cfg, whole: whole, out: p.out[:0], history: p.history}
}

// Step tells the plan an event and returns what to do, in this order. The commands are valid until the next
// Step.
func (p *Plan) Step(at Instant, ev *Event) []Command {
	p.out = p.out[:0]
	p.at = Instant{Now: max(p.at.Now, at.Now), Gap: max(p.at.Gap, at.Gap)}
	switch {
	case ev.Kind == EvPicked, ev.Kind == EvNoRank, ev.Kind == EvReserved, ev.Kind == EvRefused,
		ev.Kind == EvEnded && ev.Number == p.asked && p.asked != 0:
		p.open--
	}
	switch ev.Kind {
	case EvTick:
	case EvStart:
		p.choose(!p.cfg.IsAlone, true, false)
	case EvPicked, EvNoRank:
		p.onPick(ev)
	case EvReserved, EvRefused:
		p.onTicket(ev)
	case EvFenced:
		p.onFenced(ev)
	case EvClientGone:
		p.end(AnswerNone, GivenUp, ResultClientGone)
	case EvDeadline:
		p.end(AnswerDeadline, Deadline, ResultDeadline)
	default:
		p.onLeg(ev)
	}
	p.expire()
	p.advance()
	return p.out
}

// IsEnded reports whether the request is over for its client.
func (p *Plan) IsEnded() bool { return p.ended }

// IsSettled reports whether it is over and every question to the shell is answered: the plan may go.
func (p *Plan) IsSettled() bool { return p.ended && p.open == 0 }

// Tried are the ranks of a side that must not be picked again.
func (p *Plan) Tried(s Side) []Excluded { return p.tried[s] }

// Deadline is when the plan wants a tick at the latest; ok is false if it waits for no time.
func (p *Plan) Deadline() (at time.Duration, ok bool) {
	add := func(t time.Duration) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	for s := range p.legs {
		if l := &p.legs[s]; l.waits() {
			add(l.limit)
		}
	}
	if p.params != 0 && p.legs[Decode].state == legIdle {
		add(p.fence.Deadline)
	}
	if t, isAwaited := p.readTime(); isAwaited {
		add(t)
	}
	if t, isAwaited := p.joinTime(); isAwaited {
		add(t)
	}
	return at, ok
}

// readTime is when the decode rank of an answer that comes as a whole counts as having read the prompt, and
// the prefill rank is released; ok is false if nothing of the kind is awaited.
func (p *Plan) readTime() (at time.Duration, ok bool) {
	pre, dec := &p.legs[Prefill], &p.legs[Decode]
	if !p.whole || pre.state != legAnswered || dec.state != legSent {
		return 0, false
	}
	return max(pre.started, dec.started) + assumedRead, true
}

// waits reports whether the leg has a limit: the time between the bytes of a stream is the shell's business.
func (l *leg) waits() bool { return l.limit != 0 && (l.state == legStarted || l.state == legSent) }

// isRunning reports whether the engine may be at work for the leg.
func (l *leg) isRunning() bool {
	return l.state == legStarted || l.state == legSent || l.state == legPassed
}

// advance starts the legs for which everything is there.
func (p *Plan) advance() {
	pre, dec := &p.legs[Prefill], &p.legs[Decode]
	switch isReady := dec.ticket == ticketHeld && dec.state == legIdle; {
	case p.ended:
	case p.cfg.IsHeld:
		if dec.ticket == ticketHeld && (!p.remote || pre.ticket == ticketHeld) {
			p.ended = true
			p.out = append(p.out, Command{Kind: CmdAnswer, Answer: AnswerTickets})
		}
	case !p.remote:
		if isReady {
			p.start(Decode, p.cfg.LocalLimit)
		}
	case p.cfg.Order == PrefillFirst:
		if dec.ticket == ticketHeld && pre.ticket == ticketHeld && pre.state == legIdle {
			p.start(Prefill, p.cfg.PrefillLimit)
		}
		if pre.state == legAnswered && isReady {
			p.start(Decode, p.cfg.DecodeLimit)
		}
	default:
		if isReady && pre.ticket == ticketHeld && pre.state == legIdle {
			p.start(Decode, p.cfg.PrefillLimit+p.cfg.DecodeLimit)
		}
		if at, ok := p.joinTime(); ok && p.at.Now >= at {
			p.start(Prefill, p.cfg.PrefillLimit)
		}
	}
}

// joinTime is when the prefill leg starts beside the decode leg; ok is false if it does not yet. After a
// death the decode engine has some time to show that the request does not kill it: both of a pair must not
// die.
func (p *Plan) joinTime() (at time.Duration, ok bool) {
	pre, dec := &p.legs[Prefill], &p.legs[Decode]
	if at = dec.started; p.deaths > 0 {
		at += lastWords
	}
	return at, p.remote && p.cfg.Order != PrefillFirst && pre.ticket == ticketHeld && pre.state == legIdle &&
		(dec.state == legSent || p.cfg.Order == Together && dec.state == legStarted)
}

// start starts the leg of a side.
func (p *Plan) start(s Side, limit time.Duration) {
	l := &p.legs[s]
	l.state, l.started, l.limit = legStarted, p.at.Now, p.at.Now+limit
	cmd := Command{Kind: CmdSend, Number: l.number, Side: s, Attempt: p.attempt, Rank: l.rank}
	if p.params != 0 && !p.whole {
		l.limit = min(l.limit, p.fence.ReadBy)
	}
	if s == Decode && p.remote {
		cmd.IsRemote, cmd.Params, cmd.Fence, cmd.Prefill = true, p.params, p.fence, p.legs[Prefill].rank
	}
	p.out = append(p.out, cmd)
}

// expire gives up what has taken too long.
func (p *Plan) expire() {
	pre, dec := &p.legs[Prefill], &p.legs[Decode]
	if p.ended {
		return
	}
	if pre.waits() && p.at.Now >= pre.limit {
		p.failPrefill(p.late(pre))
	}
	if p.params != 0 && dec.state == legIdle && !p.fence.IsUsable(p.at) {
		p.note(NoteParamsLate)
		p.redo()
	}
	if dec.waits() && p.at.Now >= dec.limit {
		if p.remote { // any of the two may have stood still
			p.failPair(p.late(dec))
		} else {
			p.failAlone(p.late(dec))
		}
	}
	if t, ok := p.readTime(); ok && p.at.Now >= t {
		p.read = true
		p.release(Prefill, OK, false)
		p.read = false
	}
}

// late is the end of a leg that has taken too long. If the process stood still, the rank may have answered.
func (p *Plan) late(l *leg) *Event {
	ev := &Event{Kind: EvEnded, Cause: FirstToken, Number: l.number, Rank: l.rank}
	if p.at.Gap > l.started {
		ev.Cause = StoodStill
	}
	return ev
}

// choose asks for ranks of the sides, beside what is being asked for already. pays: see CmdPick.
func (p *Plan) choose(prefill, decode, pays bool) {
	p.cancelPick()
	p.want[Prefill], p.want[Decode] = p.want[Prefill] || prefill, p.want[Decode] || decode
	p.pick = p.next()
	cmd := Command{Kind: CmdPick, Number: p.pick, Want: p.want, Pays: pays}
	if p.remote || p.want[Prefill] { // a decode rank alone needs no partner
		cmd.Prefill, cmd.Decode = p.legs[Prefill].rank, p.legs[Decode].rank
		cmd.Unlike = p.unlike
	}
	p.out, p.open = append(p.out, cmd), p.open+1
}

func (p *Plan) cancelPick() {
	if p.pick != 0 {
		p.out = append(p.out, Command{Kind: CmdCancel, Number: p.pick})
		p.pick = 0
	}
}

func (p *Plan) next() uint32 {
	p.issued++
	return p.issued
}

func (p *Plan) note(n Note) { p.out = append(p.out, Command{Kind: CmdNote, Note: n}) }

// reserve asks rank for a ticket. The only leg of a request takes its ticket and is sent in one.
func (p *Plan) reserve(s Side, rank routing.RankRef) {
	p.open++
	l := leg{rank: rank, number: p.next(), ticket: ticketAsked}
	cmd := Command{Kind: CmdReserve, Number: l.number, Side: s, Rank: rank}
	if p.cfg.IsAlone && !p.cfg.IsHeld {
		l.ticket, l.state, l.started = ticketHeld, legStarted, p.at.Now
		cmd.Kind, p.asked = CmdAsk, l.number
	}
	p.legs[s] = l
	p.out = append(p.out, cmd)
}

// release ends a side: its leg is cancelled if it runs, and its ticket goes back.
func (p *Plan) release(s Side, why Cause, charge bool) {
	l := &p.legs[s]
	if l.ticket == ticketAsked || l.isRunning() {
		p.out = append(p.out, Command{Kind: CmdCancel, Number: l.number, Side: s, Rank: l.rank})
		if s == Decode {
			p.alarm()
		}
	}
	if l.ticket == ticketHeld {
		cmd := Command{Kind: CmdRelease, Number: l.number, Side: s, Rank: l.rank, Cause: why, Charge: charge}
		switch l.state {
		case legIdle:
			cmd.Cause = Unused
		case legStarted, legSent, legPassed, legOver:
		case legAnswered:
			cmd.Cause = OK
			if !p.read { // no decode engine has told the prefill engine that it may drop the prompt
				cmd.HeldUntil = l.started + p.cfg.Lease
			}
		}
		p.out = append(p.out, cmd)
	}
	*l = leg{}
}

// isDoubtful reports whether the decode leg that is under way may have read memory of another prompt: it was
// perhaps written too late, or had the time to read too late. While the process stood still, the prefill rank
// may have been restarted, and nothing has cancelled the leg.
func (p *Plan) isDoubtful() bool {
	switch d := &p.legs[Decode]; {
	case p.params == 0:
		return false
	case d.state == legStarted:
		return !p.fence.IsUsable(p.at)
	default:
		return d.state == legSent && (!p.whole && p.at.Now >= p.fence.ReadBy || p.at.Gap > p.fence.Since)
	}
}

// alarm reports that the decode rank's cache may hold wrong blocks, if that is so.
func (p *Plan) alarm() {
	if p.isDoubtful() {
		p.out = append(p.out, Command{
			Kind: CmdAlarm, Side: Decode, Rank: p.legs[Decode].rank, Prefill: p.fence.Prefill,
		})
	}
}

// discard drops the parameters.
func (p *Plan) discard() {
	if p.params != 0 {
		p.out = append(p.out, Command{Kind: CmdDiscard, Params: p.params})
	}
	p.params, p.fence = 0, Fence{}
}

// end ends the request: whatever runs is cancelled, and both sides are released. why is for an answer of
// dpserve's own.
func (p *Plan) end(a AnswerKind, why Cause, r Result) {
	if p.ended {
		return
	}
	p.ended = true
	if p.begun && a != AnswerNone && a != AnswerDeadline {
		a, r = AnswerStreamLost, ResultStreamLost
	}
	p.cancelPick()
	p.release(Decode, GivenUp, false)
	p.release(Prefill, GivenUp, false)
	p.discard()
	if p.pardons {
		p.out = append(p.out, Command{Kind: CmdPardon, Side: p.chargedSide, Rank: p.charged.Rank})
	}
	if a != AnswerNone {
		p.out = append(p.out, Command{Kind: CmdAnswer, Answer: a, Cause: why})
	}
	p.out = append(p.out, Command{Kind: CmdCount, Way: p.way, Result: r})
}
