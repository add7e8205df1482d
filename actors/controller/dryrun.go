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

// dryRun places what a deploy would start, beside what stays, and refuses it as a whole if that is impossible. Units of the
// other apps that wait for a place go first and do not count: they were not asked for now.
func dryRun(s *state.State, inventory []placement.Node, apps []*app.Application, prune bool) error {
	o := newOverlay(nodesOf(s, inventory), s)
	named := map[string]*application{}
	for _, a := range apps {
		next := &application{name: a.Name, launch: map[string]string{}}
		if err := next.fill(a); err != nil {
			return problem.New(problem.InvalidArgument, "deploy %s: %w", a.Name, err)
		}
		named[a.Name] = next
	}
	others := map[string]*application{}
	for name, a := range s.Apps {
		if named[name] == nil && !a.Deleting && !prune {
			others[name] = readApp(a)
		}
	}
	d := &dryRunner{state: s, overlay: o}
	d.stay(named)
	d.stay(others)
	for _, name := range slices.Sorted(maps.Keys(others)) {
		_ = d.place(others[name]) // what waits for a place without this deploy is not its fault
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if err := d.place(named[name]); err != nil {
			return err
		}
	}
	return nil
}

// dryRunner is a deploy on paper.
type dryRunner struct {
	state   *state.State
	overlay *overlay
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

// place finds room for the units of an app that start anew, and takes it.
func (d *dryRunner) place(a *application) error {
	if a.spec == nil {
		return nil
	}
	for group := range a.spec.NumGroups {
		g := d.group(a, group)
		if len(g.Ranks) == 0 {
			continue
		}
		p, err := placement.Place(d.overlay.nodes, []placement.Group{g})
		if err != nil {
			return err
		}
		var s seat
		s.fill(ranksOf(&p.Groups[0]), &p.Groups[0])
		d.overlay.use(s.ranks, s.blocks)
	}
	return nil
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
