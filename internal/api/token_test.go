package api

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// SP2: without the admin token every path of the admin API but those of probes and scrapers is 401; other
// nodes, which show certificates, need none.
func TestTheAdminAPIWantsItsToken(t *testing.T) {
	const token = "dpa1.0123456789abcdef"
	page := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "m") })
	s := NewServer(Config{
		Token: token, TokenFile: "/data/admin.token", Metrics: page, EngineMetrics: page,
	})
	ask := func(h http.Handler, method, path, authorization string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader("x"))
		r.Host = "127.0.0.1:8265"
		if authorization != "" {
			r.Header.Set("Authorization", authorization)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	guarded := s.protect(nil)
	for _, path := range []string{
		"/api/v1/version", "/api/v1/apps", "/api/v1/restart", "/api/v1/events", "/add_worker?url=x",
		"/list_workers", "/nope", "/api/v1/feed", "/page", "/api/v1/healthz/../apps", "//metrics",
	} {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodPost, http.MethodDelete} {
			for _, shown := range []string{"", "Bearer", "Bearer " + token + "0", "Basic " + token, token} {
				w := ask(guarded, method, path, shown)
				assert.Equal(t, 401, w.Code, "%s %s %q", method, path, shown)
				assert.Contains(t, w.Body.String(), "/data/admin.token")
				assert.Contains(t, w.Body.String(), `"unauthenticated"`)
				assert.NotContains(t, w.Body.String(), token)
			}
		}
	}
	for _, path := range []string{
		pathHealthz, pathMetrics, pathEngineMetrics, pathPage, "/page/page.js",
	} {
		assert.Equal(t, 200, ask(guarded, http.MethodGet, path, "").Code, path)
		assert.Equal(t, 200, ask(guarded, http.MethodHead, path, "").Code, path)
		assert.Equal(t, 401, ask(guarded, http.MethodPost, path, "").Code, path)
	}
	assert.Equal(t, 200, ask(guarded, http.MethodGet, pathVersion, "bearer "+token).Code)
	assert.Equal(t, 200, ask(s.Handler(), http.MethodGet, pathVersion, "").Code, "from another node")
	open := NewServer(Config{}).protect(nil)
	assert.Equal(t, 200, ask(open, http.MethodGet, pathVersion, "").Code, "--admin-open")
}
