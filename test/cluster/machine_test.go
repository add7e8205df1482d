package cluster_test

import (
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/state"
)

// machine is one node of the cluster: a disk, and a process with consensus, perhaps the leader's actors,
// perhaps a worker and an ingress.
type machine struct {
	*process
	c          *cluster
	i          int
	uid        string
	control    bool
	worker     bool
	ingress    bool
	dark       bool // when it is not alive its kernel is not either: nobody is refused, nobody is reset
	runs       int  // of raft
	removed    bool // by a person, who will switch it off
	disk       *disk
	wall       time.Duration   // what its wall clock is ahead
	upset      time.Duration   // when something was wrong with it last
	thawed     time.Duration   // when it was frozen last, till then
	deadly     map[string]bool // units whose start ends the process
	everDeadly map[string]bool
	afterStop  bool      // the process before this one was told to end
	shims      []*engine // that a process has left, while none runs
	answered   bool      // this process: a renewal of it was

	sought  time.Duration // since when this process has looked for a leader
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
	holds   bool // it led when its disk failed, and is the only voter: see cluster.Holds
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
	m.raft, m.watch, m.known, m.avoid, m.holds = nil, nil, -1, -1, false
	if m.c.cfg.mutant == forgets {
		m.disk.epochs = map[string]uint64{}
	}
	m.view, m.viewed, m.mustAsk = state.New(), map[string]time.Duration{}, false
	m.gone, m.leaving = map[string]time.Duration{}, false
	m.afterStop, m.disk.afterStop = m.disk.afterStop, false
	m.answered, m.sought = false, m.c.now
	if m.c.cfg.lone {
		m.sought -= m.c.cfg.ttl
	}
	m.c.log("boot", m.name)
	if m.control {
		m.raft = newRaft(m)
		if m.raft.snap != nil {
			m.view = m.raft.fsm.work.Clone()
		}
	} else {
		if m.disk.saved != nil {
			m.view = m.c.decode(m, m.disk.saved)
		}
		m.watch = newWatcher(m)
	}
	m.host = newHost(m)
	if m.ingress {
		m.ing = newGateway(m)
	}
	m.changed()
}

// crash ends the process and its engines. Without power no connection is reset.
func (m *machine) crash(power bool) {
	if !m.alive {
		return
	}
	m.c.log("crash", m.name, power)
	for _, e := range m.host.engines {
		e.dead = true
	}
	m.host.engines = nil
	m.lose()
	m.dark = power
	if !power {
		m.c.reset(m)
	}
}

// lose ends the process, and what it had not written for certain.
func (m *machine) lose() {
	m.disk.lose(m.c.sim)
	if m.raft != nil {
		m.raft.role = follower
	}
	m.end()
}

// reset tells every machine that had a stream of this machine.
func (c *cluster) reset(m *machine) {
	for _, o := range c.machines {
		if !o.alive || o == m || c.net.cuts[m.i][o.i] {
			continue
		}
		c.arrive(o.process, c.span(latencyMin, latencyMax), func() {
			if o.ing != nil {
				o.ing.broke(m.i)
			}
			if w := o.watch; w != nil && w.source == m {
				w.broke(w.session)
			}
		})
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
		n.Resources = state.Resources{
			Slots: slotsEach, Devices: []int{0, 1, 2, 3, 4, 5}, PortLo: 20000,
			PortHi: 20999,
		}
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
			if over := node.Superseded(s, id, u.Order.Epoch); !over {
				delete(m.viewed, id)
			} else if m.viewed[id] == 0 {
				m.viewed[id] = m.c.now
			}
		}
	}
	if !m.dirty {
		m.dirty = true
		m.c.after(m.process, m.c.span(0, 2*time.Millisecond), m.changed)
	}
}

// changed wakes everything on the machine that reads its copy of the state.
func (m *machine) changed() {
	m.dirty = false
	if m.shell != nil {
		m.shell.look()
	}
	m.host.check()
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
	m.handOver(m.c.now+handOverLimit, func() bool { return true }, func() { m.crash(false) })
}

// leadsAs returns the leader as far as the machine knows; -1 means none.
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
	case r.ready && m.shell != nil && m.shell.term != r.term && !m.shell.leaving, !r.ready &&
		m.shell != nil && !m.shell.leaving && !m.holds:
		l := m.shell
		l.leaving, m.holds = true, false
		m.c.after(m.process, m.c.span(0, closeAfter), func() { l.close() })
	case r.ready && m.shell == nil && m.c.cfg.mutant == noBarrier:
		m.shell = newShell(m)
	case r.ready && m.shell == nil && !m.taking:
		m.taking = true
		m.takeOver(r.round)
	}
}

// takeOver makes itself known, then begins what the leader does.
func (m *machine) takeOver(round int) {
	still := func() bool { return m.raft.ready && m.raft.round == round }
	self := m.record()
	m.propose(state.Command{PutNode: &state.PutNode{Node: self}}, proposeLimit,
		func(_ state.Result, err error) {
			switch {
			case !still():
				m.taking = false
				m.led()
			case err != nil:
				m.c.after(m.process, 200*time.Millisecond, func() { m.takeOver(round) })
			default:
				m.taking = false
				m.shell = newShell(m)
				m.host.demand() // the leader's own node renews at once
			}
		})
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

// uidOf names the nth data dir.
func uidOf(i int) string { return "uid-" + strconv.Itoa(i) }

// lossOf is what nodes do without a lease in this run.
func (c *cluster) lossOf() node.LeaseLoss {
	if c.cfg.fence && c.cfg.mutant != noFence {
		return node.Fence
	}
	return node.Serve
}
