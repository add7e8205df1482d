package cluster_test

import (
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// faults makes a part of the run bad: from the beginning to the healing, each fault at a time of its own.
type faults struct {
	c    *cluster
	heal time.Duration
}

// fault is one kind of trouble; it ends by itself at until.
type fault struct {
	name string
	do   func(f *faults, until time.Duration)
}

// kinds are all faults of a run without limits.
func kinds() []fault {
	return []fault{
		{"cut one way", (*faults).oneWay},
		{"cut", (*faults).bothWays},
		{"partition", (*faults).partition},
		{"bridge", (*faults).bridge},
		{"flaps", (*faults).flaps},
		{"loss", func(f *faults, until time.Duration) { f.setNet(&f.c.net.loss, 0.1, until) }},
		{"drop", func(f *faults, until time.Duration) { f.setNet(&f.c.net.drop, 0.1, until) }},
		{"twice", func(f *faults, until time.Duration) { f.setNet(&f.c.net.double, 0.3, until) }},
		{"delay and reorder", func(f *faults, until time.Duration) { f.setNet(&f.c.net.lag, 0.3, until) }},
		{"freeze", func(f *faults, _ time.Duration) { f.freeze(f.any()) }},
		{"freeze the leader", func(f *faults, _ time.Duration) { f.freeze(f.leader()) }},
		{"slow", func(f *faults, until time.Duration) { f.slow(f.any(), until) }},
		{"crash", func(f *faults, until time.Duration) { f.crash(f.any(), until) }},
		{"crash the leader", func(f *faults, until time.Duration) { f.crash(f.leader(), until) }},
		{fallFault, func(f *faults, until time.Duration) { f.fall(f.any(), until) }},
		{"the leader's process dies", func(f *faults, until time.Duration) { f.fall(f.leader(), until) }},
		{"a planned restart", func(f *faults, until time.Duration) { f.restart(f.any(), until) }},
		{"a disk hangs", func(f *faults, _ time.Duration) { f.hang(f.any()) }},
		{"the leader's disk hangs", func(f *faults, _ time.Duration) { f.hang(f.leader()) }},
		{"the leader hears nobody", func(f *faults, until time.Duration) { f.deafen(until) }},
		{"a machine is told to stop", func(f *faults, until time.Duration) { f.stop(f.any(), until) }},
		{deadlyFault, func(f *faults, until time.Duration) { f.poison(f.any(), until) }},
		{"clock", func(f *faults, _ time.Duration) { f.clock() }},
		{"failing starts", (*faults).starts},
		{"a node comes", func(f *faults, _ time.Duration) { f.join() }},
		{"a node goes", func(f *faults, _ time.Duration) { f.remove() }},
	}
}

// gentleKinds must not cost a single restart: what they do is between workers, or among control nodes without
// ranks, or too little to end a lease.
func gentleKinds(fence bool) []fault {
	all := []fault{
		{"cut between workers", func(f *faults, until time.Duration) { f.betweenWorkers(until) }},
		{"short flaps", (*faults).shortFlaps},
		{"loss", func(f *faults, until time.Duration) { f.setNet(&f.c.net.loss, 0.1, until) }},
		{"twice", func(f *faults, until time.Duration) { f.setNet(&f.c.net.double, 0.3, until) }},
		{"delay and reorder", func(f *faults, until time.Duration) { f.setNet(&f.c.net.lag, 0.3, until) }},
		{"slow", func(f *faults, until time.Duration) { f.slow(f.any(), until) }},
		{"clock", func(f *faults, _ time.Duration) { f.clock() }},
	}
	if fence { // without a leader for 9 s everything must be out
		return append(all, fault{"the only disk hangs", func(f *faults, _ time.Duration) {
			f.hangAlone(f.control())
		}})
	}
	return append(all, []fault{
		{"a disk hangs", func(f *faults, _ time.Duration) { f.hang(f.control()) }},
		{"the leader's disk hangs", func(f *faults, _ time.Duration) { f.hang(f.leader()) }},
		{"the leader hears nobody", func(f *faults, until time.Duration) { f.deafen(until) }},
		{"freeze a control node", func(f *faults, _ time.Duration) { f.freeze(f.control()) }},
		{"crash a control node", func(f *faults, until time.Duration) { f.crash(f.control(), until) }},
		{"crash the leader", func(f *faults, until time.Duration) { f.crash(f.leader(), until) }},
		{"a worker's process dies", func(f *faults, _ time.Duration) {
			f.fall(f.worker(), f.c.now+f.c.span(0, briefFall))
		}},
		{"a planned restart", func(f *faults, _ time.Duration) {
			f.restart(f.worker(), f.c.now+restartWait+f.c.span(0, briefFall))
		}},
	}...)
}

// plan draws the faults of a run.
func (f *faults) plan() {
	c, all := f.c, kinds()
	if c.cfg.gentle {
		all = gentleKinds(c.cfg.fence)
	}
	if c.cfg.only != "" {
		all = slices.DeleteFunc(all, func(k fault) bool { return k.name != c.cfg.only })
	}
	often := 2 + c.IntN(6)
	if c.cfg.only != "" {
		often = 8
	}
	for range often {
		k := all[c.IntN(len(all))]
		at := c.span(5*time.Second, f.heal-2*time.Second)
		c.after(nil, at, func() {
			until := min(f.heal, c.now+c.span(time.Second, 35*time.Second))
			c.log("fault", k.name, until)
			k.do(f, until)
		})
	}
	c.after(nil, f.heal, f.healAll)
}

func (f *faults) pick(so func(*machine) bool) *machine {
	var all []*machine
	for _, m := range f.c.machines {
		if m.alive && !m.removed && so(m) {
			all = append(all, m)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[f.c.IntN(len(all))]
}

func (f *faults) any() *machine { return f.pick(func(*machine) bool { return true }) }
func (f *faults) control() *machine {
	return f.pick(func(m *machine) bool { return m.control && !m.worker })
}

func (f *faults) worker() *machine {
	return f.pick(func(m *machine) bool { return m.worker && !m.control })
}

func (f *faults) leader() *machine { return f.pick(func(m *machine) bool { return m.shell != nil }) }

func (f *faults) until(t time.Duration, do func()) { f.c.after(nil, t-f.c.now, do) }

// cut cuts ways, and heals them in the end.
func (f *faults) cut(until time.Duration, so func(from, to *machine) bool) {
	c := f.c
	for _, a := range c.machines {
		for _, b := range c.machines {
			if a != b && so(a, b) {
				c.set(a, b, true)
				f.until(until, func() { c.set(a, b, false) })
			}
		}
	}
}

func (f *faults) oneWay(until time.Duration) {
	a, b := f.any(), f.any()
	f.cut(until, func(from, to *machine) bool { return from == a && to == b })
}

func (f *faults) bothWays(until time.Duration) {
	a, b := f.any(), f.any()
	f.cut(until, func(from, to *machine) bool { return from == a && to == b || from == b && to == a })
}

// partition cuts all machines in two for 30 s.
func (f *faults) partition(time.Duration) {
	side := f.sides()
	f.cut(min(f.heal, f.c.now+30*time.Second),
		func(from, to *machine) bool { return side[from.i] != side[to.i] })
}

func (f *faults) sides() []bool {
	side := make([]bool, len(f.c.machines))
	for i := range side {
		side[i] = f.c.IntN(2) == 0
	}
	side[f.c.IntN(len(side))] = true
	return side
}

// bridge leaves one machine that sees both sides.
func (f *faults) bridge(until time.Duration) {
	side, b := f.sides(), f.any()
	f.cut(until, func(from, to *machine) bool { return from != b && to != b && side[from.i] != side[to.i] })
}

// flaps cuts a machine off and on again, 10 times a minute.
func (f *faults) flaps(until time.Duration) {
	m := f.any()
	if m == nil || f.c.now >= until {
		return
	}
	down := f.c.now + f.c.span(500*time.Millisecond, 4*time.Second)
	f.cut(min(until, down), func(from, to *machine) bool { return from == m || to == m })
	f.c.after(nil, 6*time.Second, func() { f.flaps(until) })
}

// shortFlaps leave enough of each 6 s for a renewal.
func (f *faults) shortFlaps(until time.Duration) {
	m := f.pick(func(m *machine) bool { return m.shell == nil })
	if m == nil {
		return
	}
	var again func()
	again = func() {
		if f.c.now >= until {
			return
		}
		f.cut(min(until, f.c.now+f.c.span(500*time.Millisecond, 3*time.Second)),
			func(from, to *machine) bool { return from == m || to == m })
		f.c.after(nil, 6*time.Second, again)
	}
	again()
}

func (f *faults) betweenWorkers(until time.Duration) {
	worker := func(m *machine) bool { return m.worker && !m.control }
	a, b, both := f.pick(worker), f.pick(worker), f.c.IntN(2) == 0
	f.cut(until, func(from, to *machine) bool { return from == a && to == b || both && from == b && to == a })
}

// setNet makes the whole network bad.
func (f *faults) setNet(what *float64, p float64, until time.Duration) {
	*what = p
	f.until(until, func() {
		*what = 0
		f.c.upset = f.c.now
	})
}

// freeze stops a process for 1 to 20 s.
func (f *faults) freeze(m *machine) {
	if m == nil || m.frozen {
		return
	}
	m.freeze()
	gen := m.gen
	least := time.Second
	if f.c.cfg.only != "" {
		least = 13 * time.Second
	}
	f.until(min(f.heal, f.c.now+f.c.span(least, 20*time.Second)), func() {
		if m.gen == gen {
			f.thaw(m)
		}
	})
}

func (f *faults) thaw(m *machine) {
	if !m.frozen {
		return
	}
	m.mustAsk = m.mustAsk || f.c.now-m.since > f.c.cfg.ttl
	m.thawed, m.upset = f.c.now, f.c.now
	m.thaw()
}

func (f *faults) slow(m *machine, until time.Duration) {
	if m == nil || f.c.cfg.gentle && f.c.cfg.fence && m.control && f.anyHung() { // see hangAlone
		return
	}
	m.slow = true
	f.until(until, func() { m.slow = false })
}

// crash ends a process; it is started again on its disk.
func (f *faults) crash(m *machine, until time.Duration) {
	if m == nil {
		return
	}
	m.crash(f.c.IntN(3) == 0)
	f.until(until, func() { f.boot(m) })
}

// fall ends a process whose engines live on.
func (f *faults) fall(m *machine, until time.Duration) {
	if m != nil {
		m.fall()
		f.until(until, func() { f.boot(m) })
	}
}

// restart replaces a process, which has told the leader.
func (f *faults) restart(m *machine, until time.Duration) {
	if m != nil && !m.host.core.Restarting() && !m.host.core.Stopping() {
		f.c.arrive(m.process, 0, func() { m.restart(until) })
	}
}

// fallFault names the fault.
const fallFault = "a process dies, its engines live"

func (f *faults) boot(m *machine) {
	if !m.alive && !m.removed {
		m.disk.hungTill = 0 // the machine was switched off and on
		if m.disk.saved == nil && !m.control {
			m.disk.saved = f.c.public(f.c.canon.now()) // what it was told when it joined
		}
		m.boot()
		m.upset = f.c.now
	}
}

// hang lets no write of a machine's disk return for a while.
func (f *faults) hang(m *machine) {
	if m == nil || m.disk.hangs(f.c.now) {
		return
	}
	least := time.Duration(0)
	if f.c.cfg.only != "" {
		least = 13 * time.Second
	}
	m.disk.hungTill = min(f.heal, f.c.now+f.c.span(least, hangMax))
	f.c.log("disk hangs", m.name, m.disk.hungTill)
}

// hangAlone is hang while the other control nodes are well: two of three have to find a leader within the
// time of a lease.
func (f *faults) hangAlone(m *machine) {
	if !f.anyHung() && !slices.ContainsFunc(f.c.machines, func(o *machine) bool {
		return o.control && o.slow
	}) {
		f.hang(m)
	}
}

// anyHung says whether a disk hangs, or has until a moment ago.
func (f *faults) anyHung() bool {
	return slices.ContainsFunc(f.c.machines, func(o *machine) bool {
		return f.c.now < o.disk.hungTill+ledWithin
	})
}

// deafen lets the leader's controller take no renewals, while consensus goes on: until another leader begins
// again. The leader has heard its nodes before, and there is another voter to hand over to.
func (f *faults) deafen(until time.Duration) {
	if m := f.leader(); m != nil && !m.raft.isOnlyVoter() && f.c.now-m.shell.began > f.c.cfg.ttl/2 {
		m.shell.deafTill = until
	}
}

// clock sets a wall clock forward or back: by an hour, or by a little.
func (f *faults) clock() {
	if m := f.any(); m != nil {
		jumps := []time.Duration{time.Hour, -time.Hour, 3 * time.Second, -3 * time.Second}
		m.wall += jumps[f.c.IntN(len(jumps))]
	}
}

// starts lets engines die while they start, for a while.
func (f *faults) starts(until time.Duration) {
	f.c.startFails = 0.5
	f.until(until, func() { f.c.startFails = 0 })
}

// join brings a new machine.
func (f *faults) join() {
	c := f.c
	if len(c.machines) == len(c.net.cuts) {
		return
	}
	m := c.add(c.IntN(2) == 0, true)
	m.upset = c.now
	f.enter(m)
}

// enter makes it a member, and starts it with what it was told.
func (f *faults) enter(m *machine) {
	f.c.work.admin(state.Command{PutNode: &state.PutNode{Node: m.record()}}, func(err error) {
		switch n := f.c.canon.now().Nodes[m.name]; {
		case m.alive || m.removed:
		case n == nil:
			f.c.after(nil, time.Second, func() { f.enter(m) })
		default:
			f.boot(m)
		}
	})
}

// remove drains a machine and, when nothing is left on it, takes it out of the cluster for good.
func (f *faults) remove() {
	m := f.any()
	if m == nil || len(f.c.machines) < 3 || f.c.removals > 0 {
		return
	}
	f.c.removals++
	f.c.work.admin(state.Command{DrainNode: &state.DrainNode{Node: m.name}}, nil)
	f.c.after(nil, f.c.span(8*time.Second, 15*time.Second), func() {
		if !f.c.work.over && f.spare(m) {
			f.c.work.admin(state.Command{RemoveNode: &state.RemoveNode{Node: m.name}}, nil)
		}
	})
}

// spare says whether the voters that stay can do without a machine: who takes one of two that live takes the
// majority.
func (f *faults) spare(m *machine) bool {
	l, workers := f.leader(), 0
	for _, n := range f.c.canon.now().Nodes {
		if n.Has(state.RoleWorker) && n.ID != m.name {
			workers++
		}
	}
	if l == nil || workers < 2 { // what is wanted must have room
		return false
	}
	voters, live := 0, 0
	all, _ := l.raft.members()
	for _, v := range all {
		o := f.c.machines[v.i]
		if v.votes {
			voters++
		}
		if v.votes && o != m && o.alive && !o.frozen {
			live++
		}
	}
	return live > voters/2
}

// healAll ends all trouble.
func (f *faults) healAll() {
	c := f.c
	c.log("heal")
	f.cut(c.now, func(*machine, *machine) bool { return true })
	for _, a := range c.machines {
		for _, b := range c.machines {
			c.set(a, b, false)
		}
	}
	net := c.net
	net.loss, net.drop, net.double, net.lag, c.startFails = 0, 0, 0, 0, 0
	c.upset, c.work.over = c.now, true
	for _, m := range c.machines {
		m.slow, m.deadly = false, nil
		f.thaw(m)
		if m.alive && m.host.core.Stopping() { // its time is over
			m.crash(false)
		}
		if c.canon.now().Nodes[m.name] != nil {
			f.boot(m)
			c.work.undrain(m)
		} else {
			m.removed = true
			m.crash(false)
		}
	}
}
