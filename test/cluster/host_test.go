package cluster_test

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// host is a machine's worker: the rules of actors/node are its own code (node.Rules), the rest is a model:
// the actor that takes commands, the loop that renews the lease, the guard, and units without processes.
type host struct {
	m       *machine
	c       *cluster
	rules   *node.Rules
	process uint64 // random, of this process
	units   map[string]*hosted
	engines []*engine
	numbers uint64
	asked   []func() // commands that wait for the end of a renewal

	stopping bool // it was told to end
	renewing bool
	woken    bool // there is news since the last renewal began
	demanded bool // a command waits for the lease
	paused   int  // number of the pause
	opens    time.Duration
	retry    time.Duration

	sessions map[int]*session // streams to ingresses, by machine
}

// engine is a process that holds what a rank was granted.
type engine struct {
	unit  string
	epoch uint64
	grant state.RankGrant
	block state.Block
	dead  bool
}

// Parts of a lease and of its renewal, as in actors/node.
const (
	renewLimit = time.Second
	guardPart  = 20
	retryFirst = 20
	retryLast  = 2
)

func newHost(m *machine) *host {
	c := m.c
	h := &host{
		m: m, c: c, process: c.Uint64() | 1, units: map[string]*hosted{}, sessions: map[int]*session{},
		rules: node.NewRules(c.clock(), c.cfg.ttl, c.lossOf(), m.disk.epochs),
		retry: c.cfg.renew / retryFirst,
	}
	c.after(m.process, 0, h.renew)
	c.after(m.process, 0, h.guard)
	if m.worker {
		c.after(m.process, streamBeat, h.beat)
	}
	return h
}

// renew asks for the lease once, and again when it is time.
func (h *host) renew() {
	h.renewing, h.woken, h.demanded = true, false, false
	h.paused++
	sent := h.c.now
	h.rules.Look(h.c.clock())
	r := &msg.NodeReport{
		Node: h.m.record(), Incarnation: h.process, Wall: h.c.clock().Add(h.m.wall), Index: h.m.view.Index,
		Stopping: h.stopping, AfterStop: h.m.afterStop,
	}
	r.Events, r.Units = h.rules.Report()
	askLeader(h.m, renewLimit, true, func(l *shell, answer func(msg.Lease, error)) { l.renew(r, answer) },
		func(lease msg.Lease, err error) {
			h.ended(sent, lease, err)
		})
}

func (h *host) ended(sent time.Duration, lease msg.Lease, err error) {
	h.renewing = false
	if sent >= h.m.thawed {
		h.m.mustAsk = false
	}
	more := false
	if err != nil {
		h.rules.Renewed(epochStart.Add(sent), h.c.clock(), 0)
		h.pause(h.c.cfg.renew/retryFirst, h.retry)
		h.retry = min(2*h.retry, h.c.cfg.renew/retryLast)
	} else {
		more = h.rules.Taken(lease.Taken)
		h.rules.Renewed(epochStart.Add(sent), h.c.clock(), lease.TTL)
		h.retry = h.c.cfg.renew / retryFirst
		if more {
			h.c.after(h.m.process, 0, h.renew)
		} else {
			h.pause(0, h.c.cfg.renew-(h.c.now-sent))
		}
	}
	asked := h.asked
	h.asked = nil
	for _, f := range asked {
		f()
	}
}

// pause waits for longest, for news after least, or for a command that wants the lease.
func (h *host) pause(least, longest time.Duration) {
	h.opens = h.c.now + least
	h.wakeIn(max(least, longest))
	h.ring()
}

func (h *host) wakeIn(d time.Duration) {
	paused := h.paused
	h.c.after(h.m.process, d, func() {
		if h.paused == paused && !h.renewing {
			h.renew()
		}
	})
}

// ring cuts a pause short if there is a reason.
func (h *host) ring() {
	switch {
	case h.renewing:
	case h.demanded:
		h.wakeIn(0)
	case h.woken:
		h.wakeIn(h.opens - h.c.now)
	}
}

// tell numbers an event and hands it to the renewal.
func (h *host) tell(e msg.UnitEvent) {
	h.numbers++
	e.Node, e.Number = h.m.name, h.numbers
	h.c.log("event", h.m.name, e.Unit, e.Epoch, string(e.Kind), e.Reason)
	h.rules.Tell(e)
	h.woken = true
	h.ring()
}

// ensure asks for the lease before a command is refused for the want of it, at most twice.
func (h *host) ensure(times int, then func()) {
	if times == 0 || h.rules.Starts(h.c.clock()) {
		then()
		return
	}
	h.demanded = true
	h.asked = append(h.asked, func() { h.ensure(times-1, then) })
	h.ring()
}

var errNoLease = problem.New(problem.Unavailable, "no lease")

// startRank takes an order to start, or refuses it.
func (h *host) startRank(o *msg.StartRank, answer func(struct{}, error)) {
	h.ensure(2, func() { h.flush(func() { answer(struct{}{}, h.start(o)) }) })
}

// flush does what needs a write: the epoch is on disk before the node answers.
func (h *host) flush(then func()) {
	if d := h.m.disk; d.hangs(h.c.now) {
		h.c.after(h.m.process, d.hungTill-h.c.now, then)
		return
	}
	then()
}

func (h *host) start(o *msg.StartRank) error {
	before := h.units[o.Unit]
	if before != nil && before.order.Epoch == o.Epoch && h.m.disk.epochs[o.Unit] == o.Epoch {
		before.repeat()
		return nil
	}
	switch {
	case h.stopping:
		return errStopping
	case node.Superseded(h.m.view, o.Unit, o.Epoch):
		return problem.New(problem.Conflict, "unit %s: epoch %d is superseded", o.Unit, o.Epoch)
	case !h.rules.Starts(h.c.clock()):
		return errNoLease
	}
	if err := h.rules.Begin(o.Unit, o.Epoch); err != nil {
		return err
	}
	h.m.disk.epochs[o.Unit] = o.Epoch
	u := &hosted{h: h, order: o, before: before, phase: state.Starting}
	if before != nil {
		before.askStop(0, "a newer epoch was granted")
	}
	h.units[o.Unit] = u
	u.begin()
	return nil
}

// stopRank asks a unit to end. One that is not here says that it is gone.
func (h *host) stopRank(o *msg.StopRank, answer func(struct{}, error)) {
	h.flush(func() { h.stop(o, answer) })
}

func (h *host) stop(o *msg.StopRank, answer func(struct{}, error)) {
	if err := h.rules.Admit(o.Unit, o.Epoch); err != nil {
		answer(struct{}{}, err)
		return
	}
	h.m.disk.epochs[o.Unit] = max(h.m.disk.epochs[o.Unit], o.Epoch)
	u := h.units[o.Unit]
	if u == nil || u.order.Epoch < o.Epoch {
		h.tell(msg.UnitEvent{
			Unit: o.Unit, Epoch: o.Epoch, Kind: msg.UnitGone, Rank: -1, Reason: o.Reason,
			Asked: true,
		})
	}
	if u != nil {
		ends := u.phase == state.Draining || u.phase == state.Killing
		if !u.askStop(o.Grace, o.Reason) || ends {
			u.repeat()
		}
	}
	answer(struct{}{}, nil)
}

// guard looks at the clock and at the state.
func (h *host) guard() {
	h.supersede()
	h.rules.Look(h.c.clock())
	every := h.c.cfg.ttl / guardPart
	if h.c.cfg.fence && h.c.cfg.mutant != noFence {
		if h.rules.Fences(h.c.clock()) {
			for _, name := range sorted(h.units) {
				h.units[name].cut("lease_lost")
			}
		} else if in := h.rules.FencesAt().Sub(h.c.clock()); in < every {
			every = in
		}
	}
	h.c.after(h.m.process, every, h.guard)
}

// supersede ends what the state shows to be over, and forgets what is gone.
func (h *host) supersede() {
	if h.c.cfg.mutant == noSupersede {
		return
	}
	for _, name := range sorted(h.units) {
		u := h.units[name]
		if node.Superseded(h.m.view, name, u.order.Epoch) && !u.cut("superseded") {
			delete(h.units, name)
		}
	}
	digest := h.rules.Units()
	for _, name := range sorted(digest) {
		if h.units[name] == nil && node.Superseded(h.m.view, name, digest[name]) {
			h.rules.Forget(name, digest[name])
		}
	}
}

// admit asks the unit's DPServer for a ticket.
func (h *host) admit(unit string, epoch uint64) bool {
	u := h.units[unit]
	switch {
	case !h.rules.Admits(h.c.clock()) && h.c.cfg.mutant != noFence:
		return false
	case u == nil || u.order.Epoch != epoch || !u.accepting:
		return false
	}
	h.c.accepted(h.m, unit, epoch)
	return true
}

// launch starts the engines of a unit's ranks here.
func (h *host) launch(u *hosted) {
	for i := range u.order.Ranks {
		e := &engine{unit: u.order.Unit, epoch: u.order.Epoch, grant: u.order.Ranks[i], block: u.order.Block}
		h.engines = append(h.engines, e)
		u.engines = append(u.engines, e)
	}
	h.c.launched(h, u)
	h.m.dies(u.order.Unit)
}

// kill ends them.
func (h *host) kill(u *hosted) {
	var left []*engine
	for _, e := range u.engines {
		e.dead = true
	}
	for _, e := range h.engines {
		if !e.dead {
			left = append(left, e)
		}
	}
	h.engines = left
}
