package ingress

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

func TestModels(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		app:     func(a *app.Application) { a.Model.Aliases = []string{"org/alias"} },
	})
	a := g.get("/v1/models")
	require.Equal(t, 200, a.status)
	var list struct {
		Object string
		Data   []struct{ ID, Object, Root, Parent string }
	}
	require.NoError(t, json.Unmarshal([]byte(a.body), &list))
	assert.Equal(t, "list", list.Object)
	require.Len(t, list.Data, 2)
	assert.Equal(t, "demo", list.Data[0].ID)
	assert.Equal(t, "org/demo", list.Data[0].Root)
	assert.Equal(t, "demo", list.Data[1].Parent)
	assert.Equal(t, 200, g.get("/v1/models/org/alias").status)
	a = g.get("/v1/models/nope")
	assert.Equal(t, 404, a.status)
	assert.Equal(t, "model_not_found", a.code(t))
}

func TestTwoApplications(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	assert.Equal(t, 200, g.post("/v1/completions", `{"prompt":"x"}`).status,
		"the only application needs no model")
	other, hidden := demoApp(), demoApp()
	other.Name, other.Model.ID = "other", "other-model"
	hidden.Timeouts.QueueS = 0.1
	hidden.Name, hidden.Model.ID, hidden.RoutePrefix = "hidden", "hidden-model", "/team/a"
	g.deploy(other, 1)
	g.deploy(hidden, 1)
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 3 }, "both are known")

	a := g.post("/v1/completions", `{"prompt":"x"}`)
	assert.Equal(t, 400, a.status)
	assert.Contains(t, a.body, "demo, other-model")
	a = g.post("/v1/completions", `{"model":"nope","prompt":"x"}`)
	assert.Equal(t, 404, a.status)
	assert.Equal(t, "model_not_found", a.code(t))
	assert.Contains(t, a.body, "demo, other-model")
	assert.Equal(t, 404, g.post("/v1/completions", `{"model":"hidden-model","prompt":"x"}`).status,
		"only under its prefix")
	a = g.post("/team/a/v1/completions", `{"prompt":"x"}`)
	assert.Equal(t, 503, a.status, "known there, without a rank")
	assert.Equal(t, "hidden", a.header.Get("X-Dpserve-App"))
	assert.Contains(t, g.get("/team/a/v1/models").body, "hidden-model")
	assert.NotContains(t, g.get("/v1/models").body, "hidden-model")

	g.store.set(func(st *state.State) { st.Apps["demo"].Deleting = true })
	eventually(t, func() bool { return len(g.in.table.Load().routers) == 2 }, "deleting")
	assert.Equal(t, 404, g.post("/v1/chat/completions", chatBody).status)
	spec := []byte(`[{"name":"broken","routing":{"policy":"nope"}}]`)
	broken := &state.App{Name: "broken", Revision: 1, Spec: spec}
	g.store.set(func(st *state.State) { st.Apps["broken"] = broken })
	g.store.set(func(st *state.State) {
		delete(st.Apps, "demo")
		maps.DeleteFunc(st.Units, func(_ string, u *state.Unit) bool { return u.App == "demo" })
	})
	eventually(t, func() bool {
		g.in.appRoutersMu.RLock()
		defer g.in.appRoutersMu.RUnlock()
		return g.in.appRouters["demo"] == nil
	}, "forgotten")
	assert.Equal(t, 1, strings.Count(g.logs.String(), "cannot be served"))
	g.replicas[0].say(true, false, "")
	assert.Nil(t, g.in.findAppRouter("demo"), "what trails behind does not bring it back")
}

func TestNothingDeployed(t *testing.T) {
	g := newRig(t, options{noApp: true})
	assert.Equal(t, 200, g.get("/health").status)
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 404, a.status)
	assert.Contains(t, a.body, "dpserve deploy")
	assert.JSONEq(t, `{"object":"list","data":[]}`, g.get("/v1/models").body)
	assert.JSONEq(t, `{"version":"v-test"}`, g.get("/version").body)
}

// TestCompressedBodiesAreRefused: no engine unpacks them.
func TestCompressedBodiesAreRefused(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	a := g.post("/v1/chat/completions", "\x1f\x8b\x08", "Content-Encoding", "gzip")
	assert.Equal(t, 415, a.status)
	assert.Equal(t, "invalid_request", a.code(t))
	assert.Contains(t, a.body, "content-encoding gzip is not taken; send the body as it is")
	assert.Equal(t, "identity", a.header.Get("Accept-Encoding"))
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody, "Content-Encoding", "identity").status)
}

// TestWebPagesOfAnyOrigin: a browser gets the answers that it gets from vLLM, whatever the engine says.
func TestWebPagesOfAnyOrigin(t *testing.T) {
	engine := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://engine.example")
		replies(200, wholeAnswer)(w, r)
	}
	g := newRig(t, options{engines: []http.HandlerFunc{engine}})
	for _, path := range []string{"/v1/chat/completions", "/v1/models", "/nope"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, g.url+path, nil)
		require.NoError(t, err)
		req.Header.Set("Origin", "https://page.example")
		req.Header.Set("Access-Control-Request-Method", "POST")
		req.Header.Set("Access-Control-Request-Headers", "authorization,content-type")
		a := g.do(req)
		assert.Equal(t, 200, a.status, path)
		assert.Equal(t, "*", a.header.Get("Access-Control-Allow-Origin"))
		assert.Contains(t, a.header.Get("Access-Control-Allow-Methods"), "POST")
		assert.Equal(t, "authorization,content-type", a.header.Get("Access-Control-Allow-Headers"))
		a = g.post(path, chatBody, "Origin", "https://page.example")
		assert.Equal(t, []string{"*"}, a.header["Access-Control-Allow-Origin"], path)
	}
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 200, a.status)
	assert.NotContains(t, a.header, "Access-Control-Allow-Origin", "not a browser")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodOptions, g.url+"/v1/chat/completions", nil)
	require.NoError(t, err)
	assert.Equal(t, 204, g.do(req).status, "no preflight")
}

// SP8: bodies and headers that no engine should see are 400; what is only large passes unchanged.
func TestBadRequests(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	for _, body := range []string{
		``, `{`, `[]`, `{"model":"demo","model":"demo"}`,
		`{"model":"demo","n":129}`, `{"model":"demo","max_tokens":2147483649}`,
		`{"model":"demo","temperature":NaN}`,
	} {
		a := g.post("/v1/completions", body)
		assert.Equal(t, 400, a.status, body)
		assert.Equal(t, "invalid_request", a.code(t))
		assert.NotEmpty(t, a.header.Get("X-Request-Id"))
	}
	assert.Equal(t, 200, g.post("/v1/completions", `{"model":"demo","max_tokens":1000000000}`).status,
		"nothing is clamped")
	for _, h := range [][2]string{
		{"X-Dpserve-Timeout-Ms", "soon"},
		{"X-Dpserve-Timeout-Ms", "0"},
		{"X-Dpserve-Rank", "one"},
		{"X-Dpserve-Rank", "0/99999"},
	} {
		assert.Equal(t, 400, g.post("/v1/chat/completions", chatBody, h[0], h[1]).status, h)
	}
	a := g.post("/v1/chat/completions", chatBody, "X-Request-Id", "has space")
	assert.Equal(t, 200, a.status)
	assert.Len(t, a.header.Get("X-Request-Id"), 16)
	assert.Zero(t, g.replicas[0].inFlight())
}

func TestChangedPolicyKeepsTheAccounts(t *testing.T) {
	e := newGatedEngine()
	g := newRig(t, options{engines: []http.HandlerFunc{e.ServeHTTP}, max: 2})
	got := make(chan answer, 1)
	go func() { got <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "in flight")
	old := g.in.ensureAppRouter("demo").router.Load()
	a := demoApp()
	a.Routing.Policy = "least-loaded"
	g.deploy(a, 2)
	ar := g.in.ensureAppRouter("demo")
	eventually(t, func() bool { return ar.router.Load() != old }, "a new Router")
	eventually(t, func() bool {
		v := ar.router.Load().Snapshot()
		return len(v.Ranks) == 1 && v.Ranks[0].Load.O() == 1
	}, "it knows what is in flight")
	b := demoApp()
	b.Routing.Policy, b.Timeouts.QueueS = "least-loaded", 3
	kept := ar.router.Load()
	g.deploy(b, 3)
	eventually(t, func() bool { return ar.revision.Load().revision == 3 }, "a new revision")
	assert.Same(t, kept, ar.router.Load(), "the same Router")
	e.open <- struct{}{}
	assert.Equal(t, 200, (<-got).status)
	v := ar.router.Load().Snapshot()
	assert.Zero(t, v.Ranks[0].Load.O())
}

// TestTheNamedRankIsTakenUnderEveryPolicy: x-dpserve-rank pins a request to its rank, or is refused. Policy
// direct wants it.
func TestTheNamedRankIsTakenUnderEveryPolicy(t *testing.T) {
	for _, policy := range []string{"round-robin", "direct"} {
		t.Run(policy, func(t *testing.T) { takesTheNamedRank(t, policy) })
	}
}

func takesTheNamedRank(t *testing.T, policy string) {
	e := newGatedEngine()
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer), replies(200, wholeAnswer), e.ServeHTTP},
		max:     1, app: func(a *app.Application) { a.Routing.Policy = policy },
	})
	ask := func(path, rank string) answer { return g.post(path, chatBody, "X-Dpserve-Rank", rank) }
	for range 4 {
		a := ask("/v1/chat/completions", "0/1")
		require.Equal(t, 200, a.status, a.body)
		require.Equal(t, "1", a.header.Get("X-Dpserve-Rank"))
	}
	if policy == "direct" {
		assert.Equal(t, 400, g.post("/v1/chat/completions", chatBody).status)
	}
	a := ask("/tokenize", "0/0")
	assert.Equal(t, 200, a.status, a.body)
	assert.Equal(t, "0", a.header.Get("X-Dpserve-Rank"), "requests without work for the Router as well")
	for _, path := range []string{"/v1/chat/completions", "/tokenize"} {
		a = ask(path, "9/9")
		assert.Equal(t, 400, a.status, path)
		assert.Equal(t, "invalid_request", a.code(t))
		assert.Contains(t, a.body, "no rank 9/9 (it has 0/0 to 0/2)")
		for _, malformed := range []string{
			"1", "", "1/", "/1", "0/1/2", "0/1, 0/2", "-1/0", "0/x", "0/65536",
		} {
			assert.Equal(t, 400, ask(path, malformed).status, malformed)
		}
	}

	full := make(chan answer, 1)
	go func() { full <- ask("/v1/chat/completions", "0/2") }()
	eventually(t, func() bool { return g.replicas[2].inFlight() == 1 }, "in flight")
	a = ask("/v1/chat/completions", "0/2")
	assert.Equal(t, 503, a.status, "it goes nowhere else and does not wait")
	assert.Contains(t, a.body, "has all the requests that it may hold")
	assert.NotEmpty(t, a.header.Get("Retry-After"))
	e.open <- struct{}{}
	assert.Equal(t, 200, (<-full).status)

	g.replicas[1].say(false, false, "ejected")
	a = ask("/v1/chat/completions", "0/1")
	assert.Equal(t, 503, a.status)
	assert.Contains(t, a.body, "rank 0/1, which x-dpserve-rank names, is not ready")
	g.phase("demo/0/1", state.Starting, 2)
	assert.Equal(t, 400, ask("/v1/chat/completions", "0/7").status, "a unit on its way is no other rank")
}

// TestANewRouterKnowsTheRanks: a new Router has the ranks before any of them has sent a snapshot. A deploy
// that changes the policy refuses no request, not even under policy direct, which never waits.
func TestANewRouterKnowsTheRanks(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	g.feed.mu.Lock()
	g.feed.late = true
	g.feed.mu.Unlock()
	ar := g.in.ensureAppRouter("demo")
	for revision, policy := range []string{2: "least-loaded", 3: "direct"} {
		if policy == "" {
			continue
		}
		old, a := ar.router.Load(), demoApp()
		a.Routing.Policy = policy
		g.deploy(a, uint64(revision))
		eventually(t, func() bool { return ar.router.Load() != old }, "a new Router")
		assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody, "X-Dpserve-Rank", "0/0").status, policy)
	}
	g.replicas[0].publish()
	assert.Zero(t, ar.router.Load().Snapshot().Ranks[0].Load.O())
}

func TestGhostIsIgnored(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	r := g.replicas[0]
	r.reborn() // epoch 2
	g.phase("demo/0/0", state.Ready, 2)
	ar := g.in.ensureAppRouter("demo")
	eventually(t, ar.canServe, "up")
	r.mu.Lock()
	r.epoch = 1
	r.snapshot()
	r.epoch = 2
	r.mu.Unlock()
	assert.EqualValues(t, 2, ar.findRank(routing.ID(0, 0)).Epoch)
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	r.gone()
	assert.Nil(t, ar.findRank(routing.ID(0, 0)))
	assert.False(t, ar.canServe())
}

// raw sends bytes as they are and reads the answer.
func (g *rig) raw(t *testing.T, text string, closeWrite bool) (*http.Response, string) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	require.NoError(t, conn.SetDeadline(time.Now().Add(soon)))
	_, err = io.WriteString(conn, text)
	require.NoError(t, err)
	if closeWrite {
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	body, _ := io.ReadAll(resp.Body)
	require.NoError(t, resp.Body.Close())
	return resp, string(body)
}

// SP6: a body at the limit passes; one byte more is 413 before it is read, a length that lies is 400, and 101
// fields or 64 KiB and one byte of header are 431.
func TestLimitsOfBodyAndHeader(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		limits:  Limits{MaxBody: 1000}, timers: Timers{BodyStall: 100 * time.Millisecond},
	})
	fill := func(n int) string {
		head := `{"model":"demo","prompt":"`
		return head + strings.Repeat("x", n-len(head)-2) + `"}`
	}
	assert.Equal(t, 200, g.post("/v1/completions", fill(1000)).status)
	const post = "POST /v1/completions HTTP/1.1\r\nHost: h\r\n"
	resp, body := g.raw(t, "POST /sleep HTTP/1.1\r\nHost: h\r\nContent-Length: 5000\r\n\r\nstart", false)
	assert.Equal(t, 403, resp.StatusCode, body)
	assert.True(t, resp.Close, "an answer does not wait for a body that nobody wants")

	resp, body = g.raw(t, post+"Content-Length: 1001\r\n\r\n", false)
	assert.Equal(t, 413, resp.StatusCode, "before a byte of it is read")
	assert.Contains(t, body, "body_too_large")
	resp, body = g.raw(t, post+"Transfer-Encoding: chunked\r\n\r\n"+fmt.Sprintf(
		"%x\r\n%s\r\n0\r\n\r\n", 1001, fill(1001)), false)
	assert.Equal(t, 413, resp.StatusCode, body)
	resp, body = g.raw(t, post+"Transfer-Encoding: chunked\r\n\r\n"+fmt.Sprintf(
		"%x\r\n%s\r\n0\r\n\r\n", 900, fill(900)), false)
	assert.Equal(t, 200, resp.StatusCode, body)
	resp, body = g.raw(t, post+"Content-Length: 500\r\n\r\n"+fill(100), true)
	assert.Equal(t, 400, resp.StatusCode, body)
	resp, body = g.raw(t, post+"Content-Length: 500\r\n\r\n"+fill(100), false)
	assert.Equal(t, 408, resp.StatusCode, "a body that stands still")
	assert.Contains(t, body, "slow_request")

	many := func(n int) string {
		s := "GET /version HTTP/1.1\r\nHost: h\r\n"
		for i := range n - 1 {
			s += fmt.Sprintf("X-F%d: v\r\n", i)
		}
		return s + "\r\n"
	}
	resp, _ = g.raw(t, many(100), false)
	assert.Equal(t, 200, resp.StatusCode)
	resp, _ = g.raw(t, many(101), false)
	assert.Equal(t, 431, resp.StatusCode)
	sized := func(n int) string {
		head := "GET /version HTTP/1.1\r\nHost: h\r\nX-Big: "
		return head + strings.Repeat("b", n-len(head)-4) + "\r\n\r\n"
	}
	resp, _ = g.raw(t, sized(64<<10), false)
	assert.Equal(t, 200, resp.StatusCode)
	resp, _ = g.raw(t, sized(64<<10+1), false)
	assert.Equal(t, 431, resp.StatusCode)
}

func TestNoPromptInAnyLog(t *testing.T) {
	const secret = "tell nobody"
	bad := replies(500, `{"error":{"message":"engine text"}}`)
	g := newRig(t, options{engines: []http.HandlerFunc{bad, sends(textChunk, abortChunk)}, level: -8})
	for range 10 {
		g.post("/v1/chat/completions",
			`{"model":"demo","stream":true,"messages":[{"role":"user","content":"`+secret+`"}]}`,
			"Authorization", "Bearer dps_key")
	}
	g.post("/v1/completions", `{"model":"`+model1+`","prompt":"`+secret)
	assert.NotEmpty(t, g.logs.String())
	assert.NotContains(t, g.logs.String(), secret)
	assert.NotContains(t, g.logs.String(), "dps_key")
	assert.Contains(t, g.logs.String(), "engine text", "what the engine said goes to the log")
}

func TestPanicIsACutAndNotAnEnd(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	h := surface{g.in}.limitAndRecover(http.HandlerFunc(
		func(http.ResponseWriter, *http.Request) { panic("boom") }))
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	require.NoError(t, err)
	assert.PanicsWithValue(t, http.ErrAbortHandler, func() { h.ServeHTTP(nil, req) })
	assert.Contains(t, g.logs.String(), "boom")
}

func TestRequestIDsOfClients(t *testing.T) {
	for s, want := range map[string]bool{
		"a": true, "": false, "ü": false, "a\tb": false,
		strings.Repeat("x", 128): true, strings.Repeat("x", 129): false,
	} {
		assert.Equal(t, want, validRequestID(s), s)
	}
}

// TestDefaults: docs/api.md has the others (TestThePageHasEveryLimit).
func TestDefaults(t *testing.T) {
	tm := Timers{}.withDefaults()
	assert.Equal(t, 100*time.Second, tm.IdleOwned)
	assert.Equal(t, 4*time.Second, tm.IdleAttached)
	assert.Equal(t, 10*time.Second, tm.BudgetWindow)
	assert.Equal(t, 10, budgetShare)
	assert.Equal(t, 20, budgetFloor)
}

// RP10: a tokenize request is answered beside a full rank, and counts as no load.
func TestTokenizingTakesNoTicket(t *testing.T) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far %v", far), func(t *testing.T) {
			e := newGatedEngine()
			engine := func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.URL.Path, "tokenize") {
					replies(200, `{"tokens":[1]}`)(w, r)
					return
				}
				e.ServeHTTP(w, r)
			}
			g := newRig(t, options{engines: []http.HandlerFunc{engine}, max: 1, far: far})
			done := make(chan answer, 1)
			go func() { done <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
			eventually(t, func() bool { return g.replicas[0].inFlight() == 1 }, "the rank is full")
			for path, body := range map[string]string{
				"/tokenize":   `{"model":"demo","prompt":"some words"}`,
				"/detokenize": `{"model":"demo","tokens":[1,2]}`,
			} {
				a := g.post(path, body)
				assert.Equal(t, 200, a.status, a.body)
				assert.JSONEq(t, `{"tokens":[1]}`, a.body)
			}
			assert.Equal(t, 1, g.replicas[0].granted())
			assert.Equal(t, 1, g.in.ensureAppRouter("demo").router.Load().Snapshot().Ranks[0].Load.O())
			e.open <- struct{}{}
			assert.Equal(t, 200, (<-done).status)
		})
	}
}

func TestTokenizingIsTriedOnAnotherRank(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{resets, replies(200, `{"tokens":[1]}`)}})
	for range 20 {
		assert.Equal(t, 200, g.post("/tokenize", `{"model":"demo","prompt":"x"}`).status)
	}
	g.replicas[0].say(false, true, "crashed")
	g.replicas[1].say(false, true, "crashed")
	g.phase("demo/0/0", state.Failed, 1)
	g.phase("demo/0/1", state.Failed, 1)
	assert.Equal(t, 503, g.post("/tokenize", `{"model":"demo","prompt":"x"}`).status)
}
