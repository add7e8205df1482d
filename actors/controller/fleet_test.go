package controller

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// host is a model of a node. It keeps the highest epoch seen per unit over its restarts, refuses a start at
// that epoch or below, and reports what it has with every renewal.
type host struct {
	node    state.Node
	process uint64
	high    map[string]uint64
	runs    map[string]uint64 // unit → epoch of its instance
	ready   map[string]bool
	newest  map[string]msg.UnitEvent
	events  []msg.UnitEvent // not acknowledged
	n       uint64
	slow    bool // started units become ready only when the test says so
	broken  bool // engines end while they start
	cut     bool

	stopping  bool // it was told to end
	afterStop bool // its previous process was told to end
}

var errStaleOrder = problem.New(problem.Conflict, "stale epoch")

func newHost(id string, slots int) *host {
	h := &host{
		node: state.Node{
			ID: id, UID: "uid-" + id, Advertise: "10.0.0." + id,
			Roles:     []state.Role{state.RoleControl, state.RoleWorker, state.RoleIngress},
			Resources: state.Resources{Slots: slots, PortLo: 20000, PortHi: 29999},
		},
		high: map[string]uint64{}, process: 1,
	}
	h.forget()
	return h
}

func (h *host) forget() {
	h.runs, h.ready, h.newest = map[string]uint64{}, map[string]bool{}, map[string]msg.UnitEvent{}
	h.events, h.n = nil, 0
}

// restart replaces the node's process; its engines end with the old one.
func (h *host) restart() {
	h.process++
	h.stopping, h.afterStop = false, h.stopping
	h.forget()
}

// close is SIGTERM: starting units end at once, ready ones drain until the test ends them, and nothing starts
// any more.
func (h *host) close() {
	h.stopping = true
	for _, unit := range slices.Sorted(maps.Keys(h.runs)) {
		if h.ready[unit] {
			h.tell(unit, h.runs[unit], msg.UnitDraining, because("node is stopping"))
			continue
		}
		h.gone(unit)
	}
}

func (h *host) tell(unit string, epoch uint64, kind msg.UnitEventKind, more ...func(*msg.UnitEvent)) {
	h.n++
	e := msg.UnitEvent{Number: h.n, Unit: unit, Epoch: epoch, Kind: kind, Rank: -1}
	for _, f := range more {
		f(&e)
	}
	h.events = append(h.events, e)
	if old := h.newest[unit]; old.Epoch <= epoch {
		h.newest[unit] = e
	}
}

func (h *host) report(now time.Time) *msg.NodeReport {
	r := &msg.NodeReport{
		Node: h.node, Incarnation: h.process, Wall: now, Events: slices.Clone(h.events),
		Stopping: h.stopping, AfterStop: h.afterStop,
	}
	for _, u := range slices.Sorted(maps.Keys(h.newest)) {
		r.Units = append(r.Units, h.newest[u])
	}
	return r
}

// start takes an order or refuses it.
func (h *host) start(o *msg.StartRank) error {
	switch {
	case o.Epoch == h.runs[o.Unit]:
		return nil
	case h.stopping:
		return problem.New(problem.Unavailable, "node %s: %w", h.node.ID, msg.ErrNodeStopping)
	case o.Epoch <= h.high[o.Unit]:
		return errStaleOrder
	}
	if old := h.runs[o.Unit]; old != 0 {
		h.gone(o.Unit) // an older instance is killed first
	}
	h.high[o.Unit], h.runs[o.Unit] = o.Epoch, o.Epoch
	h.tell(o.Unit, o.Epoch, msg.UnitStarted)
	switch {
	case h.broken:
		h.tell(o.Unit, o.Epoch, msg.UnitKilling, because("no such folder"))
		h.gone(o.Unit)
	case !h.slow:
		h.up(o.Unit)
	}
	return nil
}

func (h *host) up(unit string) {
	h.ready[unit] = true
	h.tell(unit, h.runs[unit], msg.UnitReady)
}

func (h *host) stop(o *msg.StopRank) {
	if o.Epoch < h.high[o.Unit] {
		return
	}
	h.high[o.Unit] = o.Epoch
	if h.runs[o.Unit] == 0 {
		h.tell(o.Unit, o.Epoch, msg.UnitGone)
		return
	}
	h.gone(o.Unit)
}

func (h *host) gone(unit string) {
	was, epoch := h.ready[unit], h.runs[unit]
	delete(h.runs, unit)
	delete(h.ready, unit)
	h.tell(unit, epoch, msg.UnitGone, func(e *msg.UnitEvent) { e.WasReady = was })
}

// crash ends a unit's engines.
func (h *host) crash(unit string) {
	if h.runs[unit] == 0 {
		return
	}
	if h.ready[unit] {
		h.tell(unit, h.runs[unit], msg.UnitFenced, because("signal: killed"))
	}
	h.gone(unit)
}

// follow stops units that the state has superseded, and forgets released ones.
func (h *host) follow(s *state.State) {
	for _, u := range slices.Sorted(maps.Keys(h.newest)) {
		epoch := h.newest[u].Epoch
		if s.Epochs[u] == epoch && s.Units[u] != nil || s.Epochs[u] < epoch {
			continue
		}
		if h.runs[u] != 0 {
			h.gone(u)
		}
		delete(h.newest, u)
	}
}

// taken drops the events that the leader has acknowledged.
func (h *host) taken(n uint64) {
	h.events = slices.DeleteFunc(h.events, func(e msg.UnitEvent) bool { return e.Number <= n })
}

// fleet is a world with nodes in its state, whose hosts take orders at once.
type fleet struct {
	*world
	hosts map[string]*host
	lease map[string]RenewEffect // the last answer per node
}

func newFleet(t testing.TB, hosts ...*host) *fleet {
	c := &fleet{world: bareWorld(t, Timers{}), hosts: map[string]*host{}, lease: map[string]RenewEffect{}}
	c.auto = c.carry
	for _, h := range hosts {
		c.join(h)
	}
	return c
}

func (c *fleet) join(h *host) {
	_, err := c.apply(state.Command{PutNode: &state.PutNode{Node: h.node}})
	require.NoError(c.t, err)
	c.hosts[h.node.ID] = h
	c.step(TimerFired{})
	c.renew(h.node.ID)
}

func (c *fleet) ids() []string { return slices.Sorted(maps.Keys(c.hosts)) }

// carry gives orders to hosts, except to hosts that are cut off.
func (c *fleet) carry(_ *world, e Effect) bool {
	switch e := e.(type) {
	case StartEffect:
		c.log("start %s epoch %d on %s", e.Order.Unit, e.Order.Epoch, e.Node)
		if h := c.hosts[e.Node]; h != nil && !h.cut {
			if err := h.start(e.Order); err != nil {
				c.inbox = append(c.inbox, Refused{e.Node, e.Order.Unit, e.Order.Epoch, err})
			}
		}
	case StopEffect:
		c.log("stop %s epoch %d on %s, grace %s", e.Order.Unit, e.Order.Epoch, e.Node, e.Order.Grace)
		if h := c.hosts[e.Node]; h != nil && !h.cut && e.Order.Grace == 0 {
			h.stop(e.Order)
		} else if h != nil && !h.cut {
			h.tell(e.Order.Unit, e.Order.Epoch, msg.UnitDraining)
		}
	case RenewEffect:
		c.lease[e.Node] = e
	default:
		return false
	}
	return true
}

// renew has the hosts that are not cut off report.
func (c *fleet) renew(ids ...string) {
	for _, id := range ids {
		h := c.hosts[id]
		if h.cut {
			continue
		}
		h.follow(c.state)
		c.step(NodeReported{h.report(c.now)})
		if l := c.lease[id]; l.Err == nil {
			h.taken(l.Lease.Acked)
		}
	}
}

// run advances the time, with renewals of all hosts every two seconds.
func (c *fleet) run(d time.Duration) {
	for end := c.now.Add(d); c.now.Before(end); {
		c.renew(c.ids()...)
		c.pass(min(2*time.Second, end.Sub(c.now)))
	}
	c.renew(c.ids()...)
}

// drained ends the drain of a unit on its nodes.
func (c *fleet) drained(unit string) {
	for _, id := range c.ids() {
		if c.hosts[id].runs[unit] != 0 {
			c.hosts[id].gone(unit)
		}
	}
	c.renew(c.ids()...)
}

// newLeader makes another node lead: a new core on the same state, with the hosts as they are.
func (c *fleet) newLeader() {
	c.core = NewCore(c.timers)
	c.inbox = nil
	c.step(StateSeen{c.state.Clone()})
}

// where is "node:rank,rank …" of a unit's grant.
func (c *fleet) where(unit string) string {
	rec := c.state.Units[unit]
	if rec == nil {
		return ""
	}
	at := map[string][]string{}
	for _, r := range rec.Ranks {
		at[r.Node] = append(at[r.Node], fmt.Sprint(r.Rank))
	}
	var out []string
	for _, n := range slices.Sorted(maps.Keys(at)) {
		out = append(out, n+":"+strings.Join(at[n], ","))
	}
	return strings.Join(out, " ")
}
