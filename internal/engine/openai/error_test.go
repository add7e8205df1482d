package openai

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestErrorBody(t *testing.T) {
	got := ErrorBody(nil, 404, "", CodeModelNotFound, `model "x" does not exist`+"\n", "model")
	want := `{"error":{"message":"model \"x\" does not exist\n","type":"not_found_error",` +
		`"param":"model","code":"model_not_found"}}`
	assert.Equal(t, want, string(got))
	got = ErrorBody([]byte("kept "), 503, "overloaded_error", "", "", "")
	assert.Equal(t, `kept {"error":{"message":"","type":"overloaded_error","param":null,"code":null}}`,
		string(got))
}

func TestErrorEvent(t *testing.T) {
	got := string(ErrorEvent(nil, Chat, 502, "", CodeUpstreamLost, "the rank was lost"))
	assert.Equal(t, `data: {"error":{"message":"the rank was lost","type":"server_error","param":null,`+
		`"code":"upstream_lost"}}`+"\n\n", got)
	var w Watcher
	assert.Equal(t, EventError, w.Event([]byte(got)), "our own event must read as one")
}

func TestErrorBodyIsJSONWhateverTheText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		message := string(rapid.SliceOf(rapid.Byte()).Draw(t, "message"))
		var got struct {
			Error struct{ Message, Type, Param, Code string }
		}
		require.NoError(t, json.Unmarshal(ErrorBody(nil, 400, "", "c", message, "p"), &got))
		want := strings.ToValidUTF8(message, "\uFFFD")
		if utf8.ValidString(message) {
			assert.Equal(t, want, got.Error.Message)
		}
		assert.Equal(t, "invalid_request_error", got.Error.Type)
	})
}

func TestStatusOfEveryCode(t *testing.T) {
	want := map[string]int{
		CodeInvalidRequest: 400, CodeModelNotFound: 404, CodeRouteDenied: 403, CodeSlowRequest: 408,
		CodeBodyTooLarge: 413, CodeQuotaExceeded: 429,
		CodeUpstreamFailed: 502, CodeOverloaded: 503, CodeQueueTimeout: 503, CodeNoReadyRank: 503,
		CodeNoFiles: 503, CodeFirstTokenTimeout: 504, CodeDeadlineExceeded: 504, CodeLoopDetected: 508,
		CodeUpstreamLost: 502, CodeStalled: 502, CodeDrained: 503, "never heard of": 500,
	}
	for code, status := range want {
		assert.Equal(t, status, Status(code), code)
	}
}

func TestErrorTypeOfStatus(t *testing.T) {
	want := map[int]string{
		400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
		404: "not_found_error", 413: "invalid_request_error",
		429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error",
	}
	for status, typ := range want {
		assert.Equal(t, typ, errorType(status), status)
	}
}
