package routing

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// The names of the policies in app.yaml; no aliases.
const (
	nameRoundRobin  = "round-robin"
	nameRandom      = "random"
	nameDirect      = "direct"
	namePowerOfTwo  = "power-of-two"
	nameLeastLoaded = "least-loaded"
)

// The presets: a policy's documented defaults, and one fair-comparison setting. They are the same for every policy here.
const (
	PresetDocumented = "documented"
	PresetTuned      = "tuned"
)

// DefaultPolicy is what an app without routing.policy gets.
const DefaultPolicy = namePowerOfTwo

// entry is one row of the table of policies.
type entry struct {
	name   string
	params []string // the parameters it takes
	make   func(p *params) Policy
}

// table lists every policy; there is no other registration.
func table() []entry {
	return []entry{
		{nameRoundRobin, nil, func(*params) Policy { return RoundRobin{} }},
		{nameRandom, nil, func(*params) Policy { return Random{} }},
		{nameDirect, nil, func(*params) Policy { return Direct{} }},
		{namePowerOfTwo, []string{"prefer_local"}, newPowerOfTwo},
		{nameLeastLoaded, []string{"variant"}, newLeastLoaded},
	}
}

// Names lists the policies that exist.
func Names() []string {
	rows := table()
	names := make([]string, len(rows))
	for i := range rows {
		names[i] = rows[i].name
	}
	return names
}

// New makes the policy called name with the parameters of app.yaml; an empty preset is documented. Errors are
// *problem.Error (invalid_argument) with every fault in Details and what to write instead in the hint.
func New(name, preset string, params map[string]any) (Policy, error) {
	row, err := find(name)
	if err != nil {
		return nil, err
	}
	p := newParams(params)
	p.preset(preset)
	p.refuseUnknown(row.params)
	policy := row.make(p)
	if err := p.err(name); err != nil {
		return nil, err
	}
	return policy, nil
}

func find(name string) (*entry, error) {
	rows := table()
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
	if best := nearest(found, exist); best != "" {
		return fmt.Sprintf("did you mean %q? %s", best, all)
	}
	return all
}
