package ingress

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RP13: a request that reaches no application has its metric and one log line, and the client's input is no
// metric label.
func TestRefusedRequestsAreCountedAndLogged(t *testing.T) {
	t.Parallel()
	g := newRig(t, options{engines: []http.HandlerFunc{sends(textChunk)}})
	long := strings.Repeat("x", 300)
	for _, c := range []struct {
		method, path, body string
		code               int
		route              string
	}{
		{method: http.MethodPost, path: "/flush_cache", code: 403, route: "other"},
		{method: http.MethodDelete, path: "/" + long, code: 405, route: "other"},
		{method: http.MethodGet, path: "/v1/chat/completions", code: 405, route: "chat"},
		{method: http.MethodGet, path: "/v1/models/nobody", code: 404, route: "models"},
		{
			method: http.MethodPost, path: "/v1/chat/completions", body: `{"model":"nobody","messages":[]}`,
			code: 404, route: "chat",
		},
		{method: http.MethodPost, path: "/v1/completions", body: `{`, code: 400, route: "completions"},
	} {
		before := strings.Count(g.logs.String(), `msg="request not served"`)
		req, err := http.NewRequestWithContext(t.Context(), c.method, g.url+c.path, strings.NewReader(c.body))
		require.NoError(t, err)
		a := g.do(req)
		require.Equal(t, c.code, a.status, "%s %s: %s", c.method, c.path, a.body)
		eventually(t, func() bool {
			return strings.Count(
				g.logs.String(), `msg="request not served"`) == before+1
		}, "one log line")
	}
	for text, answer := range map[string]string{
		"this is no request of HTTP\r\n\r\n": "HTTP/1.1 400 ", "GET / HTTP/1.1\r\n\r\n": "HTTP/1.1 400 ",
		"GET / HTTP/1.1\r\nHost: x\r\n y\r\n\r\n":                                       "HTTP/1.1 400 ",
		"GET / HTTP/1.1\r\nHost: x\r\nA: " + strings.Repeat("x", 100<<10) + "\r\n\r\n":  "HTTP/1.1 431 ",
		"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n": "HTTP/1.1 413 ",
	} {
		conn := g.connect(t)
		_, err := io.WriteString(conn, text)
		require.NoError(t, err)
		got := make([]byte, len(answer))
		_, err = io.ReadFull(conn, got)
		require.NoError(t, err)
		assert.Equal(t, answer, string(got))
	}
	assert.NotContains(t, g.logs.String(), strings.Repeat("x", maxNameShown+1))
	page := g.page()
	for _, want := range []string{
		`dpserve_requests_total{app="",code="403",route="other"} 1`,
		`dpserve_requests_total{app="",code="405",route="other"} 1`,
		`dpserve_requests_total{app="",code="405",route="chat"} 1`,
		`dpserve_requests_total{app="",code="404",route="models"} 1`,
		`dpserve_requests_total{app="",code="404",route="chat"} 1`,
		`dpserve_requests_total{app="",code="400",route="completions"} 1`,
		`dpserve_requests_total{app="",code="400",route="other"} 3`,
		`dpserve_requests_total{app="",code="431",route="other"} 1`,
		`dpserve_requests_total{app="",code="413",route="completions"} 1`,
	} {
		assert.Contains(t, page, want)
	}
	assert.NotContains(t, page, "flush_cache")
	g.get("/health")
	assert.Equal(t, 7, strings.Count(g.logs.String(), `msg="request not served"`), "probes are no requests")
}
