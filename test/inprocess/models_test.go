package inprocess

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// CC13: attached engines that know the model under names of their own become ready, and serve under the names
// of the application's file alone.
func TestAttachedEnginesWithNamesOfTheirOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newKVRig(t)
		r.byHand("--port", "8100", "--served-model-name", "org/a-7b", "--sim-step-ms", "1")
		r.byHand("--port", "8101", "--served-model-name", "other", "--sim-step-ms", "1")
		r.Deploy(`applications:
  - name: a
    model: {id: a, source: org/a-7b, aliases: [b]}
    routing: {policy: round-robin}
    engine:
      kind: attach
      ranks:
        - {url: "http://127.0.0.1:8100"}
        - {url: "http://127.0.0.1:8101", model: other}
`)
		r.WaitStatus("a", "RUNNING")
		for _, rank := range []string{"0/0", "0/1"} {
			for _, model := range []string{"a", "b"} {
				s := r.StreamChat(t.Context(), model, 3, "x-dpserve-rank", rank)
				assert.True(t, s.OK(), "%s on rank %s: %v", model, rank, s)
				resp, err := r.Post(t.Context(), "/v1/completions", `{"model":"`+model+`","prompt":"x"}`,
					"x-dpserve-rank", rank)
				require.NoError(t, err)
				text, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				assert.Contains(t, string(text), `"model":"`+model+`"`)
			}
		}
		resp, err := r.Post(t.Context(), "/v1/completions", `{"model":"org/a-7b","prompt":"x"}`)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusNotFound, resp.StatusCode)
		r.Quiet()
	})
}

// RP62: an adapter is known by rank, as the engine lists it. After a control call has loaded it, status shows
// it, and a request goes only where its adapter is, under either of its names. Unloaded everywhere, the model
// is not found.
func TestAdaptersAreKnownByRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(`applications:
  - name: a
    model: {id: "a:7b"}
    routing: {policy: round-robin}
    engine: {kind: sim, args: {sim_step_ms: 1}, env: {VLLM_SERVER_DEV_MODE: "1"}}
    data_parallel: {dp_size: 3}
`)
		c.WaitStatus("a", "RUNNING")
		ask := func(model string) (rank string, status int) {
			s := c.StreamChat(t.Context(), model, 2)
			return s.Rank, s.Status
		}
		knows := func(adapter string, ranks ...int) {
			t.Helper()
			c.Until("the ranks with "+adapter, func() error {
				for i := range 3 {
					has := slices.Contains(c.Rank("a", 0, i).Adapters, adapter)
					if has != slices.Contains(ranks, i) {
						return fmt.Errorf("rank %d has it: %v", i, has)
					}
				}
				return nil
			})
		}
		call := func(path, body, rank string) {
			t.Helper()
			code, text := c.Do(http.MethodPost, "/api/v1/apps/a/call?path="+path+"&ranks="+rank, body)
			require.Equal(t, http.StatusOK, code, text)
			require.Contains(t, text, `"status":200`)
		}
		_, status := ask("sql")
		assert.Equal(t, http.StatusNotFound, status)

		call("/v1/load_lora_adapter", `{"lora_name":"sql","lora_path":"/sql"}`, "0/1")
		knows("sql", 1)
		for range 4 {
			for _, name := range []string{"sql", "a:7b:sql"} {
				rank, status := ask(name)
				assert.Equal(t, http.StatusOK, status)
				assert.Equal(t, "0/1", rank)
			}
		}
		call("/v1/unload_lora_adapter", `{"lora_name":"sql"}`, "0/1")
		knows("sql")
		_, status = ask("a:7b:sql")
		assert.Equal(t, http.StatusNotFound, status)
		c.Quiet()
	})
}
