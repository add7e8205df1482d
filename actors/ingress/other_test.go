package ingress

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
)

// echo is an engine that answers every request with what it has got.
func echo(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "text/plain")
	_, _ = fmt.Fprintf(w, "%s %s %s %s", r.Method, r.RequestURI, r.Header.Get("Content-Type"), body)
}

// send makes a request of any kind.
func (g *rig) send(method, path, contentType, body string) answer {
	req, err := http.NewRequestWithContext(g.t.Context(), method, g.url+path, strings.NewReader(body))
	require.NoError(g.t, err)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	return g.do(req)
}

// form is a form with the given fields, and its content type.
func form(t *testing.T, fields ...string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		require.NoError(t, w.WriteField(fields[i], fields[i+1]))
	}
	require.NoError(t, w.Close())
	return b.String(), w.FormDataContentType()
}

// TestEveryPathIsPassedOn: an engine gets method, path, query, content type and body as the client wrote
// them, whether its rank is of this node or of another one.
func TestEveryPathIsPassedOn(t *testing.T) {
	for _, isFar := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%v", isFar), func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{echo}, far: isFar})
			sound, formType := form(t, "file", "RIFF", "model", "demo")
			for _, c := range []struct{ method, path, kind, body, want string }{
				{"POST", "/v1/embeddings", "application/json", `{"input": "x"}`, ""},
				{"POST", "/v1/responses", "application/json", `{"input":"x","store":false}`, ""},
				{"POST", "/v1/messages?beta=true", "application/json", `{"messages":[],"max_tokens":1}`, ""},
				{"POST", "/v1/messages/count_tokens", "application/json", `{"messages":[]}`, ""},
				{"POST", "/generate", "application/json", `{"text":"x","stream":false}`, ""},
				{"POST", "/rerank", "application/json", `{"query":"x","documents":["y"]}`, ""},
				{"POST", "/invocations", "application/json", `{"prompt":"x"}`, ""},
				{"POST", "/inference/v1/generate", "application/json", `{"token_ids":[1,2]}`, ""},
				{"POST", "/v1/audio/transcriptions", formType, sound, ""},
				{"POST", "/a/b;c", "text/plain", "not JSON", "400"},
				{"POST", "/anything", "text/plain", "not JSON", ""},
				{"POST", "/anything", "application/json", `[1]`, ""},
				{"POST", "/anything", "", "", ""},
				{"GET", "/get_model_info?a=b;c&d=%2e%2e%2F", "", "", ""},
				{"GET", "/v1/responses/resp_0/input_items?limit=2", "", "", ""},
				{"POST", "/v1/responses/resp_0/cancel", "", "", ""},
				{"DELETE", "/v1/responses/resp_0", "", "", ""},
				{
					"POST", "//v1//embeddings/", "application/json", `{}`,
					"POST /v1/embeddings application/json {}",
				},
				{"GET", "/", "", "", ""},
			} {
				a := g.send(c.method, c.path, c.kind, c.body)
				if c.want == "400" {
					assert.Equal(t, 400, a.status, c.path)
					continue
				}
				want := c.want
				if want == "" {
					want = fmt.Sprintf("%s %s %s %s", c.method, c.path, c.kind, c.body)
				}
				assert.Equal(t, 200, a.status, c.path)
				assert.Equal(t, want, a.body, c.path)
			}
		})
	}
}

// CC16: on every route a bad body, form or method is a typed error in the route's own shape, and no engine is
// asked; an engine's own 404 reaches the client, and counts against no rank.
func TestBadInputOfEveryRoute(t *testing.T) {
	var asked atomic.Int32
	lacks := func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		replies(404, `{"detail":"Not Found"}`)(w, r)
	}
	g := newRig(t, options{engines: []http.HandlerFunc{lacks}, limits: Limits{MaxBody: 1 << 20}})
	other := demoApp()
	other.Name, other.Model.ID = "other", "other-model"
	g.deploy(other, 1)
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 2 }, "both are known")
	noModel, formType := form(t, "file", "RIFF")
	twice, twiceType := form(t, "model", "demo", "model", "other-model")
	json, long := "application/json", strings.Repeat("x", 1<<20)
	for _, path := range []string{
		"/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/generate",
		"/rerank", "/v1/score", "/pooling", "/classify", "/v1/audio/speech", "/v1/audio/transcriptions",
		"/invocations", "/anything",
	} {
		for name, c := range map[string]struct {
			method, kind, body string
			status             int
			code               string
		}{
			"no body":         {"POST", json, "", 400, "invalid_request"},
			"wrong JSON":      {"POST", json, `{"model":"demo",`, 400, "invalid_request"},
			"a field twice":   {"POST", json, `{"model":"demo","model":"demo"}`, 400, "invalid_request"},
			"no model":        {"POST", json, `{}`, 400, "invalid_request"},
			"wrong model":     {"POST", json, `{"model":"nobody"}`, 404, "model_not_found"},
			"too large":       {"POST", json, `{"x":"` + long + `"}`, 413, "body_too_large"},
			"form, no model":  {"POST", formType, noModel, 400, "invalid_request"},
			"form, two":       {"POST", twiceType, twice, 400, "invalid_request"},
			"no end":          {"POST", formType, noModel[:len(noModel)/2], 400, "invalid_request"},
			"no boundary":     {"POST", "multipart/form-data", noModel, 400, "invalid_request"},
			"other boundary":  {"POST", "multipart/form-data; boundary=x", noModel, 400, "invalid_request"},
			"another method":  {"DELETE", "", "", 405, "invalid_request"},
			"an engine lacks": {"POST", json, `{"model":"demo"}`, 404, ""},
		} {
			before := asked.Load()
			a := g.send(c.method, path, c.kind, c.body)
			assert.Equal(t, c.status, a.status, "%s: %s: %s", path, name, a.body)
			if c.code == "" {
				assert.Equal(t, before+1, asked.Load(), path)
				assert.JSONEq(t, `{"detail":"Not Found"}`, a.body)
				continue
			}
			assert.Equal(t, before, asked.Load(), "%s: %s", path, name)
			assert.Contains(t, a.body, `"code":"`+c.code+`"`, path)
			isAnthropic := strings.HasPrefix(path, "/v1/messages")
			assert.Equal(t, isAnthropic, strings.HasPrefix(a.body, `{"type":"error"`), path)
		}
	}
	ejected, out := g.leftOut()
	assert.Zero(t, ejected+out, "what an engine lacks counts against no rank")
}

// TestPathsThatAreNoRoutes: what steers an engine, a path that hides another one, a websocket and other
// methods are answered without an engine.
func TestPathsThatAreNoRoutes(t *testing.T) {
	engine := func(_ http.ResponseWriter, r *http.Request) { t.Errorf("an engine got %s", r.RequestURI) }
	g := newRig(t, options{engines: []http.HandlerFunc{engine}})
	prefixed := demoApp()
	prefixed.Name, prefixed.Model.ID, prefixed.RoutePrefix = "team", "team-model", "/team/a"
	g.deploy(prefixed, 1)
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 2 }, "both are known")
	for _, path := range []string{
		"/sleep", "//sleep/", "/%73leep", "/SLEEP", "/v1%2Fload_lora_adapter", "/team/a/flush_cache",
		"/team/a//sleep", "/update_weights_from_disk", "/hicache/storage-backend/clear", "/metrics",
	} {
		for _, method := range []string{"GET", "POST"} {
			a := g.send(method, path, "", `{"model":"demo"}`)
			assert.Equal(t, 403, a.status, path)
			assert.Equal(t, "route_denied", a.code(t), path)
		}
	}
	assert.Contains(t, g.send("POST", "/sleep", "", "").body, "`dpserve ranks call demo /sleep`")
	for _, path := range []string{
		"/v1/../sleep", "/v1/%2e%2e/sleep", "/%2e/sleep", "/sleep;x", "/sleep%00", "/%2573leep", "/a%5csleep",
		"/team/a/../sleep", "/" + strings.Repeat("x", 3000),
	} {
		a := g.send("POST", path, "", `{"model":"demo"}`)
		assert.Equal(t, 400, a.status, path)
		assert.Equal(t, "invalid_request", a.code(t), path)
	}
	assert.Equal(t, 414, g.send("GET", "/x?"+strings.Repeat("x", 4096), "", "").status)
	a := g.get("/v1/chat/completions")
	assert.Equal(t, 405, a.status)
	assert.Equal(t, "POST", a.header.Get("Allow"))
	a = g.send("PUT", "/v1/responses/resp_0", "", "")
	assert.Equal(t, 405, a.status)
	assert.Equal(t, "GET, HEAD, DELETE", a.header.Get("Allow"))
	a = g.send("POST", "/health", "", "")
	assert.Equal(t, 405, a.status)
	assert.Equal(t, "GET", a.header.Get("Allow"))
	assert.Equal(t, 200, g.get("//health/").status)
	assert.Equal(t, 200, g.send("POST", "/ping", "", "").status)
	a = g.send("OPTIONS", "/v1/embeddings", "", "")
	assert.Equal(t, 204, a.status)
	assert.Contains(t, a.header.Get("Allow"), "POST")
	for _, path := range []string{"/v1/realtime", "/v1/chat/completions", "/v1/messages"} {
		resp, body := g.raw(t, "GET "+path+" HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"+
			"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n", false)
		assert.Equal(t, 426, resp.StatusCode, path)
		assert.Contains(t, body, "websockets are not passed on")
	}
	assert.Zero(t, strings.Count(g.logs.String(), "level=WARN"))
}

// TestStreamsOfEveryRoute: events pass as they come, an end that lacks the route's last event is a cut, and a
// stream that is no events passes as it comes too.
func TestStreamsOfEveryRoute(t *testing.T) {
	created := "event: response.created\ndata: {\"type\":\"response.created\",\"response\":" +
		"{\"id\":\"r\"}}\n\n"
	delta := "data: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n"
	done := "data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":3," +
		"\"output_tokens\":2}}}\n\n"
	begin := "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{}}\n\n"
	block := "data: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"x\"}}\n\n"
	stop := "data: {\"type\":\"message_stop\"}\n\n"
	for name, c := range map[string]struct {
		path, sent, last string
		cut              bool
	}{
		"responses":        {"/v1/responses", created + delta + done, "", false},
		"responses, cut":   {"/v1/responses", created + delta, `"type":"error"`, true},
		"messages":         {"/v1/messages", begin + "event: ping\n\n" + block + stop, "", false},
		"messages, cut":    {"/v1/messages", begin + block, "event: error\n", true},
		"unknown":          {"/v1/anything", "data: a\n\ndata: b\n\n", "", false},
		"generate":         {"/generate", "data: {\"text\":\"x\"}\n\ndata: [DONE]\n\n", "", false},
		"sound, no length": {"/v1/audio/speech", strings.Repeat("RIFF", 9000), "", false},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
				if w.Header().Set("Content-Type", "text/event-stream"); strings.HasPrefix(name, "sound") {
					w.Header().Set("Content-Type", "audio/wav")
				}
				for i := 0; i < len(c.sent); i += 100 {
					_, _ = io.WriteString(w, c.sent[i:min(i+100, len(c.sent))])
					_ = http.NewResponseController(w).Flush()
				}
			}}})
			a := g.send("POST", c.path, "application/json", `{"stream":true,"input":"x"}`)
			assert.Equal(t, 200, a.status)
			assert.Equal(t, c.cut, a.err != nil, "%v", a.err)
			assert.True(t, strings.HasPrefix(a.body, c.sent), a.body)
			if c.last != "" {
				assert.Contains(t, a.body[len(c.sent):], c.last)
			}
		})
	}
}

// responder is an engine that keeps responses under ids that begin with its name.
type responder struct {
	name string
	mu   sync.Mutex
	made []string
	log  []string
}

func (e *responder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.log = append(e.log, r.Method+" "+r.URL.Path)
	if r.URL.Path == "/v1/responses" {
		e.made = append(e.made, fmt.Sprintf("resp_%s_%d", e.name, len(e.made)))
		replies(200, `{"id":"`+e.made[len(e.made)-1]+`","output":[]}`)(w, r)
		return
	}
	for _, id := range e.made {
		if strings.HasPrefix(r.URL.Path, "/v1/responses/"+id) {
			replies(200, `{"id":"`+id+`"}`)(w, r)
			return
		}
	}
	replies(404, `{"error":{"message":"no such response"}}`)(w, r)
}

// TestResponsesStayOnTheirRank: whoever asks for a response, or goes on from it, reaches the rank that has
// made it, also if the ingress has not seen it before; an unknown one is the engine's own 404, and store:
// false needs no memory.
func TestResponsesStayOnTheirRank(t *testing.T) {
	engines := []*responder{{name: "a"}, {name: "b"}, {name: "c"}}
	g := newRig(t, options{engines: []http.HandlerFunc{
		engines[0].ServeHTTP, engines[1].ServeHTTP, engines[2].ServeHTTP,
	}, app: func(a *app.Application) { a.Routing.Policy = "round-robin" }})
	ids := map[string]string{} // rank → id
	for range 3 {
		a := g.send("POST", "/v1/responses", "", `{"model":"demo","input":"x"}`)
		require.Equal(t, 200, a.status, a.body)
		ids[a.header.Get("X-Dpserve-Rank")] = strings.Split(a.body, `"`)[3]
	}
	require.Len(t, ids, 3)
	check := func() {
		for rank, id := range ids {
			for range 2 {
				for _, a := range []answer{
					g.get("/v1/responses/" + id), g.get("/v1/responses/" + id + "/input_items"),
					g.send("POST", "/v1/responses/"+id+"/cancel", "", ""),
					g.send("DELETE", "/v1/responses/"+id, "", ""),
					g.send("POST", "/v1/responses", "",
						`{"model":"demo","input":"y","previous_response_id":"`+id+`"}`),
				} {
					assert.Equal(t, 200, a.status, a.body)
					assert.Equal(t, rank, a.header.Get("X-Dpserve-Rank"), id)
				}
			}
		}
	}
	check()
	g.in.responses.mu.Lock()
	g.in.responses.homes, g.in.responses.order = nil, nil // as at an ingress that has begun a moment ago
	g.in.responses.mu.Unlock()
	check()
	a := g.get("/v1/responses/resp_nobody")
	assert.Equal(t, 404, a.status)
	assert.Contains(t, a.body, "no such response")
	before := len(g.in.responses.order)
	assert.Equal(t, 200, g.send("POST", "/v1/responses", "", `{"input":"x","store":false}`).status)
	assert.Len(t, g.in.responses.order, before)
}

// TestRanksAreAskedForAResponseTogether: the first rank that has it ends the questions to the others, and no
// rank waits for the answer of another one.
func TestRanksAreAskedForAResponseTogether(t *testing.T) {
	var asked atomic.Int32
	all, home := make(chan struct{}), atomic.Int32{}
	engine := func(w http.ResponseWriter, r *http.Request) {
		n := asked.Add(1)
		if n == 3 {
			close(all)
		}
		<-all
		if n == 1 {
			home.Store(int32(r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr).Port))
		}
		if n == 1 || n > 3 {
			replies(200, `{"id":"resp_x"}`)(w, r)
			return
		}
		<-r.Context().Done()
	}
	g := newRig(t, options{engines: []http.HandlerFunc{engine, engine, engine}})
	a := g.get("/v1/responses/resp_x")
	assert.Equal(t, 200, a.status, a.body)
	i, err := strconv.Atoi(a.header.Get("X-Dpserve-Rank"))
	require.NoError(t, err)
	assert.Contains(t, g.replicas[i].url, fmt.Sprintf(":%d", home.Load()))
	assert.EqualValues(t, 4, asked.Load())
}

// TestResponseHomesAreBounded: the oldest response is forgotten.
func TestResponseHomesAreBounded(t *testing.T) {
	m := responseHomes{}
	for i := range 2*maxResponseHomes + 5 {
		m.put(fmt.Appendf(nil, "resp_%d", i), responseHome{app: "demo", incarnation: uint64(i)})
	}
	assert.Len(t, m.homes, maxResponseHomes)
	assert.Len(t, m.order, maxResponseHomes)
	assert.Empty(t, m.get(fmt.Sprintf("resp_%d", maxResponseHomes+4)).app)
	for _, i := range []int{maxResponseHomes + 5, 2*maxResponseHomes + 4} {
		assert.EqualValues(t, i, m.get(fmt.Sprintf("resp_%d", i)).incarnation)
	}
}

// TestAPostOfUnknownMeaningIsSentOnce: dpserve does not know what it changes. Another engine is asked only if
// the first one took no connection, or was full.
func TestAPostOfUnknownMeaningIsSentOnce(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request)
		times  int
		status int
	}{
		"500":  {replies(500, `{"error":{"message":"x"}}`), 1, 500},
		"cut":  {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, 1, 502},
		"full": {replies(429, `{"error":{"message":"too many requests"}}`), 2, 200},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			asked := 0
			engine := func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				asked++
				isSecond := asked == 2
				mu.Unlock()
				if isSecond {
					echo(w, r)
					return
				}
				c.answer(w, r)
			}
			g := newRig(t, options{engines: []http.HandlerFunc{engine, engine}, level: -8})
			a := g.send("POST", "/v1/anything", "application/json", `{"model":"demo"}`)
			assert.Equal(t, c.status, a.status, a.body)
			mu.Lock()
			defer mu.Unlock()
			assert.Equal(t, c.times, asked)
		})
	}
}
