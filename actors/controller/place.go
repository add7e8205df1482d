package controller

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/placement"
)

// grantAll places the units that wait for a grant, group by group, and proposes each placed group as one
// command.
func (c *Core) grantAll(now time.Time) {
	var waiting []*unit
	for _, u := range c.units {
		if a := c.apps[u.app]; u.isDue(now, true) && a != nil && a.isWanted(u.id) {
			waiting = append(waiting, u)
		}
	}
	sortByGroup(waiting)
	waiting = c.delaySuspects(waiting)
	for len(waiting) > 0 {
		n := groupPrefix(waiting)
		c.grantGroup(now, waiting[:n])
		waiting = waiting[n:]
	}
}

// delaySuspects removes units whose last attempt must wait from waiting. If the node of a unit ended twice
// during its start, the unit may be the cause. So its last attempt is made while no other such unit starts:
// if the node ends again, the cause is known.
func (c *Core) delaySuspects(waiting []*unit) []*unit {
	starting := ""
	for _, id := range c.unitIDs() {
		if u := c.units[id]; u.m.NodeDied &&
			(u.m.Phase == state.Starting || u.busy && u.current.kind == state.DoGrant) {
			starting = id
			break
		}
	}
	return slices.DeleteFunc(waiting, func(u *unit) bool {
		switch {
		case !u.m.NodeDied || u.pending[0].attempt < state.MaxStartAttempts:
		case starting == "":
			starting = u.id
		default:
			u.noRoom, u.retryAt = "waits until "+starting+" has started: their nodes ended while they "+
				"were starting", time.Time{}
			return true
		}
		return false
	})
}

// groupPrefix returns how many units at the head belong to one group.
func groupPrefix(us []*unit) int {
	n := 1
	for n < len(us) && us[n].app == us[0].app && us[n].group == us[0].group {
		n++
	}
	return n
}

// grantGroup places units of one group. Units that start again keep their seats, the others get new ones;
// each of the two sets is placed completely or not at all, independently of the other.
func (c *Core) grantGroup(now time.Time, us []*unit) {
	again, anew := c.splitBySeats(us)
	var found []*unit
	var placed []placement.Placed
	for _, part := range [][]*unit{again, anew} {
		if len(part) == 0 {
			continue
		}
		p, err := placement.Place(c.overlay(part, placed), []placement.Group{c.groupOf(part, placed)})
		if err != nil {
			c.markNoRoom(part, err)
			continue
		}
		found, placed = append(found, part...), append(placed, p.Groups...)
	}
	if len(found) > 0 {
		c.proposeGrant(now, found, placed)
	}
}

// splitBySeats separates units that can keep their seats from those that need new ones.
func (c *Core) splitBySeats(us []*unit) (again, anew []*unit) {
	for _, u := range us {
		if c.canKeepSeats(u) {
			again = append(again, u)
		} else {
			anew = append(anew, u)
		}
	}
	return again, anew
}

// canKeepSeats reports whether the unit's last grant still holds its seats, on existing nodes, for what is
// started now.
func (c *Core) canKeepSeats(u *unit) bool {
	rec, a := c.state.Units[u.id], c.apps[u.app]
	if rec == nil || !rec.Holds() || rec.Launch != a.launch[u.id] {
		return false
	}
	return !slices.ContainsFunc(rec.Ranks, func(r state.RankGrant) bool { return !c.hasSeat(&r) })
}

// hasSeat reports whether the inventory still has the seat.
func (c *Core) hasSeat(r *state.RankGrant) bool {
	i := slices.IndexFunc(c.nodes, func(n placement.Node) bool { return n.ID == r.Node })
	if i < 0 {
		return false
	}
	n := &c.nodes[i]
	return r.Slot < n.Slots && !slices.ContainsFunc(r.Devices,
		func(d int) bool { return !slices.Contains(n.Devices, d) })
}

// markNoRoom notes why the units found no room. They are tried again after every change.
func (c *Core) markNoRoom(us []*unit, err error) {
	for _, u := range us {
		u.noRoom, u.retryAt = explain(err), time.Time{}
	}
}

// maxWaiting bounds the units without room that a lease names. Ingresses treat further units as starting, and
// requests wait for them.
const maxWaiting = 4096

// addWaiting adds an application's units without room to what leases tell the ingresses.
func (c *Core) addWaiting(a *application) {
	left := maxWaiting
	for i := range c.waiting {
		left -= len(c.waiting[i].Units)
	}
	w := msg.Waiting{App: a.name, Revision: a.revision}
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if a.deleting || u == nil || u.m.Phase != state.Pending || u.noRoom == "" || len(w.Units) == left {
			continue
		}
		if w.Units == nil {
			w.Reason, _, _ = strings.Cut(u.noRoom, "; ") // the rest lists the nodes
			w.Units = map[string]uint64{}
		}
		w.Units[u.id] = c.state.Epochs[u.id]
	}
	if w.Units != nil {
		c.waiting = append(c.waiting, w)
	}
}

// proposeGrant proposes one command for all units of the group.
func (c *Core) proposeGrant(now time.Time, us []*unit, placed []placement.Placed) {
	a := c.apps[us[0].app]
	g := state.GrantGroup{App: a.name, AppRevision: a.revision, Group: us[0].group, At: now.UnixMilli()}
	for _, u := range us {
		w := u.beginCommand()
		u.next = seat{spec: a.spec, revision: a.revision, launch: a.launch[u.id]}
		for i := range placed {
			u.next.addPlaced(u.ranks, &placed[i])
		}
		g.Units = append(g.Units, state.UnitGrant{
			Unit: u.id, ExpectEpoch: max(u.m.Epoch, c.state.LastEpoch(u.id)), Attempt: w.attempt,
			Launch: u.next.launch,
			Ranks:  u.next.ranks, Blocks: u.next.blocks, Restarts: u.nextRestarts(u.next.launch),
		})
	}
	c.emit(GrantEffect{g})
}

// addPlaced takes a unit's seats from a placed group.
func (s *seat) addPlaced(ranks []int, p *placement.Placed) {
	for i := range p.Seats {
		if at := &p.Seats[i]; slices.Contains(ranks, at.Rank) {
			s.ranks = append(s.ranks, state.RankGrant{
				Rank: at.Rank, Node: at.Node, Slot: at.Slot,
				Devices: at.Devices,
			})
		}
	}
	for _, b := range p.Blocks {
		if b.Rank < 0 || slices.Contains(ranks, b.Rank) {
			s.blocks = append(s.blocks, state.Block{Node: b.Node, Base: b.Base, Size: b.Size})
		}
	}
}

// groupOf is the request to placement: the units' ranks, with or without seats of their own.
func (c *Core) groupOf(us []*unit, placed []placement.Placed) placement.Group {
	a := c.apps[us[0].app]
	g := groupSpec(a.spec, us[0].group)
	g.Held = c.heldRanks(us, placed)
	for _, u := range us {
		if !c.canKeepSeats(u) {
			g.Ranks = append(g.Ranks, u.ranks...)
			continue
		}
		for _, r := range c.state.Units[u.id].Ranks {
			g.Keep = append(g.Keep, placement.Seat{
				Rank: r.Rank, Node: r.Node, Slot: r.Slot,
				Devices: r.Devices,
			})
		}
	}
	slices.Sort(g.Ranks)
	return g
}

// groupSpec is the request of one group of an application to placement.
func groupSpec(a *app.Application, group int) placement.Group {
	g := placement.Group{
		ID: a.Name + "/" + strconv.Itoa(group), Lockstep: a.DataParallel.Coupling == app.Lockstep,
		DPSize:   a.DataParallel.DPSize,
		Strategy: placement.Strategy(a.PlacementGroupStrategy), MaxRanksPerNode: a.MaxRanksPerNode,
		Labels: a.Resources.Labels,
	}
	if a.Engine.Kind == app.KindAttach {
		g.Attach, g.Pinned = true, map[int]string{}
		for _, r := range a.RankNumbers(group) {
			if e := a.Engine.Rank(group, r); e != nil {
				g.Pinned[r] = e.Node
			}
		}
		return g
	}
	g.Devices = a.Resources.GPUs
	if a.Engine.Kind == app.KindSim || g.Devices == 0 {
		g.Slots = 1
	}
	return g
}

// heldRanks counts, per node, the ranks of the group that stay where they are.
func (c *Core) heldRanks(us []*unit, placed []placement.Placed) map[string]int {
	out := map[string]int{}
	for id, rec := range c.state.Units {
		if rec.App == us[0].app && rec.Group == us[0].group && rec.Holds() && !containsUnit(us, id) &&
			!isPlaced(placed, rec) {
			for i := range rec.Ranks {
				out[rec.Ranks[i].Node]++
			}
		}
	}
	for i := range placed {
		for j := range placed[i].Seats {
			out[placed[i].Seats[j].Node]++
		}
	}
	return out
}

// isPlaced reports whether the unit's ranks were just placed.
func isPlaced(placed []placement.Placed, rec *state.Unit) bool {
	for i := range placed {
		for j := range placed[i].Seats {
			if shares(rec, []int{placed[i].Seats[j].Rank}) {
				return true
			}
		}
	}
	return false
}

func containsUnit(us []*unit, id string) bool {
	return slices.ContainsFunc(us, func(u *unit) bool { return u.id == id })
}

// overlay returns the inventory with the used resources of the state, of grants under way and of placed. The
// seats of the units being placed count as free, and their ports as those freed last.
func (c *Core) overlay(us []*unit, placed []placement.Placed) []placement.Node {
	o := newOverlay(c.nodes, c.state)
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec := c.state.Units[id]
		switch {
		case !rec.Holds():
		case containsUnit(us, id):
			o.freed(rec.Blocks)
		default:
			o.use(rec.Ranks, rec.Blocks)
		}
	}
	for _, u := range c.units {
		switch {
		case containsUnit(us, u.id):
		case u.busy && u.current.kind == state.DoGrant:
			o.use(u.next.ranks, u.next.blocks)
		case u.reserved != nil:
			o.use(u.reserved.ranks, u.reserved.blocks)
		}
	}
	for i := range placed {
		var s seat
		s.addPlaced(ranksOf(&placed[i]), &placed[i])
		o.use(s.ranks, s.blocks)
	}
	return o.nodes
}

func ranksOf(p *placement.Placed) []int {
	out := make([]int, len(p.Seats))
	for i := range p.Seats {
		out[i] = p.Seats[i].Rank
	}
	return out
}

// overlay marks resources in an inventory.
type overlay struct {
	nodes []placement.Node
	at    map[string]*placement.Node
}

func newOverlay(nodes []placement.Node, s *state.State) *overlay {
	o := &overlay{nodes: slices.Clone(nodes), at: map[string]*placement.Node{}}
	for i := range o.nodes {
		n := &o.nodes[i]
		n.UsedSlots, n.UsedDevices = slices.Clone(n.UsedSlots), slices.Clone(n.UsedDevices)
		n.UsedBlocks, n.FreedBlocks = slices.Clone(n.UsedBlocks), slices.Clone(n.FreedBlocks)
		o.at[n.ID] = n
	}
	o.freed(s.Freed)
	return o
}

func (o *overlay) use(ranks []state.RankGrant, blocks []state.Block) {
	for i := range ranks {
		r := &ranks[i]
		n := o.at[r.Node]
		if n == nil {
			continue
		}
		n.Ranks++
		n.UsedDevices = append(n.UsedDevices, r.Devices...)
		if r.Slot >= 0 {
			n.UsedSlots = append(n.UsedSlots, r.Slot)
		}
	}
	for _, b := range blocks {
		if n := o.at[b.Node]; n != nil {
			n.UsedBlocks = append(n.UsedBlocks, portsOf(b))
		}
	}
}

func (o *overlay) freed(blocks []state.Block) {
	for _, b := range blocks {
		if n := o.at[b.Node]; n != nil {
			n.FreedBlocks = append(n.FreedBlocks, portsOf(b))
		}
	}
}

func portsOf(b state.Block) placement.Ports {
	return placement.Ports{Lo: b.Base, Hi: b.Base + b.Size - 1}
}

// releaseOf is the release of a whole unit.
func releaseOf(u *unit) msg.ReleaseRank {
	return msg.ReleaseRank{Unit: u.id, Rank: -1, Epoch: u.m.Epoch, Reason: u.m.Reason}
}
