package routing

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// params reads a policy's parameters and gathers all their faults, so that a user sees them at once.
type params struct {
	given  map[string]any
	faults []string
	hints  []string
}

func newParams(given map[string]any) *params { return &params{given: given} }

// preset checks the preset's name.
func (p *params) preset(name string) {
	all := []string{PresetDocumented, PresetTuned}
	if name == "" || slices.Contains(all, name) {
		return
	}
	p.fault(fmt.Sprintf("preset: unknown preset %q", name), didYouMean(name, all, "presets"))
}

// refuseUnknown faults every parameter that is not in known.
func (p *params) refuseUnknown(known []string) {
	for _, name := range slices.Sorted(maps.Keys(p.given)) {
		if !slices.Contains(known, name) {
			p.fault("params."+name+": unknown parameter", didYouMean(name, known, "parameters"))
		}
	}
}

// boolean reads a bool parameter.
func (p *params) boolean(name string, def bool) bool {
	x, ok := p.given[name]
	if !ok {
		return def
	}
	b, ok := x.(bool)
	if !ok {
		p.fault(fmt.Sprintf("params.%s: found %v (%T), wanted true or false", name, x, x), "write "+name+": true or "+name+": false")
	}
	return b
}

// oneOf checks a word parameter; it may be left out.
func (p *params) oneOf(name string, words ...string) {
	x, ok := p.given[name]
	if !ok {
		return
	}
	if s, isWord := x.(string); !isWord || !slices.Contains(words, s) {
		p.fault(fmt.Sprintf("params.%s: found %v, wanted %s", name, x, strings.Join(words, " or ")), "drop "+name+" or write one of: "+strings.Join(words, ", "))
	}
}

func (p *params) fault(what, hint string) {
	p.faults = append(p.faults, what)
	p.hints = append(p.hints, hint)
}

// err is nil, or one problem that holds every fault.
func (p *params) err(policy string) error {
	if len(p.faults) == 0 {
		return nil
	}
	return problem.New(problem.InvalidArgument, "routing policy %s: %s", policy, strings.Join(p.faults, "; ")).
		WithHint("%s", strings.Join(p.hints, "; ")).WithDetails(p.faults...)
}
