package cluster_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// audit knows everything, and holds the cluster to what it promises.
type audit struct {
	high     map[string]uint64 // by unit: the highest epoch granted
	grants   map[string]*granted
	launches map[string]int // by unit, epoch and machine
	proposed map[*state.GrantGroup]time.Duration
	silent   map[*state.NodeRef]time.Duration // when a leader wanted to take a node for lost
	puts     map[*state.PutApps]time.Duration // committed, at
	leases   []leaseOp
	left     map[string]leaving  // ranks that ended on a machine that stops
	deaths   map[string][]uint64 // epochs of a unit whose starts ended machines, in a row
	served   map[string]string   // by unit: Launch of the last grant that was ready
	lost     int                 // nodes that were taken for lost
	restarts int                 // epochs above the first, of units that nobody asked to change
	tickets  int
}

// granted is one grant that was committed.
type granted struct {
	unit *state.Unit
	at   time.Duration
	lost map[string]bool // machines that were taken for lost while it stood
	over bool
}

func newAudit() *audit {
	return &audit{
		high: map[string]uint64{}, grants: map[string]*granted{}, launches: map[string]int{},
		proposed: map[*state.GrantGroup]time.Duration{}, silent: map[*state.NodeRef]time.Duration{},
		left: map[string]leaving{}, deaths: map[string][]uint64{}, served: map[string]string{},
		puts: map[*state.PutApps]time.Duration{},
	}
}

func key(unit string, epoch uint64) string { return fmt.Sprint(unit, "@", epoch) }

// before looks at a command that is about to be applied for the first time.
func (c *cluster) before(cmd *state.Command) {
	if ref := cmd.NodeLost; ref != nil {
		for id, u := range c.canon.master.Units {
			if g := c.audit.grants[key(id, u.Epoch)]; g != nil {
				g.lost[ref.Node] = true
			}
		}
	}
}

// committed looks at a command that was.
func (c *cluster) committed(term uint64, cmd *state.Command, res state.Result, err error) {
	if err != nil {
		return
	}
	switch {
	case cmd.GrantGroup != nil:
		c.grantCommitted(cmd.GrantGroup, res)
	case cmd.Release != nil:
		c.ended(cmd.Release.Unit, cmd.Release.Epoch)
		c.lease(leaseOp{
			kind: releases, unit: cmd.Release.Unit, epoch: cmd.Release.Epoch, call: c.now,
			back: c.now,
		})
	case cmd.UnitReady != nil:
		delete(c.audit.deaths, cmd.UnitReady.Unit)
		c.audit.served[cmd.UnitReady.Unit] = c.canon.master.Units[cmd.UnitReady.Unit].Launch
	case cmd.UnitFailed != nil:
		c.failedBeside(cmd.UnitFailed.Unit)
		if unit := cmd.UnitFailed.Unit; c.audit.served[unit] == c.canon.master.Units[unit].Launch {
			c.violate("%s has failed, and it was ready with the same launch", unit)
		}
		c.ended(cmd.UnitFailed.Unit, cmd.UnitFailed.Epoch)
		c.lease(leaseOp{
			kind: releases, unit: cmd.UnitFailed.Unit, epoch: cmd.UnitFailed.Epoch, call: c.now,
			back: c.now,
		})
	case cmd.PutApps != nil:
		clear(c.audit.deaths) // failed units get another chance
		c.audit.puts[cmd.PutApps] = c.now
		c.together()
	case cmd.DeleteApp != nil:
		c.together()
	case cmd.ForgetApp != nil:
		maps.DeleteFunc(c.audit.served, func(unit, _ string) bool {
			return strings.HasPrefix(unit, cmd.ForgetApp.Name+"/")
		})
	case cmd.NodeLost != nil && !res.Unchanged:
		c.nodeLost(c.canon.leaders[term], cmd.NodeLost)
	}
}

// grantCommitted: epochs rise by one, groups are whole, and only a lost node may still have what is granted
// again.
func (c *cluster) grantCommitted(g *state.GrantGroup, res state.Result) {
	a := c.audit
	for _, u := range g.Units {
		epoch := res.Epochs[u.Unit]
		if epoch != a.high[u.Unit]+1 {
			c.violate("%s is granted epoch %d after %d", u.Unit, epoch, a.high[u.Unit])
		}
		c.ended(u.Unit, epoch-1)
		a.high[u.Unit] = epoch
		a.grants[key(u.Unit, epoch)] = &granted{
			unit: c.canon.master.Units[u.Unit], at: c.now,
			lost: map[string]bool{},
		}
		c.whole(g, &u)
		call, known := a.proposed[g]
		if !known {
			call = c.now
		}
		c.lease(leaseOp{kind: acquires, unit: u.Unit, epoch: epoch, call: call, back: c.now})
		if epoch > 1 {
			a.restarts++
		}
		if c.cfg.gentle && epoch > 1 {
			c.violate("%s was started again, and nothing had happened to it", u.Unit)
		}
	}
}

// together: the two pools of an application come, change and go together.
func (c *cluster) together() {
	apps := c.canon.master.Apps
	for _, name := range sorted(apps) {
		owner, pool := app.SplitPool(name)
		if pool == "" {
			continue
		}
		other := app.PoolPrefill
		if pool == other {
			other = app.PoolDecode
		}
		a, b := apps[name], apps[app.PoolName(owner, other)]
		switch {
		case a.Deleting && b == nil: // its units ended first
		case b == nil:
			c.violate("%s is there without its other pool", name)
		case a.Deleting != b.Deleting || a.Revision != b.Revision:
			c.violate("%s is at revision %d, deleting %t, and its other pool at %d, %t", name, a.Revision,
				a.Deleting, b.Revision, b.Deleting)
		}
	}
}

// whole: a lockstep unit has all its ranks, each once.
func (c *cluster) whole(g *state.GrantGroup, u *state.UnitGrant) {
	spec := c.specOf(c.canon.master.Apps[g.App])
	for _, w := range spec.Units() {
		if w.ID != u.Unit {
			continue
		}
		var ranks []int
		for i := range u.Ranks {
			ranks = append(ranks, u.Ranks[i].Rank)
		}
		slices.Sort(ranks)
		if !slices.Equal(ranks, w.Ranks) {
			c.violate("%s was granted ranks %v of %v", u.Unit, ranks, w.Ranks)
		}
		return
	}
	c.violate("%s was granted, and its application does not have it", u.Unit)
}

// ended: a grant is over. Only nodes that were taken for lost may still have processes of it.
func (c *cluster) ended(unit string, epoch uint64) {
	g := c.audit.grants[key(unit, epoch)]
	if g == nil {
		return
	}
	g.over = true
	for _, m := range c.machines {
		c.orphaned(m, unit, epoch, g)
		if !m.alive {
			continue
		}
		for _, e := range m.host.engines {
			if e.unit == unit && e.epoch == epoch && !g.lost[m.name] {
				c.violate("%s is given back at epoch %d, and %s still runs it", unit, epoch, m.name)
			}
		}
	}
}

// launched: engines start once per grant and machine, where they were granted, and share no slot, device or
// port.
func (c *cluster) launched(h *host, u *hosted) {
	id := u.Order.Unit
	at := fmt.Sprint(key(id, u.Order.Epoch), " on ", h.m.name)
	if c.audit.launches[at]++; c.audit.launches[at] > 1 {
		c.violate("%s was started twice", at)
	}
	c.owner(h.m, id, u.Order.Epoch)
	for _, mine := range u.engines {
		for _, e := range h.engines {
			if e != mine && e.clashes(mine) {
				c.violate("%s starts %s beside %s at epoch %d, which holds slot %d and ports from %d still",
					h.m.name, at, e.unit, e.epoch, e.grant.Slot, e.block.Base)
			}
		}
	}
	parts := map[int]int{}
	for _, e := range h.engines {
		for _, d := range e.grant.Devices {
			if parts[d] += share.On(e.grant.Share); parts[d] > share.Whole {
				c.violate("%s starts %s, and device %d has more than one device's ranks", h.m.name, at, d)
			}
		}
	}
}

// mayTake: a node takes no start that its own copy of the state shows superseded, whose epoch or state it has
// left behind, or that no lease covers.
func (h *host) mayTake(o *msg.StartRank) {
	view, seen, why := h.m.view, h.m.disk.epochs, ""
	switch {
	case node.Superseded(view, o.Unit, o.Epoch):
		why = "its copy of the state shows that it is over"
	case o.Epoch <= seen[o.Unit]:
		why = fmt.Sprint("it has seen epoch ", seen[o.Unit])
	case view.Index < seen[seenIndex]:
		why = "its copy of the state is older than the one that it has gone by"
	case h.c.now >= h.leased:
		why = fmt.Sprint("its lease is over since ", h.leased)
	default:
		return
	}
	h.c.violate("%s takes a start of %s at epoch %d: %s", h.m.name, o.Unit, o.Epoch, why)
}

// seenIndex is the entry of a node's epochs that has the index of its state.
const seenIndex = "index"

// mustEnd: a unit of which a newer epoch starts has to end.
func (h *host) mustEnd(before *hosted) {
	if before.Next(h.c.clock()) == node.StepStay && (before.Phase == state.Starting ||
		before.Phase == state.Ready) {
		h.c.violate("%s goes on with %s at epoch %d, and starts a newer one", h.m.name, before.Order.Unit,
			before.Order.Epoch)
	}
}

// clashes says whether two engines of a machine hold the same.
func (e *engine) clashes(o *engine) bool {
	if e.grant.Slot >= 0 && e.grant.Slot == o.grant.Slot {
		return true
	}
	other := e.unit != o.unit || e.epoch != o.epoch
	return other && e.block.Size > 0 && e.block.Base < o.block.Base+o.block.Size &&
		o.block.Base < e.block.Base+e.block.Size
}

// owner is the grant that a machine acts on.
func (c *cluster) owner(m *machine, unit string, epoch uint64) *granted {
	g := c.audit.grants[key(unit, epoch)]
	if g == nil || !slices.ContainsFunc(g.unit.Ranks,
		func(r state.RankGrant) bool { return r.Node == m.name }) {
		c.violate("%s acts for %s at epoch %d, which nobody granted to it", m.name, unit, epoch)
	}
	return g
}

// accepted: a request is admitted under a grant that stands. Under one that does not, only with on_lease_loss
// serve, by a node that was taken for lost and does not know it.
func (c *cluster) accepted(m *machine, unit string, epoch uint64) {
	c.audit.tickets++
	g := c.owner(m, unit, epoch)
	if g.over && (c.cfg.fence || !g.lost[m.name]) {
		c.violate("%s admits for %s at epoch %d, which is over", m.name, unit, epoch)
	}
	if mayCopy := !c.cfg.fence && c.now-m.sought >= c.cfg.ttl; !m.answered && !mayCopy {
		c.violate("%s admits for %s, and no renewal of its process was answered", m.name, unit)
	}
	if m.mustAsk {
		c.violate("%s admits for %s after it was frozen for longer than its lease, "+
			"and has not asked the leader yet", m.name, unit)
	}
}

// overdue is a unit that a machine should have stopped a second ago, by what its own copy of the state shows;
// "" = there is none.
func (c *cluster) overdue(m *machine) string {
	for _, id := range sorted(m.host.units) {
		u := m.host.units[id]
		since := max(m.viewed[id], m.thawed)
		if u.accepting && !m.slow && node.Superseded(m.view, id, u.Order.Epoch) && c.now-since > time.Second {
			return key(id, u.Order.Epoch)
		}
	}
	return ""
}

// calm is how long nothing has been wrong with a way, a machine or the network when silence is no excuse.
const calm = 14 * time.Second

// nodeLost: a node that runs, and that the leader could hear all the time, is not taken for lost.
func (c *cluster) nodeLost(by string, ref *state.NodeRef) {
	c.audit.lost++
	i, leader := c.byUID[ref.UID], c.named(by)
	m := c.machines[i]
	c.log("node lost", m.name, by)
	if l := leader.shell; l != nil && l.sure < c.audit.silent[ref] {
		c.violate("%s was taken for lost by %s, which did not ask a majority first", m.name, by)
	}
	quiet := func(since time.Duration) bool { return c.now-since > calm }
	if !m.alive || m.frozen || !quiet(m.upset) {
		return
	}
	if c.cfg.gentle {
		c.violate("%s was taken for lost by %s, and was only bothered a little", m.name, by)
	}
	if leader == nil || leader.frozen || c.net.drop+c.net.loss+c.net.lag > 0 || !quiet(leader.upset) ||
		!quiet(c.upset) {
		return
	}
	for _, way := range [][2]int{{m.i, leader.i}, {leader.i, m.i}} {
		if c.net.cuts[way[0]][way[1]] || !quiet(c.net.changed[way[0]][way[1]]) {
			return
		}
	}
	c.violate("%s was taken for lost by %s, and nothing was wrong with it for %v", m.name, by, calm)
}

func (c *cluster) named(name string) *machine {
	for _, m := range c.machines {
		if m.name == name {
			return m
		}
	}
	return nil
}

// ledWithin bounds the time without a leader that a majority confirms while a majority of the voters is well.
const ledWithin = 10 * time.Second

// unled says since when no machine was confirmed as a leader that takes writes, although more than half of
// the voters were well all that time and could talk to each other; "" if that is not so. A machine whose disk
// hangs is not well, but it is no excuse.
func (c *cluster) unled() string {
	if c.now-c.led <= ledWithin || c.net.loss+c.net.drop+c.net.lag > 0 || c.now-c.upset <= ledWithin {
		return ""
	}
	var well []*machine
	voters := 0
	all := c.canon.members()
	for _, v := range all {
		if m := c.machines[v.i]; v.votes {
			voters++
			if m.alive && !m.frozen && !m.slow && !m.removed && c.now-max(m.upset,
				m.disk.hungTill) > ledWithin {
				well = append(well, m)
			}
		}
	}
	if len(well) <= voters/2 {
		return ""
	}
	for _, a := range well {
		for _, b := range well {
			if c.net.cuts[a.i][b.i] || a != b && c.now-c.net.changed[a.i][b.i] <= ledWithin {
				return ""
			}
		}
	}
	return fmt.Sprintf("since %v nobody leads that takes writes, and %d of %d voters are well", c.led,
		len(well), voters)
}

// Bounds of what may wait anywhere.
const (
	maxEvents  = 20000
	maxNews    = 1024
	maxBacklog = 4000
)

// bounded: nothing grows without end.
func (c *cluster) bounded() {
	if len(c.queue) > maxEvents {
		c.violate("%d events wait", len(c.queue))
	}
	if why := c.unled(); why != "" {
		c.violate("%s", why)
	}
	if why := c.unmoved(); why != "" {
		c.violate("%s", why)
	}
	for _, m := range c.machines {
		switch {
		case !m.alive || m.frozen:
		case len(m.waiting) > maxBacklog:
			c.violate("%d events wait for %s", len(m.waiting), m.name)
		case m.shell != nil && len(m.shell.waiting) > len(m.view.Units)+maxCommands:
			c.violate("%d commands wait on %s", len(m.shell.waiting), m.name)
		case c.overdue(m) != "":
			c.violate("%s admits for %s for more than 1 s after its copy of the state has shown "+
				"that it is over", m.name, c.overdue(m))
		case len(m.host.units) > len(m.view.Units)+maxNews:
			c.violate("%s keeps %d units", m.name, len(m.host.units))
		}
	}
	c.after(nil, time.Second, c.bounded)
}

// specOf reads an application of the workload.
func (c *cluster) specOf(a *state.App) *app.Application {
	if spec := c.specs[string(a.Spec)]; spec != nil {
		return spec
	}
	spec := readSpec(a.Spec)
	c.specs[string(a.Spec)] = spec
	return spec
}
