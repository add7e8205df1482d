package app

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// Diff is one value that differs. Values are JSON; empty means absent. Values of engine.env are hidden,
// because they may contain tokens.
type Diff struct {
	Path string
	Old  string
	New  string
}

// ComparePools lists what differs between two forms of an application's pools, sorted by path. A difference
// that both pools have is the application's, the paths of other ones begin with the pool. The pools of both
// forms are the same.
func ComparePools(from, to []*Application) []Diff {
	diffs := make([][]Diff, len(to))
	for i := range to {
		diffs[i] = Compare(from[i], to[i])
	}
	out := Join(to, diffs, func(pool string, d Diff) Diff {
		d.Path = pool + "." + d.Path
		return d
	})
	slices.SortFunc(out, func(a, b Diff) int { return strings.Compare(a.Path, b.Path) })
	return out
}

// Join lists once what was found of every pool of an application. What was not found of all of them gets the
// name of its pool.
func Join[T comparable](pools []*Application, found [][]T, named func(pool string, t T) T) []T {
	var out []T
	for i, of := range found {
		for _, t := range of {
			if slices.ContainsFunc(found, func(other []T) bool { return !slices.Contains(other, t) }) {
				t = named(pools[i].Pool, t)
			}
			if !slices.Contains(out, t) {
				out = append(out, t)
			}
		}
	}
	return out
}

// Compare lists the values that differ between two forms of a pool, sorted by path. It compares the stored
// JSON, so that it covers every stored field. The order of arguments and ranks counts if nothing else
// differs.
func Compare(from, to *Application) []Diff {
	before, after := leaves(from), leaves(to)
	paths := maps.Clone(before)
	maps.Copy(paths, after)
	var out []Diff
	for _, p := range slices.Sorted(maps.Keys(paths)) {
		if before[p] != after[p] {
			out = append(out, hide(Diff{Path: p, Old: before[p], New: after[p]}))
		}
	}
	if len(out) > 0 {
		return out
	}
	wasArgs, wasRanks := order(&from.Engine)
	args, ranks := order(&to.Engine)
	if wasArgs != args {
		out = append(out, Diff{Path: pathArgs, Old: wasArgs, New: args})
	}
	if wasRanks != ranks {
		out = append(out, Diff{Path: pathRanks, Old: wasRanks, New: ranks})
	}
	return out
}

// Lists whose items have names instead of indexes in differences.
const (
	pathArgs  = "engine.args"
	pathRanks = "engine.ranks"
)

// order returns the order of the arguments, and that of the attached ranks, which written numbers hide.
func order(e *Engine) (args, ranks string) {
	args, ranks = "order", "order"
	for _, arg := range e.Args {
		args += " " + arg.Name
	}
	for i := range e.Ranks {
		ranks += " " + e.Ranks[i].Address()
	}
	return args, ranks
}

// hide removes the values of environment variables from d.
func hide(d Diff) Diff {
	const hidden = "(hidden)"
	if !strings.HasPrefix(d.Path, "engine.env") {
		return d
	}
	if d.Old != "" {
		d.Old = hidden
	}
	if d.New != "" {
		d.New = hidden
	}
	return d
}

// leaves returns the JSON of every scalar of a by its path. It names arguments by their flag and attached
// ranks by their engine instead of their index, so that adding or removing one does not change the others.
func leaves(a *Application) map[string]string {
	out, rest := map[string]string{}, *a
	rest.Engine.Args, rest.Engine.Ranks = nil, nil
	text, err := json.Marshal(&rest)
	if err != nil { // only a non-finite number could fail, and Parse refuses those
		return out
	}
	if v, err := decodeExact(text); err == nil {
		walk(out, "", v)
	}
	for _, arg := range a.Engine.Args {
		out[join(pathArgs, arg.Name)] = string(appendJSON(nil, arg.Value))
	}
	numbers := a.Engine.numbers()
	for i, r := range a.Engine.Ranks {
		r.Number = &numbers[i]
		if text, err := json.Marshal(r); err == nil { // it has only text and numbers
			out[pathRanks+"["+r.Address()+"]"] = string(text)
		}
	}
	return out
}

func walk(out map[string]string, path string, v any) {
	switch t := v.(type) {
	case map[string]any:
		for k, item := range t {
			walk(out, join(path, k), item)
		}
		if len(t) == 0 {
			out[path] = "{}"
		}
	case []any:
		for i, item := range t {
			walk(out, index(path, i), item)
		}
		if len(t) == 0 {
			out[path] = "[]"
		}
	default:
		out[path] = string(appendJSON(nil, v))
	}
}
