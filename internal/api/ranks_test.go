package api_test

import (
	"context"
	"net/http"
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
	bare := api.NewServer(api.Config{Backend: newBackend()}).Handler()
	assert.Equal(t, http.StatusNotFound, request{method: "GET", target: "/list_workers"}.send(t, bare).Code)
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
