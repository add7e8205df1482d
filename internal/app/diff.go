package app

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ChangeKind is what a deploy does to an application.
type ChangeKind string

// The kinds of change.
const (
	Create ChangeKind = "create"
	Update ChangeKind = "update"
	Delete ChangeKind = "delete"
)

// Change is one application that differs between two sets of applications.
type Change struct {
	App    string     `json:"app"`
	Kind   ChangeKind `json:"kind"`
	Fields []Diff     `json:"fields,omitempty"` // of an update, sorted by path
}

// Diff is one value that differs. Values are JSON; empty means absent. Values of engine.env are hidden,
// because they may contain tokens.
type Diff struct {
	Path string `json:"path"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
}

// String returns `path: old → new`.
func (d Diff) String() string {
	show := func(s string) string {
		if s == "" {
			return "(unset)"
		}
		return s
	}
	return fmt.Sprintf("%s: %s → %s", d.Path, show(d.Old), show(d.New))
}

// String returns one line: kind, application and the changed paths.
func (c Change) String() string {
	if len(c.Fields) == 0 {
		return string(c.Kind) + " " + c.App
	}
	paths := make([]string, len(c.Fields))
	for i, f := range c.Fields {
		paths[i] = f.Path
	}
	return fmt.Sprintf("%s %s (%s)", c.Kind, c.App, strings.Join(paths, ", "))
}

// Compare returns the changes from one set of applications to another: creates and updates in the order of
// to, then deletes in the order of from. Equal applications do not appear. Only a caller that replaces the
// whole set needs the deletes: deploy leaves unlisted applications unchanged.
func Compare(from, to []*Application) []Change {
	before := byName(from)
	var out []Change
	for _, a := range to {
		was, ok := before[a.Name]
		if !ok {
			out = append(out, Change{App: a.Name, Kind: Create})
			continue
		}
		if fields := diff(was, a); len(fields) > 0 {
			out = append(out, Change{App: a.Name, Kind: Update, Fields: fields})
		}
	}
	after := byName(to)
	for _, a := range from {
		if _, ok := after[a.Name]; !ok {
			out = append(out, Change{App: a.Name, Kind: Delete})
		}
	}
	return out
}

func byName(apps []*Application) map[string]*Application {
	out := make(map[string]*Application, len(apps))
	for _, a := range apps {
		out[a.Name] = a
	}
	return out
}

// diff compares the stored JSON, so that it covers every stored field.
func diff(from, to *Application) []Diff {
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
	for _, order := range []struct{ path, was, is string }{
		{pathArgs, argNames(from), argNames(to)}, {pathRanks, rankNames(from), rankNames(to)},
	} {
		if order.was != order.is {
			out = append(out, Diff{Path: order.path, Old: order.was, New: order.is})
		}
	}
	return out
}

// Lists whose items have names instead of indexes in differences.
const (
	pathArgs  = "engine.args"
	pathRanks = "engine.ranks"
)

// argNames returns the order of the arguments, which no other difference shows.
func argNames(a *Application) string {
	var out []string
	for _, arg := range a.Engine.Args {
		out = append(out, arg.Name)
	}
	return "order " + strings.Join(out, " ")
}

// rankNames returns the order of the attached ranks, which written numbers hide.
func rankNames(a *Application) string {
	var out []string
	for i := range a.Engine.Ranks {
		out = append(out, a.Engine.Ranks[i].Address())
	}
	return "order " + strings.Join(out, ", ")
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

// leaves returns the JSON of every scalar of a by its path.
func leaves(a *Application) map[string]string {
	out := map[string]string{}
	text, err := json.Marshal(a)
	if err != nil { // only a non-finite number could fail, and Parse refuses those
		return out
	}
	v, err := decodeExact(text)
	if err != nil {
		return out
	}
	walk(out, "", v)
	walkRanks(out, &a.Engine)
	return out
}

// walkRanks names attached ranks by their engine, so that adding or removing one does not change the others.
func walkRanks(out map[string]string, e *Engine) {
	numbers := e.numbers()
	for i := range e.Ranks {
		r := e.Ranks[i]
		r.Number = &numbers[i]
		text, err := json.Marshal(r)
		if err == nil { // it has only text and numbers
			out[pathRanks+"["+r.Address()+"]"] = string(text)
		}
	}
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
		switch path {
		case pathArgs:
			walkArgs(out, path, t)
			return
		case pathRanks: // walkRanks
			return
		}
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

// walkArgs names arguments by their flag instead of their index.
func walkArgs(out map[string]string, path string, args []any) {
	for _, a := range args {
		if m, ok := a.(map[string]any); ok {
			name, _ := m["name"].(string)
			out[join(path, name)] = string(appendJSON(nil, m["value"]))
		}
	}
}
