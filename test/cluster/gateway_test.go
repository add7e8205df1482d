package cluster_test

import (
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// session is a worker's end of its stream to an ingress: one order, as TCP keeps it.
type session struct {
	id  int
	to  *machine
	gen int
	seq int
}

// record is what a stream says: of one unit's part on the worker, of all there are (a list that takes the
// place of all before), or nothing but that the worker lives.
type record struct {
	list  []part
	whole bool
	one   *part
}

// part is what an ingress knows of a unit on a worker.
type part struct {
	unit        string
	epoch       uint64
	incarnation uint64
	accepting   bool
	fenced      bool // not by a drain: what it has in hand is lost
	gone        bool
	lockstep    bool
}

// Times of the streams, as in internal/noderpc.
const (
	streamBeat    = 250 * time.Millisecond
	streamSuspect = time.Second
	streamOut     = 3 * time.Second
	streamMin     = 50 * time.Millisecond
	streamMax     = time.Second
)

func (u *hosted) part() part {
	return part{
		unit: u.Order.Unit, epoch: u.Order.Epoch, incarnation: u.incarnation, accepting: u.accepting,
		fenced: u.Failure != nil,
		gone:   u.Phase == state.Gone, lockstep: u.lockstep(),
	}
}

// show sends the state of a unit to every stream.
func (h *host) show(u *hosted) {
	p := u.part()
	for _, i := range sorted(h.sessions) {
		h.push(h.sessions[i], record{one: &p})
	}
}

// beat says that the worker lives.
func (h *host) beat() {
	for _, i := range sorted(h.sessions) {
		s := h.sessions[i]
		if s.to.gen != s.gen {
			delete(h.sessions, i)
			continue
		}
		h.push(s, record{})
	}
	h.c.after(h.m.process, streamBeat, h.beat)
}

func (h *host) push(s *session, r record) {
	s.seq++
	seq, id, from := s.seq, s.id, h.m.i
	h.c.send(h.m, s.to, streamOut, false, func() {
		if s.to.gen == s.gen {
			s.to.ing.hear(from, id, seq, r)
		}
	})
}

// subscribe begins a stream to an ingress with everything there is.
func (h *host) subscribe(to *machine, id int) {
	s := &session{id: id, to: to, gen: to.gen}
	h.sessions[to.i] = s
	r := record{whole: true}
	for _, name := range sorted(h.units) {
		if u := h.units[name]; u.Phase == state.Ready || u.Phase == state.Draining {
			r.list = append(r.list, u.part())
		}
	}
	h.push(s, r)
}

// gateway is a machine's ingress: a model of the views in actors/ingress and of the links in
// internal/noderpc, and clients that ask it for tokens all the time.
type gateway struct {
	m        *machine
	c        *cluster
	links    map[int]*inlink
	sessions int
	known    map[string]uint64 // the highest epoch of each unit that this ingress's copy has shown
}

// inlink is the stream of one worker.
type inlink struct {
	uid     string
	session int
	in      inOrder
	parts   map[string]*part
	heard   time.Duration
	tried   time.Duration
	silent  bool
	wait    time.Duration
	resting bool
}

func newGateway(m *machine) *gateway {
	g := &gateway{m: m, c: m.c, links: map[int]*inlink{}, known: map[string]uint64{}}
	m.c.after(m.process, streamBeat, g.tick)
	m.c.after(m.process, m.c.span(0, requestMax), g.request)
	return g
}

// adopt keeps one link to every worker that the state says is there.
func (g *gateway) adopt() {
	st := g.m.view
	for unit, epoch := range st.Epochs {
		g.known[unit] = max(g.known[unit], epoch)
	}
	wanted := map[int]string{}
	for _, n := range st.Nodes {
		if n.Has(state.RoleWorker) && !n.Lost {
			wanted[g.c.byUID[n.UID]] = n.UID
		}
	}
	for _, i := range sorted(g.links) {
		if g.links[i].uid != wanted[i] {
			delete(g.links, i)
		}
	}
	for _, i := range sorted(wanted) {
		if g.links[i] == nil {
			g.links[i] = &inlink{uid: wanted[i], parts: map[string]*part{}, heard: g.c.now, wait: streamMin}
			g.open(i)
		}
	}
}

// open begins a stream.
func (g *gateway) open(i int) {
	l := g.links[i]
	if l == nil {
		return
	}
	g.sessions++
	l.session, l.in, l.tried, l.resting = g.sessions, inOrder{}, g.c.now, false
	id, to := l.session, g.c.machines[i]
	call(g.c, g.m, to, streamOut, false, func(answer func(struct{}, error)) {
		to.host.subscribe(g.m, id)
		answer(struct{}{}, nil)
	}, func(_ struct{}, err error) {
		if g.links[i] != l || l.session != id {
			return
		}
		if err == errUnreachable { //nolint:errorlint // it is never wrapped
			l.silent = true
			clear(l.parts) // nobody listens there
			g.again(i, l)
		}
	})
}

// again opens a stream after a growing rest.
func (g *gateway) again(i int, l *inlink) {
	if l.resting {
		return
	}
	l.resting = true
	l.session = -1
	wait := l.wait
	l.wait = min(2*l.wait, streamMax)
	g.c.after(g.m.process, wait, func() {
		if g.links[i] == l && l.resting {
			g.open(i)
		}
	})
}

// broke is the reset of a stream: its ranks are suspect at once.
func (g *gateway) broke(i int) {
	if l := g.links[i]; l != nil {
		l.silent = true
		g.again(i, l)
	}
}

// tick looks how long nothing was heard.
func (g *gateway) tick() {
	for _, i := range sorted(g.links) {
		l := g.links[i]
		silence := g.c.now - l.heard
		if silence >= streamSuspect {
			l.silent = true
		}
		if silence >= streamOut {
			clear(l.parts)
			if g.c.now-l.tried >= streamOut {
				g.again(i, l)
			}
		}
	}
	g.c.after(g.m.process, streamBeat, g.tick)
}

// hear takes a record in its order.
func (g *gateway) hear(i, id, seq int, r record) {
	l := g.links[i]
	if l == nil || l.session != id {
		return
	}
	l.in.take(seq, func() {
		l.heard, l.silent, l.wait = g.c.now, false, streamMin
		g.take(l, r)
	})
}

func (g *gateway) take(l *inlink, r record) {
	if r.whole {
		clear(l.parts)
		for k := range r.list {
			l.parts[r.list[k].unit] = &r.list[k]
		}
	}
	p := r.one
	if p == nil {
		return
	}
	own := *p
	switch old := l.parts[p.unit]; {
	case old != nil && old.epoch > p.epoch:
		return
	case p.gone:
		delete(l.parts, p.unit)
		return
	}
	l.parts[p.unit] = &own
	if p.fenced && p.lockstep {
		g.fenceGroup(p)
	}
}

// fenceGroup drops the other parts of a unit that fails as one, until they come back as another incarnation.
func (g *gateway) fenceGroup(f *part) {
	for _, l := range g.links {
		if p := l.parts[f.unit]; p != nil && p.epoch == f.epoch && p.incarnation != f.incarnation {
			p.accepting = false
		}
	}
}

// Requests of the clients of one ingress.
const (
	requestMin   = 300 * time.Millisecond
	requestMax   = 600 * time.Millisecond
	requestLimit = time.Second
	requestTries = 3
)

// request sends one request and the next one later.
func (g *gateway) request() {
	g.attempt(map[int]bool{})
	pause := g.c.span(requestMin, requestMax)
	if g.c.cfg.rush {
		pause /= 30
	}
	g.c.after(g.m.process, pause, g.request)
}

// choice is a part of a unit that may be asked.
type choice struct {
	worker int
	part   *part
}

// attempt picks a rank and asks it for a ticket; refused, it picks another one.
func (g *gateway) attempt(tried map[int]bool) {
	pick, ok := g.pick(tried)
	if !ok {
		return
	}
	tried[pick.worker] = true
	to, unit, epoch := g.c.machines[pick.worker], pick.part.unit, pick.part.epoch
	if known := g.known[unit]; epoch < known {
		g.c.violate("the ingress of %s picks %s at epoch %d, and knows of epoch %d", g.m.name, unit, epoch,
			known)
	}
	asked := g.c.now
	call(g.c, g.m, to, requestLimit, false, func(answer func(bool, error)) {
		answer(to.host.admit(unit, epoch), nil)
	}, func(granted bool, err error) {
		switch {
		case err == nil && granted:
			g.c.served(g.m, unit, epoch, asked)
		case len(tried) < requestTries:
			g.attempt(tried)
		}
	})
}

// pick is one of the ranks that may be asked, silent ones only if nothing else is left.
func (g *gateway) pick(tried map[int]bool) (choice, bool) {
	var good, last []choice
	for _, i := range sorted(g.links) {
		l := g.links[i]
		if tried[i] {
			continue
		}
		for _, name := range sorted(l.parts) {
			p := l.parts[name]
			u := g.m.view.Units[name]
			if !p.accepting || u == nil || u.Phase != state.Ready || u.Epoch != p.epoch ||
				g.m.view.Epochs[name] != p.epoch {
				continue
			}
			if l.silent {
				last = append(last, choice{i, p})
			} else {
				good = append(good, choice{i, p})
			}
		}
	}
	if len(good) == 0 {
		good = last
	}
	if len(good) == 0 {
		return choice{}, false
	}
	return good[g.c.IntN(len(good))], true
}
