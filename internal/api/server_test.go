package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/api"
)

// request is one row of the golden file.
type request struct {
	method, target, body string
	header               map[string]string // "Host" sets the Host
}

func (r request) String() string {
	s := r.method + " " + r.target
	for _, k := range []string{"Host", "Origin", "Sec-Fetch-Site", "Last-Event-ID", "X-Dpserve-File"} {
		if v, ok := r.header[k]; ok {
			s += fmt.Sprintf(" %s=%q", k, v)
		}
	}
	return s
}

func (r request) send(t *testing.T, h http.Handler) *httptest.ResponseRecorder {
	t.Helper()
	req := httptest.NewRequestWithContext(t.Context(), r.method, "http://127.0.0.1:8265/",
		strings.NewReader(r.body))
	u, err := req.URL.Parse(r.target)
	require.NoError(t, err)
	req.URL = u
	for k, v := range r.header {
		if k == "Host" {
			req.Host = v
		}
		req.Header.Set(k, v)
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	return rec
}

// badRequests lists all kinds of invalid requests.
func badRequests() []request {
	h := func(kv ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	return []request{
		{"GET", "/page", "", nil},
		{"GET", "/api/v1/nodes", "", nil},
		{"GET", "/api/v1/apps/", "", nil},
		{"POST", "/v1/chat/completions", "{}", nil},
		{"POST", "/api/v1/apps", "x", nil},
		{"DELETE", "/api/v1/version", "", nil},
		{"HEAD", "/api/v1/events", "", nil},
		{"GET", "/api/v1/version?verbose=1", "", nil},
		{"GET", "/api/v1/apps?app=demo", "", nil},
		{"GET", "/api/v1/apps?x=%zz", "", nil},
		{"GET", "/api/v1/apps/nobody", "", nil},
		{"DELETE", "/api/v1/apps/nobody", "", nil},
		{"DELETE", "/api/v1/apps/demo?force=true", "", nil},
		{"PUT", "/api/v1/apps", "", nil},
		{"PUT", "/api/v1/apps", "faulty", h("X-Dpserve-File", "my.yaml")},
		{"PUT", "/api/v1/apps?revision=-1", "x", nil},
		{"PUT", "/api/v1/apps?revision=6", "x", nil},
		{"PUT", "/api/v1/apps?revision=", "x", nil},
		{"PUT", "/api/v1/apps?purne=true", "x", nil},
		{"PUT", "/api/v1/apps?prune=yes", "x", nil},
		{"PUT", "/api/v1/apps?prune=true&prune=false", "x", nil},
		{"PUT", "/api/v1/apps?file=%1b[31m", "x", nil},
		{"PUT", "/api/v1/apps", strings.Repeat("x", 1<<20+1), nil},
		{"POST", "/api/v1/validate?file=a.yaml", "faulty", nil},
		{"POST", "/api/v1/validate?prune=true", "x", nil},
		{"POST", "/api/v1/validate", "panic", nil},
		{"GET", "/api/v1/apps/demo/logs?rank=1", "", nil},
		{"GET", "/api/v1/apps/demo/logs?group=-1", "", nil},
		{"GET", "/api/v1/apps/demo/logs?tail=all", "", nil},
		{"GET", "/api/v1/apps/demo/logs?since=yesterday", "", nil},
		{"GET", "/api/v1/apps/demo/logs?follow=1", "", nil},
		{"GET", "/api/v1/apps/demo/logs?unit=demo/0", "", nil},
		{"GET", "/api/v1/events?since=x", "", nil},
		{"GET", "/api/v1/events", "", h("Last-Event-ID", "x")},
		{"GET", "/api/v1/apps", "", h("Host", "evil.example")},
		{"GET", "/api/v1/apps", "", h("Host", "127.0.0.1.evil.example:8265")},
		{"GET", "/api/v1/apps", "", h("Host", "")},
		{"GET", "/metrics", "", h("Host", "192.0.2.1:8265")},
		{"GET", "/api/v1/apps", "", h("Sec-Fetch-Site", "cross-site")},
		{"PUT", "/api/v1/apps", "x", h("Sec-Fetch-Site", "same-site")},
		{"PUT", "/api/v1/apps", "x", h("Origin", "http://evil.example")},
		{"DELETE", "/api/v1/apps/demo", "", h("Origin", "null")},
	}
}

// TestErrorTexts pins status and body of every refusal. Run it with DPSERVE_REWRITE=1 to write the file, then
// read the diff.
func TestErrorTexts(t *testing.T) {
	h := api.NewServer(api.Config{Backend: newBackend(), Metrics: http.NotFoundHandler()}).Handler()
	var got strings.Builder
	for _, r := range badRequests() {
		rec := r.send(t, h)
		fmt.Fprintf(&got, "%s\n----\n%d %s\n%s\n", r, rec.Code, rec.Header().Get("Allow"),
			pretty(t, rec.Body.Bytes()))
		assert.Equal(t, "application/json", rec.Header().Get("Content-Type"))
		assert.Empty(t, rec.Header().Get("Access-Control-Allow-Origin"))
	}
	golden := filepath.Join("testdata", "errors.txt")
	if os.Getenv("DPSERVE_REWRITE") != "" {
		require.NoError(t, os.MkdirAll("testdata", 0o750))
		require.NoError(t, os.WriteFile(golden, []byte(got.String()), 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.Equal(t, string(want), got.String())
}

func pretty(t *testing.T, body []byte) string {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, json.Indent(&out, body, "", " "))
	return out.String()
}

func TestAllowedHosts(t *testing.T) {
	h := api.NewServer(api.Config{Backend: newBackend()}).Handler()
	for _, host := range []string{
		"127.0.0.1:8265", "127.0.0.2", "localhost:8265", "LOCALHOST", "[::1]:8265", "::1",
	} {
		r := request{method: "GET", target: "/api/v1/healthz", header: map[string]string{"Host": host}}
		assert.Equal(t, http.StatusOK, r.send(t, h).Code, host)
	}
	same := request{"PUT", "/api/v1/apps", "x", map[string]string{"Sec-Fetch-Site": "same-origin"}}
	assert.Equal(t, http.StatusAccepted, same.send(t, h).Code)
}

// Probes and load balancers use HEAD.
func TestHeadIsGetWithoutABody(t *testing.T) {
	s, _ := serve(t,
		api.Config{
			Backend: newBackend(),
			Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte("dpserve_up 1\n"))
			}),
		})
	for _, path := range []string{"/api/v1/healthz", "/api/v1/apps", "/metrics"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, "http://"+s.Addr().String()+path,
			http.NoBody)
		require.NoError(t, err)
		res, err := http.DefaultTransport.RoundTrip(req)
		require.NoError(t, err)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		assert.Equal(t, http.StatusOK, res.StatusCode, path)
		assert.Positive(t, res.ContentLength, path)
		assert.Empty(t, body, path)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

func TestMetricsIsOptional(t *testing.T) {
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("dpserve_up 1\n"))
	})
	get := request{method: "GET", target: "/metrics"}
	rec := get.send(t, api.NewServer(api.Config{Backend: newBackend(), Metrics: metrics}).Handler())
	assert.Equal(t, "dpserve_up 1\n", rec.Body.String())
	rec = get.send(t, api.NewServer(api.Config{Backend: newBackend()}).Handler())
	assert.Equal(t, http.StatusNotFound, rec.Code)
}

// A client that leaves during its request is not an error of dpserve. A client that stays gets the error.
func TestClientThatLeavesIsNotLogged(t *testing.T) {
	var buf bytes.Buffer
	b := newBackend()
	b.fail = fmt.Errorf("propose: %w", context.Canceled)
	h := api.NewServer(api.Config{Backend: b, Log: slog.New(slog.NewTextHandler(&buf, nil))}).Handler()
	ctx, leave := context.WithCancel(t.Context())
	leave()
	h.ServeHTTP(httptest.NewRecorder(),
		httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/apps", http.NoBody))
	assert.Empty(t, buf.String())
	request{method: "GET", target: "/api/v1/apps"}.send(t, h)
	assert.Contains(t, buf.String(), "admin request failed")
}

// A 500 and a panic write a log line; a user's mistake does not, and the file's text is never logged.
func TestInternalErrorsAreLogged(t *testing.T) {
	var buf bytes.Buffer
	b := newBackend()
	h := api.NewServer(api.Config{Backend: b, Log: slog.New(slog.NewTextHandler(&buf, nil))}).Handler()
	request{method: "PUT", target: "/api/v1/apps", body: "faulty secret"}.send(t, h)
	assert.Empty(t, buf.String())
	b.fail = os.ErrClosed
	request{method: "GET", target: "/api/v1/apps"}.send(t, h)
	assert.Contains(t, buf.String(),
		`msg="admin request failed" component=api path=/api/v1/apps err="file already closed"`)
	b.fail = nil
	buf.Reset()
	rec := request{method: "POST", target: "/api/v1/validate", body: "panic secret"}.send(t, h)
	assert.Equal(t, http.StatusInternalServerError, rec.Code)
	assert.Contains(t, buf.String(), "as the test asked")
	assert.NotContains(t, buf.String(), "secret")
}
