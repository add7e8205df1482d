package app

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// CC15: an application of one rank, a lockstep group without expert parallelism, and one with 4 requests per
// rank each get one line of advice with the page that says when to use DP. A sound mixture of experts, and
// others for which DP pays, get none.
func TestCC15AdviceOnDataParallelism(t *testing.T) {
	const (
		vllm    = "engine: {kind: vllm}"
		experts = "engine: {kind: vllm, args: {enable_expert_parallel: true}}"
		none    = "engine: {kind: vllm, args: {enable_expert_parallel: false}}"
		group   = ", data_parallel: {dp_size: 8, coupling: lockstep}"
		one     = "its one rank has no other rank"
		noGain  = "do not spread experts"
		few     = "max_ongoing_requests: 4 gives the experts of the group at most 32 tokens per step"
	)
	for text, want := range map[string]string{
		vllm + ", data_parallel: {dp_size: 1}":             one,
		"engine: {kind: sim}, data_parallel: {dp_size: 1}": one,
		vllm + group:                  noGain,
		none + group:                  noGain,
		"engine: {kind: sim}" + group: noGain,
		experts + group + ", max_ongoing_requests: 4": few,
		experts + group: "",
		experts + group + ", max_ongoing_requests: 64":                                         "",
		vllm + ", data_parallel: {dp_size: 1}, num_groups: 4":                                  "",
		"engine: {kind: attach, ranks: [{url: \"http://h:1\"}]}":                               "",
		vllm + ", data_parallel: {dp_size: 4, coupling: independent}, max_ongoing_requests: 4": "",
		"engine: {kind: sglang, args: {enable_dp_attention: true, tp_size: 4}}, " +
			"data_parallel: {dp_size: 4}": "",
		"engine: {kind: sim}, prefill: {data_parallel: {dp_size: 1}}, " +
			"decode: {data_parallel: {dp_size: 3}}": "",
	} {
		yaml := "applications: [{name: a, model: {id: m}, " + text + "}]"
		file, _, err := Parse(Default(), "app.yaml", []byte(yaml))
		require.NoError(t, err, text)
		var got []string
		for _, pool := range file.Applications {
			got = append(got, Advise(pool)...)
		}
		if want == "" {
			assert.Empty(t, got, text)
			continue
		}
		require.Len(t, got, 1, text)
		assert.Contains(t, got[0], want, text)
		assert.Contains(t, got[0], "docs/when-to-use-dp.md", text)
	}
	_, err := os.Stat(filepath.Join("../..", whenToUseDP))
	require.NoError(t, err)
}
