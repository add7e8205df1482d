package routing

import (
	"testing"

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
	assert.Contains(t, Names(), DefaultPolicy)
}

func TestNewReadsParameters(t *testing.T) {
	p, err := New("power-of-two", "", map[string]any{"prefer_local": true})
	require.NoError(t, err)
	assert.Equal(t, PowerOfTwo{PreferLocal: true}, p)
	_, err = New("least-loaded", "", map[string]any{"variant": "count"})
	require.NoError(t, err)
}

func TestNewRefuses(t *testing.T) {
	all := "policies: round-robin, random, direct, power-of-two, least-loaded"
	tests := []struct {
		name, preset string
		params       map[string]any
		message      string
		hint         string
	}{
		{"power_of_two", "", nil, `unknown routing policy "power_of_two"`, `did you mean "power-of-two"? ` + all},
		{"least-load", "", nil, `unknown routing policy "least-load"`, `did you mean "least-loaded"? ` + all},
		{"scoring", "", nil, `unknown routing policy "scoring"`, all},
		{"random", "tunde", nil, `routing policy random: preset: unknown preset "tunde"`, `did you mean "tuned"? presets: documented, tuned`},
		{"random", "", map[string]any{"x": 1}, `routing policy random: params.x: unknown parameter`, `there are no parameters here; drop it`},
		{
			"power-of-two", "best",
			map[string]any{"prefer_local": "yes", "local": true},
			`routing policy power-of-two: preset: unknown preset "best"; params.local: unknown parameter; params.prefer_local: found yes (string), wanted true or false`,
			`presets: documented, tuned; parameters: prefer_local; write prefer_local: true or prefer_local: false`,
		},
		{
			"least-loaded", "",
			map[string]any{"variant": "kv"},
			`routing policy least-loaded: params.variant: found kv, wanted count`,
			`drop variant or write one of: count`,
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
			assert.Equal(t, tt.hint, got.Hint)
		})
	}
}
