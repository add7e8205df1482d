package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/problem"
)

// fakeRouters records requests and answers from its fields.
type fakeRouters struct {
	mu     sync.Mutex
	asked  []any
	fail   error
	parts  []client.Part
	runs   []client.Run
	broken error // returned after parts and runs
	hold   bool  // generate waits for its context after the parts
}

var _ api.Routers = (*fakeRouters)(nil)

func (r *fakeRouters) note(v any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked = append(r.asked, v)
	return r.fail
}

func (r *fakeRouters) Explain(_ context.Context, app string, q *client.Query) (*client.Explanation, error) {
	return &client.Explanation{App: app, Pick: "0/1"}, r.note(q)
}

func (r *fakeRouters) Decisions(_ context.Context, _ string, most int) ([]client.Replay, error) {
	return []client.Replay{{RequestID: "r1", Pick: "0/1", HitTokens: most}}, nil
}

func (r *fakeRouters) Reset(_ context.Context, app string) (client.ResetResult, error) {
	return client.ResetResult{App: app, Ranks: 4}, r.note("reset")
}

func (r *fakeRouters) Router(_ context.Context, app string) (client.Info, error) {
	info := client.Info{App: app, Policy: "kv"}
	if app == "timed" {
		info.CostModel = &client.CostModel{
			Preset: "dense", Prefill: 1.5, Decode: 1, PrefillSamples: 2, AgeS: 0.5, Error: 0.25,
			Ranks: []client.WorkerSpeed{{Worker: "0/1", Slow: 2}},
		}
	}
	return info, r.note("router")
}

func (r *fakeRouters) BestWorker(_ context.Context, _ string, q *client.BestWorkerRequest,
) (client.Worker, error) {
	return client.Worker{Worker: "0/1", RequestID: q.RequestID}, r.note(q)
}

func (r *fakeRouters) PotentialLoads(_ context.Context, _ string, ids []uint32,
) ([]client.PotentialLoad, error) {
	return nil, r.note(ids)
}

func (r *fakeRouters) MarkPrefillComplete(_ context.Context, _, id string) error {
	return r.note("mark " + id)
}
func (r *fakeRouters) Free(_ context.Context, _, id string) error { return r.note("free " + id) }

func (r *fakeRouters) DumpEvents(_ context.Context, _ string, emit func(*client.Run) error) (bool, error) {
	if err := r.note("dump"); err != nil {
		return false, err
	}
	for i := range r.runs {
		if err := emit(&r.runs[i]); err != nil {
			return false, err
		}
	}
	return true, r.broken
}

func (r *fakeRouters) Generate(ctx context.Context, _ string, q *msg.Generate,
	emit func(*client.Part) error,
) error {
	if err := r.note(q); err != nil {
		return err
	}
	for i := range r.parts {
		if err := emit(&r.parts[i]); err != nil {
			return err
		}
	}
	if r.hold {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return r.broken
}

const routersPath = "/api/v1/routers/demo"

func ask(t *testing.T, h http.Handler, method, path, body string) *httptest.ResponseRecorder {
	t.Helper()
	return request{
		method: method, target: path, body: body, header: map[string]string{"Host": "127.0.0.1"},
	}.send(t, h)
}

// TestRouterAnswers pins the JSON of each route.
func TestRouterAnswers(t *testing.T) {
	r := &fakeRouters{}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	for _, c := range []struct{ method, path, body, want string }{
		{
			"GET", "", "",
			`{"apiVersion":"dpserve/v1","app":"demo","policy":"kv","preset":"","identity":"","reads":null,` +
				`"ranks":0,"ready":0,"queued":0,"reservations":0,"imbalance":0,` +
				`"streams":{"completions":false,"chat":false}}`,
		},
		{
			"POST", "/explain", `{"prompt":"x"}`,
			`{"apiVersion":"dpserve/v1","app":"demo","policy":"","tokens":0,"estimated":false,"blocks":0,` +
				`"decision":"","pick":"0/1","reason":"","ranks":null}`,
		},
		{"POST", "/reset", ``, `{"apiVersion":"dpserve/v1","app":"demo","ranks":4}`},
		{
			"POST", "/best_worker", `{"token_ids":[1],"request_id":"r"}`,
			`{"apiVersion":"dpserve/v1","worker":"0/1","group":0,"dp_rank":0,"overlap_blocks":0,` +
				`"hit_tokens":0,"block_size":0,"reason":"","node":"","url":"","addressing":"",` +
				`"request_id":"r"}`,
		},
		{"POST", "/potential_loads", `{"token_ids":[1]}`, `{"apiVersion":"dpserve/v1","loads":[]}`},
		{"POST", "/potential_loads", `{}`, `{"apiVersion":"dpserve/v1","loads":[]}`},
		{"POST", "/get_potential_loads", `{}`, `{"apiVersion":"dpserve/v1","loads":[]}`},
		{
			"POST", "/best_worker_id", `{"token_ids":[1]}`,
			`{"apiVersion":"dpserve/v1","worker":"0/1","group":0,"dp_rank":0,"overlap_blocks":0,` +
				`"hit_tokens":0,"block_size":0,"reason":"","node":"","url":"","addressing":""}`,
		},
		{
			"POST", "/find_matches_for_request", `{"token_ids":[1]}`,
			`{"apiVersion":"dpserve/v1","block_size":0,"blocks":0,"scores":{}}`,
		},
		{
			"POST", "/mark_prefill_complete", `{"request_id":"r"}`,
			`{"apiVersion":"dpserve/v1","request_id":"r","status":"prefill_complete"}`,
		},
		{
			"POST", "/free", `{"request_id":"r"}`,
			`{"apiVersion":"dpserve/v1","request_id":"r","status":"freed"}`,
		},
	} {
		rec := ask(t, h, c.method, routersPath+c.path, c.body)
		assert.Equal(t, http.StatusOK, rec.Code, c.path)
		assert.Equal(t, c.want+"\n", rec.Body.String(), c.path)
	}
	assert.Equal(t, []any{"mark r", "free r"}, r.asked[len(r.asked)-2:])
	assert.Contains(t, ask(t, h, "GET", "/api/v1/routers/timed", "").Body.String(),
		`"cost_model":{"preset":"dense","prefill":1.5,"decode":1,"prefill_samples":2,"decode_samples":0,`+
			`"age_s":0.5,"error":0.25,"ranks":[{"worker":"0/1","slow":2}]}`)
}

// The Router hashes the bytes of a prompt, so a client must not rewrite them.
func TestExplainSendsTheBytesOfTheRequest(t *testing.T) {
	r := &fakeRouters{}
	_, c := serve(t, api.Config{Backend: newBackend(), Routers: r})
	for _, body := range []string{
		`{"prompt":"x"}`, "{\n  \"prompt\" : \"a  b\" }", `{"prompt":"<b> & \u003c é"}`, `{ }`,
	} {
		for _, q := range []client.Query{
			{Request: []byte(body)}, {Request: []byte(body), Route: "/v1/completions", Worker: "0/1"},
		} {
			_, err := c.Router("demo").Explain(t.Context(), q)
			require.NoError(t, err)
			assert.Equal(t, &q, r.asked[len(r.asked)-1])
		}
	}
	_, err := c.Router("demo").Explain(t.Context(), client.Query{Request: []byte(`{"prompt":`)})
	require.ErrorContains(t, err, "not JSON")
}

// Bad input never reaches the Routers, and each answer has a hint.
func TestRouterBadInput(t *testing.T) {
	r := &fakeRouters{}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	long := `{"token_ids":[` + strings.Repeat("1,", 1<<20) + `1]}`
	for _, c := range []struct {
		method, path, body string
		status             int
		text               string
	}{
		{"POST", "/explain", ``, 400, "the body is empty"},
		{"POST", "/explain", `[]`, 400, "the body is not a JSON object"},
		{"POST", "/explain", `{`, 400, "the body ends too early"},
		{"POST", "/explain", `{"prompt":"x"} x`, 400, "something follows the JSON object"},
		{"POST", "/explain", `{"prompt":"x"}{}`, 400, "something follows the JSON object"},
		{"POST", "/explain", `{}`, 400, "there is nothing to explain"},
		{"POST", "/explain", `{"prompt":"x","replay":"y"}`, 400, "2 requests at once"},
		{"POST", "/explain", `{"promt":"x"}`, 400, `did you mean \"prompt\"?`},
		{"POST", "/explain", `{"Prompt":"x"}`, 400, `unknown key \"Prompt\"`},
		{"POST", "/explain", `{"prompt":"x","prompt":"y"}`, 400, `key \"prompt\" is given twice`},
		{"POST", "/explain", `{"prompt":7}`, 400, "prompt cannot be a JSON number"},
		{"POST", "/explain", `{"token_ids":[]}`, 400, "token_ids is empty"},
		{"POST", "/explain", `{"token_ids":[-1]}`, 400, "cannot be a JSON number -1"},
		{"POST", "/explain", `{"token_ids":[4294967296]}`, 400, "cannot be a JSON number 4294967296"},
		{"POST", "/explain", `{"token_ids":[1],"route":"/v1/completions"}`, 400, "route and headers go with"},
		{"POST", "/explain", `{"replay":"x","model":"m"}`, 400, "model goes with"},
		{"POST", "/explain", `{"token_ids":[1],"router_config_override":{"weight":1}}`, 400, "unknown field"},
		{"POST", "/explain?x=1", `{"prompt":"x"}`, 400, "unknown query key"},
		{"POST", "/explain", long, 413, "more than 1048576"},
		{"POST", "/reset?hard=true", ``, 400, "unknown query key"},
		{"GET", "?x=1", ``, 400, "unknown query key"},
		{"POST", "/best_worker", `{}`, 400, "token_ids is empty"},
		{"POST", "/best_worker", `{"token_ids":null}`, 400, "token_ids is empty"},
		{"POST", "/best_worker", `{"token_ids":"x"}`, 400, "token_ids cannot be a JSON string"},
		{"POST", "/best_worker", `{"tokens":[1]}`, 400, "unknown key"},
		{"POST", "/potential_loads", `{"token_ids":{}}`, 400, "token_ids cannot be a JSON object"},
		{"POST", "/potential_loads", long, 413, "more than 1048576"},
		{"POST", "/mark_prefill_complete", `{}`, 400, "request_id is missing"},
		{"POST", "/free", `{"request_id":7}`, 400, "request_id cannot be a JSON number"},
		{"POST", "/free", `null`, 400, "the body is not a JSON object"},
		{"GET", "/dump_events?x=1", ``, 400, "unknown query key"},
		{"POST", "/generate", `{}`, 400, "token_ids is empty"},
		{"POST", "/generate", `{"token_ids":[1],"sampling":[]}`, 400, "sampling cannot be a JSON array"},
		{"GET", "/generate", ``, 405, "does not take GET"},
		{"DELETE", "", ``, 405, "does not take DELETE"},
		{"POST", "/find_matches_for_request", `{}`, 400, "token_ids is empty"},
		{"POST", "/best_worker_ids", `{}`, 404, "does not serve POST"},
	} {
		rec := ask(t, h, c.method, routersPath+c.path, c.body)
		assert.Equal(t, c.status, rec.Code, "%s %s %.40s", c.method, c.path, c.body)
		assert.Contains(t, rec.Body.String(), c.text, "%s %s %.40s", c.method, c.path, c.body)
		var e struct{ Error struct{ Hint string } }
		require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &e))
		assert.NotEmpty(t, e.Error.Hint, "%s %s %.40s", c.method, c.path, c.body)
	}
	assert.Empty(t, r.asked)
	rec := ask(t, h, "POST", routersPath+"/explain", `{"prompt":"`+strings.Repeat("x", 17<<20)+`"}`)
	assert.Equal(t, http.StatusRequestEntityTooLarge, rec.Code)

	without := api.NewServer(api.Config{Backend: newBackend()}).Handler()
	assert.Equal(t, http.StatusNotFound, ask(t, without, "GET", routersPath, "").Code)
}

// Errors keep their code, also on routes that stream.
func TestRouterErrorsKeepTheirCode(t *testing.T) {
	r := &fakeRouters{fail: problem.New(problem.Overloaded, "full").WithHint("later")}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	for _, c := range []struct{ method, path, body string }{
		{"GET", "", ""},
		{"POST", "/explain", `{"prompt":""}`},
		{"POST", "/reset", ""},
		{"POST", "/best_worker", `{"token_ids":[1]}`},
		{"POST", "/potential_loads", `{}`},
		{"POST", "/mark_prefill_complete", `{"request_id":"r"}`},
		{"POST", "/free", `{"request_id":"r"}`},
		{"GET", "/dump_events", ""},
		{"POST", "/generate", `{"token_ids":[1]}`},
	} {
		rec := ask(t, h, c.method, routersPath+c.path, c.body)
		assert.Equal(t, http.StatusServiceUnavailable, rec.Code, c.path)
		assert.JSONEq(t,
			`{"apiVersion":"dpserve/v1","error":{"code":"overloaded","message":"full","hint":"later"}}`,
			rec.Body.String(), c.path)
	}
}

func TestDumpEvents(t *testing.T) {
	r := &fakeRouters{
		runs: []client.Run{
			{Worker: "0/1", Tier: "gpu", Blocks: []string{"a"}}, {
				Worker: "0/1", Tier: "sent", Parent: "a", Blocks: []string{"b"},
			},
		},
	}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	rec := ask(t, h, "GET", routersPath+"/dump_events", "")
	assert.JSONEq(t,
		`{"apiVersion":"dpserve/v1","app":"demo","events":[{"worker":"0/1","tier":"gpu","blocks":["a"]},`+
			`{"worker":"0/1","tier":"sent","parent":"a","blocks":["b"]}],"truncated":true}`,
		rec.Body.String())
	r.runs = nil
	rec = ask(t, h, "GET", routersPath+"/dump_events", "")
	assert.JSONEq(t, `{"apiVersion":"dpserve/v1","app":"demo","events":[],"truncated":true}`,
		rec.Body.String())
	r.runs, r.broken = []client.Run{{}}, errors.New("gone")
	assert.PanicsWithError(t, http.ErrAbortHandler.Error(),
		func() { ask(t, h, "GET", routersPath+"/dump_events", "") })
}

func TestGenerate(t *testing.T) {
	r := &fakeRouters{
		parts: []client.Part{
			{TokenIDs: []uint32{1}, Worker: "0/1"}, {TokenIDs: []uint32{}, FinishReason: "stop"},
		},
	}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	rec := ask(t, h, "POST", routersPath+"/generate", `{"token_ids":[1],"sampling":{"max_tokens":3}}`)
	assert.Equal(t, "text/event-stream", rec.Header().Get("Content-Type"))
	first := "data: {\"token_ids\":[1],\"worker\":\"0/1\"}\n\ndata: " +
		"{\"token_ids\":[],\"finish_reason\":\"stop\"}\n\n"
	assert.Equal(t, first+"data: [DONE]\n\n", rec.Body.String())
	r.broken = problem.New(problem.Upstream, "the answer broke off").WithHint("look")
	rec = ask(t, h, "POST", routersPath+"/generate", `{"token_ids":[1]}`)
	assert.Equal(t,
		first+`event: error`+"\n"+
			`data: {"apiVersion":"dpserve/v1","error":{"code":"upstream","message":"the answer broke off",`+
			`"hint":"look"}}`+"\n\n", rec.Body.String())
	r.parts, r.broken = nil, nil
	rec = ask(t, h, "POST", routersPath+"/generate", `{"token_ids":[1]}`)
	assert.Equal(t, http.StatusBadGateway, rec.Code)
}

// Over a real connection, a client that leaves and a server that closes both end the call.
func TestGenerateEndsWithItsClient(t *testing.T) {
	r := &fakeRouters{parts: []client.Part{{TokenIDs: []uint32{1}}}, hold: true}
	s, _ := serve(t, api.Config{Backend: newBackend(), Routers: r})
	post := func(ctx context.Context) *http.Response {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost,
			"http://"+s.Addr().String()+routersPath+"/generate", strings.NewReader(`{"token_ids":[1]}`))
		require.NoError(t, err)
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		return res
	}
	ctx, leave := context.WithCancel(t.Context())
	left := post(ctx)
	leave()
	require.NoError(t, left.Body.Close())
	res := post(t.Context())
	go func() { _ = s.Close() }()
	text, _ := io.ReadAll(res.Body) // the end of the body does not matter
	require.NoError(t, res.Body.Close())
	assert.Contains(t, string(text), `data: {"token_ids":[1]}`)
	assert.NotContains(t, string(text), "[DONE]")
	http.DefaultClient.CloseIdleConnections()
}

// No body causes a 500, and accepted bodies have exactly the known keys.
func FuzzRouterBody(f *testing.F) {
	for _, s := range []string{
		`{"prompt":"x"}`, `{"token_ids":[1,2],"worker":"0/1"}`, `{"request":{"a":[{}]},"headers":{"a":"b"}}`,
		`{"replay":"x"`, `{"prompt":"a","prompt":"b"}`, "\xff", `{"\u0070rompt":"x"}`,
	} {
		f.Add(s)
	}
	r := &fakeRouters{}
	h := api.NewServer(api.Config{Backend: newBackend(), Routers: r}).Handler()
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"/explain", "/best_worker", "/potential_loads", "/free"} {
			rec := ask(t, h, "POST", routersPath+path, body)
			switch rec.Code {
			case http.StatusOK:
				require.True(t, json.Valid([]byte(body)))
				require.Equal(t, byte('{'), bytes.TrimSpace([]byte(body))[0])
			case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
			default:
				t.Fatalf("%s: status %d: %s", path, rec.Code, rec.Body)
			}
		}
	})
}
