package engine_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

func pool(name, transfer string, coupling app.Coupling, args app.Args) *app.Application {
	a := demo(coupling)
	a.Name, a.Pool = app.PoolName("demo", name), name
	a.Engine.Args, a.Engine.Env = args, nil
	a.Disaggregation = &app.Disaggregation{Transfer: transfer}
	return a
}

// rendered is the part of a launch that concerns transfers.
func rendered(t *testing.T, a *app.Application) string {
	t.Helper()
	l, err := engine.Render(&engine.Spec{App: a, Rank: 1, Base: 20000, Executable: "dpserve"}, nil)
	require.NoError(t, err)
	var out []string
	for i, word := range l.Argv {
		if strings.HasPrefix(word, "--kv-transfer") || strings.HasPrefix(word, "--disaggregation") {
			out = append(out, word, l.Argv[i+1])
		}
	}
	for _, kv := range l.Env {
		if strings.HasPrefix(kv, "VLLM_MOON") || strings.HasPrefix(kv, "VLLM_NIXL") {
			out = append(out, kv)
		}
	}
	return strings.Join(out, " ")
}

func TestTransferOfALaunchedRank(t *testing.T) {
	const consumer = `"kv_load_failure_policy":"fail","kv_role":"kv_consumer"}`
	for _, c := range []struct{ pool, transfer, want string }{
		{"prefill", "sim", `--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_producer"}`},
		{"decode", "sim", `--kv-transfer-config {"kv_connector":"NixlConnector",` + consumer},
		{"decode", "nixl-push", `--kv-transfer-config {"kv_connector":"NixlPushConnector",` + consumer},
		{"decode", "mooncake", `--kv-transfer-config {"kv_connector":"MooncakeConnector",` + consumer},
		{
			"prefill", "mooncake", `--kv-transfer-config {"kv_connector":"MooncakeConnector",` +
				`"kv_role":"kv_producer"} VLLM_MOONCAKE_BOOTSTRAP_PORT=20017`,
		},
		{"prefill", "sglang", "--disaggregation-mode prefill --disaggregation-bootstrap-port 20016"},
		{"decode", "sglang", "--disaggregation-mode decode"},
		{"", "", ""},
	} {
		assert.Equal(t, c.want, rendered(t, pool(c.pool, c.transfer, app.Lockstep, nil)), "%s %s", c.pool,
			c.transfer)
	}
}

// What the file says of the transfer is kept, however it is written; dpserve writes role and connector.
func TestTransferSettingsOfTheFile(t *testing.T) {
	want := `--kv-transfer-config {"kv_connector":"NixlConnector","kv_connector_extra_config":` +
		`{"kv_lease_duration":60},"kv_load_failure_policy":"recompute","kv_role":"kv_consumer"}`
	extra := map[string]any{"kv_lease_duration": int64(60)}
	for name, args := range map[string]app.Args{
		"map": {{Name: "kv_transfer_config", Value: map[string]any{
			"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
		}}},
		"text": {{Name: "kv-transfer-config", Value: `{"kv_load_failure_policy":"recompute",` +
			`"kv_connector_extra_config":{"kv_lease_duration":60}}`}},
		"dots": {
			{Name: "kv_transfer_config.kv_load_failure_policy", Value: "recompute"},
			{Name: "kv_transfer_config.kv_connector_extra_config.kv_lease_duration", Value: int64(60)},
		},
	} {
		assert.Equal(t, want, rendered(t, pool("decode", "sim", app.Independent, args)), name)
	}
	assert.Len(t, extra, 1, "the file's own maps are left alone")
	for _, bad := range []any{"{", int64(3)} {
		a := pool("decode", "sim", app.Independent, app.Args{{Name: "kv_transfer_config", Value: bad}})
		_, err := engine.Render(&engine.Spec{App: a}, nil)
		assert.ErrorContains(t, err, "engine.args.kv_transfer_config")
	}
}
