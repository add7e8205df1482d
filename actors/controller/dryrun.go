package controller

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// runnable refuses kinds that this version cannot start.
func runnable(apps []*app.Application) error {
	for _, a := range apps {
		if !a.Engine.Kind.Runs() {
			return problem.New(problem.Unplaceable, "deploy %s: launching engines of kind %s comes with the next version", a.Name, a.Engine.Kind).
				WithHint("run the file on the simulated engine with --engine sim, or attach engines that run already (kind: attach)")
		}
	}
	return nil
}

// dryRun refuses a deploy as a whole if it cannot place what it would start.
func dryRun(s *state.State, apps []*app.Application, prune bool) error {
	d, err := newDryRunner(s, apps, prune)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(d.named)) {
		for _, g := range d.place(d.named[name]) {
			if g.err != nil {
				return g.err
			}
		}
	}
	return nil
}

// dryRunner is a deploy on paper.
type dryRunner struct {
	state   *state.State
	overlay *overlay
	named   map[string]*application // that are deployed
	others  map[string]*application // that stay
}

// outcome is what becomes of one group on paper.
type outcome struct {
	seats map[int]state.RankGrant // by rank
	err   error                   // no room
	moves placement.Moves         // what would make room
}

// newDryRunner places what stays beside a deploy. Units of the other apps that wait for a place go first and do not count: they
// were not asked for now.
func newDryRunner(s *state.State, apps []*app.Application, prune bool) (*dryRunner, error) {
	d := &dryRunner{state: s, overlay: newOverlay(nodesOf(s), s), named: map[string]*application{}, others: map[string]*application{}}
	for _, a := range apps {
		next := &application{name: a.Name, launch: map[string]string{}}
		if err := next.fill(a); err != nil {
			return nil, problem.New(problem.InvalidArgument, "deploy %s: %w", a.Name, err)
		}
		d.named[a.Name] = next
	}
	for name, a := range s.Apps {
		if d.named[name] == nil && !a.Deleting && !prune {
			d.others[name] = readApp(a)
		}
	}
	d.stay(d.named)
	d.stay(d.others)
	for _, name := range slices.Sorted(maps.Keys(d.others)) {
		d.place(d.others[name]) // what waits for a place without this deploy is not its fault
	}
	return d, nil
}

// keeps says whether a unit runs on as it is.
func (d *dryRunner) keeps(a *application, id string) bool {
	rec := d.state.Units[id]
	return rec != nil && rec.Holds() && rec.Launch == a.launch[id]
}

// stay marks what the units that run on use.
func (d *dryRunner) stay(apps map[string]*application) {
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		a := apps[name]
		for i := range a.units {
			if id := a.units[i].ID; d.keeps(a, id) {
				d.overlay.use(d.state.Units[id].Ranks, d.state.Units[id].Blocks)
			}
		}
	}
}

// place finds room for the units of an app that start anew, and takes it. It gives an outcome per group that has such units.
func (d *dryRunner) place(a *application) map[int]*outcome {
	out := map[int]*outcome{}
	if a.spec == nil {
		return out
	}
	for group := range a.spec.NumGroups {
		if g := d.group(a, group); len(g.Ranks) > 0 {
			out[group] = d.placeGroup(&g)
		}
	}
	return out
}

func (d *dryRunner) placeGroup(g *placement.Group) *outcome {
	out := &outcome{seats: map[int]state.RankGrant{}}
	p, err := placement.Place(d.overlay.nodes, []placement.Group{*g})
	if err != nil {
		out.moves = placement.Hint(d.overlay.nodes, *g, d.occupants())
		out.err = advised(err, out.moves)
		return out
	}
	var s seat
	s.fill(ranksOf(&p.Groups[0]), &p.Groups[0])
	d.overlay.use(s.ranks, s.blocks)
	for _, r := range s.ranks {
		out.seats[r.Rank] = r
	}
	return out
}

// advised is a placement error with the advice that fits best.
func advised(err error, moves placement.Moves) error {
	var p *problem.Error
	if len(moves) == 0 || !errors.As(err, &p) {
		return err
	}
	better := *p
	return better.WithHint("%s", moves.String())
}

// occupants are the units that run on, and could move.
func (d *dryRunner) occupants() []placement.Occupant {
	var out []placement.Occupant
	for _, apps := range []map[string]*application{d.named, d.others} {
		for _, name := range slices.Sorted(maps.Keys(apps)) {
			a := apps[name]
			for i := range a.units {
				if d.keeps(a, a.units[i].ID) {
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
		o.Seats = append(o.Seats, placement.Seat{Rank: r.Rank, Node: r.Node, Slot: r.Slot, Devices: r.Devices})
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
	g := groupSpec(a.spec, group)
	g.Held = map[string]int{}
	for i := range a.units {
		u := &a.units[i]
		switch {
		case u.Group != group:
		case d.keeps(a, u.ID):
			for _, r := range d.state.Units[u.ID].Ranks {
				g.Held[r.Node]++
			}
		default:
			g.Ranks = append(g.Ranks, u.Ranks...)
		}
	}
	return g
}

// explain is a placement error in one line: what is missing, and what each node has.
func explain(err error) string {
	var p *problem.Error
	if !errors.As(err, &p) || len(p.Details) == 0 {
		return err.Error()
	}
	return p.Message + "; " + strings.Join(p.Details, "; ")
}
