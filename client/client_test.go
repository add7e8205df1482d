package client_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/problem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeRouters answers like a node with two ranks and records the requests.
type fakeRouters struct {
	asked  any
	fail   error
	broken error
	runs   int
	cut    bool
}

var _ api.Routers = (*fakeRouters)(nil)

func (r *fakeRouters) Explain(_ context.Context, app string, q *client.Query) (*client.Explanation, error) {
	r.asked = *q
	score := 0.1 + 0.2
	return &client.Explanation{
		App: app, Policy: "kv", Pick: "0/1",
		Ranks: []client.RankExplanation{
			{
				Worker: "0/1", Rank: 1, State: "ok", Score: &score,
				Terms: []client.Term{{Name: "a", Value: score}},
			},
		},
		Replay: &client.Replay{RequestID: "x"},
	}, r.fail
}

func (r *fakeRouters) Decisions(_ context.Context, _ string, most int) ([]client.Replay, error) {
	return []client.Replay{{RequestID: "r1", Pick: "0/1", HitTokens: most}}, nil
}

func (r *fakeRouters) Reset(_ context.Context, app string) (client.ResetResult, error) {
	return client.ResetResult{App: app, Ranks: 2}, r.fail
}

func (r *fakeRouters) Router(_ context.Context, app string) (client.Info, error) {
	return client.Info{
		App: app, Policy: "kv", Index: &client.Index{Blocks: 7},
		CostModel: &client.CostModel{
			Preset: "moe", Prefill: 1.5, Decode: 0.75, PrefillSamples: 3, DecodeSamples: 4, AgeS: 2.5,
			Error: 0.25,
			Ranks: []client.WorkerSpeed{{Worker: "0/1", Slow: 2, LagMs: 12.5}},
		},
	}, r.fail
}

func (r *fakeRouters) BestWorker(_ context.Context, _ string, q *client.BestWorkerRequest) (client.Worker,
	error,
) {
	r.asked = *q
	return client.Worker{
		Worker: "0/1", DPRank: 1, OverlapBlocks: 3, BlockSize: 16, RequestID: q.RequestID, ExpiresS: 300,
	}, r.fail
}

func (r *fakeRouters) PotentialLoads(_ context.Context, _ string, ids []uint32) ([]client.PotentialLoad,
	error,
) {
	r.asked = ids
	return []client.PotentialLoad{{Worker: "0/0", PrefillTokens: 5, DecodeBlocks: 1}}, r.fail
}

func (r *fakeRouters) MarkPrefillComplete(_ context.Context, _, id string) error {
	r.asked = "mark " + id
	return r.fail
}

func (r *fakeRouters) Free(_ context.Context, _, id string) error {
	r.asked = "free " + id
	return r.fail
}

func (r *fakeRouters) DumpEvents(_ context.Context, _ string, emit func(*client.Run) error) (bool, error) {
	for range r.runs {
		if err := emit(
			&client.Run{Worker: "0/1", Tier: "gpu", Blocks: []string{"00000000000000aa"}}); err != nil {
			return false, err
		}
	}
	return r.cut, r.fail
}

func (r *fakeRouters) Generate(_ context.Context, _ string, q *msg.Generate,
	emit func(*client.Part) error,
) error {
	r.asked = *q
	if r.fail != nil {
		return r.fail
	}
	for _, p := range []client.Part{
		{TokenIDs: []uint32{5, 6}, Worker: "0/1", RequestID: "g"},
		{TokenIDs: []uint32{7}, FinishReason: "stop"},
		{TokenIDs: []uint32{}, Usage: &client.Usage{Prompt: 3, Cached: 2, Completion: 3}},
	} {
		if err := emit(&p); err != nil {
			return err
		}
	}
	return r.broken
}

// RP5: The Router hashes the bytes of a prompt, so a client must not rewrite them.
func TestExplainSendsTheBytesOfTheRequest(t *testing.T) {
	r := &fakeRouters{}
	c := serve(t, r)
	for _, body := range []string{
		`{"prompt":"x"}`, "{\n  \"prompt\" : \"a  b\" }", `{"prompt":"<b> & \u003c \u2028 é"}`,
		"{\"prompt\":\"\u2028\"}", `{ }`,
	} {
		_, err := c.Explain(t.Context(),
			client.Query{Request: []byte(body), Route: "/v1/completions", Worker: "0/1"})
		require.NoError(t, err)
		assert.Equal(t, body, string(r.asked.(client.Query).Request))
		_, err = c.Explain(t.Context(), client.Query{Request: []byte(body)})
		require.NoError(t, err)
		assert.Equal(t, body, string(r.asked.(client.Query).Request))
	}
	_, err := c.Explain(t.Context(), client.Query{Request: []byte(`{"prompt":`)})
	require.ErrorContains(t, err, "not JSON")
}

// start serves r on a free loopback port like a node, and returns a client of application demo.
func start(r api.Routers) (c *client.RouterClient, stop func(), err error) {
	s := api.NewServer(api.Config{Routers: r})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err == nil {
		err = s.Attach(l)
	}
	if err != nil {
		return nil, nil, err
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve() }()
	cl, err := client.New(s.Addr().String())
	return cl.Router("demo"), func() { cl.Close(); _ = s.Close(); <-served }, err
}

func serve(t *testing.T, r api.Routers) *client.RouterClient {
	t.Helper()
	c, stop, err := start(r)
	require.NoError(t, err)
	t.Cleanup(stop)
	return c
}

// Requests and answers arrive unchanged.
func TestEveryCall(t *testing.T) {
	r := &fakeRouters{runs: 2}
	c := serve(t, r)
	ctx, weight := t.Context(), 2.0

	w, err := c.BestWorker(ctx,
		client.BestWorkerRequest{
			TokenIDs: []uint32{1}, RequestID: "r", Model: "m", Worker: "0/1",
			Override: &client.Override{OverlapScoreWeight: &weight},
		})
	require.NoError(t, err)
	assert.Equal(t,
		client.Worker{
			Worker: "0/1", DPRank: 1, OverlapBlocks: 3, BlockSize: 16, RequestID: "r", ExpiresS: 300,
		}, w)
	assert.Equal(t,
		client.BestWorkerRequest{
			TokenIDs: []uint32{1}, RequestID: "r", Model: "m", Worker: "0/1",
			Override: &client.Override{OverlapScoreWeight: &weight},
		}, r.asked)

	loads, err := c.PotentialLoads(ctx, []uint32{1, 2})
	require.NoError(t, err)
	assert.Equal(t, []client.PotentialLoad{{Worker: "0/0", PrefillTokens: 5, DecodeBlocks: 1}}, loads)
	assert.Equal(t, []uint32{1, 2}, r.asked)
	_, err = c.PotentialLoads(ctx, nil)
	require.NoError(t, err)
	require.NoError(t, c.MarkPrefillComplete(ctx, "r"))
	assert.Equal(t, "mark r", r.asked)
	require.NoError(t, c.Free(ctx, "r"))
	assert.Equal(t, "free r", r.asked)

	text := "hello"
	x, err := c.Explain(ctx,
		client.Query{Prompt: &text, Route: "/v1/chat/completions", Headers: map[string]string{"a": "b"}})
	require.NoError(t, err)
	assert.Equal(t,
		client.Query{
			Prompt: &text, Route: "/v1/chat/completions", Headers: map[string]string{"a": "b"},
		}, r.asked)
	assert.Equal(t, 0.1+0.2, *x.Ranks[0].Score) //nolint:testifylint // bit for bit
	assert.Equal(t, "x", x.Replay.RequestID)

	n, err := c.Reset(ctx)
	require.NoError(t, err)
	assert.Equal(t, 2, n)
	info, err := c.Info(ctx)
	require.NoError(t, err)
	assert.Equal(t, []any{"kv", 7}, []any{info.Policy, info.Index.Blocks})
	assert.Equal(t, &client.CostModel{
		Preset: "moe", Prefill: 1.5, Decode: 0.75, PrefillSamples: 3, DecodeSamples: 4, AgeS: 2.5,
		Error: 0.25,
		Ranks: []client.WorkerSpeed{{Worker: "0/1", Slow: 2, LagMs: 12.5}},
	}, info.CostModel)
}

func TestGenerate(t *testing.T) {
	r := &fakeRouters{}
	c := serve(t, r)
	var parts []client.Part
	for p, err := range c.Generate(t.Context(),
		client.GenerateRequest{
			TokenIDs: []uint32{1}, Sampling: map[string]any{"max_tokens": 3}, RequestID: "g",
		}) {
		require.NoError(t, err)
		parts = append(parts, p)
	}
	assert.Equal(t, []client.Part{
		{TokenIDs: []uint32{5, 6}, Worker: "0/1", RequestID: "g"},
		{TokenIDs: []uint32{7}, FinishReason: "stop"},
		{TokenIDs: []uint32{}, Usage: &client.Usage{Prompt: 3, Cached: 2, Completion: 3}},
	}, parts)
	for range c.Generate(t.Context(), client.GenerateRequest{TokenIDs: []uint32{1}}) {
		break // the caller stops ranging
	}

	c = serve(t, &fakeRouters{broken: problem.New(problem.Upstream, "the answer broke off")})
	n, last := 0, error(nil)
	for _, err := range c.Generate(t.Context(), client.GenerateRequest{TokenIDs: []uint32{1}}) {
		n, last = n+1, err
	}
	assert.Equal(t, 4, n)
	assert.Equal(t, "upstream", client.CodeOf(last))
	c = serve(t, &fakeRouters{fail: problem.New(problem.Overloaded, "full").WithHint("later")})
	for _, err := range c.Generate(t.Context(), client.GenerateRequest{TokenIDs: []uint32{1}}) {
		var e *client.Error
		require.ErrorAs(t, err, &e)
		assert.Equal(t, client.Error{Status: 503, Code: "overloaded", Message: "full", Hint: "later"}, *e)
	}
}

func TestDumpEvents(t *testing.T) {
	count := func(r *fakeRouters) (n int, last error) {
		for run, err := range serve(t, r).DumpEvents(t.Context()) {
			if last = err; err == nil {
				n++
				assert.Equal(t,
					client.Run{Worker: "0/1", Tier: "gpu", Blocks: []string{"00000000000000aa"}}, run)
			}
		}
		return n, last
	}
	n, err := count(&fakeRouters{runs: 3})
	require.NoError(t, err)
	assert.Equal(t, 3, n)
	n, err = count(&fakeRouters{runs: 3, cut: true})
	require.ErrorIs(t, err, client.ErrTruncated)
	assert.Equal(t, 3, n)
	for range serve(t, &fakeRouters{runs: 3}).DumpEvents(t.Context()) {
		break
	}
	gone := problem.New(problem.NotFound, "no app")
	_, err = count(&fakeRouters{fail: gone})
	assert.Equal(t, "not_found", client.CodeOf(err))
	_, err = count(&fakeRouters{runs: 3, fail: gone})
	require.Error(t, err, "half a dump is an error")
}

// The client reports every malformed answer and returns.
func TestBadAnswers(t *testing.T) {
	for name, body := range map[string]string{
		"empty": "", "html": "<html>", "stranger": `{}`, "other version": `{"apiVersion":"dpserve/v9"}`,
		"list": `[]`, "cut dump": `{"events":[{"worker":"0/1"`,
		"no list": `{"events":{}}`, "odd run": `{"events":[7]}`,
		"cut stream": "data: {\"token_ids\":[1]}\n\n", "odd part": "data: {\n\n",
		"odd error": "event: error\ndata: x\n\n",
		"long line": "data: " + strings.Repeat("x", 2<<20),
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(
				http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
					_, _ = io.WriteString(w, body)
				}))
			defer srv.Close()
			cl, err := client.New(srv.URL)
			require.NoError(t, err)
			defer cl.Close()
			c := cl.Router("demo")
			_, err = c.Info(t.Context())
			require.Error(t, err)
			if !strings.HasPrefix(body, "{") || strings.Contains(body, "events") {
				for _, err = range c.DumpEvents(t.Context()) {
				}
				require.Error(t, err)
			}
			for _, err = range c.Generate(t.Context(), client.GenerateRequest{}) {
			}
			require.Error(t, err)
		})
	}
	for _, addr := range []string{"ftp://x", "http://x/path", "http://", "x:y:z", "http://u:p@x"} {
		_, err := client.New(addr)
		require.Error(t, err, addr)
	}
	c, err := client.New("")
	require.NoError(t, err)
	c.Close()
	nobody, err := client.New("127.0.0.1:1")
	require.NoError(t, err)
	_, err = nobody.Router("a/b").Info(t.Context())
	require.ErrorContains(t, err, "no answer from http://127.0.0.1:1")
	assert.Empty(t, client.CodeOf(errors.New("x")))
}
