package api_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// fakeRanks records requests; the engine http://taken:1 is attached already, http://none:1 is unknown.
type fakeRanks struct {
	mu      sync.Mutex
	added   []string
	removed []api.RankRemoval
}

func (k *fakeRanks) AddRank(_ context.Context, name string, rank []byte) (client.RankChange, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.added = append(k.added, name+" "+string(rank))
	r, err := app.ParseRank(rank, "", "")
	if err != nil {
		return client.RankChange{}, err
	}
	if r.URL == "http://taken:1" {
		return client.RankChange{}, problem.New(problem.Conflict,
			"add a rank: %s is attached already, as edge/0/0", r.URL).
			WithHint("every rank is an engine of its own")
	}
	return client.RankChange{App: "edge", Rank: 2, URL: r.URL, Revision: 4}, nil
}

func (k *fakeRanks) RemoveRank(_ context.Context, _ string, r api.RankRemoval) (client.RankChange, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.removed = append(k.removed, r)
	if r.Rank.URL == "http://none:1" {
		return client.RankChange{}, problem.New(problem.NotFound,
			"there is no rank %s in edge", r.Rank).WithHint("there are others")
	}
	return client.RankChange{App: "edge", Rank: 2, URL: r.Rank.URL, Revision: 5}, nil
}

func (k *fakeRanks) Workers(_ context.Context, name string) ([]string, error) {
	if name == "empty" {
		return nil, nil
	}
	return []string{"http://a:1", "http://b:1"}, nil
}

func TestRanksByClient(t *testing.T) {
	k := &fakeRanks{}
	_, c := serve(t, api.Config{Backend: newBackend(), Ranks: k})
	ctx := t.Context()
	got, err := c.AddRank(ctx, "edge", []byte(`{"url": "http://h:1"}`))
	require.NoError(t, err)
	assert.Equal(t, client.RankChange{App: "edge", Rank: 2, URL: "http://h:1", Revision: 4}, got)
	assert.Equal(t, []string{`edge {"url": "http://h:1"}`}, k.added)
	three, second := 3, time.Second
	for _, r := range []client.RankRemoval{
		{URL: "http://h:1"},
		{URL: "http://h:1", Selector: &three, Deadline: &second},
		{Group: 1, Rank: 2, Deadline: new(time.Duration)},
	} {
		k.removed = nil
		_, err := c.RemoveRank(ctx, "edge", r)
		require.NoError(t, err)
		ref := app.RankRef{URL: r.URL, Selector: r.Selector, Group: r.Group, Rank: r.Rank}
		assert.Equal(t, []api.RankRemoval{{Rank: ref, Deadline: r.Deadline}}, k.removed)
	}
	_, err = c.AddRank(ctx, "edge", []byte(`{"url": "http://taken:1"}`))
	assert.Equal(t, client.CodeConflict, client.CodeOf(err))
	_, err = c.RemoveRank(ctx, "edge", client.RankRemoval{URL: "http://none:1"})
	assert.Equal(t, client.CodeNotFound, client.CodeOf(err))
	_, err = c.AddRank(ctx, "edge", []byte(`{"url": "nonsense"}`))
	require.ErrorContains(t, err, `url: found "nonsense", wanted http://HOST:PORT`)
}

func TestSGLangWorkerPaths(t *testing.T) {
	h := api.NewServer(api.Config{Backend: newBackend(), Ranks: &fakeRanks{}}).Handler()
	for _, c := range []struct {
		r    request
		code int
		kind string
		body string
	}{
		{
			request{method: "POST", target: "/add_worker?url=http://h:1"},
			200, "text/plain; charset=utf-8",
			"Successfully added worker: http://h:1",
		},
		{
			request{method: "POST", target: "/add_worker?url=http%3A%2F%2Fh%3A1%2F&app=edge"},
			200,
			"text/plain; charset=utf-8", "Successfully added worker: http://h:1",
		},
		{
			request{method: "POST", target: "/remove_worker?url=http://h:1"},
			200, "text/plain; charset=utf-8",
			"Successfully removed worker: http://h:1",
		},
		{
			request{method: "GET", target: "/list_workers"},
			200, "application/json",
			`{"urls":["http://a:1","http://b:1"]}` + "\n",
		},
		{
			request{method: "GET", target: "/list_workers?app=empty"},
			200, "application/json",
			`{"urls":[]}` + "\n",
		},
		{
			request{method: "POST", target: "/add_worker?url=http://taken:1"},
			409, "application/json",
			"is attached already",
		},
		{
			request{method: "POST", target: "/remove_worker?url=http://none:1"},
			404, "application/json",
			"there is no rank http://none:1 in edge",
		},
		{request{method: "POST", target: "/add_worker"}, 400, "application/json", "no url is given"},
		{
			request{method: "POST", target: "/add_worker?url=h:1"},
			400, "application/json",
			"wanted http://HOST:PORT",
		},
		{
			request{method: "POST", target: "/add_worker?url=http://h:1&ap=edge"},
			400, "application/json",
			`unknown query key \"ap\"`,
		},
		{
			request{method: "GET", target: "/add_worker?url=http://h:1"},
			405, "application/json",
			"does not take GET",
		},
		{
			request{
				method: "POST", target: "/add_worker?url=http://h:1",
				header: map[string]string{"Origin": "http://evil.example"},
			},
			403, "application/json",
			"another web page",
		},
	} {
		rec := c.r.send(t, h)
		assert.Equal(t, c.code, rec.Code, c.r.target)
		assert.Equal(t, c.kind, rec.Header().Get("Content-Type"), c.r.target)
		assert.Contains(t, rec.Body.String(), c.body, c.r.target)
	}
	for path, want := range map[string]bool{
		"/workers": true, "/workers/0/1": true, "/get_loads": true, "/api/v1/apps": false, "/workersx": false,
	} {
		assert.Equal(t, want, api.IsWorkerPath(path), path)
	}
	bare := api.NewServer(api.Config{Backend: newBackend()}).Handler()
	assert.Equal(t, http.StatusNotFound, request{method: "GET", target: "/list_workers"}.send(t, bare).Code)
}

// The newer paths of SGLang's router: what they answer, and what reaches the ranks.
func TestSGLangGatewayPaths(t *testing.T) {
	k, b := &fakeRanks{}, newBackend()
	b.apps["edge"] = client.AppStatus{
		Name: "edge", Kind: "attach", Model: "m", Policy: "mex", Desired: 2,
		Units: []client.UnitStatus{
			{Unit: "edge/0/0", Ranks: []client.RankStatus{
				{Phase: "ready", URL: "http://a:1", InFlight: 3},
			}},
			{Unit: "edge/0/1", Pool: "prefill", Ranks: []client.RankStatus{
				{Rank: 1, Phase: "starting", URL: "http://b:1"},
			}},
		},
	}
	h := api.NewServer(api.Config{Backend: b, Ranks: k, Version: client.BuildInfo{Version: "v"}}).Handler()
	const head = `{"apiVersion":"dpserve/v1",`
	for _, c := range []struct {
		method, target, body string
		code                 int
		want                 string
	}{
		{"GET", "/workers", "", 200, head + `"total":2,"workers":[` +
			`{"id":"0/0","url":"http://a:1","model_id":"m","worker_type":"regular",` +
			`"is_healthy":true,"load":3},` +
			`{"id":"0/1","url":"http://b:1","model_id":"m","worker_type":"prefill",` +
			`"is_healthy":false,"load":0}]}`},
		{"GET", "/get_loads?app=edge", "", 200, head + `"workers":[{"worker":"http://a:1","load":3},` +
			`{"worker":"http://b:1","load":0}]}`},
		{"GET", "/get_server_info", "", 200, head + `"dp_size":2,"model_path":"m","policy":"mex",` +
			`"served_model_name":"m","version":"v"}`},
		{"POST", "/workers", `{"url":"http://h:1","worker_type":"regular"}`, 202, head +
			`"status":"accepted","url":"http://h:1","worker_id":"0/2"}`},
		{"POST", "/workers?app=edge", `{"url":"http://h:1","api_key":"x"}`, 400, `unknown key`},
		{"POST", "/workers", `{"url":"http://taken:1"}`, 409, "attached already"},
		{"DELETE", "/workers/0/2", "", 202, `"worker_id":"0/2"`},
		{"DELETE", "/workers/http%3A%2F%2Fnone%3A1", "", 404, "there is no rank http://none:1"},
		{"GET", "/workers?app=nobody", "", 404, "nobody"},
	} {
		rec := request{method: c.method, target: c.target, body: c.body}.send(t, h)
		assert.Equal(t, c.code, rec.Code, c.target)
		assert.Contains(t, rec.Body.String(), c.want, c.target)
	}
	assert.Equal(t, []api.RankRemoval{
		{Rank: app.RankRef{Rank: 2}}, {Rank: app.RankRef{URL: "http://none:1"}},
	}, k.removed)
	request{
		method: "POST", target: "/workers",
		body: `{"url":"http://h:1","worker_type":"prefill","bootstrap_port":8998}`,
	}.send(t, h)
	assert.Contains(t, k.added,
		` {"pd":{"bootstrap":"http://h:8998"},"role":"prefill","url":"http://h:1"}`)
}

// At another port the paths are for programs of this machine, not for what a proxy passes on, and for the
// admin token.
func TestWorkerPathsElsewhere(t *testing.T) {
	for _, c := range []struct {
		token, from string
		header      map[string]string
		want        int
	}{
		{"secret", "127.0.0.1:4000", nil, 200},
		{"secret", "[::1]:4000", nil, 200},
		{"secret", "192.0.2.1:4000", nil, 401},
		{"secret", "127.0.0.1:4000", map[string]string{"X-Forwarded-For": "192.0.2.1"}, 401},
		{"secret", "192.0.2.1:4000", map[string]string{"Authorization": "Bearer secret"}, 200},
		{"secret", "127.0.0.1:4000", map[string]string{"Origin": "http://evil.example"}, 403},
		{"", "127.0.0.1:4000", nil, 200},
		{"", "192.0.2.1:4000", nil, 403},
	} {
		h := api.NewServer(api.Config{Backend: newBackend(), Ranks: &fakeRanks{}, Token: c.token}).
			WorkerHandler()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/list_workers", nil)
		r.RemoteAddr = c.from
		for name, value := range c.header {
			r.Header.Set(name, value)
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		assert.Equal(t, c.want, rec.Code, "%+v", c)
	}
}

func TestBadRankRequests(t *testing.T) {
	k := &fakeRanks{}
	h := api.NewServer(api.Config{Backend: newBackend(), Ranks: k}).Handler()
	const path = "/api/v1/apps/edge/ranks"
	for _, c := range []struct {
		r    request
		code int
		text string
	}{
		{request{method: "POST", target: path}, 400, "nothing is given"},
		{
			request{method: "POST", target: path + "?url=http://h:1", body: "{}"},
			400,
			"this path takes no query",
		},
		{
			request{method: "POST", target: path, body: `{"url": "` + strings.Repeat("x", 1<<16) + `"}`},
			413,
			"larger than",
		},
		{
			request{method: "POST", target: path, body: `{"url": "http://h:1", "selektor": 2}`},
			400,
			`did you mean \"selector\"?`,
		},
		{request{method: "DELETE", target: path}, 400, "one of url and rank"},
		{request{method: "DELETE", target: path + "?url=http://h:1&rank=0/1"}, 400, "one of url and rank"},
		{request{method: "DELETE", target: path + "?rank=1"}, 400, "write GROUP/RANK"},
		{request{method: "DELETE", target: path + "?rank=0/-1"}, 400, "write GROUP/RANK"},
		{request{method: "DELETE", target: path + "?rank=0/1&selector=2"}, 400, "selector goes with url"},
		{request{method: "DELETE", target: path + "?url=http://h:1&selector=x"}, 400, "whole number"},
		{request{method: "DELETE", target: path + "?rank=0/1&deadline=soon"}, 400, "write a duration"},
		{request{method: "DELETE", target: path + "?rank=0/1&deadline=-1s"}, 400, "write a duration"},
		{request{method: "DELETE", target: path + "?rank=0/1&deadline=99999h"}, 400, "write a duration"},
		{request{method: "PUT", target: path}, 405, "does not take PUT"},
	} {
		rec := c.r.send(t, h)
		assert.Equal(t, c.code, rec.Code, c.r.target)
		assert.Contains(t, rec.Body.String(), c.text, c.r.target)
	}
	assert.Empty(t, k.removed)
}
