package controller

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

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
