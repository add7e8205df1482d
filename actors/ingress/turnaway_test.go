package ingress

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/telemetry"
)

// TestRefusedRequestsAreCountedAndLogged: a request that reaches no application has its metric and its one
// log line, and what the client sent is no label.
func TestRefusedRequestsAreCountedAndLogged(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{sends(textChunk)}})
	metrics, ok := g.in.metrics.(*telemetry.Metrics)
	require.True(t, ok)
	long := strings.Repeat("x", 300)
	for _, c := range []struct {
		method, path, body string
		code               int
		route              string
	}{
		{method: http.MethodPost, path: "/v1/embeddings", code: 404, route: "other"},
		{method: http.MethodGet, path: "/" + long, code: 404, route: "other"},
		{method: http.MethodGet, path: "/v1/chat/completions", code: 405, route: "chat"},
		{method: http.MethodGet, path: "/v1/models/nobody", code: 404, route: "models"},
		{method: http.MethodPost, path: "/v1/chat/completions", body: `{"model":"nobody","messages":[]}`, code: 404, route: "chat"},
		{method: http.MethodPost, path: "/v1/completions", body: `{`, code: 400, route: "completions"},
	} {
		before := strings.Count(g.logs.String(), `msg="request not served"`)
		req, err := http.NewRequestWithContext(t.Context(), c.method, g.url+c.path, strings.NewReader(c.body))
		require.NoError(t, err)
		a := g.do(req)
		require.Equal(t, c.code, a.status, "%s %s: %s", c.method, c.path, a.body)
		eventually(t, func() bool { return strings.Count(g.logs.String(), `msg="request not served"`) == before+1 }, "one log line")
	}
	assert.NotContains(t, g.logs.String(), strings.Repeat("x", maxNameShown+1))
	rec := httptest.NewRecorder()
	metrics.Handler().ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil))
	for _, want := range []string{
		`dpserve_requests_total{app="",code="404",route="other"} 2`, `dpserve_requests_total{app="",code="405",route="chat"} 1`,
		`dpserve_requests_total{app="",code="404",route="models"} 1`, `dpserve_requests_total{app="",code="404",route="chat"} 1`,
		`dpserve_requests_total{app="",code="400",route="completions"} 1`,
	} {
		assert.Contains(t, rec.Body.String(), want)
	}
	assert.NotContains(t, rec.Body.String(), "embeddings")
	g.get("/health")
	assert.Equal(t, 6, strings.Count(g.logs.String(), `msg="request not served"`), "probes are no requests")
}
