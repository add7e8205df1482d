package routing

import (
	"fmt"
	"slices"
	"strings"

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
	nameLMetric         = "lmetric"
	nameLMetric1        = "lmetric-1"
	nameLPWL            = "lpwl"
	nameMinTTFT         = "min-ttft"
	nameSticky          = "sticky"
	nameCHWBL           = "chwbl"
	nameSessionAffinity = "session-affinity"
	nameMex             = "mex"
)

// The presets: a policy's documented defaults, and one fair-comparison setting. They are the same for every
// policy here.
const (
	PresetDocumented = "documented"
	PresetTuned      = "tuned"
)

// entry is one row of the table of policies.
type entry struct {
	name   string
	params []string // the parameters it takes
	make   func(p *params) Policy
}

// policies lists every policy; there is no other registration.
func policies() []entry {
	return []entry{
		{nameRoundRobin, []string{"profile"}, func(p *params) Policy {
			p.refuseProfile()
			return RoundRobin{}
		}},
		{nameRandom, nil, func(*params) Policy { return Random{} }},
		{nameDirect, nil, func(*params) Policy { return Direct{} }},
		{namePowerOfTwo, []string{"prefer_local"}, newPowerOfTwo},
		{nameLeastLoaded, []string{"variant", "clients"}, newLeastLoaded},
		{nameLeastKV, nil, func(*params) Policy { return LeastKV{} }},
		{nameScoring, []string{"profile", "norm"}, newScoring},
		{nameCacheAware, []string{
			"variant", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold",
			"eviction_interval_s", "max_tree_size", "low_match",
			"matches", "kv_usage_spread", "kv_usage_ceiling", "max_worker_retries", "max_total_retries",
		}, newCacheAware},
		{namePrefixAware, []string{
			"imbalanced_threshold", "match_rate_threshold", "do_eviction", "eviction_threshold_chars",
			"eviction_target_chars", "eviction_interval_s",
		}, newPrefixAware},
		{nameKV, []string{
			"variant", "overlap_score_weight", "router_temperature", "no_track_active_blocks", "no_kv_events",
			"prefill_weight", "overlap_credit",
			"overlap_decay", "request_weight",
		}, newKV},
		{nameLMetric, nil, func(*params) Policy { return LMetric{} }},
		{nameLMetric1, nil, func(*params) Policy { return LMetric{PlusOne: true} }},
		{nameLPWL, nil, func(*params) Policy { return LPWL{} }},
		{nameMinTTFT, []string{"eta"}, newMinTTFT},
		{nameSticky, []string{"threshold", "spill_tokens", "by"}, newSticky},
		{nameCHWBL, []string{"variant", "key", "load_factor", "virtual_nodes"}, newCHWBL},
		{
			nameSessionAffinity,
			[]string{"num_virtual_nodes", "num_fallback_replicas", "table", "ttl_s"},
			newSessionAffinity,
		},
		{nameMex, []string{"goal", "ttft_s", "tpot_s", "law"}, newMex},
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

// New makes the policy called name with the parameters of app.yaml; an empty preset is documented. Errors are
// *problem.Error (invalid_argument) with every fault in Details and what to write instead in the hint.
func New(name, preset string, params map[string]any) (Policy, error) {
	row, err := find(name)
	if err != nil {
		return nil, err
	}
	p := newParams(params)
	p.preset(preset)
	p.tuned = preset == PresetTuned
	p.refuseUnknown(row.params)
	policy := row.make(p)
	if err := p.err(name); err != nil {
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
