package dispatch

import (
	"container/heap"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/routing"
)

const fakeLease = 30 * time.Second

// world is a proxy with prefill and decode engines on one timeline. It stops, kills and restarts them at
// random. Engines are those that were observed: a decode engine reads whatever the parameters point to,
// checks nothing, and caches what it has read under the prompt.
type world struct {
	rnd   *rand.Rand
	now   time.Duration
	due   worldQueue
	n     int
	ranks [2][]*fakeRank

	rate  float64 // of the proxy's clock
	watch Watch
	walkFaults
	frozenUntil time.Duration
	deferred    []func(at Instant) // what the proxy does when it runs again
	known       map[*fakeRank]uint64
	flights     map[*flight]bool
	cfg         Config

	wrong, passed, twice, unfair, badRelease int
	leaked, overdue                          int
	mostDeaths                               int // of one request
	results                                  map[Result]int
	ways                                     map[Way]int
	notes                                    map[Note]int
	alarms                                   int
	longest                                  time.Duration
	waitsForDead                             int
	all                                      []*flight
}

// walkFaults says what goes wrong in a walk beside the engines' own errors and deaths.
type walkFaults struct {
	engines bool    // engines stand still
	stalls  bool    // the proxy stands still
	isBlind bool    // it does not notice that
	poison  float64 // percent of requests of which every engine dies
	hides   bool    // a leg whose engine died looks like one that was refused the connection
}

type worldEvent struct {
	at time.Duration
	n  int
	do func()
}

type worldQueue []worldEvent

func (q worldQueue) Len() int { return len(q) }
func (q worldQueue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}
func (q worldQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *worldQueue) Push(x any)   { *q = append(*q, x.(worldEvent)) }
func (q *worldQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func (w *world) after(d time.Duration, do func()) {
	w.n++
	heap.Push(&w.due, worldEvent{w.now + d, w.n, do})
}

// between is a random time, mostly near the lower end.
func (w *world) between(from, to time.Duration) time.Duration {
	x := w.rnd.Float64()
	return from + time.Duration(x*x*float64(to-from))
}

func (w *world) chance(percent float64) bool { return w.rnd.Float64()*100 < percent }

// proxy lets the proxy do something after d, or when it runs again.
func (w *world) proxy(d time.Duration, do func(at Instant)) {
	w.after(d, func() {
		if w.now < w.frozenUntil {
			w.deferred = append(w.deferred, do)
			return
		}
		do(w.instant())
	})
}

func (w *world) instant() Instant {
	at := w.watch.At(time.Duration(float64(w.now)*w.rate) + time.Hour)
	if w.isBlind {
		at.Gap = 0
	}
	return at
}

// open are the requests that are not settled, oldest first.
func (w *world) open() []*flight {
	w.all = slices.DeleteFunc(w.all, func(f *flight) bool { return !w.flights[f] })
	return slices.Clone(w.all)
}

// freezeProxy stops the proxy. When it runs again, it does what has come meanwhile in any order.
func (w *world) freezeProxy(d time.Duration) {
	if w.now < w.frozenUntil {
		return
	}
	w.frozenUntil = w.now + d
	w.after(d, func() {
		todo := w.deferred
		w.deferred = nil
		w.rnd.Shuffle(len(todo), func(i, j int) { todo[i], todo[j] = todo[j], todo[i] })
		for _, do := range todo {
			do(w.instant())
		}
	})
}

// fakeRank is an engine with its actor.
type fakeRank struct {
	w           *world
	side        Side
	id          routing.RankID
	incarnation uint64
	isAlive     bool
	frozenUntil time.Duration
	legs        map[*fakeLeg]bool
	order       []*fakeLeg  // in which they came
	slots       []*fakeSlot // prefill: memory
	cache       map[int]int // decode: content by prompt
}

func (r *fakeRank) ref() routing.RankRef {
	return routing.RankRef{ID: r.id, Incarnation: r.incarnation}
}

// unit is a number of the incarnation.
func (r *fakeRank) unit(incarnation uint64) uint64 {
	return incarnation<<8 + uint64(r.side)<<4 + uint64(r.id.Rank()) + 1
}

// fakeSlot is memory for one prompt. It keeps its content until another prompt gets it.
type fakeSlot struct {
	content int
	owner   *fakeParams // nil = free
}

// fakeParams point to a slot.
type fakeParams struct {
	rank        *fakeRank
	incarnation uint64
	slot        *fakeSlot
	used        int
}

// fakeLeg is a request at an engine.
type fakeLeg struct {
	f        *flight
	rank     *fakeRank
	ref      routing.RankRef // of its incarnation
	number   uint32
	params   *fakeParams
	isOver   bool // the engine knows that nobody waits
	isFaulty bool // what happens to it is its rank's fault
	isError  bool // what it answers is an error
	isPassed bool // the client has the beginning of its answer
	text     int
	inbox    []Event // that the proxy has not read
}

// after does something after d, unless this incarnation is dead by then.
func (r *fakeRank) after(d time.Duration, do func()) {
	ref := r.ref()
	r.w.after(d, func() {
		if r.isAlive && r.ref() == ref {
			do()
		}
	})
}

// awake does something when the engine runs, after d.
func (r *fakeRank) awake(d time.Duration, do func()) {
	r.w.after(d, func() {
		if wait := r.frozenUntil - r.w.now; wait > 0 {
			r.awake(wait+r.w.between(0, 5*time.Millisecond), do)
			return
		}
		do()
	})
}

// kill ends the engine; another incarnation comes later. The proxy learns both with a delay.
func (r *fakeRank) kill() {
	if !r.isAlive {
		return
	}
	w, old := r.w, r.ref()
	r.isAlive, r.frozenUntil = false, 0
	for _, l := range r.order {
		if !r.legs[l] {
			continue
		}
		l.isFaulty = true
		cause := Reset
		if w.hides {
			cause = ConnRefused
		}
		if l.isPassed {
			cause = UpstreamLost
		}
		l.tell(w.between(0, 20*time.Millisecond), Event{
			Kind: EvEnded, Cause: cause, CanContinue: !w.isBlind && w.chance(70),
		})
		l.isOver = true
	}
	r.legs, r.order = map[*fakeLeg]bool{}, nil
	w.proxy(w.between(20*time.Millisecond, 300*time.Millisecond), func(at Instant) {
		if w.known[r] == old.Incarnation {
			delete(w.known, r)
		}
		for _, f := range w.open() {
			f.step(at, Event{
				Kind: EvFenced, Side: r.side, Rank: old, Unit: r.unit(old.Incarnation), EngineFailed: true,
			})
			for s := range f.plan.legs {
				if h := &f.plan.legs[s]; Side(s) == r.side && h.rank == old && h.number != 0 {
					w.waitsForDead++
				}
			}
		}
	})
	w.after(w.between(2*time.Second, 6*time.Second), func() {
		r.incarnation++
		r.isAlive, r.cache = true, map[int]int{}
		for _, s := range r.slots {
			s.owner = nil
		}
		up := r.incarnation
		w.proxy(100*time.Millisecond, func(Instant) {
			if r.isAlive && r.incarnation == up {
				w.known[r] = up
			}
		})
	})
}

// tell sends the proxy an event of the leg.
func (l *fakeLeg) tell(d time.Duration, ev Event) {
	ev.Number, ev.Side, ev.Rank = l.number, l.rank.side, l.ref
	ev.Unit = l.rank.unit(l.ref.Incarnation)
	l.f.w.after(d, func() { // what comes on one connection keeps its order
		l.inbox = append(l.inbox, ev)
		l.f.w.proxy(0, func(at Instant) {
			first := l.inbox[0]
			l.inbox = l.inbox[1:]
			l.f.step(at, first)
		})
	})
}

// accept begins a leg at the engine, unless it is not there any more.
func (r *fakeRank) accept(l *fakeLeg, ref routing.RankRef) bool {
	if !r.isAlive || r.ref() != ref || r.w.chance(0.5) {
		l.isFaulty = true
		l.tell(time.Millisecond, Event{Kind: EvEnded, Cause: ConnRefused})
		return false
	}
	r.legs[l] = true
	r.order = append(r.order, l)
	return true
}

// finish ends a leg at the engine, and reports whether anybody waits for it.
func (r *fakeRank) finish(l *fakeLeg) bool {
	was := r.legs[l] && !l.isOver
	delete(r.legs, l)
	return was
}

// refuse answers a decode leg with a status of 400.
func (l *fakeLeg) refuse() {
	l.isError = true
	l.tell(0, Event{Kind: EvAnswered, Cause: Passed})
	l.tell(0, Event{Kind: EvEnded, Cause: Passed})
}

// prefill computes a prompt and keeps it for a lease.
func (r *fakeRank) prefill(l *fakeLeg, asksParams bool) {
	w := r.w
	r.awake(w.between(30*time.Millisecond, 500*time.Millisecond), func() {
		if !r.finish(l) {
			return
		}
		switch {
		case l.f.isBad:
			l.tell(0, Event{Kind: EvEnded, Cause: Passed})
		case w.chance(1):
			l.isFaulty = true
			l.tell(0, Event{Kind: EvEnded, Cause: EngineError})
		case w.chance(1):
			l.tell(0, Event{Kind: EvEnded, Cause: Busy})
		case w.chance(0.5) || !asksParams:
			l.tell(w.between(0, 10*time.Millisecond), Event{Kind: EvEnded})
		default:
			p := &fakeParams{rank: r, incarnation: r.incarnation, slot: r.slot()}
			p.slot.content, p.slot.owner = l.f.prompt, p
			r.awake(fakeLease, func() { p.free() })
			w.n++
			handle := uint64(w.n)
			l.f.params[handle] = p
			l.tell(w.between(0, 10*time.Millisecond), Event{Kind: EvEnded, Params: handle})
		}
	})
}

// slot is the slot that was freed first.
func (r *fakeRank) slot() *fakeSlot {
	for _, s := range r.slots {
		if s.owner == nil {
			return s
		}
	}
	s := &fakeSlot{}
	r.slots = append(r.slots, s)
	return s
}

func (p *fakeParams) free() {
	if p.slot.owner == p {
		p.slot.owner = nil
	}
}

// decode answers a leg with parameters: it reads what they point to.
func (r *fakeRank) decode(l *fakeLeg) {
	w, p := r.w, l.params
	if p.used++; p.used > 1 {
		w.twice++
	}
	r.awake(w.between(time.Millisecond, 50*time.Millisecond), func() {
		switch {
		case l.isOver: // the engine tells the prefill engine that it does not come
			p.free()
			r.finish(l)
			return
		case w.chance(1):
			r.finish(l)
			p.free()
			l.isFaulty = true // a fault of its own, that looks like one of the transfer
			l.tell(0, Event{Kind: EvEnded, Cause: EngineError})
			return
		case !p.rank.isAlive, p.rank.incarnation != p.incarnation && w.chance(50), w.chance(1):
			r.awake(w.between(50*time.Millisecond, 6*time.Second), func() {
				if r.finish(l) {
					l.tell(0, Event{Kind: EvEnded, Cause: EngineError})
				}
			})
			return
		}
		p.rank.awake(0, func() { // a prefill engine that stands still is waited for
			r.awake(0, func() {
				if !r.legs[l] || l.isOver {
					r.finish(l)
					p.free()
					return
				}
				l.text = p.slot.content
				p.free()
				r.cache[l.f.prompt] = l.text
				r.answer(l)
			})
		})
	})
}

// local answers a leg without parameters from the cache, or computes the prompt.
func (r *fakeRank) local(l *fakeLeg) {
	w := r.w
	r.awake(w.between(30*time.Millisecond, 500*time.Millisecond), func() {
		switch {
		case !r.legs[l] || l.isOver:
			r.finish(l)
		case l.f.isBad:
			r.finish(l)
			l.refuse()
		case w.chance(1):
			l.isFaulty = true
			r.finish(l)
			l.tell(0, Event{Kind: EvEnded, Cause: EngineError})
		default:
			if _, ok := r.cache[l.f.prompt]; !ok {
				r.cache[l.f.prompt] = l.f.prompt
			}
			l.text = r.cache[l.f.prompt]
			r.answer(l)
		}
	})
}

// answer streams.
func (r *fakeRank) answer(l *fakeLeg) {
	w := r.w
	l.tell(w.between(0, 20*time.Millisecond), Event{Kind: EvContent})
	r.awake(w.between(20*time.Millisecond, 3*time.Second), func() {
		if r.finish(l) {
			l.tell(20*time.Millisecond, Event{Kind: EvEnded})
		}
	})
}

// flight is one request with its shell.
type flight struct {
	w      *world
	plan   *Plan
	prompt int
	isBad  bool
	// every engine dies that gets it
	isPoison bool
	deaths   int
	began    time.Duration
	legs     map[uint32]*fakeLeg
	tickets  map[uint32]int // 1 = held, 2 = returned
	params   map[uint64]*fakeParams
	written  map[uint32][2]int   // by attempt: legs that were written
	pushed   map[uint32]*fakeLeg // by attempt: a decode leg that waits for a push
	ranks    map[uint32]*fakeRank
}

// step tells the core an event and does what it says.
func (f *flight) step(at Instant, ev Event) {
	for _, cmd := range append([]Command(nil), f.plan.Step(at, &ev)...) {
		f.do(&cmd)
	}
	if f.plan.IsSettled() && f.w.flights[f] {
		delete(f.w.flights, f)
		for _, n := range f.tickets {
			if n != 2 {
				f.w.leaked++
			}
		}
	}
}

func (f *flight) do(cmd *Command) {
	w := f.w
	switch cmd.Kind {
	case CmdPick:
		f.choose(*cmd, 30)
	case CmdReserve:
		r, number, ref := w.ranks[cmd.Side][cmd.Rank.ID.Rank()], cmd.Number, cmd.Rank
		f.ranks[number] = r
		w.proxy(w.between(time.Millisecond, 30*time.Millisecond), func(at Instant) {
			refused := Event{
				Kind: EvRefused, Side: r.side, Number: number, Rank: ref, Unit: r.unit(ref.Incarnation),
			}
			switch {
			case !r.isAlive || r.ref() != ref:
				refused.Cause = Gone
			case w.chance(1):
				refused.Cause = NoLease
			case w.chance(1):
				refused.Cause = Full
			}
			if refused.Cause != OK {
				f.step(at, refused)
				return
			}
			f.tickets[number]++
			f.step(at, Event{Kind: EvReserved, Number: number})
		})
	case CmdSend:
		f.start(cmd)
	case CmdRelay:
		l := f.legs[cmd.Number]
		if l.isError {
			break
		}
		l.isPassed = true
		w.passed++
		if l.text != f.prompt {
			w.wrong++
		}
	case CmdCancel:
		if l := f.legs[cmd.Number]; l != nil {
			w.after(time.Millisecond, func() { l.isOver = true })
		}
	case CmdRelease:
		if f.tickets[cmd.Number]++; f.tickets[cmd.Number] != 2 {
			w.badRelease++
		}
		row := cmd.Cause.Row()
		isBlamed := cmd.Charge || row.CheckHealth || row.Done == DoneFailed && !row.Busy
		if isBlamed && !f.isAtFault(cmd.Number) {
			w.unfair++
		}
	case CmdAlarm:
		r := w.ranks[Decode][cmd.Rank.ID.Rank()]
		w.alarms++
		w.after(2*time.Millisecond, func() { r.cache = map[int]int{} })
	case CmdCount:
		w.results[cmd.Result]++
		w.mostDeaths = max(w.mostDeaths, f.deaths)
		w.ways[cmd.Way]++
		w.longest = max(w.longest, w.now-f.began)
	case CmdNote:
		w.notes[cmd.Note]++
	case CmdUndo, CmdDiscard, CmdAnswer, CmdSuspect, CmdPardon, CmdPairFailed, CmdAsk:
	}
}

// isAtFault reports whether the rank failed the leg by itself. An engine that stands still does.
func (f *flight) isAtFault(number uint32) bool {
	l, r := f.legs[number], f.ranks[number]
	return l != nil && l.isFaulty || r.frozenUntil > 0 || !r.isAlive
}

// choose takes any known rank that was not tried, and waits for a decode rank.
func (f *flight) choose(cmd Command, more int) {
	w := f.w
	pick := func(s Side, not routing.RankRef) (out routing.RankRef, ok bool) {
		n := 0
		for _, r := range w.ranks[s] {
			ref := routing.RankRef{ID: r.id, Incarnation: w.known[r]}
			isTried := ref == not
			for _, tried := range f.plan.Tried(s) {
				isTried = isTried || tried.Rank == ref
			}
			if n++; w.known[r] != 0 && !isTried && (!ok || w.rnd.IntN(n) == 0) {
				out, ok = ref, true
			}
		}
		return out, ok
	}
	w.proxy(w.between(0, 3*time.Millisecond), func(at Instant) {
		d, ok := pick(Decode, cmd.Unlike[Decode])
		if !ok {
			d, ok = pick(Decode, routing.RankRef{})
		}
		if cmd.Want[Decode] && !ok {
			if more > 0 {
				w.proxy(100*time.Millisecond, func(Instant) { f.choose(cmd, more-1) })
				return
			}
			f.step(at, Event{Kind: EvNoRank, Number: cmd.Number, HasWaited: true})
			return
		}
		ev := Event{Kind: EvPicked, Number: cmd.Number, Decode: d}
		if p, ok := pick(Prefill, cmd.Unlike[Prefill]); !cmd.Want[Prefill] || w.chance(5) {
		} else if ev.Prefill, ev.IsRemote = p, ok; !ok {
			ev.Fallback = true
		}
		f.step(at, ev)
	})
}

// start sends a leg. Between the check of parameters and the write, the proxy may stand still.
func (f *flight) start(cmd *Command) {
	w, side, isRemote, fence, ref, attempt := f.w, cmd.Side, cmd.IsRemote, cmd.Fence, cmd.Rank, cmd.Attempt
	r := w.ranks[side][ref.ID.Rank()]
	l := &fakeLeg{f: f, rank: r, ref: ref, number: cmd.Number, params: f.params[cmd.Params]}
	f.legs[cmd.Number] = l
	w.proxy(w.between(0, 20*time.Millisecond), func(at Instant) {
		if l.isOver || !r.accept(l, ref) {
			return
		}
		if l.params != nil && !fence.IsUsable(at) {
			r.finish(l)
			l.tell(0, Event{Kind: EvEnded, Cause: TooLate})
			return
		}
		w.proxy(w.between(0, 2*time.Millisecond), func(at Instant) {
			if l.isOver {
				r.finish(l)
				return
			}
			switch {
			case f.isPoison: // the engine dies of it, at once or later, unless it hears of a cancel before
				late := [...]time.Duration{5 * time.Millisecond, 3 * time.Second}[w.rnd.IntN(2)]
				r.after(w.between(0, late), func() {
					if !l.isOver && r.legs[l] {
						f.deaths++
						r.kill()
					}
				})
			case side == Decode && !isRemote:
				r.local(l)
			case side == Prefill:
				f.write(attempt, Prefill)
				r.prefill(l, f.plan.cfg.Order == PrefillFirst)
				f.push(l, attempt)
			case l.params != nil:
				r.decode(l)
			default:
				f.write(attempt, Decode)
				f.pushed[attempt] = l
			}
			if side == Decode {
				f.step(at, Event{Kind: EvSent, Number: l.number})
			}
		})
	})
}

// write counts the legs of an attempt: its ids must not be used again.
func (f *flight) write(attempt uint32, s Side) {
	n := f.written[attempt]
	if n[s]++; n[s] > 1 {
		f.w.twice++
	}
	f.written[attempt] = n
}

// push moves the prompt to the decode leg of the same attempt when it is computed, if the transfer has that
// direction.
func (f *flight) push(p *fakeLeg, attempt uint32) {
	w := f.w
	if f.plan.cfg.Order == PrefillFirst {
		return
	}
	p.rank.awake(w.between(30*time.Millisecond, 600*time.Millisecond), func() {
		d := f.pushed[attempt]
		if d == nil || d.isOver || p.isOver || !d.rank.legs[d] || !p.rank.isAlive {
			return // the decode leg waits until its limit
		}
		d.text = f.prompt
		d.rank.awake(0, func() {
			if d.rank.legs[d] && !d.isOver {
				d.rank.answer(d)
			}
		})
	})
}
