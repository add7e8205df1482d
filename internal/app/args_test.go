package app

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/simflags"
)

// TestSimArgs: what the simulated engine would refuse at its start is a fault of the file, all at once.
func TestSimArgs(t *testing.T) {
	t.Parallel()
	got := faultsOf(t, "applications:\n  - name: demo\n    model: {id: demo}\n    engine:\n      kind: sim\n"+
		"      args:\n        sim_sped: 3\n        max_num_seqs: lots\n")
	require.Len(t, got, 2)
	const args = "applications[0].engine.args."
	assert.Equal(t, "app.yaml:7:9: "+args+`sim_sped: the simulated engine has no argument "sim_sped"; `+
		`hint: did you mean "sim_speed"?`, strings.Replace(got[0], ":7:19:", ":7:9:", 1))
	assert.Contains(t, got[1],
		"app.yaml:8:23: "+args+`max_num_seqs: found "lots", wanted an integer from 1 to 1048576`)
	for text, want := range map[string]string{
		"max_num_seqs: 0":                "found 0, wanted an integer from 1 to 1048576",
		"max_num_seqs: true":             "found true, wanted an integer",
		"max_num_seqs: [1, 2]":           "found [1,2], wanted an integer",
		"max-model-len: 1.5":             "found 1.5, wanted an integer",
		"sim_speed: 0":                   "found 0, wanted a number above 0",
		"sim_step_ms: -1":                "found -1, wanted a number from 0",
		"enable_prefix_caching: 'false'": `found "false", wanted true or false`,
		"no_enable_prefix_caching: true": "hint: write enable_prefix_caching: false",
		"sim_death: glo":                 `wanted gloo | nccl; hint: did you mean "gloo"?`,
		"sim_fail: crsh=1@2":             `did you mean "crash"?`,
		"sim_fail: [crash@1, hang@soon]": `found "hang@soon", wanted MODE`,
		"sim_xyzzy: 1":                   "docs/app-yaml.md#simulated-engine",
	} {
		got := faultsOf(t, with("kind: sim, args: {"+text+"}"))
		require.Len(t, got, 1, text)
		assert.Contains(t, got[0], want, text)
	}
	for _, text := range []string{
		"max_num_seqs: 8, sim_speed: 50, sim_step_ms: 0.5, seed: 3, enable_prefix_caching: false",
		"sim_fail: [crash@1, 'hang=@2%1', 'start-exit-once=/tmp/x%5']", "max_num_seqs: '8'",
		"gpu_memory_utilization: 0.9, max_num_scheduled_tokens: 5, compilation_config: {level: 3}",
		"sim_kv_first_seq: 7, sim_kv_sliding_window: true",
	} {
		_, warnings, err := Parse(Default(), "app.yaml", []byte(with("kind: sim, args: {"+text+"}")))
		require.NoError(t, err, text)
		assert.Empty(t, warnings, text)
	}
	_, warnings, err := Parse(Default(), "app.yaml", []byte(with("kind: sim, args: {max_num_seq: 8}")))
	require.NoError(t, err)
	require.Len(t, warnings, 1)
	assert.Contains(t, warnings[0].String(),
		`ignores the argument "max_num_seq"; hint: did you mean "max_num_seqs"?`)
	assert.Empty(t, faultsOf(t, with("kind: vllm, args: {max_num_seqs: lots, sim_sped: 3}")),
		"other engines check their own arguments")
}

// TestSimArgsAreDocumented: docs/app-yaml.md names each argument of the simulated engine that users may set.
func TestSimArgsAreDocumented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(referencePath)
	require.NoError(t, err)
	for _, name := range simflags.Names() {
		if _, isOwned := engineflags.FindOwned(name); !isOwned {
			isNamed := strings.Contains(string(text), "`"+strings.ReplaceAll(name, "-", "_")+"`")
			assert.True(t, isNamed, name)
		}
	}
}

// TestExtensionKeys: keys that begin with x- are the user's own at the top of a file, and only there.
func TestExtensionKeys(t *testing.T) {
	t.Parallel()
	file := parsed(t, "x-engine: &engine {kind: sim, args: {max_num_seqs: 8}}\nx-note: [1, {a: b}]\n"+
		"applications:\n  - {name: a, model: {id: a}, engine: *engine}\n"+
		"  - {name: b, model: {id: b}, engine: {<<: *engine, startup_timeout_s: 5}}\n")
	require.Len(t, file.Applications, 2)
	assert.Equal(t, file.Applications[0].Engine.Args, file.Applications[1].Engine.Args)
	got := faultsOf(t, one("x-note: 1"))
	require.Len(t, got, 1)
	assert.Contains(t, got[0], `unknown key "x-note"`)
	got = faultsOf(t, "x-note: 1\n")
	require.Len(t, got, 1)
	assert.Contains(t, got[0], "the key applications is missing")
}

// TestTabs: a tab where YAML takes none is named, at its place.
func TestTabs(t *testing.T) {
	t.Parallel()
	for text, at := range map[string]string{
		"applications:\n\t- name: a\n":                                                 "2:1",
		"applications:\n  - name: a\n\tmodel: {id: a}\n":                               "3:1",
		"applications:\n  - name: a\n    model:\n\t\tid: a\n    engine: {kind: sim}\n": "4:1",
		"applications:\n  - name: a\n    engine:\n  \t  kind: sim\n":                   "4:3",
		"applications:\n  -\tname: a\n":                                                "2:",
	} {
		got := faultsOf(t, text)
		require.Len(t, got, 1, text)
		assert.Contains(t, got[0], "app.yaml:"+at)
		assert.Contains(t, got[0], ": YAML takes no tabs; hint: indent with spaces")
	}
}
