package openai

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestShapes: clients of each API find dpserve's errors where their API writes them.
func TestShapes(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/responses": `{"error":{"message":"no \"x\"","type":"not_found_error","param":"model",` +
			`"code":"model_not_found"}}`,
		"/v1/messages": `{"type":"error","error":{"type":"not_found_error","message":"no \"x\"",` +
			`"code":"model_not_found"}}`,
		"/generate": `{"error":{"message":"no \"x\"","code":"model_not_found"}}`,
	} {
		got := RouteOf(path).Shape().Error(nil, 404, "", CodeModelNotFound, `no "x"`, "model")
		assert.JSONEq(t, want, string(got), path)
	}
	for status, want := range map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
		413: "request_too_large", 429: "rate_limit_error", 502: "api_error", 503: "overloaded_error",
		504: "timeout_error",
	} {
		assert.Contains(t, string(Anthropic.Error(nil, status, "", "", "x", "")), want)
	}
}

// TestErrorEventsOfEachShape: the last event of a broken stream is read as an error by the clients of its
// API.
func TestErrorEventsOfEachShape(t *testing.T) {
	for r, name := range map[Route]string{Messages: "error", Responses: "error", Generate: "", Chat: ""} {
		event := ErrorEvent(nil, r, 502, "", CodeUpstreamLost, "the rank was lost")
		if name != "" {
			assert.Contains(t, string(event), "event: "+name+"\n", r)
		}
		var data struct {
			Type  string
			Error struct{ Message, Code string }
		}
		require.NoError(t, json.Unmarshal(EventData(event), &data), r)
		assert.Equal(t, "the rank was lost", data.Error.Message)
		assert.Equal(t, CodeUpstreamLost, data.Error.Code)
		assert.Equal(t, name, data.Type)
	}
}
