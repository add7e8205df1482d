package inprocess

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/test/harness"
)

// p99 is the time that all but one of a hundred took.
func p99(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)*99/100]
}

// FS8, HF56: an engine stands still in the middle of its streams, /health says 200. The rank is out of
// routing within 30 s, and its stream is cut then; requests that other ranks serve do not notice.
func TestFS8FrozenEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.EngineFails, harness.StreamBreaks)
		c.Deploy(simApp("a", 4, "independent", "sim_step_ms: 20"))
		c.WaitStatus("a", "RUNNING")
		totals := func(list []asked) (out []time.Duration) {
			for _, a := range list {
				if a.Rank != "0/1" && a.Attempts == "1" {
					out = append(out, a.Total)
				}
			}
			return out
		}
		load := ask(t, c.Peer(0), "a", 100*time.Millisecond, 20)
		time.Sleep(10 * time.Second)
		quiet := p99(totals(load.end()))

		long := make(chan *harness.Stream)
		go func() { long <- c.StreamChat(t.Context(), "a", 5000, "x-dpserve-rank", "0/1") }()
		time.Sleep(time.Second)
		c.Fail("a", 0, 1, sim.Fault{Mode: sim.ModeHang})
		frozen := time.Now()
		load = ask(t, c.Peer(0), "a", 100*time.Millisecond, 20)
		s := <-long
		assert.Contains(t, []string{"stalled", "upstream_lost"}, s.Error, s)
		assert.False(t, s.Done)
		assert.InDelta(t, 30, (s.Total - s.Last).Seconds(), 1.1)
		c.WaitUnit("a/0/1", "ready", 2)
		fences := 0
		for _, e := range c.Events("a") {
			if e.Phase == "fenced" {
				fences++
				assert.Equal(t, "a/0/1", e.Unit)
				assert.LessOrEqual(t, e.Time.Sub(frozen), 31*time.Second,
					"20 s without progress, a probe of 10 s")
			}
		}
		assert.Equal(t, 1, fences)
		list := load.end()
		assert.Zero(t, clean(t, list), "a request without a byte is moved to another rank")
		others := totals(list)
		enough := 200
		if testing.Short() { // a third of the requests
			enough /= 3
		}
		require.Greater(t, len(others), enough)
		assert.Less(t, p99(others), 2*quiet, "the other ranks")
		c.Quiet()
	})
}

// HF55: The process of an engine stands still under load and goes on: as long as the swap of a machine or the
// move of its VM may take, no engine is killed and no stream is cut. The rank is full, so no probe finds a
// place.
func TestAPausedEngineKeepsItsStreams(t *testing.T) {
	for _, pause := range []float64{7, 25} {
		for coupling, ranks := range map[string]int{"independent": 1, "lockstep": 4} {
			synctest.Test(t, func(t *testing.T) {
				c := harness.New(t)
				c.Deploy(simApp("a", ranks, coupling, "max_num_seqs: 2, sim_step_ms: 200"))
				c.WaitStatus("a", "RUNNING")
				var streams sync.WaitGroup
				for range 2 * ranks {
					streams.Go(func() {
						s := c.StreamChat(t.Context(), "a", 230)
						assert.True(t, s.OK(), "%s, %v s: %v", coupling, pause, s)
						assert.Greater(t, s.Total.Seconds(), 44+pause, "it stood still")
					})
				}
				time.Sleep(5 * time.Second)
				c.Fail("a", 0, ranks-1, sim.Fault{Mode: sim.ModeFreeze, ForS: pause})
				streams.Wait()
				for _, e := range c.Events("a") {
					assert.NotEqual(t, "fenced", e.Phase, "%s, %v s: %s", coupling, pause, e.Reason)
				}
				s := c.StreamChat(t.Context(), "a", 3)
				assert.True(t, s.OK(), "%s, %v s: it takes requests again: %v", coupling, pause, s)
				c.Quiet()
			})
		}
	}
}

// FS8: answers of engines that are dying, stopping, full or broken while their /health says 200. What failed
// before its first byte is repeated elsewhere. A full engine is passed over and never ejected.
func TestFS8SickAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Expect(harness.EngineFails, harness.RequestsFail)
		c.Deploy(simApp("a", 3, "independent", "sim_step_ms: 10", "routing: {policy: round-robin}"))
		c.WaitStatus("a", "RUNNING")
		serve := func(what string) (repeated int) {
			for range 18 {
				s := c.StreamChat(t.Context(), "a", 3)
				assert.True(t, s.OK(), "%s: %v", what, s)
				if s.Attempts != "1" {
					repeated++
				}
				synctest.Wait()
			}
			return repeated
		}
		for _, f := range []sim.Fault{
			{Mode: sim.ModeBareDone},
			{Mode: sim.ModeErrorEvent, Code: 500},
			{Mode: sim.ModeHTTP500},
			{Mode: sim.ModeStopping},
		} {
			c.Fail("a", 0, 0, f)
			assert.Equal(t, 5, serve(string(f.Mode)), "%s: five in a row eject the rank", f.Mode)
			assert.True(t, c.Rank("a", 0, 0).Ejected, f.Mode)
			c.Recover("a", 0, 0)
			time.Sleep(10 * time.Second) // a probe comes back
			assert.Zero(t, serve("after "+string(f.Mode)))
		}
		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeBusy})
		for range 6 { // a rank that was full gets no requests for a moment
			assert.Positive(t, serve("busy"), "the next rank takes it")
			assert.False(t, c.Rank("a", 0, 0).Ejected)
			time.Sleep(10 * time.Second)
		}
		c.Recover("a", 0, 0)
		assert.Equal(t, uint64(1), c.Unit("a/0/0").Epoch)

		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeErrorEvent, Code: 400, Count: 1})
		s := c.StreamChat(t.Context(), "a", 3, "x-dpserve-rank", "0/0")
		assert.Equal(t, http.StatusBadRequest, s.Status, "the client's own fault: %v", s)

		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeCoreDead}) // the process ends with exit code 0
		serve("core-dead")
		c.WaitUnit("a/0/0", "ready", 2)
		success := 0
		c.Fail("a", 0, 0, sim.Fault{Mode: sim.ModeCrash, ExitCode: &success})
		serve("an exit that nobody asked for")
		c.WaitUnit("a/0/0", "ready", 3)
		var reasons []string
		for _, e := range c.Events("a") {
			if e.Phase == "fenced" {
				reasons = append(reasons, e.Reason)
			}
		}
		require.Len(t, reasons, 2)
		assert.Contains(t, reasons[0], "/health answered 503")
		assert.Regexp(t, "engine exited with code 0|refused", reasons[1], "its exit, or a probe came first")
		c.Quiet()
	})
}

// FS8: 60 s without a token of an answer: the engine's counters move, or it sends empty deltas. Neither is
// cut or fenced.
func TestFS8QuietEnginesThatWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(simApp("a", 1, "independent", "sim_step_ms: 100"))
		c.WaitStatus("a", "RUNNING")
		resp, err := c.Post(t.Context(), "/v1/chat/completions", `{"model":"a","stream":true,`+
			`"max_tokens":1210,"ignore_eos":true,"stream_interval":600,`+
			`"messages":[{"role":"user","content":"hello"}]}`)
		require.NoError(t, err)
		s := harness.ReadStream(resp)
		assert.True(t, s.OK(), "gaps of 60 s: %v", s)
		assert.Greater(t, s.Total, 2*time.Minute)
		assert.Equal(t, uint64(1), c.Unit("a/0/0").Epoch)

		ln, err := c.Net.Listen("127.0.0.1:8100")
		require.NoError(t, err)
		srv := &http.Server{Handler: http.HandlerFunc(emptyDeltas), ReadHeaderTimeout: time.Minute}
		done := make(chan struct{})
		go func() { defer close(done); _ = srv.Serve(ln) }()
		c.Deploy(attached("b", "routing: {policy: round-robin}", `{url: "http://127.0.0.1:8100"}`))
		c.WaitStatus("b", "RUNNING")
		s = c.StreamChat(t.Context(), "b", 5)
		assert.True(t, s.OK(), "empty deltas: %v", s)
		assert.Greater(t, s.Total, time.Minute)
		for _, e := range c.Events("b") {
			assert.NotEqual(t, "fenced", e.Phase)
		}
		c.Delete("b")
		c.Until("b is gone", gone(c, "b"))
		_ = srv.Close()
		<-done
		c.Quiet()
	})
}

// emptyDeltas is an engine without counters and events, whose streams are empty for a minute.
func emptyDeltas(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
	case "/v1/models":
		_, _ = io.WriteString(w, `{"data":[{"id":"b","owned_by":"vllm"}]}`)
	case "/v1/completions":
		_, _ = io.WriteString(w, `{"choices":[{"finish_reason":"length"}]}`)
	case "/v1/chat/completions":
		send := func(delta, finish string) {
			_, _ = fmt.Fprintf(w, `data: {"choices":[{"index":0,"delta":{%s},"finish_reason":%s}]}`+"\n\n",
				delta, finish)
			_ = http.NewResponseController(w).Flush()
		}
		w.Header().Set("Content-Type", "text/event-stream")
		send(`"role":"assistant","content":""`, "null")
		send(`"content":"x"`, "null")
		for range 65 {
			time.Sleep(time.Second)
			send(`"content":""`, "null")
		}
		send(`"content":"y"`, `"stop"`)
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	default:
		http.NotFound(w, r)
	}
}
