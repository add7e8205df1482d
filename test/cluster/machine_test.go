package cluster_test

import (
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/state"
)

// machine is one node of the cluster: a disk, and a process with consensus, perhaps the leader's actors, perhaps a worker and an
// ingress.
type machine struct {
	*process
	c       *cluster
	i       int
	uid     string
	control bool
	worker  bool
	ingress bool
	dark    bool // when it is not alive its kernel is not either: nobody is refused, nobody is reset
	removed bool // by a person, who will switch it off
	disk    *disk
	wall    time.Duration // what its wall clock is ahead
	upset   time.Duration // when something was wrong with it last
	thawed  time.Duration // when it was frozen last, till then
	mustAsk bool          // it was frozen for longer than its lease, and has not asked the leader since

	// of its process
	raft    *raft    // nil without role control
	watch   *watcher // nil with role control
	view    *state.State
	gone    map[string]time.Duration // when view has shown first that a machine was removed, by UID
	leaving bool                     // it was removed, and has seen that
	viewed  map[string]time.Duration // when view has shown first that a unit here is over
	dirty   bool                     // view has changed and nobody was told yet
	shell   *shell
	taking  bool // it is about to lead
	host    *host
	ing     *gateway
	follows []*following // copies of the state that this control node feeds
	known   int          // machine that answered as the leader last, -1: none
	avoid   int          // machine that did not answer last, -1: none
}

// boot starts the machine's process on what its disk has.
func (m *machine) boot() {
	m.alive, m.dark, m.frozen, m.slow = true, false, false, false
	m.shell, m.host, m.ing, m.follows, m.dirty, m.taking = nil, nil, nil, nil, false, false
	m.raft, m.watch, m.known, m.avoid = nil, nil, -1, -1
	if m.c.cfg.mutant == forgets {
		m.disk.epochs = map[string]uint64{}
	}
	m.view, m.viewed, m.mustAsk = state.New(), map[string]time.Duration{}, false
	m.gone, m.leaving = map[string]time.Duration{}, false
	m.c.log("boot", m.name)
	if m.control {
		m.raft = newRaft(m)
	} else {
		m.view = m.disk.saved
		m.watch = newWatcher(m)
	}
	m.host = newHost(m)
	if m.ingress {
		m.ing = newGateway(m)
	}
	m.changed()
}

// crash ends the process and its engines. Without power the kernel tells nobody.
func (m *machine) crash(power bool) {
	if !m.alive {
		return
	}
	m.c.log("crash", m.name, power)
	if kept := m.disk.synced; kept < len(m.disk.log) {
		kept += m.c.IntN(len(m.disk.log) - kept + 1)
		m.disk.log, m.disk.synced = m.disk.log[:kept:kept], kept
	}
	for _, e := range m.host.engines {
		e.dead = true
	}
	m.host.engines = nil
	if m.raft != nil {
		m.raft.role = follower
	}
	m.end()
	m.dark = power
	if !power {
		m.c.reset(m)
	}
}

// reset tells everybody who had a stream of the machine.
func (c *cluster) reset(m *machine) {
	for _, o := range c.machines {
		if o.alive && o != m && o.ing != nil && !c.net.cuts[m.i][o.i] {
			c.arrive(o.process, c.span(latencyMin, latencyMax), func() { o.ing.broke(m.i) })
		}
	}
}

// record is the machine as it shows itself.
func (m *machine) record() state.Node {
	n := state.Node{ID: m.name, UID: m.uid, Advertise: m.name, Address: m.name + ":7947", Version: "sim"}
	if m.control {
		n.Roles = append(n.Roles, state.RoleControl)
	}
	if m.worker {
		n.Roles = append(n.Roles, state.RoleWorker)
		n.Offer = state.Offer{Slots: slotsEach, Devices: []int{0, 1, 2, 3, 4, 5}, PortLo: 20000, PortHi: 20999}
	}
	if m.ingress {
		n.Roles = append(n.Roles, state.RoleIngress)
	}
	return n
}

// slotsEach is how many ranks a worker takes.
const slotsEach = 6

// publish is the next state of this machine's copy.
func (m *machine) publish(s *state.State) {
	if s == m.view || s.Index < m.view.Index {
		return
	}
	m.view = s
	for _, uid := range s.Removed {
		if _, known := m.gone[uid]; !known {
			m.gone[uid] = m.c.now
		}
	}
	if _, gone := m.gone[m.uid]; gone && !m.leaving {
		m.leaving = true
		m.c.after(m.process, m.c.span(0, closeAfter), m.leave)
	}
	if m.host != nil {
		for id, u := range m.host.units {
			if over := node.Superseded(s, id, u.order.Epoch); !over {
				delete(m.viewed, id)
			} else if m.viewed[id] == 0 {
				m.viewed[id] = m.c.now
			}
		}
	}
	if m.watch != nil {
		m.disk.saved = s
	}
	if !m.dirty {
		m.dirty = true
		m.c.after(m.process, m.c.span(0, 2*time.Millisecond), m.changed)
	}
}

// changed tells everybody on the machine who looks at its copy.
func (m *machine) changed() {
	m.dirty = false
	if m.shell != nil {
		m.shell.look()
	}
	m.host.supersede()
	if m.ing != nil {
		m.ing.adopt()
	}
	m.feedFollowers()
}

// handOverLimit bounds the wait for another leader.
const handOverLimit = 3 * time.Second

// leave ends a machine that was removed: another one leads first, if it can.
func (m *machine) leave() {
	m.removed = true
	m.c.log("leaves", m.name)
	until := m.c.now + handOverLimit
	var wait func()
	wait = func() {
		if m.raft == nil || m.raft.role != leader || m.c.now > until || !m.raft.transfer() {
			m.crash(false)
			return
		}
		m.c.after(m.process, 100*time.Millisecond, wait)
	}
	wait()
}

// leadsAs is who leads as far as the machine knows, -1: nobody.
func (m *machine) leadsAs() int {
	if m.raft != nil {
		return m.raft.leads
	}
	return m.watch.leads
}

// closeAfter bounds the time between the loss of leadership and the end of what only the leader runs.
const closeAfter = 20 * time.Millisecond

// led follows the machine's own leadership.
func (m *machine) led() {
	m.feedFollowers()
	switch r := m.raft; {
	case r.ready && m.shell == nil && m.c.cfg.mutant == noBarrier:
		m.shell = newShell(m)
	case r.ready && m.shell == nil && !m.taking:
		m.taking = true
		m.takeOver(r.round)
	case !r.ready && m.shell != nil && !m.shell.leaving:
		l := m.shell
		l.leaving = true
		m.c.after(m.process, m.c.span(0, closeAfter), func() { l.close() })
	}
}

// takeOver makes itself known, then begins what the leader does.
func (m *machine) takeOver(round int) {
	still := func() bool { return m.raft.ready && m.raft.round == round }
	self := m.record()
	m.propose(state.Command{PutNode: &state.PutNode{Node: self}}, proposeLimit, func(_ state.Result, err error) {
		switch {
		case !still():
			m.taking = false
			m.led()
		case err != nil:
			m.c.after(m.process, 200*time.Millisecond, func() { m.takeOver(round) })
		default:
			m.taking = false
			m.shell = newShell(m)
		}
	})
}

// proposeLimit bounds one command on its way through consensus.
const proposeLimit = 5 * time.Second

// propose puts a command through consensus: here, or, once, at who leads.
func (m *machine) propose(c state.Command, limit time.Duration, done func(state.Result, error)) {
	over := false
	finish := func(r state.Result, err error) {
		if !over {
			over = true
			done(r, err)
		}
	}
	m.c.after(m.process, limit, func() { finish(state.Result{}, errLate) })
	if m.raft.propose(&c, finish) {
		return
	}
	m.forward(&c, m.c.now+limit, 1, finish)
}

// proposeHere is propose for what only the leader may propose: it is never sent on. A controller that was deposed and does not know it
// would decide on what it saw last.
func (m *machine) proposeHere(c state.Command, limit time.Duration, done func(state.Result, error)) {
	if m.c.cfg.mutant == sendsOn {
		m.propose(c, limit, done)
		return
	}
	over := false
	finish := func(r state.Result, err error) {
		if !over {
			over = true
			done(r, err)
		}
	}
	m.c.after(m.process, limit, func() { finish(state.Result{}, errLate) })
	if !m.raft.propose(&c, finish) {
		finish(state.Result{}, errNotLeader)
	}
}

func (m *machine) forward(c *state.Command, until time.Duration, again int, done func(state.Result, error)) {
	to := m.leadsAs()
	if to < 0 || to == m.i {
		m.c.after(m.process, 50*time.Millisecond, func() {
			if m.c.now < until && !m.raft.propose(c, done) {
				m.forward(c, until, again, done)
			}
		})
		return
	}
	target := m.c.machines[to]
	call(m.c, m, target, until-m.c.now, false, func(answer func(state.Result, error)) {
		if !target.raft.propose(c, answer) {
			answer(state.Result{}, &notLeader{target.leadsAs()})
		}
	}, func(r state.Result, err error) {
		if hint, ok := err.(*notLeader); ok { //nolint:errorlint // it is never wrapped
			if again > 0 && hint.leads >= 0 && hint.leads != to {
				m.forward(c, until, again-1, done)
				return
			}
			err = errNotLeader
		}
		done(r, err)
	})
}

// notLeader refuses what only the leader does, and names it.
type notLeader struct{ leads int }

func (*notLeader) Error() string { return "not the leader" }

// watcher is the copy of the state on a node without role control.
type watcher struct {
	m       *machine
	leads   int
	heard   time.Duration
	spoke   bool // something came of this session
	session int
	turn    int
	wait    time.Duration
	in      inOrder
}

// following is a copy that a control node feeds.
type following struct {
	to      *machine
	gen     int
	session int
	told    uint64
	leads   int
	queued  bool
	seq     int
}

// Times of the copies, as in cluster.
const (
	watchSilence = 3 * time.Second
	watchBeat    = time.Second
	watchGap     = 20 * time.Millisecond
	watchMin     = 50 * time.Millisecond
	watchMax     = time.Second
)

func newWatcher(m *machine) *watcher {
	w := &watcher{m: m, leads: -1, wait: watchMin, turn: m.i}
	m.c.after(m.process, 0, w.connect)
	return w
}

// connect asks the next control node.
func (w *watcher) connect() {
	m := w.m
	w.session++
	w.in = inOrder{}
	w.turn++
	session := w.session
	all := m.controls()
	if len(all) == 0 {
		return
	}
	source := m.c.machines[all[w.turn%len(all)]]
	w.heard, w.spoke = m.c.now, false
	from := m.view.Index
	call(m.c, m, source, watchSilence, false, func(answer func(struct{}, error)) {
		f := &following{to: m, gen: m.gen, session: session, told: from, leads: -1}
		source.follows = append(source.follows, f)
		source.feed(f)
		source.beatFollower(f)
		answer(struct{}{}, nil)
	}, func(_ struct{}, err error) {
		if err != nil && !w.spoke {
			w.broke(session)
		}
	})
	w.listen(session)
}

// listen gives a control node up that says nothing.
func (w *watcher) listen(session int) {
	w.m.c.after(w.m.process, watchBeat, func() {
		switch {
		case w.session != session:
		case w.m.c.now-w.heard >= watchSilence:
			w.broke(session)
		default:
			w.listen(session)
		}
	})
}

func (w *watcher) broke(session int) {
	if w.session != session {
		return
	}
	w.session++ // what comes late of the old one is dropped
	w.m.c.after(w.m.process, w.wait, w.connect)
	w.wait = min(2*w.wait, watchMax)
}

// take is what a control node says.
func (w *watcher) take(s *state.State, leads int) {
	w.heard, w.spoke, w.wait, w.leads = w.m.c.now, true, watchMin, leads
	if s != nil {
		w.m.publish(s)
	}
}

func (m *machine) beatFollower(f *following) {
	m.c.after(m.process, watchBeat, func() {
		if m.feed(f) {
			m.beatFollower(f)
		}
	})
}

func (m *machine) feedFollowers() {
	for _, f := range m.follows {
		if (f.told < m.view.Index || f.leads != m.leadsAs()) && !f.queued {
			f.queued = true
			m.c.after(m.process, watchGap, func() {
				f.queued = false
				m.feed(f)
			})
		}
	}
}

// feed sends what a follower lacks, or a heartbeat. While nobody leads there is none.
func (m *machine) feed(f *following) bool {
	if f.to.gen != f.gen || f.to.watch.session != f.session {
		m.follows = without(m.follows, f)
		return false
	}
	var s *state.State
	if m.view.Index > f.told {
		s = m.view
	}
	leads := m.leadsAs()
	if s == nil && leads < 0 {
		return true
	}
	f.told, f.leads = m.view.Index, leads
	f.seq++
	seq := f.seq
	m.c.send(m, f.to, watchSilence, false, func() {
		if w := f.to.watch; w.session == f.session {
			w.in.take(seq, func() { w.take(s, leads) })
		}
	})
	return true
}

func without(all []*following, f *following) []*following {
	var out []*following
	for _, o := range all {
		if o != f {
			out = append(out, o)
		}
	}
	return out
}

// controls are the other control nodes of the machine's copy, lost ones last.
func (m *machine) controls() []int {
	var live, lost []int
	for _, id := range sorted(m.view.Nodes) {
		n := m.view.Nodes[id]
		if i := m.c.byUID[n.UID]; n.Has(state.RoleControl) && i != m.i {
			if n.Lost {
				lost = append(lost, i)
			} else {
				live = append(live, i)
			}
		}
	}
	return append(live, lost...)
}

// askLeader asks each control node in turn until one answers that leads, for at most limit in all: as the remote room does it.
func askLeader[R any](m *machine, limit time.Duration, twice bool, ask func(l *shell, answer func(R, error)), done func(R, error)) {
	var none R
	if m.shell != nil {
		ask(m.shell, done)
		return
	}
	until := m.c.now + limit
	tried := map[int]bool{}
	var next func()
	next = func() {
		i := m.nextLeader(tried)
		if i < 0 || m.c.now >= until {
			done(none, errUnreachable)
			return
		}
		tried[i] = true
		to := m.c.machines[i]
		call(m.c, m, to, until-m.c.now, twice, func(answer func(R, error)) {
			if to.shell == nil {
				answer(none, &notLeader{to.leadsAs()})
				return
			}
			ask(to.shell, answer)
		}, func(r R, err error) {
			hint, refused := err.(*notLeader) //nolint:errorlint // it is never wrapped
			m.learn(i, hint, err)
			if refused || err == errUnreachable || err == errLate { //nolint:errorlint // they are never wrapped
				next()
				return
			}
			done(r, err)
		})
	}
	next()
}

// nextLeader is who is asked now: who led last, who is said to lead, then the others; who did not answer last comes last.
func (m *machine) nextLeader(tried map[int]bool) int {
	order := append([]int{m.known, m.leadsAs()}, m.controls()...)
	for _, all := range []bool{false, true} {
		for _, i := range order {
			if i >= 0 && i != m.i && !tried[i] && (all || i != m.avoid) {
				return i
			}
		}
	}
	return -1
}

func (m *machine) learn(i int, hint *notLeader, err error) {
	switch {
	case hint != nil:
		m.known = hint.leads
	case err == errUnreachable || err == errLate: //nolint:errorlint // they are never wrapped
		m.avoid = i
		if m.known == i {
			m.known = -1
		}
	default:
		m.known = i
		if m.avoid == i {
			m.avoid = -1
		}
	}
}

// uidOf names the nth data dir.
func uidOf(i int) string { return "uid-" + strconv.Itoa(i) }

// lossOf is what nodes do without a lease in this run.
func (c *cluster) lossOf() node.LeaseLoss {
	if c.cfg.fence {
		return node.Fence
	}
	return node.Serve
}
