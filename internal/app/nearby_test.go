package app

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// shortText has every short form.
const shortText = `applications:
- {name: a, model: m, engine: {kind: attach, ranks: ["http://h:1", {url: "http://h:2"}]}, routing: kv}
`

// CC8: where a map has one obvious key, its value alone is read as the map.
func TestShortForms(t *testing.T) {
	short, warnings, err := Parse(Default(), "app.yaml", []byte(shortText))
	require.NoError(t, err)
	assert.Empty(t, warnings)
	long, _, err := Parse(Default(), "app.yaml", []byte(strings.NewReplacer("model: m", "model: {id: m}",
		`"http://h:1"`, `{url: "http://h:1"}`, "routing: kv", "routing: {policy: kv}").Replace(shortText)))
	require.NoError(t, err)
	assert.Equal(t, long, short)

	for text, want := range map[string]string{
		"resources: [m]": "found a list, wanted a map; hint: the keys of resources are gpus, ",
		"routing: mexx":  `applications[0].routing.policy: found "mexx"`,
		"routing: kb":    `did you mean "kv"?`,
	} {
		text = "applications: [{name: a, engine: {kind: sim}, model: m, " + text + "}]"
		assert.Contains(t, faultsOf(t, text)[0], want, text)
	}
}

// CC8: a value that is no map or no list, and a key at a wrong place, say what to write instead.
func TestFaultsSayWhatToWrite(t *testing.T) {
	for more, want := range map[string]string{
		"data_parallel: 4":           "write data_parallel: {dp_size: 4}",
		"resources: 2":               "write resources: {gpus: 2}",
		"timeouts: 60":               "the keys of timeouts are queue_s, first_token_s, ",
		"routing: {params: 3}":       "write params: {KEY: VALUE}",
		"dp_size: 4":                 "dp_size belongs under data_parallel",
		"dp: 4":                      "dp_size belongs under data_parallel",
		"replicas: 4":                "write num_replicas",
		"policy: kv":                 "policy belongs under routing",
		"gpus: 1":                    "gpus belongs under resources",
		"max-model-len: 4096":        "max_model_len belongs under engine.args",
		"timeouts: {queue: 60}":      `did you mean "queue_s"?`,
		"routing: {max_ongoing: 3}":  "the keys here are policy, ",
		"rollout: {num_replicas: 2}": "num_replicas belongs beside name and model, not under rollout",
		"retries: {replicas: 2}":     "num_replicas belongs beside name and model, not under retries",
		"prefill: 2":                 "write prefill: {num_replicas: 2}",
		"nonsense_of_mine: 2":        "the keys here are name, ",
	} {
		assert.Contains(t, strings.Join(faultsOf(t, one(more)), "\n"), "hint: "+want, more)
	}
	for text, want := range map[string]string{
		"name: a\nmodel: m\n":                   "it belongs to an application: applications: [{name: ...}]",
		"applications: {name: a}":               "wanted a list; hint: write - before each item",
		"applications: [{engine: sim}]":         `write engine: {kind: "sim"}`,
		"applications: [{model: {aliases: b}}]": `write aliases: ["b"]`,
		`applications: [{model: "a b"}]`:        "applications[0].model.id: found",
		"applications: [{engine: {args: [a]}}]": "write each flag as a key: args: {max_model_len: 4096}",
	} {
		assert.Contains(t, strings.Join(faultsOf(t, text), "\n"), want, text)
	}
}

// CC8: a mistyped engine flag is a warning. Others that dpserve does not know are passed on, because the
// engine may be newer.
func TestUnknownEngineFlags(t *testing.T) {
	for engine, want := range map[string]string{
		"vllm, args: {gpu_memory_utilisation: 0.9}":                  "did you mean gpu_memory_utilization?",
		"sglang, args: {mem-fraction-statik: 0.9}":                   "did you mean mem_fraction_static?",
		"vllm, args: {quite_another_thing: 1}":                       "",
		"vllm, args: {no_enable_prefix_caching: true}":               "",
		"vllm, args: {compilation_config.mode: 3}":                   "",
		"vllm, command: [mine], args: {gpu_memory_utilisation: 0.9}": "",
	} {
		text := "applications: [{name: a, model: m, engine: {kind: " + engine + "}}]"
		_, warnings, err := Parse(Default(), "app.yaml", []byte(text))
		require.NoError(t, err, text)
		if want == "" {
			assert.Empty(t, warnings, text)
			continue
		}
		require.Len(t, warnings, 1, text)
		assert.Equal(t, want, warnings[0].Hint)
	}
}
