package system

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

const twoApps = `applications:
  - name: one
    model: {id: model-one}
    engine: {kind: sim, args: {sim_step_ms: 1}}
    data_parallel: {dp_size: 2}
  - name: two
    model: {id: model-two}
    engine: {kind: sim, args: {sim_step_ms: 1}}
`

// Bodies that are malformed, cut, too large or of an unknown route are refused, and nothing else is
// disturbed.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Deploy(twoApps)
	r.WaitStatus("one", "RUNNING")
	for _, c := range []struct {
		path, body string
		status     int
		code       string
	}{
		{"/v1/chat/completions", `{"model":"model-one","messages":[`, 400, "invalid_request"},
		{"/v1/chat/completions", `[]`, 400, "invalid_request"},
		{"/v1/chat/completions", ``, 400, "invalid_request"},
		{
			"/v1/chat/completions", `{"model":"model-one","model":"model-two","messages":[]}`, 400,
			"invalid_request",
		},
		{"/v1/chat/completions", `{"model":"model-one","n":129,"messages":[]}`, 400, "invalid_request"},
		{"/v1/chat/completions", `{"messages":[]}`, 400, "invalid_request"},
		{"/v1/chat/completions", `{"model":"other","messages":[]}`, 404, "model_not_found"},
		{"/v1/embeddings", `{"model":"model-one","input":"x"}`, 404, "unsupported_route"},
		{"/v1/chat/completions", `{"model":"model-one","messages":[{"role":"user","content":"` +
			strings.Repeat("x", 16<<20) + `"}]}`, 413, "body_too_large"},
	} {
		resp, err := r.Post(t.Context(), c.path, c.body)
		require.NoError(t, err)
		var e struct {
			Error struct{ Code, Message, Type string }
		}
		decode(t, resp, &e)
		head := c.body[:min(len(c.body), 60)]
		assert.Equal(t, c.status, resp.StatusCode, head)
		assert.Equal(t, c.code, e.Error.Code, head)
		assert.NotEmpty(t, e.Error.Message)
		assert.NotEmpty(t, resp.Header.Get("x-request-id"), head)
	}
	assert.True(t, r.StreamChat(t.Context(), "model-one", "still fine", 3).OK())
	r.Quiet()
}
