package controller

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// What a deploy does to an application or a unit.
const (
	actionCreate    = "create"
	actionReplace   = "replace"
	actionDelete    = "delete"
	actionUnchanged = "unchanged"
)

// Plan is what Deploy would do now, on paper: what is created, replaced and deleted, where every rank would lie, and why something
// would find no place, which is no error here. Errors are those of a deploy that would be refused for another reason.
func (c *Controller) Plan(apps []*app.Application, prune bool) (msg.Plan, error) {
	if err := runnable(apps); err != nil {
		return msg.Plan{}, err
	}
	return planOf(c.placeable(), apps, prune)
}

// planner is a plan in the making.
type planner struct {
	*dryRunner
	plan  msg.Plan
	nodes map[string]*msg.NodePlan
}

func planOf(s *state.State, apps []*app.Application, prune bool) (msg.Plan, error) {
	put := &state.PutApps{Prune: prune}
	for _, a := range apps {
		spec, err := specOf(a)
		if err != nil {
			return msg.Plan{}, err
		}
		put.Apps = append(put.Apps, spec)
	}
	if _, err := s.Clone().Apply(s.Index+1, &state.Command{PutApps: put}); err != nil {
		return msg.Plan{}, err
	}
	d, err := newDryRunner(s, apps, prune)
	if err != nil {
		return msg.Plan{}, err
	}
	p := &planner{dryRunner: d, plan: msg.Plan{Revision: s.Revision, Fits: true}, nodes: map[string]*msg.NodePlan{}}
	p.lookAtNodes()
	for _, a := range slices.SortedFunc(slices.Values(apps), byName) { // as the core takes its turns
		p.app(d.named[a.Name])
	}
	if prune {
		p.deletes()
	}
	p.sum()
	return p.plan, nil
}

func byName(a, b *app.Application) int { return cmp.Compare(a.Name, b.Name) }

// lookAtNodes lists the nodes with what they have free before the deploy.
func (p *planner) lookAtNodes() {
	for _, n := range p.state.Nodes {
		p.nodes[n.ID] = &msg.NodePlan{
			Node: n.ID, Slots: n.Offer.Slots, SlotsFree: n.Offer.Slots, GPUs: len(n.Offer.Devices), GPUsFree: len(n.Offer.Devices), Note: whyNot(n),
		}
	}
	for _, rec := range p.state.Units {
		for i := range rec.Ranks {
			if n := p.nodes[rec.Ranks[i].Node]; n != nil && rec.Holds() {
				n.SlotsFree -= slots(&rec.Ranks[i])
				n.GPUsFree -= len(rec.Ranks[i].Devices)
			}
		}
	}
}

// whyNot is why placement leaves a node out; "" = it does not.
func whyNot(n *state.Node) string {
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

// slots is how many slots a rank holds.
func slots(r *state.RankGrant) int {
	if r.Slot < 0 {
		return 0
	}
	return 1
}

// need adds what ranks take of their nodes anew; with times -1, what they give back.
func (p *planner) need(ranks []state.RankGrant, times int) {
	for i := range ranks {
		if n := p.nodes[ranks[i].Node]; n != nil {
			n.SlotsNeed += times * slots(&ranks[i])
			n.GPUsNeed += times * len(ranks[i].Devices)
		}
	}
}

// app plans one application that is deployed.
func (p *planner) app(a *application) {
	out := msg.AppPlan{App: a.name, Action: actionCreate}
	if old := p.state.Apps[a.name]; old != nil {
		out.Action, out.Fields = changed(old, a.spec)
	}
	groups := p.place(a)
	for i := range a.units {
		out.Units = append(out.Units, p.unit(a, &a.units[i], groups[a.units[i].Group]))
	}
	for _, rec := range p.unitsOf(a.name) {
		if !a.wants(rec.ID) {
			out.Units = append(out.Units, p.end(rec))
		}
	}
	p.plan.Apps = append(p.plan.Apps, out)
}

// changed says what a deploy does to an application that is there, and which fields differ.
func changed(old *state.App, a *app.Application) (action string, fields []string) {
	was := new(app.Application)
	if err := json.Unmarshal(old.Spec, was); err != nil {
		return actionReplace, nil // of another version: what differs cannot be told
	}
	changes := app.Compare([]*app.Application{was}, []*app.Application{a})
	if len(changes) == 0 {
		return actionUnchanged, nil
	}
	for _, f := range changes[0].Fields {
		fields = append(fields, f.Path)
	}
	return actionReplace, fields
}

// unitsOf are the records of an application, in order.
func (p *planner) unitsOf(name string) []*state.Unit {
	var out []*state.Unit
	for _, id := range slices.Sorted(maps.Keys(p.state.Units)) {
		if rec := p.state.Units[id]; rec.App == name {
			out = append(out, rec)
		}
	}
	return out
}

// unit plans one wanted unit.
func (p *planner) unit(a *application, u *app.Unit, group *outcome) msg.UnitPlan {
	out := msg.UnitPlan{Unit: u.ID, Action: actionCreate}
	rec := p.state.Units[u.ID]
	if p.keeps(a, u.ID) {
		out.Action, out.Seats = actionUnchanged, seatsOf(rec.Ranks)
		return out
	}
	if rec != nil && rec.Holds() {
		out.Action = actionReplace
		p.need(rec.Ranks, -1)
	}
	if group.err != nil {
		p.plan.Fits = false
		out.Why, out.Hint = explain(group.err), group.moves.String()
		return out
	}
	ranks := make([]state.RankGrant, 0, len(u.Ranks))
	for _, r := range u.Ranks {
		ranks = append(ranks, group.seats[r])
	}
	p.need(ranks, 1)
	out.Seats = seatsOf(ranks)
	return out
}

// end plans a unit that is not wanted any more.
func (p *planner) end(rec *state.Unit) msg.UnitPlan {
	out := msg.UnitPlan{Unit: rec.ID, Action: actionDelete}
	if rec.Holds() {
		p.need(rec.Ranks, -1)
		out.Seats = seatsOf(rec.Ranks)
	}
	return out
}

func seatsOf(ranks []state.RankGrant) []msg.SeatPlan {
	out := make([]msg.SeatPlan, len(ranks))
	for i, r := range ranks {
		out[i] = msg.SeatPlan{Rank: r.Rank, Node: r.Node, Devices: r.Devices}
	}
	return out
}

// deletes plans the applications that are not listed.
func (p *planner) deletes() {
	for _, name := range slices.Sorted(maps.Keys(p.state.Apps)) {
		if p.named[name] != nil || p.state.Apps[name].Deleting {
			continue
		}
		out := msg.AppPlan{App: name, Action: actionDelete}
		for _, rec := range p.unitsOf(name) {
			out.Units = append(out.Units, p.end(rec))
		}
		p.plan.Apps = append(p.plan.Apps, out)
	}
}

// sum lists the nodes in order. A node that gets back more than it gives needs nothing.
func (p *planner) sum() {
	for _, a := range p.plan.Apps {
		p.plan.Changes = p.plan.Changes || a.Action != actionUnchanged
	}
	for _, id := range slices.Sorted(maps.Keys(p.nodes)) {
		n := p.nodes[id]
		n.SlotsNeed, n.GPUsNeed = max(0, n.SlotsNeed), max(0, n.GPUsNeed)
		n.SlotsFree, n.GPUsFree = max(0, n.SlotsFree), max(0, n.GPUsFree)
		p.plan.Nodes = append(p.plan.Nodes, *n)
	}
}
