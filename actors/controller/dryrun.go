package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/placement"
)

// dryRun is a deploy that was computed and not carried out: what it changes, and where its new ranks would
// be. Deploy goes by it, and Plan shows it.
type dryRun struct {
	state     *state.State
	avoided   avoidances
	put       *state.PutApps // the command of the deploy
	free      *rankassigner.Inventory
	deployed  map[string]*application // apps of the deploy
	remaining map[string]*application // apps that stay as they are
	groups    map[string]*groupOutcome
	placed    map[string]nodeCounts // by pool: where its ranks are, or will be
	shared    sharedDevices         // devices that ranks share, or will
	noRoom    error                 // why the first group without room finds none
}

// nodeCounts counts ranks by node.
type nodeCounts map[string]int

// groupOutcome is the computed placement of one group.
type groupOutcome struct {
	seats map[int]state.RankGrant // by rank
	err   error                   // no room
}

// newDryRun computes a deploy of pools. It reserves what keeps running. Then it places the other apps'
// waiting units without judging the result, because this deploy did not ask for them, and at last its own. An
// error means that the deploy would be refused for another reason than room.
func newDryRun(s *state.State, avoided avoidances, pools []*app.Application, prune bool) (*dryRun, error) {
	d := &dryRun{
		state: s, avoided: avoided, put: &state.PutApps{Prune: prune},
		free:     rankassigner.NewInventory(s, rankassigner.UsableNodes(s)),
		deployed: map[string]*application{}, remaining: map[string]*application{},
		groups: map[string]*groupOutcome{}, placed: map[string]nodeCounts{}, shared: sharedDevices{},
	}
	for _, of := range app.ByName(pools) {
		spec, err := encodeSpec(of)
		if err != nil {
			return nil, err
		}
		d.put.Apps = append(d.put.Apps, spec)
		next := &application{name: spec.Name}
		if err := next.setPools(of); err != nil {
			return nil, problem.New(problem.InvalidArgument, "deploy %s: %w", spec.Name, err)
		}
		d.deployed[spec.Name] = next
	}
	if _, err := s.Clone().Apply(s.Index+1, &state.Command{PutApps: d.put}); err != nil {
		return nil, err
	}
	for name, a := range s.Apps {
		if d.deployed[name] == nil && !a.Deleting && !prune {
			d.remaining[name] = readApp(a)
		}
	}
	d.reserveRunning(d.deployed)
	d.reserveRunning(d.remaining)
	for _, a := range inOrder(d.remaining) {
		d.placeApp(a)
	}
	d.noRoom = nil // not caused by this deploy
	for _, a := range inOrder(d.deployed) {
		d.placeApp(a)
	}
	return d, nil
}

// encodeSpec is an application as the state stores it.
func encodeSpec(pools []*app.Application) (state.AppSpec, error) {
	answers := pools[len(pools)-1]
	spec, err := json.Marshal(pools)
	if err != nil {
		return state.AppSpec{}, problem.New(problem.Internal, "deploy %s: %w", answers.Name, err)
	}
	return state.AppSpec{Name: answers.Name, Spec: spec, Names: answers.Model.ServedNames()}, nil
}

// inOrder returns applications in the order of their names, which is the core's.
func inOrder(apps map[string]*application) []*application {
	var out []*application
	for _, name := range slices.Sorted(maps.Keys(apps)) {
		out = append(out, apps[name])
	}
	return out
}

func (d *dryRun) keepsRunning(a *application, id string) bool {
	return d.unitEffect(a, id) == client.EffectUnchanged
}

// unitEffect is what a deploy of the application does to a unit that it wants. The core decides by the same
// comparison (startsAs).
func (d *dryRun) unitEffect(a *application, id string) client.Effect {
	rec := d.state.Units[id]
	switch {
	case rec == nil || !rec.Holds():
		return client.EffectCreate
	case a.startsAs(id, rec.Launch):
		return client.EffectUnchanged
	default:
		return client.EffectRestart
	}
}

func (d *dryRun) reserveRunning(apps map[string]*application) {
	for _, a := range inOrder(apps) {
		for i := range a.units {
			if u := &a.units[i]; d.keepsRunning(a, u.ID) {
				d.use(a.pool(u.Pool), u.Group, d.state.Units[u.ID].Ranks, d.state.Units[u.ID].Blocks)
			}
		}
	}
}

// placeApp places an app's new units and reserves their room.
func (d *dryRun) placeApp(a *application) {
	for _, pool := range slices.Backward(a.pools) { // in the order of their names, as the core does
		for group := range pool.NumGroups {
			if g := d.group(a, pool, group); len(g.Ranks) > 0 {
				d.placeGroup(pool, group, &g)
			}
		}
	}
}

// use marks the seats and ports of a pool's ranks as used.
func (d *dryRun) use(pool *app.Application, group int, ranks []state.RankGrant, blocks []state.Block) {
	d.free.Use(ranks, blocks)
	name := pool.PoolName()
	if d.placed[name] == nil {
		d.placed[name] = nodeCounts{}
	}
	for i := range ranks {
		d.placed[name][ranks[i].Node]++
		d.shared.add(name, group, &ranks[i])
	}
}

func groupName(pool string, group int) string { return pool + "/" + strconv.Itoa(group) }

func (d *dryRun) placeGroup(pool *app.Application, group int, g *placement.Group) {
	out := &groupOutcome{seats: map[int]state.RankGrant{}}
	d.groups[groupName(pool.PoolName(), group)] = out
	placed, err := d.free.Place(g)
	if err != nil {
		out.err = withAdvice(err, placement.Hint(d.free.Nodes, *g, d.occupants()))
		if d.noRoom == nil {
			d.noRoom = out.err
		}
		return
	}
	ranks, blocks := rankassigner.SeatsOf(g.Ranks, &placed)
	d.use(pool, group, ranks, blocks)
	for _, r := range ranks {
		out.seats[r.Rank] = r
	}
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
func (d *dryRun) occupants() []placement.Occupant {
	var out []placement.Occupant
	for _, a := range slices.Concat(inOrder(d.deployed), inOrder(d.remaining)) {
		for i := range a.units {
			if d.keepsRunning(a, a.units[i].ID) {
				out = append(out, d.occupant(a, &a.units[i]))
			}
		}
	}
	return out
}

func (d *dryRun) occupant(a *application, u *app.Unit) placement.Occupant {
	o := placement.Occupant{Unit: u.ID, Group: d.group(a, a.pool(u.Pool), u.Group)}
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

func (d *dryRun) group(a *application, pool *app.Application, group int) placement.Group {
	g := rankassigner.GroupRequest(pool, group)
	g.Avoid = d.avoided.nodesOf(a, pool.Pool)
	if g.Other.Name != "" {
		g.Other.Ranks = d.placed[g.Other.Name]
	}
	g.Siblings = maps.Clone(d.placed[pool.PoolName()])
	for i := range a.units {
		u := &a.units[i]
		switch {
		case u.Pool != pool.Pool || u.Group != group:
		case d.keepsRunning(a, u.ID):
			for _, r := range d.state.Units[u.ID].Ranks {
				g.Held[r.Node]++
				g.Siblings[r.Node]--
			}
		default:
			g.Ranks = append(g.Ranks, u.Ranks...)
		}
	}
	return g
}

// changes returns what the deploy does to each application: those that it puts, then those that it ends.
func (d *dryRun) changes() []client.Change {
	var out []client.Change
	for _, next := range inOrder(d.deployed) {
		was := d.stored(next.name)
		out = append(out, client.Change{
			App: next.name, Impact: d.impactOf(was, next), Gone: removedRanks(was, next),
		})
	}
	for _, name := range slices.Sorted(maps.Keys(d.state.Apps)) {
		if stored := d.state.Apps[name]; d.deployed[name] == nil && d.put.Prune && !stored.Deleting {
			out = append(out, client.Change{App: name, Impact: client.Impact{
				Effect: client.EffectDelete, RanksBefore: readApp(stored).countWanted(),
			}})
		}
	}
	return out
}

// stored returns an application as it is stored; nil = it is not deployed.
func (d *dryRun) stored(name string) *application {
	if was := d.state.Apps[name]; was != nil {
		return readApp(was)
	}
	return nil
}

// impactOf is what the deploy does to an application and to its ranks. was is nil if it is not deployed.
func (d *dryRun) impactOf(was, next *application) client.Impact {
	out := client.Impact{Effect: client.EffectCreate, RanksAfter: next.countWanted()}
	if was == nil {
		return out
	}
	out.Effect, out.RanksBefore = client.EffectUpdate, was.countWanted()
	switch {
	case was.pools == nil: // what another version stored cannot be compared
	case len(was.pools) < len(next.pools):
		out.Effect = client.EffectRestart
		out.Reasons = []string{"it has prefill and decode ranks from now on"}
		return out
	case len(was.pools) > len(next.pools):
		out.Effect, out.Reasons = client.EffectRestart, []string{"it has one pool from now on"}
		return out
	default:
		for _, diff := range app.ComparePools(was.pools, next.pools) {
			out.Diffs = append(out.Diffs, client.FieldDiff(diff))
		}
		if len(out.Diffs) == 0 {
			out.Effect = client.EffectUnchanged
			return out
		}
		for i, pool := range next.pools {
			if pool.NumReplicas != was.pools[i].NumReplicas {
				out.Effect = client.EffectScale
			}
		}
	}
	if out.Reasons = d.appReasons(was, next, out.Diffs); len(out.Reasons) > 0 {
		out.Effect = client.EffectRestart
	}
	return out
}

// appReasons says why units of an application restart. A reason that is not that of all pools names its pool.
func (d *dryRun) appReasons(was, next *application, diffs []client.FieldDiff) []string {
	reasons := make([][]string, len(next.pools))
	for i := range next.units {
		u := &next.units[i]
		rec := d.state.Units[u.ID]
		if d.unitEffect(next, u.ID) != client.EffectRestart {
			if rec = d.heldByAnother(next, u); rec == nil {
				continue
			}
		}
		of := &reasons[next.poolAt(u.Pool)]
		for _, why := range restartReasons(was, next, u, rec) {
			if !slices.Contains(*of, why) {
				*of = append(*of, why)
			}
		}
	}
	return app.Join(next.pools, reasons, func(pool, why string) string {
		isPath := func(diff client.FieldDiff) bool { return diff.Path == why || diff.Path == pool+"."+why }
		if slices.ContainsFunc(diffs, isPath) {
			return pool + "." + why
		}
		return pool + ": " + why
	})
}

// heldByAnother returns a unit that ends and holds ranks of u, as when the coupling changes; nil if there is
// none.
func (d *dryRun) heldByAnother(next *application, u *app.Unit) *state.Unit {
	for id, rec := range d.state.Units {
		if !next.isWanted(id) && holdsRanksOf(rec, u) {
			return rec
		}
	}
	return nil
}

// holdsRanksOf reports whether a unit has a rank that another one wants.
func holdsRanksOf(rec *state.Unit, u *app.Unit) bool {
	return rec.App == u.App && rec.Pool == u.Pool && rec.Group == u.Group && rec.Holds() &&
		slices.ContainsFunc(u.Ranks, rec.HasRank)
}

// restartReasons says why a unit restarts: the fields of the file that are part of its launch spec, or what
// follows from them.
func restartReasons(was, next *application, u *app.Unit, rec *state.Unit) []string {
	if was == nil || was.pools == nil {
		return []string{"another version of dpserve wrote what is stored"}
	}
	before, after := was.pool(u.Pool), next.pool(u.Pool)
	if before == nil || was.startsAs(u.ID, next.launch[u.ID]) && next.isWanted(rec.ID) {
		return []string{"it still runs an earlier revision"}
	}
	var out []string
	if on := engine.WantsEvents(after); on != engine.WantsEvents(before) {
		out = append(out, "KV events go "+map[bool]string{true: "on", false: "off"}[on])
	}
	written := app.Compare(before, after)
	for _, diff := range app.Compare(launchSpec(before, u), launchSpec(after, u)) {
		if slices.ContainsFunc(written, func(w app.Diff) bool { return w.Path == diff.Path }) &&
			diff.Path != "engine.kv_events" {
			out = append(out, diff.Path)
		}
	}
	return out
}

// removedRanks lists the attached ranks that a deploy ends because it does not list their engines, for
// example those added at run time.
func removedRanks(was, next *application) []string {
	var out []string
	for _, pool := range next.pools {
		var old *app.Application
		if was != nil {
			old = was.pool(pool.Pool)
		}
		if old == nil || old.Engine.Kind != app.KindAttach {
			continue
		}
		listed, of := map[string]bool{}, ""
		for i := range pool.Engine.Ranks {
			listed[pool.Engine.Ranks[i].Address()] = true
		}
		if pool.Pool != "" {
			of = pool.PoolName() + "/"
		}
		for at, r := range attached(old) {
			if !listed[r.Address()] {
				out = append(out, fmt.Sprintf("%s%d/%d %s", of, at.group, at.rank, r.Address()))
			}
		}
	}
	return out
}
