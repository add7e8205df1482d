package engine_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/ports"
)

func file(t testing.TB, name string) []byte {
	b, err := os.ReadFile("testdata/" + name)
	require.NoError(t, err)
	return b
}

// keyOf is a key alone.
type keyOf string

func (k keyOf) Key() string      { return string(k) }
func (k keyOf) TLS() *tls.Config { return nil }

// serve starts an engine that answers by path and gives a client of it.
func serve(t *testing.T, addr engine.Addressing, key string, h http.HandlerFunc) *engine.Client {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	rt := engine.NewTransport()
	t.Cleanup(rt.CloseIdleConnections)
	return engine.NewClient(srv.URL, addr, keyOf(key), rt)
}

// RP52: an engine that answers every request, `/health` too, with vLLM's 503 of elastic EP; another 503: as
// RP51 with `scaling`, and requests wait for it in the queue; another 503 is a dead engine.
func TestHealthIsTyped(t *testing.T) {
	for status, want := range map[int]engine.Health{
		200: engine.Alive, 204: engine.Alive, 503: engine.Dead,
		500: engine.Odd, 404: engine.Alive, 302: engine.Odd,
	} {
		c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.Path, "/is_") {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			assert.Equal(t, "GET /health", r.Method+" "+r.URL.Path)
			w.WriteHeader(status)
		})
		got, err := c.Health(t.Context())
		assert.Equal(t, want.String(), got.String(), "%d", status)
		assert.Equal(t, want == engine.Alive, err == nil, "%d", status)
	}
	for body, want := range map[string]engine.Health{
		`{"error":"The model is currently scaling. Please try again later."}`: engine.Scaling, // vLLM
		`{"error":"Service Unavailable"}`:                                     engine.Dead,
	} {
		c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, body)
		})
		got, err := c.Health(t.Context())
		assert.Equal(t, want.String(), got.String())
		require.Error(t, err)
	}
}

// RP51: with each probe where the engine has the route, and once where it has none, until another engine may
// answer.
func TestHealthAsksWhetherAnEngineSleeps(t *testing.T) {
	for _, what := range []string{"is_sleeping", "is_paused"} {
		t.Run(what, func(t *testing.T) { testAway(t, what) })
	}
}

func testAway(t *testing.T, what string) {
	asked, answer, health := 0, "", http.StatusOK
	c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			w.WriteHeader(health)
		case r.URL.Path != "/"+what:
			w.WriteHeader(http.StatusNotFound)
		case answer == "":
			asked++
			w.WriteHeader(http.StatusNotFound)
		default:
			asked++
			_, _ = io.WriteString(w, answer)
		}
	})
	for _, step := range []struct {
		answer string
		health int
		want   engine.Health
		asked  int // in all
	}{
		{`{"` + what + `": false}`, 200, engine.Alive, 1},
		{`{"` + what + `": true}`, 200, engine.Asleep, 2},
		{`{"` + what + `": false}`, 200, engine.Alive, 3},
		{`<html>`, 200, engine.Alive, 4},
		{``, 200, engine.Alive, 5},
		{``, 200, engine.Alive, 5},
		{``, 500, engine.Odd, 5},
		{`{"` + what + `": true}`, 200, engine.Asleep, 6},
	} {
		answer, health = step.answer, step.health
		got, _ := c.Health(t.Context())
		assert.Equal(t, step.want.String(), got.String(), step)
		assert.Equal(t, step.asked, asked, step)
	}
}

// RP32: health and counters are asked for in the same moment, time and again; the engine accepts two
// connections in all.
func TestProbesKeepTheirConnections(t *testing.T) {
	meeting, accepted := make(chan struct{}), atomic.Int32{}
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/is_") {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		select { // each is answered when the other is there, so both need a connection
		case meeting <- struct{}{}:
		case <-meeting:
		}
	}))
	srv.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			accepted.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	rt := engine.NewTransport()
	t.Cleanup(rt.CloseIdleConnections)
	c := engine.NewClient(srv.URL, engine.Addressing{}, nil, rt)
	for range 10 {
		var probes sync.WaitGroup
		probes.Go(func() { _, err := c.Health(t.Context()); assert.NoError(t, err) })
		probes.Go(func() { _, err := c.Counters(t.Context()); assert.NoError(t, err) })
		probes.Wait()
	}
	assert.Equal(t, int32(2), accepted.Load())
}

func TestHealthOfNobodyAndOfAFrozenEngine(t *testing.T) {
	ln, err := net.Listen("tcp", ports.TakeAddr(t))
	require.NoError(t, err)
	rt := engine.NewTransport()
	defer rt.CloseIdleConnections()
	c := engine.NewClient("http://"+ln.Addr().String(), engine.Addressing{}, nil, rt)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	got, err := c.Health(ctx) // accepted by the kernel, answered by nobody
	assert.Equal(t, engine.Unanswered, got)
	require.ErrorIs(t, err, context.DeadlineExceeded)

	require.NoError(t, ln.Close())
	got, err = c.Health(t.Context())
	assert.Equal(t, engine.RefusedConn, got)
	require.Error(t, err)

	var net memnet.Network
	c = engine.NewClient("http://127.0.0.1:1", engine.Addressing{}, nil,
		&http.Transport{DialContext: net.DialContext})
	got, _ = c.Health(t.Context())
	assert.Equal(t, engine.RefusedConn, got)
}

func TestProbe(t *testing.T) {
	cases := map[string]struct {
		status int
		body   string
		want   string
	}{
		"a token":    {200, string(file(t, "completion.json")), ""},
		"queue full": {503, string(file(t, "queue_full.json")), ""},
		"aborted": {200, string(file(t, "aborted.json")), "the probe was answered without a " +
			"completion"},
		"dead core": {500, `{"error":{"message":"EngineCore encountered an issue.",` +
			`"type":"InternalServerError","param":null,"code":500}}`, "/v1/completions answered 500: " +
			"EngineCore encountered an issue."},
		"front gone":   {503, "", "/v1/completions answered 503"},
		"unauthorized": {401, `{"error":"Unauthorized"}`, "/v1/completions answered 401"},
		"unknown model": {404, `{"error":{"message":"The model x does not exist.",` +
			`"type":"NotFoundError","param":"model","code":404}}`, "/v1/completions answered 404: The " +
			"model x does not exist."},
		"garbage": {200, "<html>", "the probe was answered without a completion: invalid character '<' " +
			"looking for beginning of value"},
		"long text": {
			500, `{"error":{"message":"` + strings.Repeat("x", 400) + `"}}`,
			"/v1/completions answered 500: " + strings.Repeat("x", 300) + "…",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			client := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			})
			err := client.Probe(t.Context(), "m")
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.want)
			}
		})
	}
}

func TestProbeNamesItsRankAndKey(t *testing.T) {
	var header, key string
	var body map[string]any
	record := func(w http.ResponseWriter, r *http.Request) {
		header, key = r.Header.Get("X-Data-Parallel-Rank"), r.Header.Get("Authorization")
		assert.Empty(t, r.Header.Values("Idempotency-Key"))
		body = nil
		_ = json.NewDecoder(r.Body).Decode(&body)
		_, _ = w.Write(file(t, "completion.json"))
	}
	require.NoError(t, serve(t, engine.Addressing{Mode: "header", Selector: 3}, "", record).
		Probe(t.Context(), "m"))
	assert.Equal(t, "3", header)
	assert.Equal(t, map[string]any{"model": "m", "prompt": "1", "max_tokens": 1.0, "temperature": 0.0}, body)
	require.NoError(t, serve(t, engine.Addressing{Mode: "body", Selector: 2}, "secret", record).
		Probe(t.Context(), "m"))
	assert.Equal(t, 2.0, body["routed_dp_rank"]) //nolint:testifylint // a small integer
	assert.Equal(t, "Bearer secret", key)
}

// SGLang's prefill and decode engines refuse plain requests, in either shape of an error.
func TestProbeOfAnEngineThatNeedsARoom(t *testing.T) {
	const text = "Disaggregated request received without bootstrap room id"
	for _, refusal := range []string{
		`{"object":"error","message":"` + text + `","type":"BadRequest","param":null,"code":400}`,
		`{"error":{"message":"` + text + `","type":"BadRequestError","param":null,"code":400}}`,
	} {
		var body map[string]any
		c := serve(t, engine.Addressing{Mode: "body", Selector: 2}, "",
			func(w http.ResponseWriter, r *http.Request) {
				body = nil
				_ = json.NewDecoder(r.Body).Decode(&body)
				if body["bootstrap_room"] == nil {
					w.WriteHeader(400)
					_, _ = io.WriteString(w, refusal)
					return
				}
				_, _ = w.Write(file(t, "completion.json"))
			})
		require.NoError(t, c.Probe(t.Context(), "m"))
		assert.Equal(t, map[string]any{
			"model": "m", "prompt": "1", "max_tokens": 1.0, "temperature": 0.0, "routed_dp_rank": 2.0,
			"bootstrap_host": "2.2.2.2", "bootstrap_room": 2.0,
		}, body)
	}
}

func TestProbeOfAChatOnlyEngine(t *testing.T) {
	c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/chat/completions" {
			w.WriteHeader(404)
			_, _ = io.WriteString(w, `{"detail":"Not Found"}`)
			return
		}
		_, _ = w.Write(file(t, "completion.json"))
	})
	require.NoError(t, c.Probe(t.Context(), "m"))
}

func TestReadBack(t *testing.T) {
	c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, r *http.Request) {
		name := map[string]string{"/v1/models": "models.json", "/metrics": "metrics_dense.txt"}[r.URL.Path]
		_, _ = w.Write(file(t, name))
	})
	s, err := c.ReadBack(t.Context())
	require.NoError(t, err)
	assert.Equal(t, engine.Settings{Model: "tiny", MaxModelLen: 2048, BlockSize: 32}, s)
}

func TestMaxModelLen(t *testing.T) {
	for body, want := range map[string]int{
		string(file(t, "models.json")):                              2048,
		`{"data":[{"id":"a"}]}`:                                     0,
		`{"data":[{"id":"a","max_model_len":null}]}`:                0,
		`{"data":[{"id":"a","max_model_len":-1}]}`:                  0,
		`{"data":[{"id":"a","max_model_len":9000000000000000000}]}`: 0,
	} {
		c := serve(t, engine.Addressing{}, "", answers(map[string]string{"/v1/models": body}))
		list, err := c.Models(t.Context())
		require.NoError(t, err)
		assert.Equal(t, want, engine.MaxModelLenOf(list), body)
	}
}

// Engines that list their adapters have those of the list. Of others, and before a list, those of the file
// count as loaded.
func TestAdaptersOf(t *testing.T) {
	long := strings.Repeat("x", 257)
	list := []engine.Model{
		{ID: "m"},
		{ID: "sql", Parent: "m"},
		{ID: "fr", Parent: "m"},
		{ID: "fr", Parent: "m"},
		{Parent: "m"},
		{ID: long, Parent: "m"},
	}
	vllm, other := app.Engine{Kind: app.KindVLLM}, app.Engine{Kind: app.KindAttach, Family: app.FamilyOpenAI}
	for name, c := range map[string]struct {
		engine app.Engine
		file   []string
		list   []engine.Model
		want   []string
	}{
		"loaded":                      {vllm, nil, list, []string{"fr", "sql"}},
		"not listed":                  {vllm, []string{"gone"}, list, []string{"fr", "sql"}},
		"listed without a parent":     {vllm, []string{"m"}, list, []string{"fr", "m", "sql"}},
		"no list":                     {vllm, []string{"b", "a"}, nil, []string{"a", "b"}},
		"an engine that may not list": {other, []string{"gone"}, list, []string{"fr", "gone", "sql"}},
		"none":                        {vllm, nil, list[:1], nil},
	} {
		a := &app.Application{Engine: c.engine}
		for _, id := range c.file {
			a.Model.Adapters = append(a.Model.Adapters, app.Adapter{ID: id})
		}
		assert.Equal(t, c.want, engine.AdaptersOf(a, c.list), name)
	}
	many := []engine.Model{}
	for i := range 2000 {
		many = append(many, engine.Model{ID: strconv.Itoa(i), Parent: "m"})
	}
	assert.Len(t, engine.AdaptersOf(&app.Application{}, many), 1024)
}

func TestModelsRefuseNonsense(t *testing.T) {
	for body, want := range map[string]string{
		`{"data":[]}`: "/v1/models lists no model",
		`[]`: "/v1/models: json: cannot unmarshal array into Go value of type struct { Data " +
			"[]engine.Model \"json:\\\"data\\\"\" }",
		"endless": "answer is too long",
	} {
		c := serve(t, engine.Addressing{}, "", func(w http.ResponseWriter, _ *http.Request) {
			if body == "endless" {
				body = strings.Repeat(" ", 1<<20+1)
			}
			_, _ = io.WriteString(w, body)
		})
		_, err := c.Models(t.Context())
		require.EqualError(t, err, want)
	}
}

// answers is an engine that knows some paths, and 404 for the others.
func answers(pages map[string]string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		text, ok := pages[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
		}
		_, _ = io.WriteString(w, text)
	}
}

func TestCacheIsAskedWhereTheEngineTells(t *testing.T) {
	const info = `{"page_size":16,"max_total_num_tokens":1600,"disable_radix_cache":true}`
	for name, c := range map[string]struct {
		pages map[string]string
		want  engine.Cache
		err   string
	}{
		"vllm": {pages: map[string]string{
			"/metrics":     string(file(t, "metrics_dense.txt")),
			"/server_info": info,
		}, want: engine.Cache{BlockSize: 32, Blocks: 24}},
		"sglang": {
			pages: map[string]string{"/metrics": "sglang_page_size 8\n", "/server_info": info},
			want:  engine.Cache{BlockSize: 8, Blocks: 100, CachingOff: true},
		},
		"sglang without metrics": {
			pages: map[string]string{"/get_server_info": info},
			want:  engine.Cache{BlockSize: 16, Blocks: 100, CachingOff: true},
		},
		"an engine that is silent": {err: "/metrics answered 404\n/get_server_info answered 404"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := serve(t, engine.Addressing{}, "", answers(c.pages)).Cache(t.Context())
			assert.Equal(t, c.want, got)
			if c.err == "" {
				require.NoError(t, err)
			} else {
				require.EqualError(t, err, c.err)
			}
		})
	}
}

func TestARankBehindASharedURLReadsItsOwnSeries(t *testing.T) {
	pages := map[string]string{"/metrics": "vllm:kv_cache_usage_perc{engine=\"0\"} " +
		"0.9\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.1\n"}
	for mode, want := range map[string]float64{
		app.AddressURL: 0.9, app.AddressHeader: 0.1,
		app.AddressBody: 0.1,
	} {
		c, err := serve(t, engine.Addressing{Mode: mode, Selector: 1}, "", answers(pages)).
			Counters(t.Context())
		require.NoError(t, err)
		assert.InDelta(t, want, c.KVUsage, 0, mode)
	}
}

func TestEventSourcesAreHandedOnAsTheyAre(t *testing.T) {
	b, err := serve(t, engine.Addressing{}, "", answers(map[string]string{"/kv_event_sources": "<html>"})).
		EventSources(t.Context())
	require.NoError(t, err)
	assert.Equal(t, "<html>", string(b))
	_, err = serve(t, engine.Addressing{}, "", answers(nil)).EventSources(t.Context())
	var status *engine.StatusError
	require.ErrorAs(t, err, &status)
	assert.Equal(t, http.StatusNotFound, status.Status)
}
