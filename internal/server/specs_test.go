package server

import (
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// The schema accepts every policy of the router, or says that this version does not support it yet.
func TestSchemaKnowsEveryPolicy(t *testing.T) {
	for _, name := range routing.Names() {
		_, _, err := app.Parse(app.Default(), "app.yaml",
			[]byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, "+
				"routing: {policy: "+name+"}}]"))
		if err != nil {
			assert.ErrorContains(t, err, "not supported in this version", name)
		}
	}
}

func TestPolicyChecksItsParameters(t *testing.T) {
	_, _, err := app.Parse(app.Default(), "app.yaml", []byte(`applications:
  - name: a
    model: {id: a}
    engine: {kind: sim}
    routing:
      policy: power-of-two
      params: {prefer_lokal: true}
`))
	require.Error(t, err)
	assert.Contains(t, err.Error(), "app.yaml:7:15: applications[0].routing.params: ")
	assert.Contains(t, err.Error(), "params.prefer_lokal: unknown parameter")
	assert.Contains(t, err.Error(), `did you mean "prefer_local"`)
}

// The rule about pairs checks when it uses a prefill rank.
func TestValidateReportsFaultsOfDecide(t *testing.T) {
	for decide, want := range map[string]string{
		"isl": "", "prefill-load": "", "uncached>=2048": "", "mex": "",
		"islx": `app.yaml:7:30: applications[0].disaggregation.decide: unknown decider "islx"; hint: ` +
			`did you mean "isl"?`,
		"uncached>=0": "want a number of tokens from 1",
	} {
		_, _, err := app.Parse(app.Default(), "app.yaml", []byte(`applications:
  - name: pd
    model: {id: m}
    engine: {kind: sim}
    prefill: {data_parallel: {dp_size: 2}}
    decode: {data_parallel: {dp_size: 4}}
    disaggregation: {decide: "`+decide+`"}
`))
		if want == "" {
			require.NoError(t, err, decide)
			continue
		}
		require.ErrorContains(t, err, want)
		var faults app.Faults
		require.ErrorAs(t, err, &faults)
		assert.Len(t, faults, 1, "both pools have the same fault")
	}
}

// A policy's complaint is a fault of the file, in the policy's own words.
func TestValidateReportsFaultsOfThePolicy(t *testing.T) {
	const at = "app.yaml:1:"
	for routing, want := range map[string][]string{
		"{policy: scoring, params: {profile: fastest}}": {"balanced", "locality", "load"},
		"{policy: round-robin, params: {profile: locality}}": {
			"profile 'locality' has no effect with round-robin; use policy: scoring or drop the profile",
		},
		"{policy: scorin}": {
			`routing.policy: found "scorin", wanted power-of-two | `, "scoring", `did you mean "scoring"?`,
		},
		"{policy: sticky}": {`routing.policy: found "sticky"`, "dpserve has no sticky; write policy: mex"},
		"{policy: min-ttft}": {
			`routing.policy: found "min-ttft"`, "write policy: mex with params: {goal: latency}",
		},
		"{policy: scoring, params: {profil: locality}}": {
			"params.profil: unknown parameter", `did you mean "profile"?`,
		},
		"{policy: random, params: {profile: locality}}": {"params.profile: unknown parameter"},
		"{policy: kv, params: {router_temperature: hot, no_kv_event: 1}}": {
			"params.router_temperature: found hot", "params.no_kv_event: unknown parameter",
			`did you mean "no_kv_events"?`,
		},
		"{policy: scoring, preset: tund}": {
			`routing.preset: found "tund", wanted documented | tuned`, `did you mean "tuned"?`,
		},
		"{policy: group-balance}": {
			`policy "group-balance" is not supported in this version`,
		},
		"{identity: learned}": {
			`identity "learned" is not supported in this version`,
		},
		"{identity: txt}": {
			`routing.identity: found "txt", wanted text | tokens`,
		},
		"{busy_threshold: 95}": {
			"routing.busy_threshold: found 95, wanted a share from 0 to 1",
		},
	} {
		_, _, err := app.Parse(app.Default(), "app.yaml",
			[]byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, routing: "+routing+"}]"))
		require.Error(t, err, routing)
		var faults app.Faults
		require.ErrorAs(t, err, &faults, routing)
		assert.Len(t, faults, 1, routing)
		for _, text := range append(want, at, "applications[0].routing") {
			assert.Contains(t, err.Error(), text, routing)
		}
	}
	for _, routing := range []string{
		"{policy: mex}", "{policy: mex, params: {goal: latency, ttft_s: 0.5, tpot_s: 0.02, cost_model: moe}}",
		"{policy: mex, params: {ttft_s: 10, tpot_s: 1}}",
		"{policy: round-robin, params: {profile: balanced}}",
		"{policy: scoring, params: {profile: locality}}", "{policy: kv, preset: tuned}",
		"{busy_threshold: 0.95, identity: tokens}",
	} {
		_, _, err := app.Parse(app.Default(), "app.yaml",
			[]byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, routing: "+routing+"}]"))
		require.NoError(t, err, routing)
	}
}

// Impossible times and unknown words are faults.
func TestInvalidParametersOfMexAreFaults(t *testing.T) {
	file := func(params string) []byte {
		return []byte(`applications:
  - name: a
    model: {id: a}
    engine: {kind: sim}
    routing:
      policy: mex
      params: {` + params + `}
`)
	}
	for params, want := range map[string][]string{
		"ttft_s: 0":      {"params.ttft_s: found 0", "wanted a number from"},
		"ttft_s: -2":     {"params.ttft_s: found -2"},
		"ttft_s: soon":   {"params.ttft_s: found soon (string)"},
		`ttft_s: "2"`:    {"params.ttft_s: found 2 (string)"},
		"ttft_s: [2]":    {"params.ttft_s: found [2]"},
		"ttft_s: 1e300":  {"params.ttft_s: found 1e+300"},
		"ttft_s: 1e-300": {"params.ttft_s: found 1e-300"},
		"tpot_s: 0":      {"params.tpot_s: found 0"},
		"tpot_s: -0.05":  {"params.tpot_s: found -0.05"},
		"tpot_s: 3600":   {"params.tpot_s: found 3600"},
		"tpot_s: true":   {"params.tpot_s: found true (bool)"},
		"goal: goodputs": {
			"params.goal: found goodputs, wanted goodput or latency", `did you mean "goodput"?`,
		},
		"goal: 1":            {"params.goal: found 1"},
		"cost_model: sparse": {"params.cost_model: found sparse, wanted dense or moe"},
		"ttft_ms: 2000":      {"params.ttft_ms: unknown parameter", `did you mean "ttft_s"?`},
		"mode: goodput": {
			"params.mode: unknown parameter", "parameters: goal, ttft_s, tpot_s, cost_model",
		},
		"ttft_s: 0, tpot_s: x, goal: y": {
			"params.ttft_s: found 0", "params.tpot_s: found x", "params.goal: found y",
		},
	} {
		_, _, err := app.Parse(app.Default(), "app.yaml", file(params))
		if want == nil {
			require.NoError(t, err, params)
			continue
		}
		require.Error(t, err, params)
		for _, text := range append(want, "app.yaml:7:15: applications[0].routing.params: ") {
			assert.Contains(t, err.Error(), text, params)
		}
	}
	for _, value := range []string{".nan", ".inf", "-.inf"} {
		_, _, err := app.Parse(app.Default(), "app.yaml", file("ttft_s: "+value))
		require.ErrorContains(t, err,
			"app.yaml:7:24: applications[0].routing.params.ttft_s: found "+value+", wanted a finite number")
	}
}

// The admin API takes JSON as it takes YAML: the same application, and the same faults at their positions.
func TestDeployTakesJSON(t *testing.T) {
	t.Parallel()
	b := newBackend(t, edgeFile)
	text, err := yaml.YAMLToJSON([]byte(edgeFile))
	require.NoError(t, err)
	res, err := b.Deploy(t.Context(), client.DeployRequest{File: "app.json", Text: text})
	require.NoError(t, err)
	assert.Equal(t, []client.Change{{
		App:    "edge",
		Impact: client.Impact{Effect: client.EffectUnchanged, RanksBefore: 1, RanksAfter: 1},
	}}, res.Changes)

	_, err = b.Deploy(t.Context(), client.DeployRequest{File: "app.json", Text: []byte(`{"applications": [
  {"name": "a", "model": {"id": "a"}, "engine": {"kind": "vlm"},
   "num_replica": 4}]}`)})
	require.ErrorContains(t, err, `app.json:2:58: applications[0].engine.kind: found "vlm", wanted sim | `)
	require.ErrorContains(t, err, `app.json:3:4: applications[0].num_replica: unknown key "num_replica"; `+
		`hint: did you mean "num_replicas"?`)
}
