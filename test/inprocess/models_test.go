package inprocess

import (
	"io"
	"net/http"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
