// Package pdproxy gives a request to two ranks: a prefill rank computes its prompt, and a decode rank takes
// the KV blocks over and answers. Core holds every decision about one request and does no IO.
package pdproxy

import (
	"time"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/routing"
)

// Config is what an application sets for all its requests.
type Config struct {
	Order         transfer.Order
	FallbackFails bool          // disaggregation.fallback: fail
	Lease         time.Duration // how long a prefill engine keeps a prompt that no decode engine has read
	PrefillLimit  time.Duration // of a prefill leg
	DecodeLimit   time.Duration // of a decode leg with a prefill, to its first byte
	LocalLimit    time.Duration // of a decode leg without, to its first byte
	MaxDecodes    int           // decode legs that may fail on their own account
}

const (
	// maxRefusals is how many ranks of a side may refuse a request.
	maxRefusals = 3
	// assumedRead is how long after the start of its leg a decode rank counts as having read the prompt if
	// its answer comes as a whole. Only the count of what the prefill rank holds depends on it: from its
	// arrival on, an engine renews the lease itself.
	assumedRead = 2 * time.Second
)

// Core decides everything about one request's two legs. It is pure: the same events at the same instants give
// the same commands. DESIGN.md has its states.
type Core struct {
	cfg Config
	at  Instant
	out []Command

	halves [2]half
	want   [2]bool // of the choice under way
	choice uint32  // number of it; 0 = none
	last   uint32  // number
	open   int     // choices and reservations that are not answered

	whole   bool // the answer comes as a whole
	remote  bool // a prefill rank computes the prompt
	way     Way
	read    bool               // the decode rank has the prompt
	attempt uint32             // of a pair
	params  uint64             // of the prefill leg that is done; 0 = none
	fence   Fence              // of params
	unlike  [2]routing.RankRef // of a pair that failed, to be chosen again only if there is no other

	failures
	ended bool
}

// failures are what the request has been through.
type failures struct {
	tried    [2][]routing.RankRef
	refusals [2]int
	redone   bool // the prefill was done again, which happens once
	decodes  int  // decode legs that failed on their own account
	deaths   int
}

// half is one side: a rank, its reservation, and the one leg that uses it.
type half struct {
	rank    routing.RankRef
	number  uint32 // of the reservation and its leg
	ticket  ticketState
	leg     legState
	started time.Duration // the leg; of a prefill leg that is answered, the answer
	limit   time.Duration // when the leg is given up
}

type ticketState uint8

const (
	ticketNone ticketState = iota
	ticketAsked
	ticketHeld
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

// Step tells the core an event and returns what to do, in this order. The commands are valid until the next
// Step.
func (c *Core) Step(at Instant, ev Event) []Command {
	c.out = c.out[:0]
	c.at = Instant{Now: max(c.at.Now, at.Now), Gap: max(c.at.Gap, at.Gap)}
	switch ev.Kind {
	case EvChosen, EvNoRank, EvReserved, EvRefused:
		c.open--
	default:
	}
	switch ev.Kind {
	case EvTick:
	case EvStart:
		c.whole = ev.Whole
		c.choose(true, true)
	case EvChosen, EvNoRank:
		c.onChoice(&ev)
	case EvReserved, EvRefused:
		c.onTicket(&ev)
	case EvFenced:
		c.onFenced(&ev)
	case EvClientGone:
		c.end(AnswerNone, OutcomeClientGone, 0)
	case EvDeadline:
		c.end(AnswerDeadline, OutcomeDeadline, 0)
	default:
		c.onLeg(&ev)
	}
	c.expire()
	c.advance()
	return c.out
}

// IsEnded reports whether the request is over for its client.
func (c *Core) IsEnded() bool { return c.ended }

// IsSettled reports whether it is over and every question to the shell is answered: the core may go.
func (c *Core) IsSettled() bool { return c.ended && c.open == 0 }

// Tried are the ranks of a side that must not be chosen again.
func (c *Core) Tried(s Side) []routing.RankRef { return c.tried[s] }

// Deadline is when the core wants a tick at the latest; ok is false if it waits for no time.
func (c *Core) Deadline() (at time.Duration, ok bool) {
	add := func(t time.Duration) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	for s := range c.halves {
		if h := &c.halves[s]; h.waits() {
			add(h.limit)
		}
	}
	if c.params != 0 && c.halves[Decode].leg == legIdle {
		add(c.fence.Deadline)
	}
	if t, isAwaited := c.readTime(); isAwaited {
		add(t)
	}
	return at, ok
}

// readTime is when the decode rank of an answer that comes as a whole counts as having read the prompt, and
// the prefill rank is released; ok is false if nothing of the kind is awaited.
func (c *Core) readTime() (at time.Duration, ok bool) {
	p, d := &c.halves[Prefill], &c.halves[Decode]
	if !c.whole || p.leg != legAnswered || d.leg != legSent {
		return 0, false
	}
	return max(p.started, d.started) + assumedRead, true
}

// waits reports whether the leg has a limit: the time between the bytes of a stream is the shell's business.
func (h *half) waits() bool { return h.leg == legStarted || h.leg == legSent }

// advance starts the legs for which everything is there.
func (c *Core) advance() {
	p, d := &c.halves[Prefill], &c.halves[Decode]
	switch isReady := d.ticket == ticketHeld && d.leg == legIdle; {
	case c.ended:
	case !c.remote:
		if isReady {
			c.start(Decode, CmdStartLocal, c.cfg.LocalLimit)
		}
	case c.cfg.Order == transfer.PrefillFirst:
		if d.ticket == ticketHeld && p.ticket == ticketHeld && p.leg == legIdle {
			c.start(Prefill, CmdStartPrefill, c.cfg.PrefillLimit)
		}
		if p.leg == legAnswered && isReady {
			c.start(Decode, CmdStartDecode, c.cfg.DecodeLimit)
		}
	default:
		if isReady && p.ticket == ticketHeld && p.leg == legIdle {
			c.start(Decode, CmdStartDecode, c.cfg.PrefillLimit+c.cfg.DecodeLimit)
		}
		if p.ticket == ticketHeld && p.leg == legIdle &&
			(d.leg == legSent || c.cfg.Order == transfer.Together && d.leg == legStarted) {
			c.start(Prefill, CmdStartPrefill, c.cfg.PrefillLimit)
		}
	}
}

// start starts the leg of a side.
func (c *Core) start(s Side, kind CommandKind, limit time.Duration) {
	h := &c.halves[s]
	h.leg, h.started, h.limit = legStarted, c.at.Now, c.at.Now+limit
	cmd := Command{Kind: kind, Number: h.number, Side: s, Attempt: c.attempt, Rank: h.rank}
	if c.params != 0 && !c.whole {
		h.limit = min(h.limit, c.fence.ReadBy)
	}
	if kind == CmdStartDecode {
		cmd.Params, cmd.Fence, cmd.Prefill = c.params, c.fence, c.halves[Prefill].rank
	}
	c.out = append(c.out, cmd)
}

// expire gives up what has taken too long.
func (c *Core) expire() {
	p, d := &c.halves[Prefill], &c.halves[Decode]
	if c.ended {
		return
	}
	if p.waits() && c.at.Now >= p.limit {
		c.failPrefill(c.lateEnding(p))
	}
	if c.params != 0 && d.leg == legIdle && !c.fence.IsUsable(c.at) {
		c.note(NoteParamsLate)
		c.redo()
	}
	if d.waits() && c.at.Now >= d.limit {
		if c.remote {
			c.note(NoteDecodeLate) // any of the two may have stood still
			c.release(Decode, EndCancelled)
			c.redo()
		} else {
			c.failLocal(c.lateEnding(d))
		}
	}
	if t, ok := c.readTime(); ok && c.at.Now >= t {
		c.read = true
		c.release(Prefill, EndOK)
		c.read = false
	}
}

// lateEnding is EndLate, unless the process stood still while the rank may have answered.
func (c *Core) lateEnding(h *half) Ending {
	if c.at.Gap > h.started {
		return EndCancelled
	}
	return EndLate
}

// choose asks for ranks of the sides, beside what is being asked for already.
func (c *Core) choose(prefill, decode bool) {
	c.cancelChoice()
	c.want[Prefill], c.want[Decode] = c.want[Prefill] || prefill, c.want[Decode] || decode
	c.choice = c.next()
	cmd := Command{
		Kind: CmdChoose, Number: c.choice, WantPrefill: c.want[Prefill], WantDecode: c.want[Decode],
	}
	if c.remote || c.want[Prefill] { // a decode rank alone needs no partner
		cmd.Prefill, cmd.Decode = c.halves[Prefill].rank, c.halves[Decode].rank
		cmd.Unlike = c.unlike
	}
	c.out, c.open = append(c.out, cmd), c.open+1
}

func (c *Core) cancelChoice() {
	if c.choice != 0 {
		c.out = append(c.out, Command{Kind: CmdCancel, Number: c.choice})
		c.choice = 0
	}
}

func (c *Core) next() uint32 {
	c.last++
	return c.last
}

func (c *Core) note(n Note) { c.out = append(c.out, Command{Kind: CmdNote, Note: n}) }

// reserve asks rank for a ticket.
func (c *Core) reserve(s Side, rank routing.RankRef) {
	c.halves[s] = half{rank: rank, number: c.next(), ticket: ticketAsked}
	c.out = append(c.out, Command{Kind: CmdReserve, Number: c.halves[s].number, Side: s, Rank: rank})
	c.open++
}

// release ends a side: its leg is cancelled if it runs, and its ticket goes back.
func (c *Core) release(s Side, e Ending) {
	h := &c.halves[s]
	if h.ticket == ticketAsked || h.leg == legStarted || h.leg == legSent || h.leg == legPassed {
		c.out = append(c.out, Command{Kind: CmdCancel, Number: h.number, Side: s, Rank: h.rank})
		if s == Decode {
			c.alarm()
		}
	}
	if h.ticket == ticketHeld {
		cmd := Command{Kind: CmdRelease, Number: h.number, Side: s, Rank: h.rank, Ending: e}
		switch h.leg {
		case legIdle:
			cmd.Ending = EndUnused
		case legStarted, legSent, legPassed, legOver:
		case legAnswered:
			cmd.Ending = EndOK
			if !c.read { // no decode engine has told the prefill engine that it may drop the prompt
				cmd.HeldUntil = h.started + c.cfg.Lease
			}
		}
		c.out = append(c.out, cmd)
	}
	*h = half{}
}

// isDoubtful reports whether the decode leg that is under way may have read memory of another prompt: it was
// perhaps written too late, or had the time to read too late. While the process stood still, the prefill rank
// may have been restarted, and nothing has cancelled the leg.
func (c *Core) isDoubtful() bool {
	switch d := &c.halves[Decode]; {
	case c.params == 0:
		return false
	case d.leg == legStarted:
		return !c.fence.IsUsable(c.at)
	default:
		return d.leg == legSent && (!c.whole && c.at.Now >= c.fence.ReadBy || c.at.Gap > c.fence.Since)
	}
}

// alarm reports that the decode rank's cache may hold wrong blocks, if that is so.
func (c *Core) alarm() {
	if c.isDoubtful() {
		c.out = append(c.out, Command{
			Kind: CmdAlarm, Side: Decode, Rank: c.halves[Decode].rank, Prefill: c.fence.Prefill,
		})
	}
}

// discard drops the parameters.
func (c *Core) discard() {
	if c.params != 0 {
		c.out = append(c.out, Command{Kind: CmdDiscard, Params: c.params})
	}
	c.params, c.fence = 0, Fence{}
}

// avoid excludes the side's rank from later choices.
func (c *Core) avoid(s Side) { c.tried[s] = append(c.tried[s], c.halves[s].rank) }

// end ends the request: whatever runs is cancelled, and both sides are released. passed is the leg whose
// answer the client gets, if that is meant.
func (c *Core) end(a Answer, o Outcome, passed uint32) {
	if c.ended {
		return
	}
	c.ended = true
	c.cancelChoice()
	c.release(Decode, EndCancelled)
	c.release(Prefill, EndCancelled)
	c.discard()
	if a != AnswerNone {
		c.out = append(c.out, Command{Kind: CmdAnswer, Answer: a, Number: passed})
	}
	c.out = append(c.out, Command{Kind: CmdCount, Way: c.way, Outcome: o})
}

// Transfer parameters name memory of a prefill engine, which may give that memory to another prompt when its
// lease has ended. Neither engine notices: the decode engine answers 200 with a wrong text. So the age of
// parameters must never be underestimated. The proxy learns of a prefill's answer when it reads it, and that
// may be much later than it came if the process stood still meanwhile.

const (
	// WatchPeriod is how often the process must call Watch.At.
	WatchPeriod = 250 * time.Millisecond
	// maxGap is how long the process may be silent before it counts as having stood still. It is well within
	// the margin of a lease.
	maxGap = 2 * time.Second
)

// Instant is a time with what is known about the process.
type Instant struct {
	// since an arbitrary origin, on a clock that goes on while the process is stopped or the machine sleeps
	Now time.Duration
	// when the process was last seen to run again after it had stood still for more than maxGap; 0 = never
	Gap time.Duration
}

// Watch notices that the process stood still: stopped by a signal, frozen with its machine, starved. There is
// one per process. The caller serializes its calls.
type Watch struct{ last, gap time.Duration }

// At is the present instant. It must be called at least every WatchPeriod, and for every Step.
func (w *Watch) At(now time.Duration) Instant {
	if now-w.last > maxGap {
		w.gap = now
	}
	w.last = max(w.last, now)
	return Instant{Now: w.last, Gap: w.gap}
}

// Fence bounds the use of one prefill's parameters: to its incarnation, to a deadline below its lease, and to
// a process that did not stand still since the prefill began.
type Fence struct {
	Prefill  routing.RankRef
	Since    time.Duration // when the prefill leg was started
	Deadline time.Duration // of the write
	// of the first byte of the answer to it: a decode engine may begin to read long after it has the request,
	// and nothing renews the lease before
	ReadBy time.Duration
}

// IsUsable reports whether the parameters may be sent at that instant. The Core asks when it decides; its
// shell asks again directly before it writes the request.
func (f *Fence) IsUsable(at Instant) bool { return at.Now < f.Deadline && at.Gap <= f.Since }

func newFence(p routing.RankRef, since, answered, lease time.Duration) Fence {
	r := transfer.Usable(lease)
	return Fence{Prefill: p, Since: since, Deadline: answered + r, ReadBy: answered + (r+lease)/2}
}
