package routing

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

func TestNewMakesEveryPolicyInBothPresets(t *testing.T) {
	for _, name := range Names() {
		for _, preset := range []string{"", PresetDocumented, PresetTuned} {
			p, err := New(name, preset, map[string]any{})
			require.NoError(t, err)
			assert.Equal(t, name, p.Name())
		}
	}
}

// RA7: policies take their parameters, presets and profiles from the file.
func TestNewReadsParameters(t *testing.T) {
	p, err := New("power-of-two", "", map[string]any{"prefer_local": true})
	require.NoError(t, err)
	assert.Equal(t, PowerOfTwo{PreferLocal: true}, p)
	for _, tt := range []struct {
		name, preset string
		params       map[string]any
		want         Policy
	}{
		{"round-robin", "", map[string]any{"profile": "balanced"}, RoundRobin{}},
		{"scoring", "", nil, Scoring{Profile: profileBalanced}},
		{
			"scoring", "",
			map[string]any{"profile": "load"},
			Scoring{Profile: profileLoad},
		},
		{"session-affinity", "", nil, SessionAffinity{TTL: 300 * time.Second}},
		{"kv", "", nil, KV{Weight: 1}},
		{
			"kv", "tuned",
			map[string]any{"no_kv_events": true},
			KV{Weight: 32, NoEvents: true},
		},
		{"prefix-aware", "", nil, PrefixAware{
			Imbalanced: math.Inf(1), MatchRate: 0.1, High: 400_000,
			Low: 360_000, Interval: 10 * time.Second,
		}},
		{
			"prefix-aware", "tuned", nil,
			PrefixAware{Imbalanced: 64, MatchRate: 0.1, Interval: 10 * time.Second},
		},
		{
			"prefix-aware", "tuned",
			map[string]any{"do_eviction": true},
			PrefixAware{Imbalanced: 64, MatchRate: 0.1, Evict: true, Interval: 10 * time.Second},
		},
		{"cache-aware", "", nil, CacheAware{
			Threshold: 0.5, Abs: 32, Rel: 1.0001, Interval: time.Minute, MaxTree: 16_777_216,
			RetriesPerRank: 3, RetriesPerRequest: 6,
		}},
		{"cache-aware", "tuned", nil, CacheAware{
			Threshold: 0.3, Abs: 32, Rel: 1.1, LeastPending: true, KVMatches: true, Interval: time.Minute,
			MaxTree: 16_777_216,
		}},
	} {
		got, err := New(tt.name, tt.preset, tt.params)
		require.NoError(t, err)
		assert.Equal(t, tt.want, got)
	}
}

func TestNeeds(t *testing.T) {
	assert.Equal(t, Needs{}, NeedsOf(PowerOfTwo{}))
	assert.Equal(t, Needs{Hits: true, Blocks: true}, NeedsOf(newPolicy(t, "kv")))
	assert.Equal(t, Needs{Blocks: true}, NeedsOf(KV{Weight: 0}), "weight 0: no index")
	assert.Equal(t, Needs{Hits: true, Blocks: true, Approximate: true},
		NeedsOf(KV{Weight: 1, NoEvents: true}))
	assert.Equal(t, Needs{Text: true, Hits: true}, NeedsOf(tuned(t, "cache-aware")))
	assert.Equal(t, Needs{
		Text: true, Hits: true, Approximate: true, AttemptsPerRank: 3,
		AttemptsPerRequest: 6,
	}, NeedsOf(newPolicy(t, "cache-aware")))
	assert.Equal(t, Needs{Text: true, Hits: true, Approximate: true},
		NeedsOf(newPolicy(t, "prefix-aware")))
	assert.Equal(t, Needs{Session: true}, NeedsOf(newPolicy(t, "session-affinity")))
}

func TestNewRefuses(t *testing.T) {
	all := "policies: " + strings.Join(Names(), ", ")
	tests := []struct {
		name, preset string
		params       map[string]any
		message      string
		hint         string
	}{
		{"power_of_two", "", nil, `unknown routing policy "power_of_two"`, `did you mean "power-of-two"? ` +
			all},
		{"least-load", "", nil, `unknown routing policy "least-load"`, `did you mean "least-loaded"? ` + all},
		{"mexican-hat", "", nil, `unknown routing policy "mexican-hat"`, all},
		{"cache_aware", "", nil, `unknown routing policy "cache_aware"`, `did you mean "cache-aware"? ` +
			all},
		{"lmetric+1", "", nil, `unknown routing policy "lmetric+1"`, `did you mean "lmetric-1"? ` + all},
		{
			"random", "tunde", nil, `routing policy random: preset: unknown preset "tunde"`,
			`did you mean "tuned"? presets: documented, tuned`,
		},
		{
			"random", "",
			map[string]any{"x": 1},
			`routing policy random: params.x: unknown parameter`,
			`there are no parameters here; drop it`,
		},
		{
			"power-of-two", "best",
			map[string]any{"prefer_local": "yes", "local": true},
			`routing policy power-of-two: preset: unknown preset "best"; params.local: unknown ` +
				`parameter; params.prefer_local: found yes (string), wanted true or false`,
			`presets: documented, tuned; parameters: prefer_local; write prefer_local: true or ` +
				`prefer_local: false`,
		},
		{
			"least-loaded", "",
			map[string]any{"variant": "kv"},
			`routing policy least-loaded: params.variant: unknown parameter`,
			`there are no parameters here; drop it`,
		},
		{
			"round-robin", "",
			map[string]any{"profile": "locality"},
			`routing policy round-robin: profile 'locality' has no effect with round-robin; use ` +
				`policy: scoring or drop the profile`,
			`write policy: scoring, or drop profile`,
		},
		{
			"scoring", "",
			map[string]any{"profile": "localty", "prefix_weight": 1},
			`routing policy scoring: params.prefix_weight: unknown parameter; params.profile: found ` +
				`localty, wanted balanced or locality or load`,
			`parameters: profile; did you mean "locality"? profiles: balanced, locality, load`,
		},
		{
			"kv", "",
			map[string]any{"overlap_score_weight": -1, "router_temperature": "hot", "overlap_weight": 2},
			`routing policy kv: params.overlap_weight: unknown parameter; params.overlap_score_weight: ` +
				`found -1 (int), wanted a number from 0 to 1e+09; params.router_temperature: found hot ` +
				`(string), wanted a number from 0 to 1e+09`,
			"",
		},
		{
			"kv", "",
			map[string]any{"router_temperature": math.NaN()},
			`routing policy kv: params.router_temperature: found NaN (float64), wanted a number from 0 ` +
				`to 1e+09`,
			`write router_temperature as a number from 0 to 1e+09`,
		},
		{
			"prefix-aware", "",
			map[string]any{"eviction_threshold_chars": 10, "eviction_target_chars": 20},
			`routing policy prefix-aware: params.eviction_target_chars: above eviction_threshold_chars`,
			`write a target at or below the threshold`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.message, func(t *testing.T) {
			p, err := New(tt.name, tt.preset, tt.params)
			assert.Nil(t, p)
			var got *problem.Error
			require.ErrorAs(t, err, &got)
			assert.Equal(t, problem.InvalidArgument, got.Code)
			assert.Equal(t, tt.message, got.Message)
			if tt.hint != "" {
				assert.Equal(t, tt.hint, got.Hint)
			}
		})
	}
}

// TestBalancingNames: of two ranks with two requests each, long ones and short ones, the policies of the list
// take the rank with the short ones. Every other policy for independent ranks takes the other one too.
func TestBalancingNames(t *testing.T) {
	assert.Equal(t, []string{DefaultName(true)}, BalancingNames(true))
	var balancing []string
	for _, name := range Names() {
		if GroupFitOf(name) == ForGroupsOnly {
			continue
		}
		takesLong := false
		for seed := range uint64(20) {
			r := NewRouter(newPolicy(t, name), seed)
			for i, tokens := range []int{100_000, 1000} {
				e := up(ID(0, i), 64)
				for k := range uint64(2) {
					open := Open{ReqID: 10*k + uint64(i), Tokens: tokens, Decoding: true}
					e.Snapshot = append(e.Snapshot, open)
				}
				r.Observe(e)
			}
			d, _ := r.Why(&Request{ID: 1 + seed, Tokens: 100})
			takesLong = takesLong || d.Kind != Route || d.Ranked[0] != ID(0, 1)
		}
		if !takesLong {
			balancing = append(balancing, name)
		}
	}
	assert.ElementsMatch(t, balancing, BalancingNames(false))
}
