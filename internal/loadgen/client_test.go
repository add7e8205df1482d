package loadgen

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/ports"
)

// engine starts a server that answers like an engine, in n chunks.
func engine(t *testing.T, chunks int, broken string) *httptest.Server {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		var ask struct {
			Stream bool `json:"stream"`
		}
		assert.NoError(t, json.Unmarshal(body, &ask), string(body))
		w.Header().Set("x-dpserve-app", "demo")
		w.Header().Set("x-dpserve-group", "0")
		w.Header().Set("x-dpserve-rank", "1")
		switch {
		case broken == "503":
			http.Error(w, `{"error":{"message":"secret","type":"x","code":"queue_timeout"}}`,
				http.StatusServiceUnavailable)
		case broken == "hang":
			<-r.Context().Done()
		case !ask.Stream:
			fmt.Fprintf(w,
				`{"choices":[{"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":7,`+
					`"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":3}}}`, chunks)
		default:
			stream(w, r.URL.Path, chunks, broken)
		}
	}))
	t.Cleanup(srv.Close)
	return srv
}

func stream(w http.ResponseWriter, path string, chunks int, broken string) {
	w.Header().Set("Content-Type", "text/event-stream")
	say := func(text string) {
		_, _ = fmt.Fprintf(w, "data: %s\n\n", text)
		_ = http.NewResponseController(w).Flush()
	}
	delta := `{"choices":[{"index":0,"text":"x","finish_reason":%s}]}`
	if strings.HasSuffix(path, "/chat/completions") {
		delta = `{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":%s}]}`
		say(`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`)
	}
	for range chunks - 1 {
		say(fmt.Sprintf(delta, "null"))
	}
	switch broken {
	case "cut":
		return
	case "reset":
		panic(http.ErrAbortHandler)
	case "abort":
		say(fmt.Sprintf(delta, `"abort"`))
	case "error":
		say(`{"error": {"message": "secret", "type": "InternalServerError", "code": 500}}`)
	default:
		say(fmt.Sprintf(delta, `"length"`))
		say(fmt.Sprintf(
			`{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":%d,`+
				`"prompt_tokens_details":{"cached_tokens":3}}}`, chunks))
	}
	say("[DONE]")
}

func TestRunCountsWhatTheServerSent(t *testing.T) {
	t.Parallel()
	srv := engine(t, 5, "")
	for _, route := range []Route{Chat, Completions} {
		for _, mode := range []Mode{Open, Closed} {
			cfg := Config{
				URL: srv.URL, Model: "demo", Mode: mode, Route: route, Stream: true, Requests: 50,
				Concurrency: 4, APIKey: "dps_secret", PIDs: []int{os.Getpid()},
			}
			if mode == Open {
				cfg.Rate = 2000
			}
			r, err := Run(t.Context(), cfg)
			require.NoError(t, err)
			assert.Equal(t, []int{50, 50, 0}, []int{r.Offered, r.OK, r.Failed}, r.Errors)
			assert.Equal(t, []int{350, 250, 150}, []int{r.PromptTokens, r.OutputTokens, r.CachedTokens})
			assert.Equal(t, []int{50, 200, 50, 50},
				[]int{r.TTFT.Count, r.ITL.Count, r.TPOT.Count, r.E2E.Count})
			assert.Equal(t, map[string]int{"demo/0/1": 50}, r.Ranks)
			assert.Positive(t, r.RequestsPerS)
			assert.Equal(t, mode == Open, r.Lag != nil)
			assert.NotNil(t, r.CPU)
			text, err := json.Marshal(r)
			require.NoError(t, err)
			assert.NotContains(t, string(text), "dps_secret")
			assert.Contains(t, string(text), `"apiVersion":"dpserve/v1"`)
			var table bytes.Buffer
			require.NoError(t, r.WriteTable(&table))
			assert.Contains(t, table.String(), "50 requests in")
			assert.Contains(t, table.String(), "between tokens")
		}
	}
}

func TestRunWithoutStreaming(t *testing.T) {
	t.Parallel()
	srv := engine(t, 5, "")
	r, err := Run(t.Context(), Config{URL: srv.URL, Model: "demo", Requests: 20, Concurrency: 2})
	require.NoError(t, err)
	assert.Equal(t, 20, r.OK, r.Errors)
	assert.Nil(t, r.TTFT)
	assert.Nil(t, r.ITL)
	assert.Equal(t, 100, r.OutputTokens)
	assert.InDelta(t, 1, r.Goodput.Share, 0)
}

func TestFailuresHaveKinds(t *testing.T) {
	t.Parallel()
	for broken, want := range map[string]string{
		"503": "http 503 queue_timeout", "cut": "cut stream", "reset": "cut stream", "abort": "abort",
		"error": "error event InternalServerError", "hang": "timeout",
	} {
		srv := engine(t, 3, broken)
		cfg := Config{
			URL: srv.URL, Model: "demo", Stream: true, Requests: 3, Concurrency: 1, Timeout: 20 * time.Second,
		}
		if broken == "hang" {
			cfg.Timeout = 20 * time.Millisecond
		}
		r, err := Run(t.Context(), cfg)
		require.NoError(t, err)
		assert.Equal(t, map[string]int{want: 3}, r.Errors, broken)
		assert.Equal(t, []int{3, 0, 3}, []int{r.Offered, r.OK, r.Failed})
		assert.Zero(t, r.Goodput.Share)
		require.NoError(t, r.WriteTable(io.Discard))
	}
	gone := "http://" + ports.TakeAddr(t)
	r, err := Run(t.Context(), Config{URL: gone, Model: "demo", Requests: 2, Concurrency: 1})
	require.NoError(t, err)
	assert.Equal(t, map[string]int{"connect": 2}, r.Errors)
}

func TestStopCutsRunningRequests(t *testing.T) {
	t.Parallel()
	srv := engine(t, 3, "hang")
	ctx, cancel := context.WithCancelCause(t.Context())
	var asked atomic.Int64
	srv.Config.Handler = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if asked.Add(1) == 2 {
			cancel(fmt.Errorf("stop: %w", context.Canceled))
		}
		<-r.Context().Done()
	})
	r, err := Run(ctx, Config{URL: srv.URL, Model: "demo", Stream: true, Concurrency: 2, Requests: 100})
	require.ErrorContains(t, err, "stop")
	assert.Zero(t, r.Offered)
	assert.Empty(t, r.Errors)
}

func TestOverheadAgainstServers(t *testing.T) {
	t.Parallel()
	direct, proxied := engine(t, 3, ""), engine(t, 3, "")
	o, err := RunOverhead(t.Context(), Config{URL: direct.URL, Model: "demo"},
		Config{
			URL: proxied.URL, Model: "demo", Stream: true, Requests: 40, Concurrency: 2,
			PIDs: []int{os.Getpid()},
		})
	require.NoError(t, err)
	require.Len(t, o.Runs, overheadRuns)
	for _, r := range o.Runs {
		assert.Equal(t, 40, r.Direct.Count+r.Proxied.Count, r.Errors)
		assert.Empty(t, r.Errors)
	}
	require.NotNil(t, o.CPU)
	assert.Nil(t, o.DirectCPU)
	text, err := json.Marshal(o)
	require.NoError(t, err)
	assert.Contains(t, string(text), `"kind":"BenchOverhead"`)
	var table bytes.Buffer
	require.NoError(t, o.WriteTable(&table))
	assert.Contains(t, table.String(), "added latency: p50")
}

// A comparison without answers must not print an overhead of zero.
func TestOverheadWithoutAnswersIsNotZero(t *testing.T) {
	t.Parallel()
	var table bytes.Buffer
	o := &Overhead{
		Runs: []OverheadRun{{Proxied: &Percentiles{P50: 1}, Errors: map[string]int{"direct connect": 3}}},
	}
	require.NoError(t, o.WriteTable(&table))
	assert.Contains(t, table.String(), "added latency: not measured")
	assert.Contains(t, table.String(), "no good answers (direct connect: 3)")
}

func TestPromptsDifferAndRepeat(t *testing.T) {
	t.Parallel()
	for _, route := range []Route{Chat, Completions} {
		cfg := Config{
			Model: `m"<x`, Route: route, Stream: true, IgnoreEOS: true, PromptBytes: 1000,
			MaxTokens: 9, Seed: 1,
		}
		p, again := newPrompts(cfg), newPrompts(cfg)
		one, two := p.body(1), p.body(2)
		assert.Equal(t, one, again.body(1))
		assert.NotEqual(t, one[:60], two[:60], "prompts differ from the start")
		var body map[string]any
		require.NoError(t, json.Unmarshal(one, &body), string(one))
		assert.Equal(t, `m"<x`, body["model"])
		assert.InDelta(t, 9, body["max_tokens"], 0)
		assert.Equal(t, true, body["ignore_eos"])
		assert.Len(t, one, len(p.head)+1000+len(p.tail))
	}
	tiny := newPrompts(Config{PromptBytes: 1})
	assert.True(t, json.Valid(tiny.body(7)))
}

func TestChargeCPU(t *testing.T) {
	t.Parallel()
	assert.Nil(t, chargeCPU(cpuTime(nil), cpuTime(nil), time.Second, counts{1, 1}))
	assert.Equal(t, &CPU{Seconds: 1, Cores: 0.5, UsPerRequest: 100_000, UsPerChunk: 10_000},
		chargeCPU(cpuReading{0, true}, cpuReading{time.Second, true}, 2*time.Second, counts{10, 100}))
}
