package ingress

import (
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RP36: An engine's URL leads back to the ingress: one request becomes two, not as many as there are places.
func TestARequestThatComesBackIsRefused(t *testing.T) {
	var back *httputil.ReverseProxy
	var asked atomic.Int32
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		back.ServeHTTP(w, r)
	}}})
	own, err := url.Parse(g.url)
	require.NoError(t, err)
	back = &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(own) }}
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 508, a.status, a.body)
	assert.Equal(t, "loop_detected", a.code(t))
	assert.Contains(t, a.body, "dpserve ranks remove")
	assert.EqualValues(t, 1, asked.Load())
}

// RP36: engines get a `Via` header with the cluster; a request that carries it already is answered with 508.
func TestViaNamesTheCluster(t *testing.T) {
	var got atomic.Value
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header["Via"])
		replies(200, wholeAnswer)(w, r)
	}}})
	for _, c := range []struct {
		via    string
		status int
		engine []string
	}{
		{"", 200, []string{"1.1 dpserve-n1"}},
		{"1.0 front, 1.1 dpserve-n10", 200, []string{"1.0 front, 1.1 dpserve-n10", "1.1 dpserve-n1"}},
		{"1.1 dpserve-n1", 508, nil},
		{"1.0 front (a b),1.1 dpserve-n1 , 1.1 last", 508, nil},
	} {
		got.Store([]string(nil))
		var header []string
		if c.via != "" {
			header = []string{"Via", c.via}
		}
		assert.Equal(t, c.status, g.post("/v1/chat/completions", chatBody, header...).status, c.via)
		assert.Equal(t, c.engine, got.Load(), c.via)
	}
	probe, err := http.NewRequestWithContext(t.Context(), http.MethodGet, g.url+"/health", nil)
	require.NoError(t, err)
	probe.Header.Set("Via", "1.1 dpserve-n1")
	assert.Equal(t, 508, g.do(probe).status, "a rank with this URL never becomes ready")
}
