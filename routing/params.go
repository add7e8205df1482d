package routing

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// params reads a policy's parameters and collects all their faults, so that a user sees them at once.
type params struct {
	given  map[string]any
	tuned  bool // preset tuned: what is not given gets the tuned value
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

// choose is the preset's value of a parameter.
func (p *params) choose(documented, tuned float64) float64 {
	if p.tuned {
		return tuned
	}
	return documented
}

// number reads a number from lo to hi, both included; hi may be infinite.
func (p *params) number(name string, def, lo, hi float64) float64 {
	x, ok := p.given[name]
	if !ok {
		return def
	}
	n, ok := asNumber(x)
	if !ok || !(n >= lo && n <= hi) { // NaN too
		want := fmt.Sprintf("a number from %v to %v", lo, hi)
		if math.IsInf(hi, 1) {
			want = fmt.Sprintf("a number of at least %v", lo)
		}
		p.fault(fmt.Sprintf("params.%s: found %v (%T), wanted %s", name, x, x, want),
			"write "+name+" as "+want)
	}
	return n
}

// integer reads a whole number from lo to hi.
func (p *params) integer(name string, def, lo, hi int) int {
	x, ok := p.given[name]
	if !ok {
		return def
	}
	n, ok := asNumber(x)
	if !ok || n != math.Trunc(n) || n < float64(lo) || n > float64(hi) {
		want := fmt.Sprintf("a whole number from %d to %d", lo, hi)
		p.fault(fmt.Sprintf("params.%s: found %v (%T), wanted %s", name, x, x, want),
			"write "+name+" as "+want)
		return def
	}
	return int(n)
}

// asNumber converts the number types of YAML and JSON decoders.
func asNumber(x any) (float64, bool) {
	switch n := x.(type) {
	case int:
		return float64(n), true
	case int64:
		return float64(n), true
	case uint64:
		return float64(n), true
	case float64:
		return n, true
	}
	return 0, false
}

// boolean reads a bool parameter.
func (p *params) boolean(name string, def bool) bool {
	x, ok := p.given[name]
	if !ok {
		return def
	}
	b, ok := x.(bool)
	if !ok {
		p.fault(fmt.Sprintf("params.%s: found %v (%T), wanted true or false", name, x, x),
			"write "+name+": true or "+name+": false")
	}
	return b
}

// word reads one of words; def if it is left out.
func (p *params) word(name, def string, words ...string) string {
	x, ok := p.given[name]
	if !ok {
		return def
	}
	s, isWord := x.(string)
	if isWord && slices.Contains(words, s) {
		return s
	}
	hint := "drop " + name + " or write one of: " + strings.Join(words, ", ")
	if best := nearest.Word(s, words); isWord && best != "" {
		hint = fmt.Sprintf("did you mean %q? %s", best, hint)
	}
	p.fault(fmt.Sprintf("params.%s: found %v, wanted %s", name, x, strings.Join(words, " or ")), hint)
	return def
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
	return problem.New(problem.InvalidArgument, "routing policy %s: %s", policy,
		strings.Join(p.faults, "; ")).
		WithHint("%s", strings.Join(p.hints, "; ")).WithDetails(p.faults...)
}

// profile reads the scoring profile and refuses the removed name with the new one.
func (p *params) profile() string {
	x, given := p.given["profile"]
	if !given {
		return profileBalanced
	}
	name, _ := x.(string)
	switch {
	case slices.Contains(profiles(), name):
		return name
	case name == removedProfile:
		p.fault("profile 'prefix-aware' was removed; use 'locality'", "write profile: locality")
	default:
		p.fault(fmt.Sprintf("params.profile: found %v, wanted %s", x, strings.Join(profiles(), " or ")),
			didYouMean(name, profiles(), "profiles"))
	}
	return ""
}

// refuseProfile refuses a scoring profile under round-robin, which ignores it; the default profile passes.
func (p *params) refuseProfile() {
	if name := p.profile(); name != "" && name != profileBalanced {
		p.fault(fmt.Sprintf("profile '%s' has no effect with round-robin; use policy: scoring or drop the "+
			"profile", name),
			"write policy: scoring, or drop profile")
	}
}

func (p *params) cacheAwareDefaults(variant string) cacheAwareDefaults {
	page := cacheAwareDefaults{
		threshold: 0.5, abs: 32, rel: 1.0001, interval: 60, size: 16_777_216, sizeInNodes: true,
		lowMatch: "smallest-tree", matches: "text", perRank: 3, perRequest: 6,
	}
	switch {
	case variant == variantGateway:
		return cacheAwareDefaults{
			threshold: 0.3, abs: 64, rel: 1.5, interval: 120, size: 67_108_864, lowMatch: "least-pending",
			matches: "kv",
		}
	case p.tuned:
		page.threshold, page.rel, page.lowMatch, page.matches = 0.3, 1.1, "least-pending", "kv"
		page.perRank, page.perRequest = 0, 0
	}
	return page
}

// seconds reads a span of time in seconds.
func (p *params) seconds(name string, def float64) time.Duration {
	const least = 0.001
	return time.Duration(p.number(name, def, least, maxSeconds) * float64(time.Second))
}
