package state

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// rootRoute may be shared by all applications; the ingress then picks the application by the request's model.
const rootRoute = "/"

// putApps changes a copy of the app table and stores the copy when no part of the command was refused.
func (s *State) putApps(c *PutApps) (Result, error) {
	next := maps.Clone(s.Apps)
	changed := false
	for i := range c.Apps {
		put, err := s.putApp(next, &c.Apps[i], c.Expect)
		if err != nil {
			return Result{}, err
		}
		changed = changed || put
	}
	if c.Prune && markUnlisted(next, c.Apps) {
		changed = true
	}
	if err := checkNames(next); err != nil {
		return Result{}, err
	}
	s.Apps = next
	return s.putResult(c.Apps, changed), nil
}

func (s *State) putResult(apps []AppSpec, changed bool) Result {
	if changed {
		s.Revision++
	}
	r := Result{Revision: s.Revision, Apps: make(map[string]uint64, len(apps))}
	for i := range apps {
		r.Apps[apps[i].Name] = s.Apps[apps[i].Name].Revision
	}
	return r
}

// putApp puts one application into next and reports whether that changed the application.
func (s *State) putApp(next map[string]*App, spec *AppSpec, expect map[string]uint64) (bool, error) {
	old := s.Apps[spec.Name]
	if err := checkExpect(spec.Name, old, expect); err != nil {
		return false, err
	}
	if next[spec.Name] != old {
		return false, problem.New(problem.InvalidArgument, "put apps: %w: application %q is listed twice",
			ErrBadCommand, spec.Name)
	}
	canonical, err := compact(spec.Spec)
	if err != nil {
		return false, problem.New(problem.InvalidArgument, "put apps: %w: spec of application %q is not JSON",
			ErrBadCommand, spec.Name)
	}
	if old != nil && old.Deleting {
		return false, problem.New(problem.Conflict, "put apps: application %q: %w", spec.Name, ErrDeleting).
			WithHint("wait until it is gone (dpserve status %s), then deploy it again", spec.Name)
	}
	if old != nil && bytes.Equal(old.Spec, canonical) {
		return false, nil
	}
	a := &App{Name: spec.Name, Revision: s.lastRevision(spec.Name) + 1, ChangedAt: s.Revision + 1,
		Spec: canonical, Names: slices.Clone(spec.Names), Route: spec.Route}
	if old != nil {
		a.Revision, a.Previous = old.Revision+1, old.Spec
	}
	next[spec.Name] = a
	return true, nil
}

func checkExpect(name string, old *App, expect map[string]uint64) error {
	want, ok := expect[name]
	if !ok {
		return nil
	}
	var have uint64
	if old != nil {
		have = old.Revision
	}
	if have == want {
		return nil
	}
	return problem.New(problem.Conflict,
		"put apps: %w: application %q is at revision %d, the change was made for revision %d",
		ErrStaleRevision, name, have, want).
		WithHint("look at what changed (dpserve status %s), then deploy again", name)
}

// compact returns the canonical form of a spec: the JSON of raft and of the proposer may differ in white
// space.
func compact(spec json.RawMessage) (json.RawMessage, error) {
	var b bytes.Buffer
	if err := json.Compact(&b, spec); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// markUnlisted marks the applications that are not listed as deleting.
func markUnlisted(apps map[string]*App, listed []AppSpec) bool {
	keep := make(map[string]bool, len(listed))
	for i := range listed {
		keep[listed[i].Name] = true
	}
	changed := false
	for name, a := range apps {
		if !keep[name] && !a.Deleting {
			apps[name] = markDeleting(a)
			changed = true
		}
	}
	return changed
}

func markDeleting(a *App) *App {
	d := *a
	d.Deleting = true
	return &d
}

// checkNames refuses a model name, or a route other than "/", that two applications share. Applications that
// are being deleted do not count.
func checkNames(apps map[string]*App) error {
	names, routes := map[string]string{}, map[string]string{}
	for _, app := range slices.Sorted(maps.Keys(apps)) {
		a := apps[app]
		if a.Deleting {
			continue
		}
		for _, n := range a.Names {
			if other, taken := names[n]; taken && other != app {
				return problem.New(problem.Conflict,
					"put apps: %w: applications %q and %q both serve the model %q", ErrNameTaken, other, app,
					n).
					WithHint("give one of them another model.id, alias or adapter id")
			}
			names[n] = app
		}
		if other, taken := routes[a.Route]; taken && a.Route != rootRoute {
			return problem.New(problem.Conflict,
				"put apps: %w: applications %q and %q both have route_prefix %s", ErrRouteTaken, other, app,
				a.Route).
				WithHint("give one of them another route_prefix; only / may be shared")
		}
		routes[a.Route] = app
	}
	return nil
}

// deleteApp marks an application as deleting. A second command changes nothing.
func (s *State) deleteApp(c *DeleteApp) (Result, error) {
	a, ok := s.Apps[c.Name]
	if !ok {
		return Result{}, s.unknownAppError("delete app", c.Name)
	}
	if !a.Deleting {
		s.Apps[c.Name] = markDeleting(a)
		s.Revision++
	}
	return Result{Revision: s.Revision, Apps: map[string]uint64{c.Name: a.Revision}}, nil
}

// forgetApp removes an application whose units are all released. Its epochs and its revision stay recorded.
func (s *State) forgetApp(c *ForgetApp) error {
	a, ok := s.Apps[c.Name]
	if !ok {
		return s.unknownAppError("forget app", c.Name)
	}
	if !a.Deleting {
		return problem.New(problem.Conflict, "forget app: application %q: %w", c.Name, ErrNotDeleting).
			WithHint("delete it first")
	}
	for _, id := range slices.Sorted(maps.Keys(s.Units)) {
		if s.Units[id].App == c.Name {
			return problem.New(problem.Conflict, "forget app: %w: %s is not released", ErrUnitsLeft, id).
				WithHint("wait until its processes are gone")
		}
	}
	delete(s.Apps, c.Name)
	s.Revisions[c.Name] = a.Revision
	s.dropOldNames()
	return nil
}

// maxGoneNames bounds the names of removed applications, and of removed units, that the state keeps.
const maxGoneNames = 1024

// dropOldNames drops names of removed applications and units above maxGoneNames, the lowest numbers first. A
// name without an entry counts as having the floor's number. The floor is at least as high as every dropped
// number, so no name comes back with a number that it had before.
func (s *State) dropOldNames() {
	gone := func(unit string) bool {
		app, _, _ := strings.Cut(unit, "/")
		return s.Units[unit] == nil && s.Apps[app] == nil
	}
	s.EpochFloor = max(s.EpochFloor, dropLowest(s.Epochs, gone))
	s.RevisionFloor = max(s.RevisionFloor, dropLowest(s.Revisions,
		func(app string) bool { return s.Apps[app] == nil }))
}

// dropLowest drops all but maxGoneNames of the entries that may go and returns the highest number that it
// dropped.
func dropLowest(of map[string]uint64, mayGo func(name string) bool) (highest uint64) {
	var names []string
	for name := range of {
		if mayGo(name) {
			names = append(names, name)
		}
	}
	if len(names) <= maxGoneNames {
		return 0
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(of[a], of[b]),
			cmp.Compare(a, b))
	})
	for _, name := range names[:len(names)-maxGoneNames] {
		highest = max(highest, of[name])
		delete(of, name)
	}
	return highest
}

// LastEpoch returns a number at least as high as every epoch that the unit had. The next grant adds 1 to it.
func (s *State) LastEpoch(unit string) uint64 {
	if e, ok := s.Epochs[unit]; ok {
		return e
	}
	return s.EpochFloor
}

// lastRevision returns a number at least as high as every revision that the application had.
func (s *State) lastRevision(app string) uint64 {
	if r, ok := s.Revisions[app]; ok {
		return r
	}
	return s.RevisionFloor
}

func (s *State) unknownAppError(verb, name string) error {
	return problem.New(problem.NotFound, "%s: %w %q", verb, ErrUnknownApp, name).
		WithHint("list the applications with dpserve status").WithDetails(slices.Sorted(maps.Keys(s.Apps))...)
}
