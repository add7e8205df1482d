package cluster_test

import (
	"cmp"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/state"
)

// Times of processes whose engines outlive them.
const (
	orphanTimeout = 25 * time.Second // an engine without a node ends after it
	adoptMin      = 20 * time.Millisecond
	adoptMax      = 400 * time.Millisecond
	restartGrace  = 20 * time.Second // that a planned restart asks for
	restartWait   = 2 * time.Second  // for the leader's answer and for open requests
	briefFall     = 3 * time.Second  // of gentle runs: a lease outlives it
)

// fall ends the process alone. Its engines live on in shims, until the next process finds them or a deadline
// passes: that of the last lease with fence, else the orphan timeout.
func (m *machine) fall() {
	if !m.alive {
		return
	}
	c := m.c
	c.log("falls", m.name)
	m.shims = m.host.engines
	left := orphanTimeout
	if c.lossOf() == node.Fence {
		left = min(left, m.host.leased-c.cfg.ttl/10-c.now)
	}
	m.host.engines = nil
	m.lose()
	gen := m.gen
	c.after(nil, left, func() {
		if m.gen == gen && !m.alive {
			for _, e := range m.shims {
				e.dead = true
			}
		}
	})
	m.dark = false
	c.reset(m)
}

// takeShims groups what the process before has left, by unit and epoch; the newest epoch of a unit is last.
func (m *machine) takeShims() (found [][]*engine) {
	byKey := map[string][]*engine{}
	for _, e := range m.shims {
		k := key(e.unit, e.epoch)
		byKey[k] = append(byKey[k], e)
	}
	m.shims = nil
	for _, k := range sorted(byKey) {
		found = append(found, byKey[k])
	}
	slices.SortStableFunc(found, func(a, b []*engine) int {
		return cmp.Or(cmp.Compare(a[0].unit, b[0].unit), cmp.Compare(a[0].epoch, b[0].epoch))
	})
	return found
}

// newestFound are the orders of the newest epoch of each unit.
func newestFound(found [][]*engine) (orders []*msg.StartRank) {
	for i, es := range found {
		if i+1 == len(found) || found[i+1][0].unit != es[0].unit {
			orders = append(orders, es[0].order)
		}
	}
	return orders
}

// takeOver makes units of the engines that were found.
func (h *host) takeOver(found [][]*engine) {
	var before *hosted
	for _, es := range found {
		o := es[0].order
		if before != nil && before.Order.Unit != o.Unit {
			before = nil
		}
		life := h.core.Life(o.Unit)
		isNewest := life.Order == o
		if !isNewest {
			life = &node.Life{Order: o, Phase: state.Starting}
			life.AskStop(h.c.clock(), 0, "a newer epoch was granted")
		}
		u := &hosted{h: h, Life: life, before: before, engines: es, incarnation: es[0].incarnation}
		for _, e := range es {
			if !e.dead {
				h.engines = append(h.engines, e)
				continue
			}
			u.Fail(e.grant.Rank, "the engine exited while no node was running")
		}
		if isNewest {
			h.units[o.Unit] = u
		}
		before = u
		h.c.log("found", h.m.name, o.Unit, o.Epoch, string(life.Phase))
		if h.c.cfg.mutant == adoptsUnasked && isNewest {
			h.c.after(h.m.process, 0, u.adopt)
			continue
		}
		h.c.after(h.m.process, 0, u.poke)
	}
}

// adopt attaches to engines that run already.
func (u *hosted) adopt() {
	u.Adopt()
	u.log("adopted", "")
	if u.lockstep() && !u.WasReady && u.Order.Ranks[0].Rank == 0 {
		u.publish() // the other nodes may still wait for it
	}
	u.after(u.h.c.span(adoptMin, adoptMax), u.up)
}

// restart is a planned one: the node tells the leader, closes its ranks, waits a little and is replaced. The
// next process starts at until, or at once after that.
func (m *machine) restart(until time.Duration) {
	h, c := m.host, m.c
	c.log("restarts", m.name)
	h.core.Restart(restartGrace)
	h.plan()
	for _, name := range sorted(h.units) {
		if u := h.units[name]; u.accepting {
			u.accepting = false
			h.show(u)
		}
	}
	c.after(m.process, c.span(0, restartWait), func() {
		m.disk.afterStop = true
		m.fall()
		c.after(nil, until-c.now, func() {
			if !m.alive && !m.removed {
				m.boot()
				m.upset = c.now
			}
		})
	})
}

// orphaned: what a dead process has left belongs to a grant that stands, unless its node was taken for lost.
func (c *cluster) orphaned(m *machine, unit string, epoch uint64, g *granted) {
	for _, e := range m.shims {
		if !m.alive && !e.dead && e.unit == unit && e.epoch == epoch && !g.lost[m.name] {
			c.violate("%s is given back at epoch %d, and an engine of it lives on %s without a node", unit,
				epoch, m.name)
		}
	}
}

// hide removes from a report what the process has found and not decided about.
func hide(r *msg.NodeReport) {
	r.Units = slices.DeleteFunc(r.Units, func(e msg.UnitEvent) bool { return e.Kind == msg.UnitPresent })
}
