package controller

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// planner shows a dry run to people.
type planner struct {
	*dryRun
	plan  client.Plan
	nodes map[string]*nodePlan
}

// nodePlan is a node's part of a plan, with its devices in parts (share.Whole), whose sums are exact.
type nodePlan struct {
	client.NodePlan
	free, need int
}

func (d *dryRun) plan() client.Plan {
	p := &planner{
		dryRun: d, plan: client.Plan{Revision: d.state.Revision, Fits: d.noRoom == nil},
		nodes: map[string]*nodePlan{},
	}
	p.addNodes()
	for _, change := range d.changes() {
		out := client.AppPlan{Change: change}
		a := d.deployed[change.App]
		if a != nil {
			for _, pool := range a.pools {
				for _, text := range app.Advise(pool) {
					out.Advice = append(out.Advice, pool.PoolName()+": "+text)
				}
			}
			was := d.stored(a.name)
			for i := range a.units {
				out.Units = append(out.Units, p.planUnit(was, a, &a.units[i]))
			}
		}
		for _, id := range slices.Sorted(maps.Keys(d.state.Units)) {
			if rec := d.state.Units[id]; rec.App == change.App && (a == nil || !a.isWanted(id)) {
				out.Units = append(out.Units, p.planEnd(rec))
			}
		}
		p.plan.Apps = append(p.plan.Apps, out)
		p.plan.Changes = p.plan.Changes || change.Effect != client.EffectUnchanged
	}
	p.sumNodes()
	return p.plan
}

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

func (p *planner) planUnit(was, a *application, u *app.Unit) client.UnitPlan {
	out := client.UnitPlan{Unit: u.ID, Pool: u.Pool, Effect: p.unitEffect(a, u.ID)}
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
	group := p.groups[groupName(a.pool(u.Pool).PoolName(), u.Group)]
	if group.err != nil {
		out.Why, out.Hint = rankassigner.Explain(group.err), problem.HintOf(group.err)
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
	out := client.UnitPlan{Unit: rec.ID, Pool: rec.Pool, Effect: client.EffectDelete}
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

// sumNodes lists the nodes in order. A node that frees more than it takes needs nothing.
func (p *planner) sumNodes() {
	for _, id := range slices.Sorted(maps.Keys(p.nodes)) {
		n := p.nodes[id]
		n.SlotsNeed, n.SlotsFree = max(0, n.SlotsNeed), max(0, n.SlotsFree)
		n.GPUsNeed, n.GPUsFree = share.Devices(max(0, n.need)), share.Devices(max(0, n.free))
		n.Shared = p.shared.on(id)
		p.plan.Nodes = append(p.plan.Nodes, n.NodePlan)
	}
}
