package system

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/test/harness"
)

// routesEngine is an engine that generates, and answers every other path with what it has got.
func routesEngine(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch {
	case r.URL.Path == "/health":
	case r.URL.Path == "/v1/models":
		_, _ = io.WriteString(w, `{"data":[{"id":"m","owned_by":"me"}]}`)
	case r.URL.Path == "/v1/completions", r.URL.Path == "/v1/chat/completions":
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}`)
	case r.Method == http.MethodGet && openai.ResponseIDOf(r.URL.Path) == "", r.URL.Path == "/lacks":
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, `{"detail":"Not Found"}`)
	default:
		_, _ = fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.Path, body)
	}
}

// CC10: each route of the table reaches the engine once through the binary, with its method, path and body,
// and the answer comes back. What an engine lacks is its own 404, and what steers it is refused.
func TestEveryRouteReachesTheEngine(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.HandlerFunc(routesEngine))
	t.Cleanup(engine.Close)
	r := harness.Run(t, "up", "--attach", engine.URL)
	upServes(t, r)
	ask := func(method, path, kind, body string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+r.HTTP+path,
			strings.NewReader(body))
		require.NoError(t, err)
		req.Header.Set("Content-Type", kind)
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp.StatusCode, string(text)
	}
	var sound bytes.Buffer
	form := multipart.NewWriter(&sound)
	require.NoError(t, form.WriteField("model", "m"))
	require.NoError(t, form.WriteField("file", "RIFF"))
	require.NoError(t, form.Close())
	for route := openai.Completions; route <= openai.Other; route++ {
		path, kind := strings.ReplaceAll(route.Path(), "{id}", "resp_1"), "application/json"
		body := `{"model":"m","prompt":"x","input":"x","text":"x","messages":[]}`
		switch route {
		case openai.Transcriptions, openai.Translations:
			kind, body = form.FormDataContentType(), sound.String()
		case openai.Other:
			path = "/invocations"
		default:
		}
		if route.Method() != http.MethodPost {
			body = ""
		}
		status, text := ask(route.Method(), path, kind, body)
		assert.Equal(t, 200, status, "%s: %s", path, text)
		switch route {
		case openai.Completions, openai.Chat:
			assert.Contains(t, text, "finish_reason")
		case openai.Models:
			assert.Contains(t, text, `"id":"m"`)
		default:
			assert.Equal(t, fmt.Sprintf("%s %s %s", route.Method(), path, body), text)
		}
	}
	status, text := ask(http.MethodPost, "/lacks", "application/json", `{}`)
	assert.Equal(t, []any{404, `{"detail":"Not Found"}`}, []any{status, text})
	for _, path := range openai.AllowedControls() {
		status, text := ask(http.MethodPost, path, "application/json", `{}`)
		assert.Equal(t, 403, status, path)
		assert.Contains(t, text, `"code":"route_denied"`)
	}
	r.Quiet()
	r.Signal(os.Interrupt)
	assert.Equal(t, 0, r.ExitCode(), r.Output())
}
