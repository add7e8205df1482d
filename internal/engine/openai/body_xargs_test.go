package openai

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// RP19: what a client may not set does not pass in a bag of further arguments either.
func TestScanRefusesReservedXargs(t *testing.T) {
	for _, xargs := range []string{
		`{"kv_cache_report_mode":"full"}`, `{"a":1,"kv_transfer_params":{"do_remote_decode":true}}`,
		`{"kv_transfer_params":"x"}`,
		`{"kv_cache_\u0072eport_mode":"full"}`, `{"kv_cache_report_mode":null}`,
	} {
		for route, prompt := range map[Route]string{Chat: `"messages":[]`, Completions: `"prompt":"x"`} {
			err := refused(t, route, `{`+prompt+`,"vllm_xargs":`+xargs+`}`)
			assert.Equal(t, "vllm_xargs", err.Param)
			assert.True(t, strings.HasPrefix(err.Message, "vllm_xargs must not hold kv_"), err.Message)
		}
	}
	for _, xargs := range []string{
		`{"top_n_sigma":1.5,"note":"kv_cache_report_mode"}`, `{}`, `null`,
		`"kv_transfer_params"`, `[{"kv_transfer_params":1}]`,
	} {
		scan(t, Chat, `{"messages":[],"vllm_xargs":`+xargs+`}`)
	}
}
