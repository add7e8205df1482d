package controller

import (
	"errors"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/placement"
)

// CheckRunnable refuses kinds that this version cannot start.
func CheckRunnable(apps []*app.Application) error {
	for _, a := range apps {
		if !a.Engine.Kind.Runs() {
			return problem.New(problem.Unplaceable,
				"%s: this version cannot start engines of kind %s", a.AppName(), a.Engine.Kind).
				WithHint("--engine sim runs the file on the simulated engine, " +
					"and kind: attach serves engines that run already")
		}
	}
	return nil
}

// checkPlaceable refuses a whole deploy if its new units cannot be placed.
func checkPlaceable(s *state.State, apps []*app.Application, prune bool) error {
	d, err := newDryRunner(s, apps, prune)
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
	free      *rankassigner.Inventory
	deployed  map[string]*application // apps of the deploy
	remaining map[string]*application // apps that stay as they are
	placed    map[string]nodeCounts   // by app: where its ranks are, or will be
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
func newDryRunner(s *state.State, apps []*app.Application, prune bool) (*dryRunner, error) {
	d := &dryRunner{
		state: s, free: rankassigner.NewInventory(s, rankassigner.UsableNodes(s)),
		deployed: map[string]*application{}, remaining: map[string]*application{},
		placed: map[string]nodeCounts{},
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

// keepsRunning reports whether a unit continues unchanged.
func (d *dryRunner) keepsRunning(a *application, id string) bool {
	return unitEffect(d.state, a, id) == client.EffectUnchanged
}

// reserveRunning marks the resources of the units that keep running as used.
func (d *dryRunner) reserveRunning(apps map[string]*application) {
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		a := apps[name]
		for i := range a.units {
			if id := a.units[i].ID; d.keepsRunning(a, id) {
				d.use(name, d.state.Units[id].Ranks, d.state.Units[id].Blocks)
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
			out[group] = d.placeGroup(a.name, &g)
		}
	}
	return out
}

// use marks the seats and ports of an application's ranks as used.
func (d *dryRunner) use(name string, ranks []state.RankGrant, blocks []state.Block) {
	d.free.Use(ranks, blocks)
	if d.placed[name] == nil {
		d.placed[name] = nodeCounts{}
	}
	for i := range ranks {
		d.placed[name][ranks[i].Node]++
	}
}

func (d *dryRunner) placeGroup(name string, g *placement.Group) *groupOutcome {
	out := &groupOutcome{seats: map[int]state.RankGrant{}}
	placed, err := d.free.Place(g)
	if err != nil {
		out.moves = placement.Hint(d.free.Nodes, *g, d.occupants())
		out.err = withAdvice(err, out.moves)
		return out
	}
	ranks, blocks := rankassigner.SeatsOf(g.Ranks, &placed)
	d.use(name, ranks, blocks)
	for _, r := range ranks {
		out.seats[r.Rank] = r
	}
	return out
}

// withAdvice adds the moves that would make room to a placement error.
func withAdvice(err error, moves placement.Moves) error {
	var p *problem.Error
	if len(moves) == 0 || !errors.As(err, &p) {
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
		o.Seats = append(o.Seats, placement.Seat{
			Rank: r.Rank, Node: r.Node, Slot: r.Slot,
			Devices: r.Devices,
		})
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
