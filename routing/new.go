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

// The names of the policies in app.yaml; no aliases.
const (
	nameRoundRobin      = "round-robin"
	nameRandom          = "random"
	nameDirect          = "direct"
	namePowerOfTwo      = "power-of-two"
	nameLeastLoaded     = "least-loaded"
	nameLeastKV         = "least-kv"
	nameScoring         = "scoring"
	nameCacheAware      = "cache-aware"
	namePrefixAware     = "prefix-aware"
	nameKV              = "kv"
	nameLMetric1        = "lmetric-1"
	nameLPWL            = "lpwl"
	nameSessionAffinity = "session-affinity"
	nameMex             = "mex"
	nameCohorts         = "cohorts"
)

// The presets: a policy's documented defaults, and one fair-comparison setting. They are the same for every
// policy here.
const (
	PresetDocumented = "documented"
	PresetTuned      = "tuned"
)

// entry is one row of the table of policies.
type entry struct {
	name string
	make func(p *params) Policy
	fit  GroupFit
}

// GroupFit says how a policy suits lockstep groups, each of whose steps lasts as long as that of the slowest
// rank.
type GroupFit int

// The fits.
const (
	SlowForGroups  GroupFit = iota // it sends each prompt by itself, which makes the step of every rank long
	WrongForGroups                 // what it predicts of a rank is not so in a group
	FitForAll                      // it does not choose between ranks
	ForGroupsOnly                  // it lets prompts share steps, and does nothing for independent ranks
)

// policies lists every policy; there is no other registration.
func policies() []entry {
	return []entry{
		{namePowerOfTwo, newPowerOfTwo, SlowForGroups},
		{nameLeastLoaded, func(*params) Policy { return LeastLoaded{} }, SlowForGroups},
		{nameRoundRobin, func(p *params) Policy {
			p.refuseProfile()
			return RoundRobin{}
		}, SlowForGroups},
		{nameRandom, func(*params) Policy { return Random{} }, SlowForGroups},
		{nameDirect, func(*params) Policy { return Direct{} }, FitForAll},
		{nameScoring, newScoring, SlowForGroups},
		{nameCacheAware, newCacheAware, SlowForGroups},
		{namePrefixAware, newPrefixAware, SlowForGroups},
		{nameKV, newKV, SlowForGroups},
		{nameLeastKV, func(*params) Policy { return LeastKV{} }, SlowForGroups},
		{nameLMetric1, func(*params) Policy { return LMetric{} }, SlowForGroups},
		{nameLPWL, func(*params) Policy { return LPWL{} }, SlowForGroups},
		{nameSessionAffinity, newSessionAffinity, SlowForGroups},
		{nameMex, newMex, WrongForGroups},
		{nameCohorts, newCohorts, ForGroupsOnly},
	}
}

// Names lists the policies that exist.
func Names() []string {
	rows := policies()
	names := make([]string, len(rows))
	for i := range rows {
		names[i] = rows[i].name
	}
	return names
}

// DefaultName is the policy of an application whose file names none. Independent ranks get mex, which charges
// a request for the delay that it causes to all requests on its rank. Lockstep ranks get cohorts: each of
// their steps lasts as long as that of the slowest rank, so prompts are released together.
func DefaultName(isLockstep bool) string {
	if isLockstep {
		return nameCohorts
	}
	return nameMex
}

// BalancingNames lists the policies that compare how many tokens the ranks have in flight, the default first.
// They keep away from a rank with one long request, which those that count requests take for an idle one.
func BalancingNames(isLockstep bool) []string {
	if isLockstep {
		return []string{nameCohorts}
	}
	return []string{nameMex, nameKV, nameLeastKV, nameScoring}
}

// GroupFitOf is how the policy called name suits lockstep groups; one that does not exist is slow for them.
func GroupFitOf(name string) GroupFit {
	row, err := find(name)
	if err != nil {
		return SlowForGroups
	}
	return row.fit
}

// New makes the policy called name with the parameters of app.yaml; an empty preset is documented. Errors are
// *problem.Error (invalid_argument) with every fault in Details and what to write instead in the hint.
func New(name, preset string, params map[string]any) (Policy, error) {
	row, err := find(name)
	if err != nil {
		return nil, err
	}
	p := newParams(params, preset)
	policy := row.make(p)
	if err := p.err(name, preset); err != nil {
		return nil, err
	}
	return policy, nil
}

func find(name string) (*entry, error) {
	rows := policies()
	if i := slices.IndexFunc(rows, func(e entry) bool { return e.name == name }); i >= 0 {
		return &rows[i], nil
	}
	return nil, problem.New(problem.InvalidArgument, "unknown routing policy %q", name).
		WithHint("%s", didYouMean(name, Names(), "policies"))
}

// didYouMean is the hint for an unknown word: the nearest one that exists, and all of them.
func didYouMean(found string, exist []string, what string) string {
	if len(exist) == 0 {
		return "there are no " + what + " here; drop it"
	}
	all := fmt.Sprintf("%s: %s", what, strings.Join(exist, ", "))
	if best := nearest.Word(found, exist); best != "" {
		return fmt.Sprintf("did you mean %q? %s", best, all)
	}
	return all
}

// params reads a policy's parameters and collects all their faults, so that a user sees them at once.
type params struct {
	given  map[string]any
	known  []string // that the policy has asked for
	tuned  bool     // preset tuned: what is not given gets the tuned value
	faults []string
	hints  []string
}

func newParams(given map[string]any, preset string) *params {
	return &params{given: given, tuned: preset == PresetTuned}
}

// value is what is given for a parameter of the policy.
func (p *params) value(name string) (x any, ok bool) {
	p.known = append(p.known, name)
	x, ok = p.given[name]
	return x, ok
}

// preset checks the preset's name.
func (p *params) preset(name string) {
	all := []string{PresetDocumented, PresetTuned}
	if name == "" || slices.Contains(all, name) {
		return
	}
	p.fault(fmt.Sprintf("preset: unknown preset %q", name), didYouMean(name, all, "presets"))
}

// refuseUnknown faults every parameter that the policy has not asked for.
func (p *params) refuseUnknown() {
	for _, name := range slices.Sorted(maps.Keys(p.given)) {
		if !slices.Contains(p.known, name) {
			p.fault("params."+name+": unknown parameter", didYouMean(name, p.known, "parameters"))
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
	x, ok := p.value(name)
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
	x, ok := p.value(name)
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

// boolean reads a bool parameter, false if it is not given.
func (p *params) boolean(name string) bool {
	x, ok := p.value(name)
	if !ok {
		return false
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
	x, ok := p.value(name)
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

// err is nil, or one problem that holds every fault, those of the names first.
func (p *params) err(policy, preset string) error {
	names := params{given: p.given, known: p.known}
	names.preset(preset)
	names.refuseUnknown()
	faults, hints := append(names.faults, p.faults...), append(names.hints, p.hints...)
	if len(faults) == 0 {
		return nil
	}
	return problem.New(problem.InvalidArgument, "routing policy %s: %s", policy, strings.Join(faults, "; ")).
		WithHint("%s", strings.Join(hints, "; ")).WithDetails(faults...)
}

// profile reads the scoring profile.
func (p *params) profile() string {
	x, given := p.value("profile")
	if !given {
		return profileBalanced
	}
	name, _ := x.(string)
	if slices.Contains(profiles(), name) {
		return name
	}
	p.fault(fmt.Sprintf("params.profile: found %v, wanted %s", x, strings.Join(profiles(), " or ")),
		didYouMean(name, profiles(), "profiles"))
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

// seconds reads a span of time in seconds.
func (p *params) seconds(name string, def float64) time.Duration {
	const least = 0.001
	return time.Duration(p.number(name, def, least, maxSeconds) * float64(time.Second))
}
