package rankassigner

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/placement"
)

// Place numbers and seats the units of one group. Units that start again keep their seats, unless a node of
// theirs is avoided and there is room without it; the others get new ones. Each of the two sets is placed
// completely or not at all, independently of the other. underWay holds the grants that were proposed and may
// not be in the state yet. The grant holds the units that found room, and noRoom says of the others why they
// found none.
func Place(s *state.State, m *msg.AssignGroup, underWay []*state.GrantGroup) (
	grant state.GrantGroup, noRoom map[string]string,
) {
	grant, noRoom = m.Grant, map[string]string{}
	grant.Units = nil
	p := placer{state: s, m: m, numbers: numberRanks(m.App, m.Grant.Group), keep: map[string]bool{}}
	p.others = append(slices.Clone(underWay), &grant)
	var again, anew []state.UnitGrant
	for _, u := range m.Grant.Units {
		switch {
		case !p.canKeepSeats(&u):
			anew = append(anew, u)
		case p.leaves(&u):
			grant.Units = append(grant.Units, u)
		default:
			p.keep[u.Unit] = true
			again = append(again, u)
		}
	}
	for _, part := range [][]state.UnitGrant{again, anew} {
		if len(part) == 0 {
			continue
		}
		placed, err := p.place(part)
		for _, u := range part {
			if err != nil {
				noRoom[u.Unit] = Explain(err) + hintOf(err)
				continue
			}
			u.Ranks, u.Blocks = SeatsOf(p.numbers[u.Unit], &placed)
			grant.Units = append(grant.Units, u)
		}
	}
	return grant, noRoom
}

// numberRanks numbers the ranks of a group 0..dp_size-1, by unit: a lockstep group is one unit, else every
// rank is one. The numbers of attached ranks are those of the application.
func numberRanks(a *app.Application, group int) map[string][]int {
	out := map[string][]int{}
	for _, u := range a.Units() {
		if u.Group == group {
			out[u.ID] = u.Ranks
		}
	}
	return out
}

// placer places the units of one request.
type placer struct {
	state   *state.State
	m       *msg.AssignGroup
	numbers map[string][]int    // ranks by unit
	others  []*state.GrantGroup // under way, and the units of this request that have found room
	keep    map[string]bool     // units that keep their seats
}

func (p *placer) place(part []state.UnitGrant) (placement.Placed, error) {
	request := p.request(part)
	return p.inventory(part).Place(&request)
}

// leaves seats a unit elsewhere that could keep its seats, if one of them is on a node that is avoided and
// there is room on nodes that are not, or less.
func (p *placer) leaves(u *state.UnitGrant) bool {
	now := p.firstAvoided(p.state.Units[u.Unit].Ranks)
	if now == len(p.m.Avoid) {
		return false
	}
	placed, err := p.place([]state.UnitGrant{*u})
	if err != nil {
		return false
	}
	ranks, blocks := SeatsOf(p.numbers[u.Unit], &placed)
	if p.firstAvoided(ranks) <= now {
		return false
	}
	u.Ranks, u.Blocks = ranks, blocks
	return true
}

// firstAvoided returns the place in Avoid of the most avoided node with one of the ranks; behind the last
// place if there is none.
func (p *placer) firstAvoided(ranks []state.RankGrant) int {
	for i, node := range p.m.Avoid {
		if slices.ContainsFunc(ranks, func(r state.RankGrant) bool { return r.Node == node }) {
			return i
		}
	}
	return len(p.m.Avoid)
}

// canKeepSeats reports whether the unit's last grant still holds its seats, on usable nodes, for what is
// started now.
func (p *placer) canKeepSeats(u *state.UnitGrant) bool {
	rec := p.state.Units[u.Unit]
	if rec == nil || !rec.Holds() || rec.Launch != u.Launch {
		return false
	}
	return !slices.ContainsFunc(rec.Ranks, func(r state.RankGrant) bool { return !p.hasSeat(&r) })
}

func (p *placer) hasSeat(r *state.RankGrant) bool {
	n := p.state.Nodes[r.Node]
	if n == nil || !n.Takes() || !slices.Contains(p.m.Nodes, r.Node) {
		return false
	}
	return r.Slot < n.Resources.Slots && !slices.ContainsFunc(r.Devices,
		func(d int) bool { return !slices.Contains(n.Resources.Devices, d) })
}

// inventory returns what is free for part. The seats that the units of part hold count as free, and their
// ports as those freed last.
func (p *placer) inventory(part []state.UnitGrant) *Inventory {
	free := NewInventory(p.state, p.m.Nodes)
	for _, id := range slices.Sorted(maps.Keys(p.state.Units)) {
		rec := p.state.Units[id]
		switch {
		case !rec.Holds():
		case containsUnit(part, id):
			free.addFreed(rec.Blocks)
		default:
			free.Use(rec.Ranks, rec.Blocks)
		}
	}
	underWay := map[string]bool{}
	for _, g := range p.others {
		for i := range g.Units {
			underWay[g.Units[i].Unit] = true
			free.Use(g.Units[i].Ranks, g.Units[i].Blocks)
		}
	}
	for _, u := range p.m.Reserved {
		if !underWay[u.Unit] {
			free.Use(u.Ranks, u.Blocks)
		}
	}
	return free
}

// request is what placement is asked for part, which keeps its seats or gets new ones.
func (p *placer) request(part []state.UnitGrant) placement.Group {
	g := GroupRequest(p.m.App, p.m.Grant.Group)
	g.Avoid = p.m.Avoid
	stay, siblings := map[string][]state.RankGrant{}, map[string][]state.RankGrant{}
	add := func(unit string, group int, ranks []state.RankGrant) {
		if group == p.m.Grant.Group {
			stay[unit] = ranks
		} else {
			siblings[unit] = ranks
		}
	}
	for id, rec := range p.state.Units {
		if rec.PoolName() == p.m.Grant.PoolName() && rec.Holds() && !containsUnit(part, id) {
			add(id, rec.Group, rec.Ranks)
		}
	}
	for _, other := range p.others {
		for i := range other.Units {
			if other.PoolName() == p.m.Grant.PoolName() {
				add(other.Units[i].Unit, other.Group, other.Units[i].Ranks)
			}
		}
	}
	countByNode(g.Held, stay)
	countByNode(g.Siblings, siblings)
	p.addOtherPool(&g)
	for i := range part {
		if !p.keep[part[i].Unit] {
			g.Ranks = append(g.Ranks, p.numbers[part[i].Unit]...)
			continue
		}
		for _, r := range p.state.Units[part[i].Unit].Ranks {
			g.Keep = append(g.Keep, placement.Seat(r))
		}
	}
	slices.Sort(g.Ranks)
	return g
}

// countByNode adds the ranks of units to the numbers of ranks by node.
func countByNode(sum map[string]int, units map[string][]state.RankGrant) {
	for _, ranks := range units {
		for i := range ranks {
			sum[ranks[i].Node]++
		}
	}
}

// addOtherPool adds where the ranks of the application's other pool are, or soon will be, if that matters.
func (p *placer) addOtherPool(g *placement.Group) {
	other := g.Other.Name
	if other == "" {
		return
	}
	add := func(ranks []state.RankGrant) {
		for i := range ranks {
			g.Other.Ranks[ranks[i].Node]++
		}
	}
	for _, rec := range p.state.Units {
		if rec.PoolName() == other && rec.Holds() {
			add(rec.Ranks)
		}
	}
	for _, grant := range p.others {
		for i := range grant.Units {
			if grant.PoolName() == other {
				add(grant.Units[i].Ranks)
			}
		}
	}
	for i := range p.m.Reserved {
		if strings.HasPrefix(p.m.Reserved[i].Unit, other+"/") {
			add(p.m.Reserved[i].Ranks)
		}
	}
}

func containsUnit(us []state.UnitGrant, id string) bool {
	return slices.ContainsFunc(us, func(u state.UnitGrant) bool { return u.Unit == id })
}

// GroupRequest is what placement must know of a group of an application, without ranks, and without where the
// ranks of its other pool are.
func GroupRequest(a *app.Application, group int) placement.Group {
	g := placement.Group{
		ID: a.PoolName() + "/" + strconv.Itoa(group), Lockstep: a.DataParallel.Coupling == app.Lockstep,
		DPSize: a.DataParallel.DPSize, Strategy: placement.Strategy(a.PlacementGroupStrategy),
		MaxRanksPerNode: a.MaxRanksPerNode, Labels: a.Resources.Labels, Held: map[string]int{},
		Siblings: map[string]int{},
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
	if d := a.Disaggregation; d != nil && d.Colocate != "" {
		g.Other = placement.OtherPool{
			Name: a.OtherPool(), Ranks: map[string]int{}, Apart: d.Colocate == app.ColocateNo,
		}
	}
	g.Devices, g.Share = a.Resources.Devices(), a.Resources.Share()
	if a.Engine.Kind == app.KindSim || g.Devices == 0 {
		g.Slots = 1
	}
	return g
}

// SeatsOf returns the seats and port blocks of a unit with these ranks in a placed group.
func SeatsOf(ranks []int, p *placement.Placed) (seats []state.RankGrant, blocks []state.Block) {
	for _, at := range p.Seats {
		if slices.Contains(ranks, at.Rank) {
			seats = append(seats, state.RankGrant(at))
		}
	}
	for _, b := range p.Blocks {
		if b.Rank < 0 || slices.Contains(ranks, b.Rank) {
			blocks = append(blocks, state.Block{Node: b.Node, Base: b.Base, Size: b.Size})
		}
	}
	return seats, blocks
}

// Inventory is what nodes offer, and what of it is in use.
type Inventory struct {
	Nodes []placement.Node
	at    map[string]*placement.Node
}

// NewInventory returns the usable nodes with nothing in use. Nodes that may not get ranks are left out.
func NewInventory(s *state.State, usable []string) *Inventory {
	v := &Inventory{at: map[string]*placement.Node{}}
	for _, id := range usable {
		if n := s.Nodes[id]; n != nil && n.Takes() {
			at := placement.Node{
				ID: id, Slots: n.Resources.Slots, Devices: n.Resources.Devices, Near: n.Resources.Near,
				Model: modelOf(n), Labels: n.Resources.Labels,
				Ports: placement.Ports{Lo: n.Resources.PortLo, Hi: n.Resources.PortHi},
			}
			for _, t := range n.Resources.Taken { // by other programs
				at.UsedBlocks = append(at.UsedBlocks, placement.Ports(t))
			}
			v.Nodes = append(v.Nodes, at)
		}
	}
	for i := range v.Nodes {
		v.at[v.Nodes[i].ID] = &v.Nodes[i]
	}
	v.addFreed(s.Freed)
	return v
}

// modelOf names the models of a node's devices.
func modelOf(n *state.Node) string {
	var names []string
	for i := range n.Resources.Models {
		names = append(names, n.Resources.Models[i].Name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// UsableNodes returns the nodes that may get ranks, in order.
func UsableNodes(s *state.State) []string {
	var out []string
	for _, id := range slices.Sorted(maps.Keys(s.Nodes)) {
		if s.Nodes[id].Takes() {
			out = append(out, id)
		}
	}
	return out
}

// Place places a group. The inventory stays as it is.
func (v *Inventory) Place(g *placement.Group) (placement.Placed, error) {
	p, err := placement.Place(v.Nodes, []placement.Group{*g})
	if err != nil {
		return placement.Placed{}, err
	}
	return p[0], nil
}

// Use marks seats and port blocks as in use.
func (v *Inventory) Use(ranks []state.RankGrant, blocks []state.Block) {
	for i := range ranks {
		r := &ranks[i]
		n := v.at[r.Node]
		if n == nil {
			continue
		}
		n.Ranks++
		if r.Share == 0 {
			n.UsedDevices = append(n.UsedDevices, r.Devices...)
		} else {
			useShare(n, r)
		}
		if r.Slot >= 0 {
			n.UsedSlots = append(n.UsedSlots, r.Slot)
		}
	}
	for _, b := range blocks {
		if n := v.at[b.Node]; n != nil {
			n.UsedBlocks = append(n.UsedBlocks, portsOf(b))
		}
	}
}

func useShare(n *placement.Node, r *state.RankGrant) {
	if n.UsedShares == nil {
		n.UsedShares = map[int]int{}
	}
	for _, d := range r.Devices {
		n.UsedShares[d] += r.Share
	}
}

func (v *Inventory) addFreed(blocks []state.Block) {
	for _, b := range blocks {
		if n := v.at[b.Node]; n != nil {
			n.FreedBlocks = append(n.FreedBlocks, portsOf(b))
		}
	}
}

func portsOf(b state.Block) placement.Ports {
	return placement.Ports{Lo: b.Base, Hi: b.Base + b.Size - 1}
}

// Explain puts a placement error into one line: what is missing, and what each node has.
func Explain(err error) string {
	if p, ok := errors.AsType[*problem.Error](err); ok && len(p.Details) > 0 {
		return p.Message + "; " + strings.Join(p.Details, "; ")
	}
	return err.Error()
}

// hintOf returns what the user can do about an error of placement, as one more clause; "" if there is no
// hint.
func hintOf(err error) string {
	if hint := problem.HintOf(err); hint != "" {
		return "; hint: " + hint
	}
	return ""
}
