package engine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// What launched vLLM and SGLang engines of a pool will get. Their profiles come with the next version.
func TestTransferOfRealEngines(t *testing.T) {
	const nixl = " | VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=20012"
	for _, c := range []struct {
		kind                     app.Kind
		pool, transfer, fallback string
		args                     app.Args
		want                     string
	}{
		{
			app.KindVLLM, "prefill", "nixl", "local", nil,
			`--kv-transfer-config {"kv_connector":"NixlConnector","kv_connector_extra_config":` +
				`{"kv_lease_duration":120},"kv_role":"kv_producer"}` + nixl,
		},
		{
			app.KindVLLM, "decode", "nixl", "local", nil,
			`--kv-transfer-config {"kv_connector":"NixlConnector","kv_connector_extra_config":` +
				`{"kv_lease_duration":120},"kv_load_failure_policy":"recompute",` +
				`"kv_role":"kv_consumer"}` + nixl,
		},
		{
			app.KindVLLM, "decode", "nixl-push", "fail",
			app.Args{
				{Name: "max_num_seqs", Value: int64(8)},
				{Name: "kv_transfer_config.kv_connector_extra_config.kv_lease_duration", Value: int64(300)},
				{Name: "kv_transfer_config.kv_buffer_device", Value: "cpu"},
			},
			`--kv-transfer-config {"kv_buffer_device":"cpu","kv_connector":"NixlPushConnector",` +
				`"kv_connector_extra_config":{"kv_lease_duration":300},"kv_load_failure_policy":"fail",` +
				`"kv_role":"kv_consumer"} max_num_seqs` + nixl,
		},
		{
			app.KindVLLM, "prefill", "mooncake", "local", nil,
			`--kv-transfer-config {"kv_connector":"MooncakeConnector","kv_role":"kv_producer"} | ` +
				`VLLM_MOONCAKE_BOOTSTRAP_PORT=20018`,
		},
		{
			app.KindSGLang, "prefill", "sglang", "local", nil,
			"--disaggregation-mode prefill --disaggregation-bootstrap-port 20016 | ",
		},
		{app.KindSGLang, "decode", "sglang", "local", nil, "--disaggregation-mode decode | "},
	} {
		s := &Spec{
			App: &app.Application{
				Pool: c.pool, Engine: app.Engine{Kind: c.kind, Args: c.args},
				DataParallel:   app.DataParallel{DPSize: 4, Coupling: app.Lockstep},
				Disaggregation: &app.Disaggregation{Transfer: c.transfer, Fallback: c.fallback},
			},
			Rank: 2, Base: 20000, Host: "10.0.0.1",
		}
		got, err := transferOf(s)
		require.NoError(t, err)
		words := got.flags
		for _, a := range got.args {
			words = append(words, a.Name)
		}
		assert.Equal(t, c.want, strings.Join(words, " ")+" | "+strings.Join(got.env, " "), "%s %s %s", c.kind,
			c.pool, c.transfer)
	}
}
