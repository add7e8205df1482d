package cluster_test

import (
	"fmt"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// The ways in which a machine ends: by SIGTERM, or because its process dies of an engine that it starts.
const (
	stopGrace  = 15 * time.Second // of the application whose streams are long
	drainShort = time.Second      // of units without long streams
	lastReport = 2 * time.Second  // for the leader to take the last events
	bootAfter  = 2 * time.Second  // as the service file: between the end of a process and the next one
	// between the end of a rank on a stopping machine and its next grant, if there is room
	movedWithin  = 12 * time.Second
	deadlyStarts = 3 // failed starts in a row, then a unit has failed, or waits for minutes
)

// terminate is SIGTERM. Every unit drains, one of them with a stream as long as its grace. The machine renews
// its lease and says that it is stopping. When no unit is left it lets another machine lead, and ends.
func (m *machine) terminate() {
	h := m.host
	m.c.log("told to stop", m.name)
	h.core.Leave()
	h.core.StopAll(m.c.clock(), time.Hour)
	names := sorted(h.units)
	if len(names) > 0 {
		h.units[names[m.c.IntN(len(names))]].streams = true
	}
	for _, name := range names {
		h.units[name].poke()
	}
	h.plan()
	m.awaitUnits()
}

func (m *machine) awaitUnits() {
	m.c.after(m.process, 100*time.Millisecond, func() {
		for _, u := range m.host.units {
			if u.Phase != state.Gone {
				m.awaitUnits()
				return
			}
		}
		m.handOver(m.c.now+lastReport, func() bool { return !m.host.core.Waiting() }, func() {
			m.disk.afterStop = true
			m.crash(false)
		})
	})
}

// handOver waits until another machine leads and done says so, for so long, then goes on.
func (m *machine) handOver(until time.Duration, done func() bool, then func()) {
	leads := m.raft != nil && m.raft.role == leader
	if m.c.now > until || done() && (!leads || !m.raft.transfer()) {
		then()
		return
	}
	m.c.after(m.process, 100*time.Millisecond, func() { m.handOver(until, done, then) })
}

// stopsHere says what the leader has heard of a machine that stops.
func (l *shell) stopsHere(r *msg.NodeReport) {
	l.stopping[r.Node.ID] = r.Stopping
}

// mayGrant: nothing is granted on a machine that has told this leader that it stops.
func (l *shell) mayGrant(g *state.GrantGroup) {
	for i := range g.Units {
		u := &g.Units[i]
		for k := range u.Ranks {
			if l.stopping[u.Ranks[k].Node] {
				l.m.c.violate("%s grants %s on %s, which has said that it stops", l.m.name, u.Unit,
					u.Ranks[k].Node)
			}
		}
	}
}

// left notes that a rank has ended on a machine that stops: it is to be granted elsewhere.
func (c *cluster) left(u *hosted) {
	if u.h.core.Stopping() && u.WasReady && !u.lockstep() {
		c.audit.left[u.Order.Unit] = leaving{u.Order.Epoch, c.now}
	}
}

// leaving is a rank that has ended on a machine that stops.
type leaving struct {
	epoch uint64
	at    time.Duration
}

// unmoved is a rank that has ended on a machine that stops, and was not granted elsewhere although nothing
// else is wrong and there is room; "" = there is none.
func (c *cluster) unmoved() string {
	if c.disturbed() {
		c.calmSince = c.now
		return ""
	}
	now := c.canon.now()
	for _, unit := range sorted(c.audit.left) {
		l := c.audit.left[unit]
		switch rec := now.Units[unit]; {
		case now.Epochs[unit] > l.epoch, !c.wants(unit), rec != nil && rec.Phase == state.Failed:
			delete(c.audit.left, unit)
		case c.now-max(l.at, c.calmSince) > movedWithin && c.room(unit):
			return fmt.Sprintf(
				"%s ended at epoch %d at %v on a machine that stops, and was not granted elsewhere",
				unit, l.epoch, l.at)
		}
	}
	return ""
}

// disturbed says whether anything is wrong, apart from machines that were told to stop.
func (c *cluster) disturbed() bool {
	l := c.leading()
	if l != c.leader || l == nil || c.now < l.deafTill ||
		c.net.loss+c.net.drop+c.net.lag+c.net.double+c.startFails > 0 {
		c.leader = l
		return true
	}
	for _, id := range sorted(c.canon.now().Nodes) {
		m := c.named(id)
		if !m.alive && !m.disk.afterStop || m.frozen || m.slow || m.disk.hangs(c.now) || len(m.deadly) > 0 {
			return true
		}
		for _, o := range c.machines {
			if c.net.cuts[m.i][o.i] || c.net.cuts[o.i][m.i] {
				return true
			}
		}
	}
	return false
}

// wants says whether an application has a unit.
func (c *cluster) wants(unit string) bool {
	now := c.canon.now()
	for _, a := range now.Apps {
		if a.Deleting {
			continue
		}
		for _, w := range c.specOf(a).Units() {
			if w.ID == unit {
				return true
			}
		}
	}
	return false
}

// room says whether a unit of one rank finds a seat on a machine that does not stop.
func (c *cluster) room(unit string) bool {
	now := c.canon.now()
	slots, devices := map[string]int{}, map[string]int{}
	for _, u := range now.Units {
		for i := range u.Ranks {
			if r := &u.Ranks[i]; u.Holds() {
				devices[r.Node] += r.DeviceParts()
				if r.Slot >= 0 {
					slots[r.Node]++
				}
			}
		}
	}
	for _, id := range sorted(now.Nodes) {
		n, m := now.Nodes[id], c.named(id)
		if n.Takes() && m.alive && !m.host.core.Stopping() && slots[id] < n.Resources.Slots &&
			devices[id] < share.Whole*len(n.Resources.Devices) {
			return true
		}
	}
	return false
}

// dies ends the machine's process if what it starts is deadly there. The service manager starts it again.
func (m *machine) dies(unit string) {
	if !m.deadly[unit] {
		return
	}
	m.c.after(m.process, m.c.span(0, startMax), func() {
		u := m.host.units[unit]
		if u == nil || u.Phase != state.Starting || !m.deadly[unit] {
			return
		}
		m.c.log("dies of", m.name, unit)
		a := m.c.audit
		if a.deadly(unit, u.Order.Epoch) > deadlyStarts && m.c.cfg.steady {
			m.c.violate("%s has died of start %d of %s", m.name, deadlyStarts+1, unit)
		}
		m.crash(false)
		m.c.after(nil, bootAfter, func() {
			if !m.alive && !m.removed {
				m.boot()
				m.upset = m.c.now
			}
		})
	})
}

// deadly notes that a machine has died of a start, and returns how many starts of the unit in a row some
// machine has died of. A start on several machines is one, however many of them die of it.
func (a *audit) deadly(unit string, epoch uint64) int {
	if epochs := a.deaths[unit]; len(epochs) == 0 || epochs[len(epochs)-1] < epoch {
		a.deaths[unit] = append(epochs, epoch)
	}
	return len(a.deaths[unit])
}

// failedBeside: a unit that only started beside a deadly one does not end in failed.
func (c *cluster) failedBeside(unit string) {
	if c.cfg.only != deadlyFault {
		return
	}
	for _, m := range c.machines {
		if m.everDeadly[unit] {
			return
		}
	}
	c.violate("%s has failed, and only machines died beside it", unit)
}

// deadlyFault names the fault.
const deadlyFault = "a start ends its machine"

// poison makes the start of one of a machine's units deadly for the machine, and ends the unit's engine so
// that it starts.
func (f *faults) poison(m *machine, until time.Duration) {
	if m == nil || !m.worker || len(m.deadly) > 0 {
		return
	}
	var names []string
	for _, name := range sorted(m.host.units) {
		if m.host.units[name].Phase == state.Ready {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return
	}
	unit := names[f.c.IntN(len(names))]
	f.c.log("deadly", m.name, unit)
	m.deadly, m.everDeadly[unit] = map[string]bool{unit: true}, true
	f.until(until, func() { m.deadly = nil })
	f.c.arrive(m.process, 0, func() { m.host.units[unit].fail("signal: killed") })
}

// stop tells a machine to end; it is started again when it has.
func (f *faults) stop(m *machine, until time.Duration) {
	if m == nil || m.frozen || m.host.core.Stopping() || f.heal-f.c.now < stopGrace+5*time.Second {
		return
	}
	f.c.arrive(m.process, 0, m.terminate)
	var again func()
	again = func() {
		if m.alive && m.host.core.Stopping() {
			f.c.after(nil, time.Second, again)
			return
		}
		f.boot(m)
	}
	f.until(until, again)
}
