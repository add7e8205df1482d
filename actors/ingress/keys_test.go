package ingress

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

const (
	annsKey = "sk-ann-0001"
	bobsKey = "sk-bob-0001"
)

// keys is the file of the tests below.
func keys(t *testing.T) func() *apikeys.Set {
	t.Helper()
	s, err := apikeys.Parse([]byte("ann " + annsKey + "\nbob " + bobsKey + " models=other\n"))
	require.NoError(t, err)
	return func() *apikeys.Set { return s }
}

// unread is a body of a request that must not be read.
type unread struct{ t *testing.T }

func (u unread) Read([]byte) (int, error) {
	u.t.Error("the body is read")
	return 0, io.EOF
}

func (u unread) Close() error { return nil }

// serveDirectly answers a request without a connection.
func serveDirectly(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

// metricsPage is what a scrape reads.
func metricsPage(g *rig) string {
	r := httptest.NewRequestWithContext(g.t.Context(), http.MethodGet, "/metrics", nil)
	return serveDirectly(g.in.metrics.Handler(), r).Body.String()
}

// SP2: every path but those of probes wants a key. Without a right one it is 401 in the shape of the route;
// no byte of the body is read, and no engine is asked.
func TestRequestsNeedAKey(t *testing.T) {
	var asked atomic.Int32
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		replies(200, wholeAnswer)(w, r)
	}}, keys: keys(t)})
	paths := []string{
		"/v1/models/demo", "/version", "/-/routes", "/nope", "/", "/health/../v1/models", "//health",
		"/sleep",
	}
	for r := openai.Completions; r < openai.Other; r++ {
		paths = append(paths, r.Paths()...)
	}
	for _, path := range paths {
		for _, c := range []struct{ name, value, text string }{
			{"Accept", "*/*", "wants an API key"},
			{"Authorization", "Bearer sk-eve-0001", "not valid"},
			{"X-Api-Key", annsKey + "x", "not valid"},
		} {
			for _, method := range []string{http.MethodGet, http.MethodPost} {
				r, err := http.NewRequestWithContext(t.Context(), method, g.url+path, unread{t})
				require.NoError(t, err)
				r.Header.Set(c.name, c.value)
				w := serveDirectly(g.in.handler, r)
				assert.Equal(t, 401, w.Code, path)
				assert.Contains(t, w.Body.String(), c.text, path)
				begins := `{"error":{"message":"`
				if shape := openai.RouteOf(path).Shape(); shape == openai.Anthropic {
					begins = `{"type":"error","error":{"type":"authentication_error","message":"`
				} else {
					isTyped := strings.Contains(w.Body.String(), `"type":"authentication_error"`)
					assert.Equal(t, shape == openai.OpenAI, isTyped, path)
				}
				assert.True(t, strings.HasPrefix(w.Body.String(), begins), path)
				assert.Contains(t, w.Body.String(), `"code":"invalid_api_key"`)
				assert.Equal(t, "Bearer", w.Header().Get("Www-Authenticate"))
			}
		}
	}
	for _, path := range []string{"/health", "/healthz", "/readyz", "/livez", "/ping", "/-/healthz"} {
		assert.Equal(t, 200, g.get(path).status, path)
	}
	assert.Zero(t, asked.Load())
	assert.Contains(t, metricsPage(g), `dpserve_requests_total{app="",code="401",route="messages"} 6`)
	assert.NotContains(t, g.logs.String(), "sk-", "no key in the log")
	preflight, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, g.url+"/v1/models", nil)
	require.NoError(t, err)
	preflight.Header.Set("Origin", "http://a.example")
	preflight.Header.Set("Access-Control-Request-Method", "POST")
	assert.Equal(t, 200, g.do(preflight).status, "browsers send no key with it")
}

// BenchmarkKey is what a key costs a request beside its look-up among 4,096 keys (goal: 1 µs), and what a
// refusal costs in all (goal: 1 ms).
func BenchmarkKey(b *testing.B) {
	var file strings.Builder
	for i := range 4096 {
		fmt.Fprintf(&file, "n%d sk-%08d\n", i%256, i)
	}
	set, err := apikeys.Parse([]byte(file.String()))
	require.NoError(b, err)
	g := newRig(b, options{noApp: true, keys: func() *apikeys.Set { return set }})
	r := httptest.NewRequestWithContext(b.Context(), http.MethodPost, "/v1/chat/completions", http.NoBody)
	for name, c := range map[string]struct {
		key string
		ask func()
	}{
		"admitted": {"sk-00004095", func() { _, _ = surface{g.in}.authenticate(r) }},
		"refused":  {"sk-no", func() { serveDirectly(g.in.handler, r) }},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.Header = http.Header{"X-Api-Key": {c.key}}
				c.ask()
			}
		})
	}
}

// SP2: the engine never sees the key; the log and the metrics have its name.
func TestTheKeyStaysHere(t *testing.T) {
	var got atomic.Value
	g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header.Clone())
		replies(400, `{"error":{"message":"no"}}`)(w, r)
	}}, keys: keys(t)})
	for _, field := range [][]string{
		{"Authorization", "Bearer " + annsKey},
		{"x-api-key", annsKey},
		{"api-key", annsKey},
		{"Authorization", "Bearer of-another", "x-api-key", annsKey},
	} {
		assert.Equal(t, 400, g.post("/v1/chat/completions", chatBody, field...).status)
		header, _ := got.Load().(http.Header)
		for _, name := range []string{"Authorization", "X-Api-Key", "Api-Key"} {
			assert.Empty(t, header.Values(name), name)
		}
	}
	assert.Contains(t, g.logs.String(), "key=ann")
	assert.NotContains(t, g.logs.String(), annsKey)
	page := metricsPage(g)
	assert.Contains(t, page, `dpserve_key_requests_total{key="ann"} 4`)
	assert.NotContains(t, page, annsKey)
}

// SP2: a key that may not use a model is told what it would be told if the model did not exist.
func TestAKeyIsForItsModels(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}, keys: keys(t)})
	other := demoApp()
	other.Name, other.Model.ID = "other", "other"
	other.Timeouts.QueueS = 0.1
	g.deploy(other, 1)
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 2 }, "both are known")
	bob, ann := []string{"x-api-key", bobsKey}, []string{"x-api-key", annsKey}
	refused := g.post("/v1/chat/completions", chatBody, bob...)
	unknown := g.post("/v1/chat/completions", strings.ReplaceAll(chatBody, `"demo"`, `"nope"`), bob...)
	assert.Equal(t, 404, refused.status)
	assert.Equal(t, "model_not_found", refused.code(t))
	assert.Equal(t, strings.ReplaceAll(refused.body, "demo", "nope"), unknown.body)
	assert.Equal(t, 404, g.get("/v1/models/demo", bob...).status)
	assert.Equal(t, 200, g.get("/v1/models/other", bob...).status)
	assert.NotContains(t, g.get("/v1/models", bob...).body, `"demo"`)
	assert.Contains(t, g.get("/v1/models", ann...).body, `"demo"`)
	assert.Equal(t, 503, g.post("/v1/chat/completions", strings.ReplaceAll(chatBody, `"demo"`, `"other"`),
		bob...).status, "it may ask for this model, which has no rank")
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody, ann...).status)
}

// SP2: a key is of use from the next request on after its file has changed; of names that went, no series
// stays.
func TestKeysChange(t *testing.T) {
	var current atomic.Pointer[apikeys.Set]
	before := keys(t)()
	current.Store(before)
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}, keys: current.Load})
	ask := func(key string) int {
		return g.post("/v1/chat/completions", chatBody, "x-api-key", key).status
	}
	assert.Equal(t, []int{200, 401}, []int{ask(annsKey), ask("sk-ann-0002")})
	next, err := apikeys.Parse([]byte("ann2 sk-ann-0002"))
	require.NoError(t, err)
	g.in.access.Replaced(before.Names(), next.Names())
	current.Store(next)
	assert.Equal(t, []int{401, 200}, []int{ask(annsKey), ask("sk-ann-0002")})
	lines := slices.DeleteFunc(strings.Split(metricsPage(g), "\n"), func(line string) bool {
		return !strings.HasPrefix(line, "dpserve_key_requests_total")
	})
	assert.Equal(t, []string{`dpserve_key_requests_total{key="ann2"} 1`}, lines)
}
