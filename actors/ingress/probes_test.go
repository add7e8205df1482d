package ingress

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/apikeys"
)

// RP17: load balancers, Kubernetes and probes written for Ray Serve or vLLM use these paths, with GET and
// HEAD.
func TestProbesAnswer(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	hidden := demoApp()
	hidden.Name, hidden.Model.ID, hidden.RoutePrefix = "hidden", "hidden-model", "/team/a"
	g.deploy(hidden, 1)
	other := demoApp()
	other.Name, other.Model.ID = "other", "other-model"
	g.deploy(other, 1)
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 3 }, "all are known")
	head := func(path string) answer {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, g.url+path, nil)
		require.NoError(t, err)
		return g.do(req)
	}
	readiness := []string{"/health", "/health_generate", "/healthz", "/readyz", "/ping", "/-/healthz"}
	for _, path := range append(readiness, "/livez", "/-/routes", "/v1/models", "/v1/models/",
		"/v1/models/demo", "/version") {
		assert.Equal(t, 200, g.get(path).status, path)
		a := head(path)
		assert.Equal(t, 200, a.status, path)
		assert.Empty(t, a.body)
		assert.NotEqual(t, "0", a.header.Get("Content-Length"), path)
	}
	assert.JSONEq(t, g.get("/v1/models").body, g.get("/v1/models/").body)
	assert.Equal(t, "success", g.get("/-/healthz").body)
	assert.JSONEq(t, `{"/": "demo,other", "/team/a": "hidden"}`, g.get("/-/routes").body)

	g.replicas[0].say(false, false, "ejected")
	for _, path := range readiness {
		a := g.get(path)
		assert.Equal(t, 503, a.status, path)
		assert.NotEmpty(t, a.header.Get("Retry-After"), path)
		assert.Equal(t, 503, head(path).status, path)
	}
	assert.Equal(t, 200, g.get("/livez").status, "the process lives")
}

// A path that steers the ranks is answered by whoever the node names, and before keys of clients are asked
// for; without one it is a path like any other.
func TestPathsThatSteer(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		keys:    func() *apikeys.Set { return &apikeys.Set{} },
	})
	assert.Equal(t, 401, g.get("/workers").status)
	g.in.steers = func(path string) http.Handler {
		if path != "/workers" {
			return nil
		}
		return replies(http.StatusTeapot, path)
	}
	a := g.get("/workers")
	assert.Equal(t, []any{http.StatusTeapot, "/workers"}, []any{a.status, a.body})
	assert.Equal(t, 401, g.get("/list_workers").status)
}

// RP17: /v1/models shows the length that fits into every ready rank, and none if no engine reports one.
func TestModelsTellTheirLength(t *testing.T) {
	e := replies(200, wholeAnswer)
	g := newRig(t, options{engines: []http.HandlerFunc{e, e, e}})
	length := func() (n float64, told bool) {
		var list struct{ Data []map[string]any }
		require.NoError(t, json.Unmarshal([]byte(g.get("/v1/models").body), &list))
		require.Len(t, list.Data, 1)
		n, told = list.Data[0]["max_model_len"].(float64)
		return n, told
	}
	_, told := length()
	assert.False(t, told)
	for i, n := range []int{8192, 4096, 0} {
		g.replicas[i].mu.Lock()
		g.replicas[i].length = n
		g.replicas[i].mu.Unlock()
		g.replicas[i].publish()
	}
	n, _ := length()
	assert.InDelta(t, 4096, n, 0)
	assert.Contains(t, g.get("/v1/models/demo").body, `"max_model_len":4096`)
	g.replicas[1].say(false, false, "ejected")
	n, _ = length()
	assert.InDelta(t, 8192, n, 0)
}
