package cluster_test

import (
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/state"
)

// host is a machine's worker. It decides by actors/node's own code (node.Core); the shell around it is a
// model: the actor that takes commands, the loop that renews the lease, the guard, units without processes.
type host struct {
	m       *machine
	c       *cluster
	core    *node.Core
	units   map[string]*hosted
	engines []*engine
	asked   []func() // commands that wait for the end of a renewal

	leased   time.Duration // end of the last lease that the leader granted, counted from its renewal
	renewing bool
	planned  int // number of the last plan for the next renewal

	sessions map[int]*session // streams to ingresses, by machine
}

// engine is a process that holds what a rank was granted.
type engine struct {
	unit  string
	epoch uint64
	grant state.RankGrant
	block state.Block
	order *msg.StartRank
	dead  bool

	incarnation uint64
}

// renewLimit is the deadline of one renewal, as in actors/node.
const renewLimit = time.Second

func newHost(m *machine) *host {
	c, found := m.c, m.takeShims()
	h := &host{
		m: m, c: c, units: map[string]*hosted{}, sessions: map[int]*session{},
		core: node.NewCore(c.clock(), node.CoreConfig{
			Node: m.name, Incarnation: c.Uint64() | 1, AfterStop: m.afterStop, Epochs: m.disk.epochs,
			OnLeaseLoss: c.lossOf(), LeaseTTL: c.cfg.ttl, LeaseRenew: c.cfg.renew, Found: newestFound(found),
			Sought: c.clock().Add(m.sought - c.now),
		}),
	}
	h.takeOver(found)
	h.plan()
	c.after(m.process, 0, h.guard)
	if m.worker {
		c.after(m.process, streamBeat, h.beat)
	}
	return h
}

// plan renews the lease when the core wants it.
func (h *host) plan() {
	if h.renewing {
		return
	}
	h.planned++
	planned := h.planned
	h.c.after(h.m.process, h.core.RenewAt().Sub(h.c.clock()), func() {
		if h.planned == planned && !h.renewing {
			h.renew()
		}
	})
}

// renew asks for the lease once.
func (h *host) renew() {
	h.renewing = true
	sent := h.c.now
	r := h.core.Renew(h.c.clock())
	r.Node, r.Wall, r.Index = h.m.record(), h.c.clock().Add(h.m.wall), h.m.view.Index
	if h.c.cfg.mutant == hidesFound {
		hide(r)
	}
	askLeader(h.m, renewLimit, true, func(l *shell, answer func(msg.Lease, error)) { l.renew(r, answer) },
		func(lease msg.Lease, err error) {
			h.renewing = false
			if sent >= h.m.thawed {
				h.m.mustAsk = false
			}
			granted := &lease
			if err != nil {
				granted = nil
			} else {
				h.leased, h.m.answered = max(h.leased, sent+lease.TTL), true
			}
			h.core.Renewed(h.c.clock(), granted)
			if h.core.Undecided() {
				h.check()
			}
			h.plan()
			asked := h.asked
			h.asked = nil
			for _, f := range asked {
				f()
			}
		})
}

// demand renews the lease at once, and returns the number of the renewal.
func (h *host) demand() uint64 {
	number := h.core.Demand()
	h.plan()
	return number
}

// covered goes on when an engine may be launched, or when a renewal has not helped.
func (h *host) covered(renewal uint64, then func()) {
	if h.core.MayLaunch(h.c.clock()) == nil || h.core.Ended() >= renewal {
		then()
		return
	}
	h.asked = append(h.asked, func() { h.covered(renewal, then) })
}

// startRank takes an order to start, or refuses it.
func (h *host) startRank(o *msg.StartRank, answer func(struct{}, error)) {
	start := func() { h.flush(func() { answer(struct{}{}, h.start(o)) }) }
	if h.core.MayLaunch(h.c.clock()) == nil {
		start()
		return
	}
	h.covered(h.demand(), start)
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
	defer h.plan()
	epochs, err := h.core.MayStart(h.c.clock(), h.m.view, o)
	if err != nil || epochs == nil {
		return err
	}
	h.mayTake(o)
	h.m.disk.epochs = epochs
	before := h.units[o.Unit]
	u := &hosted{h: h, Life: h.core.Start(h.c.clock(), o, epochs), before: before}
	if before != nil {
		h.mustEnd(before)
		before.poke()
	}
	h.units[o.Unit] = u
	u.begin()
	return nil
}

// stopRank asks a unit to end. One that is not here says that it is gone.
func (h *host) stopRank(o *msg.StopRank, answer func(struct{}, error)) {
	h.flush(func() { answer(struct{}{}, h.stop(o)) })
}

func (h *host) stop(o *msg.StopRank) error {
	defer h.plan()
	epochs, err := h.core.MayStop(o)
	if err != nil {
		return err
	}
	if seen := h.m.disk.epochs[o.Unit]; o.Epoch < seen {
		h.c.violate("%s takes an order to stop %s at epoch %d after epoch %d", h.m.name, o.Unit, o.Epoch,
			seen)
	}
	if epochs != nil {
		h.m.disk.epochs = epochs
	}
	h.core.Stop(h.c.clock(), o, epochs)
	if u := h.units[o.Unit]; u != nil {
		u.poke()
	}
	return nil
}

// guard checks the clock and the state.
func (h *host) guard() { h.c.after(h.m.process, h.check(), h.guard) }

// check ends what the core finds, and returns the time until the next check.
func (h *host) check() time.Duration {
	view := h.m.view
	if h.c.cfg.mutant == noSupersede {
		view = state.New()
	}
	cut, next := h.core.Check(h.c.clock(), view)
	for _, name := range cut {
		h.units[name].closed()
		h.units[name].poke()
	}
	for name := range h.units {
		if !h.core.Has(name) {
			delete(h.units, name)
		}
	}
	for _, name := range sorted(h.units) {
		if u := h.units[name]; u.IsFound() {
			u.poke()
		}
	}
	return next
}

// admit asks the unit's DPServer for a ticket.
func (h *host) admit(unit string, epoch uint64) bool {
	u := h.units[unit]
	switch {
	case !h.c.clock().Before(h.core.AdmitsUntil()) && h.c.cfg.mutant != noFence:
		return false
	case u == nil || u.Order.Epoch != epoch || !u.accepting:
		return false
	}
	h.c.accepted(h.m, unit, epoch)
	return true
}

// launch starts the engines of a unit's ranks here.
func (h *host) launch(u *hosted) {
	u.incarnation = h.c.Uint64()
	for i := range u.Order.Ranks {
		e := &engine{
			unit: u.Order.Unit, epoch: u.Order.Epoch, grant: u.Order.Ranks[i], block: u.Order.Block,
			order: u.Order, incarnation: u.incarnation,
		}
		h.engines = append(h.engines, e)
		u.engines = append(u.engines, e)
	}
	h.c.launched(h, u)
	h.m.dies(u.Order.Unit)
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
