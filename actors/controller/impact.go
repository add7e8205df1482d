package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// unitEffect is what a deploy of the application does to a unit that it wants. The core decides by the same
// comparison (startsAs).
func unitEffect(s *state.State, a *application, id string) client.Effect {
	rec := s.Units[id]
	switch {
	case rec == nil || !rec.Holds():
		return client.EffectCreate
	case a.startsAs(id, rec.Launch):
		return client.EffectUnchanged
	default:
		return client.EffectRestart
	}
}

// impactOf is what a deploy does to an application and to its ranks. was is nil if it is not deployed.
func impactOf(s *state.State, was, next *application) client.Impact {
	out := client.Impact{Effect: client.EffectCreate, RanksAfter: countWanted(next.units)}
	if was == nil {
		return out
	}
	out.RanksBefore = countWanted(was.units)
	if was.spec != nil { // what another version stored cannot be compared
		if out.Diffs = diffsOf(was.spec, next.spec); len(out.Diffs) == 0 {
			out.Effect = client.EffectUnchanged
			return out
		}
	}
	out.Effect = client.EffectUpdate
	if was.spec != nil && out.RanksBefore != out.RanksAfter {
		out.Effect = client.EffectScale
	}
	for i := range next.units {
		u := &next.units[i]
		rec := s.Units[u.ID]
		if unitEffect(s, next, u.ID) != client.EffectRestart {
			if rec = heldByAnother(s, next, u); rec == nil {
				continue
			}
		}
		out.Effect = client.EffectRestart
		for _, why := range restartReasons(was, next, u, rec) {
			if !slices.Contains(out.Reasons, why) {
				out.Reasons = append(out.Reasons, why)
			}
		}
	}
	return out
}

// heldByAnother returns a unit that ends and holds ranks of u, as when the coupling changes; nil if there is
// none.
func heldByAnother(s *state.State, next *application, u *app.Unit) *state.Unit {
	for id, rec := range s.Units {
		if !next.isWanted(id) && rec.App == u.App && rec.Group == u.Group && rec.Holds() &&
			slices.ContainsFunc(u.Ranks, rec.HasRank) {
			return rec
		}
	}
	return nil
}

// deletionOf is what a deploy with prune does to an application that it does not list.
func deletionOf(old *state.App) client.Impact {
	return client.Impact{Effect: client.EffectDelete, RanksBefore: countWanted(readApp(old).units)}
}

// readStored returns an application as it is stored; nil = it is not deployed.
func readStored(s *state.State, name string) *application {
	if old := s.Apps[name]; old != nil {
		return readApp(old)
	}
	return nil
}

func countWanted(units []app.Unit) int {
	n := 0
	for i := range units {
		n += len(units[i].Ranks)
	}
	return n
}

func diffsOf(was, now *app.Application) []client.FieldDiff {
	var out []client.FieldDiff
	for _, d := range app.Compare(was, now) {
		out = append(out, client.FieldDiff(d))
	}
	return out
}

// restartReasons says why a unit restarts: the fields of the file that are part of its launch spec, or what
// follows from them.
func restartReasons(was, next *application, u *app.Unit, rec *state.Unit) []string {
	if was == nil || was.spec == nil {
		return []string{"another version of dpserve wrote what is stored"}
	}
	if was.startsAs(u.ID, next.launch[u.ID]) && next.isWanted(rec.ID) {
		return []string{"it still runs an earlier revision"}
	}
	var out []string
	if on := engine.WantsEvents(next.spec); on != engine.WantsEvents(was.spec) {
		out = append(out, "KV events go "+map[bool]string{true: "on", false: "off"}[on])
	}
	written := diffsOf(was.spec, next.spec)
	for _, d := range diffsOf(launchSpec(was.spec, u), launchSpec(next.spec, u)) {
		if slices.ContainsFunc(written, func(w client.FieldDiff) bool { return w.Path == d.Path }) &&
			d.Path != "engine.kv_events" {
			out = append(out, d.Path)
		}
	}
	return out
}

// summaryOf is an impact in the words of Action, with the paths of the fields that differ.
func summaryOf(i *client.Impact) (client.Action, []string) {
	var fields []string
	for _, d := range i.Diffs {
		fields = append(fields, d.Path)
	}
	return actionOf(i.Effect), fields
}

func actionOf(e client.Effect) client.Action {
	switch e {
	case client.EffectUpdate, client.EffectScale, client.EffectRestart:
		return client.ActionReplace
	case client.EffectCreate, client.EffectDelete, client.EffectUnchanged:
	}
	return client.Action(e)
}

// DeployChanges is Deploy for a caller that has seen the cluster at a revision (nil = any). It also returns
// what the deploy changes. Errors: problem.Conflict if a listed application changed after that revision.
func DeployChanges(ctx context.Context, c *Controller, apps []*app.Application, seen *uint64, prune,
	partial bool,
) (state.Result, []client.Change, error) {
	st := c.cfg.Store.State()
	expect, err := expectedRevisions(st, apps, seen)
	if err != nil {
		return state.Result{}, nil, err
	}
	changes, err := appChanges(st, apps, prune)
	if err != nil {
		return state.Result{}, nil, err
	}
	r, err := c.Deploy(ctx, apps, expect, prune, partial)
	r.Apps = foldRevisions(r.Apps)
	return r, changes, err
}

// expectedRevisions returns the revision of every named app that a caller at cluster revision seen has seen.
// An app that changed after that revision is a conflict.
func expectedRevisions(st *state.State, apps []*app.Application, seen *uint64) (map[string]uint64, error) {
	if seen == nil {
		return nil, nil //nolint:nilnil // no expectation
	}
	if *seen > st.Revision {
		return nil, problem.New(problem.Conflict, "revision %d does not exist yet, the cluster is at %d",
			*seen, st.Revision).WithHint("plan against this cluster again")
	}
	out := map[string]uint64{}
	names := formerNames(st, apps)
	for _, a := range apps {
		names = append(names, a.Name)
	}
	for _, name := range names {
		out[name] = 0
		if now := st.Apps[name]; now != nil {
			if now.ChangedAt > *seen {
				user, _ := app.SplitPool(name)
				return nil, problem.New(problem.Conflict,
					"app %s has changed at revision %d, after the %d you saw", user, now.ChangedAt, *seen).
					WithHint("look at `dpserve status %s`, then deploy again", user)
			}
			out[name] = now.Revision
		}
	}
	return out, nil
}

// appChanges returns what a deploy does to each app, listed ones in their order, then deleted ones by name.
// The pools of an application are one.
func appChanges(st *state.State, apps []*app.Application, prune bool) ([]client.Change, error) {
	var out []client.Change
	listed := map[string]bool{}
	for _, a := range apps {
		listed[a.Name] = true
		next, err := wantedApp(a)
		if err != nil {
			return nil, err
		}
		c := client.Change{App: a.Name, Impact: impactOf(st, readStored(st, a.Name), next)}
		c.Action, c.Fields = summaryOf(&c.Impact)
		c.Gone = removedRanks(st.Apps[a.Name], a)
		out = append(out, c)
	}
	ended := formerNames(st, apps)
	for _, name := range slices.Sorted(maps.Keys(st.Apps)) {
		if prune && !listed[name] || slices.Contains(ended, name) {
			c := client.Change{App: name, Impact: deletionOf(st.Apps[name])}
			c.Action, _ = summaryOf(&c.Impact)
			out = append(out, c)
		}
	}
	return foldChanges(out), nil
}

// removedRanks lists the attached ranks that a deploy ends because it does not list their engines, for
// example those added at run time.
func removedRanks(stored *state.App, a *app.Application) []string {
	if stored == nil {
		return nil
	}
	old, err := stored.Application()
	if err != nil || old.Engine.Kind != app.KindAttach {
		return nil
	}
	listed := map[string]bool{}
	for i := range a.Engine.Ranks {
		listed[a.Engine.Ranks[i].Address()] = true
	}
	var out []string
	for at, r := range attached(old) {
		if !listed[r.Address()] {
			out = append(out, fmt.Sprintf("%d/%d %s", at.group, at.rank, r.Address()))
		}
	}
	return out
}
