package state

import (
	"slices"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// poolLevel is the Level that knows pools: two applications of the state that users know by one name.
const poolLevel = 2

// namesOf lists the names under which the state may have what users call by one name: the application itself,
// or its pools.
func namesOf(name string) []string {
	base, _ := app.SplitPool(name)
	return []string{base, app.PoolName(base, app.PoolPrefill), app.PoolName(base, app.PoolDecode)}
}

// FindApps returns what users call by a name: an application, or the two pools of one, the prefill pool
// first. While an application turns from one pool into two, it is all of them. The name of a pool is that
// pool alone.
func FindApps(s *State, name string) []*App {
	names := namesOf(name)
	if !slices.Contains(names[:1], name) {
		names = []string{name}
	}
	var out []*App
	for _, n := range names {
		if a := s.Apps[n]; a != nil {
			out = append(out, a)
		}
	}
	return out
}

// isPools reports whether a command is about pools.
func (c *PutApps) isPools() bool {
	return len(c.End) > 0 || slices.ContainsFunc(c.Apps, func(a AppSpec) bool {
		_, pool := app.SplitPool(a.Name)
		return pool != ""
	})
}

// endApps marks applications as deleting and reports whether that changed one.
func endApps(s *State, next map[string]*App, c *PutApps) (changed bool, err error) {
	for _, name := range c.End {
		if slices.ContainsFunc(c.Apps, func(a AppSpec) bool { return a.Name == name }) {
			return false, problem.New(problem.InvalidArgument,
				"put apps: %w: application %q is put and ended",
				ErrBadCommand, name)
		}
		if err := checkExpect(name, s.Apps[name], c.Expect); err != nil {
			return false, err
		}
		if a := next[name]; a != nil && !a.Deleting {
			next[name], changed = markDeleting(a), true
		}
	}
	return changed, nil
}

// alignPools gives both pools of an application one revision: a change of either is one of the application.
func alignPools(next map[string]*App, specs []AppSpec) {
	for i := range specs {
		name := specs[i].Name
		if _, pool := app.SplitPool(name); pool == "" {
			continue
		}
		pools := namesOf(name)[1:]
		newer, older := next[pools[0]], next[pools[1]]
		if newer == nil || older == nil || newer.Deleting || older.Deleting {
			continue
		}
		if newer.Revision < older.Revision {
			newer, older = older, newer
		}
		if newer.Revision > older.Revision {
			raised := *older
			raised.Revision, raised.ChangedAt = newer.Revision, newer.ChangedAt
			next[older.Name] = &raised
		}
	}
}
