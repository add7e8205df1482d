package cluster_test

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// sim is a world of processes on one queue of events, ordered by (time, number). All that happens by chance
// comes from one generator, so a seed is a run.
type sim struct {
	*rand.Rand
	now   time.Duration // since the beginning; every process's monotonic clock
	queue eventQueue
	count uint64 // events scheduled so far
	hash  uint64 // of everything that happened, in order
	lines []string
	trace bool // keep lines
}

// event is something that happens to a process, or (p nil) to the world.
type event struct {
	at    time.Duration
	n     uint64
	p     *process
	gen   int
	late  bool // its process was slow to get to it
	timer bool
	do    func()
}

// process is what lives, dies, freezes and starves as one: a node's dpserve.
type process struct {
	s       *sim
	name    string
	alive   bool
	gen     int           // +1 per start
	frozen  bool          // nothing runs, everything waits
	since   time.Duration // of that
	slow    bool          // it has a tenth of a CPU
	reached time.Duration // slow: when it got to its last event
	waiting []event       // while frozen
}

// A process with a tenth of a CPU runs 10 ms of every 100; now and then it is not scheduled for longer.
const (
	starved      = 90 * time.Millisecond
	starvedLong  = 600 * time.Millisecond
	starvedOften = 50 // one event in so many waits for starvedLong
)

// epochStart is the wall clock at the beginning.
var epochStart = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func newSim(seed uint64, trace bool) *sim {
	return &sim{
		Rand: rand.New(rand.NewPCG(seed, 0x9e3779b97f4a7c15)), hash: 14695981039346656037,
		trace: trace,
	}
}

// clock is the monotonic time as the cores take it.
func (s *sim) clock() time.Time { return epochStart.Add(s.now) }

// violation is a rule that was broken.
type violation struct{ text string }

func (s *sim) violate(format string, args ...any) {
	panic(violation{fmt.Sprintf("at %v: ", s.now) + fmt.Sprintf(format, args...)})
}

// after lets something happen to a process (nil: to the world) that is not restarted meanwhile.
func (s *sim) after(p *process, d time.Duration, do func()) { s.push(p, d, true, do) }

// arrive is after for what comes from outside of the process.
func (s *sim) arrive(p *process, d time.Duration, do func()) { s.push(p, d, false, do) }

func (s *sim) push(p *process, d time.Duration, timer bool, do func()) {
	s.count++
	e := event{at: s.now + max(0, d), n: s.count, p: p, timer: timer, do: do}
	if p != nil {
		e.gen = p.gen
	}
	s.queue.push(e)
}

// run goes on until a time.
func (s *sim) run(until time.Duration) {
	for len(s.queue) > 0 && s.queue[0].at <= until {
		e := s.queue.pop()
		s.now = e.at
		s.fire(e)
	}
	s.now = until
}

func (s *sim) fire(e event) {
	switch p := e.p; {
	case p == nil:
	case !p.alive || p.gen != e.gen:
		return
	case p.frozen:
		p.waiting = append(p.waiting, e)
		return
	case p.slow && !e.late:
		s.delay(e)
		return
	}
	s.mix(uint64(e.at))
	s.mix(e.n)
	e.do()
}

// delay lets a slow process get to an event later, in order.
func (s *sim) delay(e event) {
	d := s.span(0, starved)
	if s.IntN(starvedOften) == 0 {
		d = s.span(0, starvedLong)
	}
	e.p.reached = max(e.p.reached, s.now+d)
	e.at, e.late = e.p.reached, true
	s.count++
	e.n = s.count
	s.queue.push(e)
}

// freeze stops a process: its clock goes on, what comes for it waits.
func (p *process) freeze() {
	if p.alive && !p.frozen {
		p.frozen, p.since = true, p.s.now
		p.s.log("freeze", p.name)
	}
}

// thaw lets it get to what has waited: in order, or what came from outside first.
func (p *process) thaw() {
	if !p.frozen {
		return
	}
	p.frozen = false
	p.s.log("thaw", p.name)
	waiting := p.waiting
	p.waiting = nil
	if p.s.IntN(2) == 0 {
		var in, own []event
		for _, e := range waiting {
			if e.timer {
				own = append(own, e)
			} else {
				in = append(in, e)
			}
		}
		waiting = append(in, own...)
	}
	for _, e := range waiting {
		p.s.count++
		e.at, e.n = p.s.now, p.s.count
		p.s.queue.push(e)
	}
}

// end kills the process.
func (p *process) end() {
	p.alive, p.frozen, p.waiting = false, false, nil
	p.gen++
}

// span draws a duration of at least a, less than b.
func (s *sim) span(a, b time.Duration) time.Duration {
	if b <= a {
		return a
	}
	return a + time.Duration(s.Int64N(int64(b-a)))
}

func (s *sim) chance(p float64) bool { return p > 0 && s.Float64() < p }

// log notes something that happened: it is part of the run's hash.
func (s *sim) log(what string, args ...any) {
	s.mixText(what)
	for _, a := range args {
		switch a := a.(type) {
		case string:
			s.mixText(a)
		case uint64:
			s.mix(a)
		case int:
			s.mix(uint64(a))
		case bool:
			if a {
				s.mix(1)
			}
		case time.Duration:
			s.mix(uint64(a))
		default:
			s.mixText(fmt.Sprint(a))
		}
	}
	if s.trace {
		s.lines = append(s.lines, fmt.Sprintf("%10.3f %s %s", s.now.Seconds(), what, fmt.Sprint(args...)))
	}
}

const fnvPrime = 1099511628211

func (s *sim) mix(v uint64) { s.hash = (s.hash ^ v) * fnvPrime; s.hash ^= s.hash >> 29 }

func (s *sim) mixText(t string) {
	for i := range len(t) {
		s.hash = (s.hash ^ uint64(t[i])) * fnvPrime
	}
}

// eventQueue is a binary heap by (at, n).
type eventQueue []event

func (q eventQueue) before(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].n < q[j].n
}

func (q *eventQueue) push(e event) {
	*q = append(*q, e)
	h := *q
	for i := len(h) - 1; i > 0 && h.before(i, (i-1)/2); i = (i - 1) / 2 {
		h[i], h[(i-1)/2] = h[(i-1)/2], h[i]
	}
}

func (q *eventQueue) pop() event {
	h := *q
	first, last := h[0], len(h)-1
	h[0], h[last] = h[last], event{}
	h = h[:last]
	for i := 0; ; {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < last; c++ {
			if h.before(c, least) {
				least = c
			}
		}
		if least == i {
			break
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
	*q = h
	return first
}
