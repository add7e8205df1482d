package controller

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/placement"
)

// planner builds a plan.
type planner struct {
	*dryRunner
	plan  client.Plan
	nodes map[string]*nodePlan
}

// nodePlan is a node's part of a plan, with its devices in parts (share.Whole), whose sums are exact.
type nodePlan struct {
	client.NodePlan
	free, need int
}

func planOf(s *state.State, avoided avoidances, apps []*app.Application, prune bool) (client.Plan, error) {
	put := &state.PutApps{Prune: prune, End: formerNames(s, apps)}
	for _, a := range apps {
		spec, err := encodeSpec(a)
		if err != nil {
			return client.Plan{}, err
		}
		put.Apps = append(put.Apps, spec)
	}
	if _, err := s.Clone().Apply(s.Index+1, &state.Command{PutApps: put}); err != nil {
		return client.Plan{}, err
	}
	d, err := newDryRunner(s, avoided, apps, prune)
	if err != nil {
		return client.Plan{}, err
	}
	p := &planner{
		dryRunner: d, plan: client.Plan{Revision: s.Revision, Fits: true},
		nodes: map[string]*nodePlan{},
	}
	p.addNodes()
	for _, a := range slices.SortedFunc(slices.Values(apps), compareNames) { // in the core's order
		p.planApp(d.deployed[a.Name])
	}
	p.planDeletions(prune, put.End)
	p.sumNodes()
	p.plan.Apps = foldPlans(p.plan.Apps)
	return p.plan, nil
}

func compareNames(a, b *app.Application) int { return cmp.Compare(a.Name, b.Name) }

// addNodes lists the nodes with their free resources before the deploy.
func (p *planner) addNodes() {
	for _, n := range p.state.Nodes {
		p.nodes[n.ID] = &nodePlan{free: share.Whole * len(n.Resources.Devices), NodePlan: client.NodePlan{
			Node: n.ID, Slots: n.Resources.Slots, SlotsFree: n.Resources.Slots,
			GPUs: len(n.Resources.Devices), Devices: deviceModels(n),
			Note: cmp.Or(excludedReason(n),
				strings.Join(p.avoided.notesOn(n.ID, p.deployed, len(p.free.Nodes)), "; ")),
		}}
	}
	for _, rec := range p.state.Units {
		for i := range rec.Ranks {
			if n := p.nodes[rec.Ranks[i].Node]; n != nil && rec.Holds() {
				n.SlotsFree -= slotsOf(&rec.Ranks[i])
				n.free -= rec.Ranks[i].DeviceParts()
			}
		}
	}
}

// excludedReason says why placement excludes a node; "" = it does not.
func excludedReason(n *state.Node) string {
	switch {
	case n.Lost:
		return "lost: " + n.Reason
	case n.Draining:
		return "draining"
	case !n.Has(state.RoleWorker):
		return "no role worker"
	default:
		return ""
	}
}

func slotsOf(r *state.RankGrant) int {
	if r.Slot < 0 {
		return 0
	}
	return 1
}

// addNeed adds the resources of new ranks to their nodes; with times -1 it subtracts those of ending ranks.
func (p *planner) addNeed(ranks []state.RankGrant, times int) {
	for i := range ranks {
		if n := p.nodes[ranks[i].Node]; n != nil {
			n.SlotsNeed += times * slotsOf(&ranks[i])
			n.need += times * ranks[i].DeviceParts()
		}
	}
}

func (p *planner) planApp(a *application) {
	was := readStored(p.state, a.name)
	out := client.AppPlan{App: a.name, Impact: impactOf(p.state, was, a)}
	action, fields := summaryOf(&out.Impact)
	out.Action, out.Fields = string(action), fields
	groups := p.placeApp(a)
	for i := range a.units {
		out.Units = append(out.Units, p.planUnit(was, a, &a.units[i], groups[a.units[i].Group]))
	}
	for _, rec := range p.appUnits(a.name) {
		if !a.isWanted(rec.ID) {
			out.Units = append(out.Units, p.planEnd(rec))
		}
	}
	p.plan.Apps = append(p.plan.Apps, out)
}

// appUnits returns the records of an application's units, in order.
func (p *planner) appUnits(name string) []*state.Unit {
	var out []*state.Unit
	for _, id := range slices.Sorted(maps.Keys(p.state.Units)) {
		if rec := p.state.Units[id]; rec.App == name {
			out = append(out, rec)
		}
	}
	return out
}

func (p *planner) planUnit(was, a *application, u *app.Unit, group *groupOutcome) client.UnitPlan {
	out := client.UnitPlan{Unit: u.ID, Effect: unitEffect(p.state, a, u.ID)}
	out.Action = string(actionOf(out.Effect))
	rec := p.state.Units[u.ID]
	switch out.Effect {
	case client.EffectUnchanged:
		out.Seats = seatsOf(rec.Ranks)
		return out
	case client.EffectRestart:
		out.Reasons = restartReasons(was, a, u, rec)
		p.addNeed(rec.Ranks, -1)
	default:
	}
	if group.err != nil {
		p.plan.Fits = false
		out.Why, out.Hint = rankassigner.Explain(group.err), group.moves.String()
		return out
	}
	ranks := make([]state.RankGrant, 0, len(u.Ranks))
	for _, r := range u.Ranks {
		ranks = append(ranks, group.seats[r])
	}
	p.addNeed(ranks, 1)
	out.Seats = seatsOf(ranks)
	return out
}

// planEnd plans a unit that is not wanted any more.
func (p *planner) planEnd(rec *state.Unit) client.UnitPlan {
	out := client.UnitPlan{Unit: rec.ID, Action: string(client.ActionDelete), Effect: client.EffectDelete}
	if rec.Holds() {
		p.addNeed(rec.Ranks, -1)
		out.Seats = seatsOf(rec.Ranks)
	}
	return out
}

func seatsOf(ranks []state.RankGrant) []client.SeatPlan {
	out := make([]client.SeatPlan, len(ranks))
	for i, r := range ranks {
		out[i] = client.SeatPlan{
			Rank: r.Rank, Node: r.Node, Devices: r.Devices, Share: share.Devices(r.Share),
		}
	}
	return out
}

// planDeletions plans the applications that end: with prune all that the deploy does not list, and those in
// ended.
func (p *planner) planDeletions(prune bool, ended []string) {
	for _, name := range slices.Sorted(maps.Keys(p.state.Apps)) {
		if p.deployed[name] != nil || p.state.Apps[name].Deleting || !prune && !slices.Contains(ended, name) {
			continue
		}
		out := client.AppPlan{
			App: name, Action: string(client.ActionDelete), Impact: deletionOf(p.state.Apps[name]),
		}
		for _, rec := range p.appUnits(name) {
			out.Units = append(out.Units, p.planEnd(rec))
		}
		p.plan.Apps = append(p.plan.Apps, out)
	}
}

// sumNodes lists the nodes in order. A node that frees more than it takes needs nothing.
func (p *planner) sumNodes() {
	for _, a := range p.plan.Apps {
		p.plan.Changes = p.plan.Changes || a.Effect != client.EffectUnchanged
	}
	for _, id := range slices.Sorted(maps.Keys(p.nodes)) {
		n := p.nodes[id]
		n.SlotsNeed, n.SlotsFree = max(0, n.SlotsNeed), max(0, n.SlotsFree)
		n.GPUsNeed, n.GPUsFree = share.Devices(max(0, n.need)), share.Devices(max(0, n.free))
		n.Shared = p.shared.on(id)
		p.plan.Nodes = append(p.plan.Nodes, n.NodePlan)
	}
}

// checkPlaceable refuses a whole deploy if its new units cannot be placed.
func checkPlaceable(s *state.State, avoided avoidances, apps []*app.Application, prune bool) error {
	d, err := newDryRunner(s, avoided, apps, prune)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(d.deployed)) {
		for _, g := range d.placeApp(d.deployed[name]) {
			if g.err != nil {
				return g.err
			}
		}
	}
	return nil
}

// dryRunner computes a deploy's placement without changing anything.
type dryRunner struct {
	state     *state.State
	avoided   avoidances
	free      *rankassigner.Inventory
	deployed  map[string]*application // apps of the deploy
	remaining map[string]*application // apps that stay as they are
	placed    map[string]nodeCounts   // by app: where its ranks are, or will be
	shared    sharedDevices           // devices that ranks share, or will
}

// nodeCounts counts ranks by node.
type nodeCounts map[string]int

// groupOutcome is the computed placement of one group.
type groupOutcome struct {
	seats map[int]state.RankGrant // by rank
	err   error                   // no room
	moves placement.Moves         // what would make room
}

// newDryRunner reserves what keeps running. Then it places the other apps' waiting units without judging the
// result, because this deploy did not ask for them.
func newDryRunner(s *state.State, avoided avoidances, apps []*app.Application, prune bool) (*dryRunner,
	error,
) {
	d := &dryRunner{
		state: s, avoided: avoided, free: rankassigner.NewInventory(s, rankassigner.UsableNodes(s)),
		deployed: map[string]*application{}, remaining: map[string]*application{},
		placed: map[string]nodeCounts{}, shared: sharedDevices{},
	}
	ended := formerNames(s, apps)
	for _, a := range apps {
		next, err := wantedApp(a)
		if err != nil {
			return nil, err
		}
		d.deployed[a.Name] = next
	}
	for name, a := range s.Apps {
		if d.deployed[name] == nil && !a.Deleting && !prune && !slices.Contains(ended, name) {
			d.remaining[name] = readApp(a)
		}
	}
	d.reserveRunning(d.deployed)
	d.reserveRunning(d.remaining)
	for _, name := range slices.Sorted(maps.Keys(d.remaining)) {
		d.placeApp(d.remaining[name]) // a failure here is not caused by this deploy
	}
	return d, nil
}

func (d *dryRunner) keepsRunning(a *application, id string) bool {
	return unitEffect(d.state, a, id) == client.EffectUnchanged
}

func (d *dryRunner) reserveRunning(apps map[string]*application) {
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		a := apps[name]
		for i := range a.units {
			if id := a.units[i].ID; d.keepsRunning(a, id) {
				d.use(name, a.units[i].Group, d.state.Units[id].Ranks, d.state.Units[id].Blocks)
			}
		}
	}
}

// placeApp places an app's new units and reserves their room. It returns an outcome for each group with such
// units.
func (d *dryRunner) placeApp(a *application) map[int]*groupOutcome {
	out := map[int]*groupOutcome{}
	if a.spec == nil {
		return out
	}
	for group := range a.spec.NumGroups {
		if g := d.group(a, group); len(g.Ranks) > 0 {
			out[group] = d.placeGroup(a.name, group, &g)
		}
	}
	return out
}

// use marks the seats and ports of an application's ranks as used.
func (d *dryRunner) use(name string, group int, ranks []state.RankGrant, blocks []state.Block) {
	d.free.Use(ranks, blocks)
	if d.placed[name] == nil {
		d.placed[name] = nodeCounts{}
	}
	for i := range ranks {
		d.placed[name][ranks[i].Node]++
		d.shared.add(name, group, &ranks[i])
	}
}

func (d *dryRunner) placeGroup(name string, group int, g *placement.Group) *groupOutcome {
	out := &groupOutcome{seats: map[int]state.RankGrant{}}
	placed, err := d.free.Place(g)
	if err != nil {
		out.moves = placement.Hint(d.free.Nodes, *g, d.occupants())
		out.err = withAdvice(err, out.moves)
		return out
	}
	ranks, blocks := rankassigner.SeatsOf(g.Ranks, &placed)
	d.use(name, group, ranks, blocks)
	for _, r := range ranks {
		out.seats[r.Rank] = r
	}
	return out
}

// withAdvice adds the moves that would make room to a placement error.
func withAdvice(err error, moves placement.Moves) error {
	p, ok := errors.AsType[*problem.Error](err)
	if len(moves) == 0 || !ok {
		return err
	}
	better := *p
	return better.WithHint("%s", moves.String())
}

// occupants returns the units that keep running and could move.
func (d *dryRunner) occupants() []placement.Occupant {
	var out []placement.Occupant
	for _, apps := range []map[string]*application{d.deployed, d.remaining} {
		for _, name := range slices.Sorted(maps.Keys(apps)) {
			a := apps[name]
			for i := range a.units {
				if d.keepsRunning(a, a.units[i].ID) {
					out = append(out, d.occupant(a, &a.units[i]))
				}
			}
		}
	}
	return out
}

func (d *dryRunner) occupant(a *application, u *app.Unit) placement.Occupant {
	o := placement.Occupant{Unit: u.ID, Group: d.group(a, u.Group)}
	o.Group.Ranks = u.Ranks
	rec := d.state.Units[u.ID]
	for _, r := range rec.Ranks {
		o.Group.Held[r.Node]--
		o.Seats = append(o.Seats, placement.Seat(r))
	}
	for _, b := range rec.Blocks {
		block := placement.Block{Rank: -1, Node: b.Node, Base: b.Base, Size: b.Size}
		if !o.Group.Lockstep {
			block.Rank = u.Ranks[0]
		}
		o.Blocks = append(o.Blocks, block)
	}
	return o
}

func (d *dryRunner) group(a *application, group int) placement.Group {
	g := rankassigner.GroupRequest(a.spec, group)
	g.Avoid = d.avoided.nodesOf(a)
	if g.Other.Name != "" {
		g.Other.Ranks = d.placed[g.Other.Name]
	}
	for i := range a.units {
		u := &a.units[i]
		switch {
		case u.Group != group:
		case d.keepsRunning(a, u.ID):
			for _, r := range d.state.Units[u.ID].Ranks {
				g.Held[r.Node]++
			}
		default:
			g.Ranks = append(g.Ranks, u.Ranks...)
		}
	}
	return g
}
