package inprocess

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// CC18: Whichever node is asked, one valid page has the metrics of all ranks of all applications with their
// app, pool, group and rank: started ones, attached ones that want a key, and several behind one URL; a rank
// that gives none is 0 in a gauge.
func TestOnePageHasTheMetricsOfAllEngines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t, harness.Nodes(2), harness.Slots(4), harness.Roles(0, "control", "ingress"),
			harness.Roles(1, "worker"))
		const policy = "routing: {policy: round-robin}"
		key := filepath.Join(t.TempDir(), "key")
		require.NoError(t, os.WriteFile(key, []byte("secret\n"), 0o600))
		r.byHand("--port", "8100", "--served-model-name", "keyed", "--api-key", "secret")
		r.byHand("--port", "8101", "--served-model-name", "shared", "--data-parallel-size", "2")
		r.Deploy(simPools(1, 1, "max_model_len: 8192", "decide: isl"))
		r.Deploy(simApp("chat", 2, "independent", "sim_step_ms: 10"))
		r.Deploy(attached("keyed", "  api_key_file: "+key, `{url: "http://127.0.0.1:8100"}`))
		r.Deploy(attached("shared", policy, `{url: "http://127.0.0.1:8101", addressing: header, selector: 0}`,
			`{url: "http://127.0.0.1:8101", addressing: header, selector: 1}`))
		r.Deploy(attached("absent", policy, `{url: "http://127.0.0.1:8102"}`))
		for _, app := range []string{"pd", "chat", "keyed", "shared"} {
			r.WaitStatus(app, "RUNNING")
		}
		r.Until("the pair has met", func() error { return haveMet(r.Cluster, 1) })
		for _, p := range r.Peers() {
			page := adminPage(t, p, "/metrics/engines")
			parser := expfmt.NewTextParser(model.LegacyValidation)
			families, err := parser.TextToMetricFamilies(strings.NewReader(page))
			require.NoError(t, err)
			assert.Len(t, families["vllm:num_requests_running"].GetMetric(), 7, p.ID)
			assert.Equal(t, []string{
				`dpserve_engine_metrics_up{app="absent",group="0",rank="0"} 0`,
				`dpserve_engine_metrics_up{app="chat",group="0",rank="0"} 1`,
				`dpserve_engine_metrics_up{app="chat",group="0",rank="1"} 1`,
				`dpserve_engine_metrics_up{app="keyed",group="0",rank="0"} 1`,
				`dpserve_engine_metrics_up{app="pd",pool="decode",group="0",rank="0"} 1`,
				`dpserve_engine_metrics_up{app="pd",pool="prefill",group="0",rank="0"} 1`,
				`dpserve_engine_metrics_up{app="shared",group="0",rank="0"} 1`,
				`dpserve_engine_metrics_up{app="shared",group="0",rank="1"} 1`,
			}, linesWith(page, "dpserve_engine_metrics_up{"), p.ID)
			assert.Empty(t, linesWith(page, "dpserve_engine_metrics_skipped_lines{"))
			const running = `vllm:num_requests_running{app="shared",group="0",`
			assert.Equal(t, []string{
				running + `rank="0",engine="0",model_name="shared"} 0.0`,
				running + `rank="1",engine="1",model_name="shared"} 0.0`,
			}, linesWith(page, running))
			assert.Len(t, linesWith(page, `process_start_time_seconds{app="shared",group="0"} `), 1)
		}
	})
}
