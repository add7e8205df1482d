package ingress

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
)

// answers makes an engine answer every request that is not a prewarm leg with h.
func answers(h http.HandlerFunc) func(w http.ResponseWriter, r *http.Request, c pdCall) bool {
	return func(w http.ResponseWriter, r *http.Request, _ pdCall) bool {
		h(w, r)
		return true
	}
}

// onlyPrefill makes an engine answer prefill legs with h.
func onlyPrefill(h http.HandlerFunc) func(w http.ResponseWriter, r *http.Request, c pdCall) bool {
	return func(w http.ResponseWriter, r *http.Request, c pdCall) bool {
		if c.isPrefill() {
			h(w, r)
		}
		return c.isPrefill()
	}
}

// onlyOnce is for the first request alone.
func onlyOnce(h http.HandlerFunc) func(w http.ResponseWriter, r *http.Request, c pdCall) bool {
	var n atomic.Int32
	return func(w http.ResponseWriter, r *http.Request, _ pdCall) bool {
		if n.Add(1) > 1 {
			return false
		}
		h(w, r)
		return true
	}
}

// breaksOff ends the connection without an answer. The body is read already.
func breaksOff(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// TestPrefillFails: a 400 of the prefill rank goes to the client as it is. After a 500 or a reset another
// prefill rank is asked once. Its fault is not charged to the decode rank, whose engine is not asked before.
func TestPrefillFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		engine  http.HandlerFunc
		status  int
		asked   int
		outcome msg.Outcome
		trip    bool
		probe   bool
	}{
		"400":   {replies(400, `{"error":{"message":"bad","code":400}}`), 400, 1, msg.OK, false, false},
		"500":   {replies(500, `{}`), 200, 2, msg.FailedOutcome, true, false},
		"reset": {breaksOff, 200, 2, msg.FailedOutcome, false, true},
		"busy":  {replies(503, busyError), 200, 2, msg.FailedOutcome, false, false},
		"junk":  {replies(200, `{"choices":[]}`), 200, 2, msg.FailedOutcome, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newPairRig(t, pairOptions{prefills: 2, decodes: 1})
			g.p[0].set(answers(c.engine))
			var a answer
			// the policy takes the prefill ranks in turn: ask until the first one was the first
			for len(g.p[0].taken()) == 0 {
				a = g.post("/v1/chat/completions", streamBody)
			}
			require.Equal(t, c.status, a.status, a.body)
			if c.status == 400 {
				assert.JSONEq(t, `{"error":{"message":"bad","code":400}}`, a.body)
			} else {
				g.served(a, "remote")
				assert.Equal(t, "0/1", a.header.Get("X-Dpserve-Prefill-Rank"))
			}
			d := g.prefills[0].oneDone(t)
			assert.Equal(t, c.outcome, d.Outcome)
			assert.Equal(t, c.trip, d.Trip, "trip")
			assert.Equal(t, c.probe, d.Probe, "probe")
			for _, d := range g.decodes[0].allDones() {
				assert.NotEqual(t, msg.FailedOutcome, d.Outcome)
				assert.False(t, d.Trip || d.Probe || d.BusyFor > 0)
			}
		})
	}
}

func (r *replica) allDones() []msg.Done {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]msg.Done(nil), r.dones...)
}

// TestDecodeFails: after a decode leg with parameters has failed, the prompt is computed again, with new
// parameters. Neither rank is charged for what may be a fault of the transfer; a broken connection is the
// decode rank's.
func TestDecodeFails(t *testing.T) {
	const failed = `{"error":{"message":"Internal server error","code":500}}`
	for name, c := range map[string]struct {
		engine  http.HandlerFunc
		outcome msg.Outcome
		probe   bool
	}{
		"500":   {replies(500, failed), msg.Cancelled, false},
		"event": {sends(failed, doneEvent), msg.Cancelled, false},
		"empty": {sends(), msg.Cancelled, false},
		"reset": {func(w http.ResponseWriter, r *http.Request) {
			time.Sleep(100 * time.Millisecond) // or its connection counts as one that was being closed
			breaksOff(w, r)
		}, msg.FailedOutcome, true},
	} {
		t.Run(name, func(t *testing.T) {
			g := newPairRig(t, pairOptions{prefills: 1, decodes: 2})
			g.d[0].set(onlyOnce(c.engine))
			var a answer
			for len(g.d[0].taken()) == 0 {
				a = g.post("/v1/chat/completions", streamBody)
			}
			require.Equal(t, http.StatusOK, a.status, a.body)
			var params []string
			for _, e := range g.d {
				for _, call := range e.taken() {
					if call.params != nil {
						params = append(params, call.params["remote_request_id"].(string))
					}
				}
			}
			seen := map[string]bool{}
			for _, id := range params {
				assert.False(t, seen[id], "parameters are sent once")
				seen[id] = true
			}
			var failed []msg.Done
			for _, r := range g.decodes {
				for _, d := range r.allDones() {
					if d.Outcome != msg.OK {
						failed = append(failed, d)
					}
				}
			}
			require.NotEmpty(t, failed)
			assert.Equal(t, c.outcome, failed[0].Outcome)
			assert.Equal(t, c.probe, failed[0].Probe)
			assert.False(t, failed[0].Trip)
			for _, d := range g.prefills[0].allDones() {
				assert.Equal(t, msg.OK, d.Outcome, "the prefill rank did its work")
			}
		})
	}
}

// TestDecodeRejects: a 4xx of the decode rank goes to the client as it is, streamed or not.
func TestDecodeRejects(t *testing.T) {
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 1})
	const said = `{"error":{"message":"too long","type":"BadRequestError","code":400}}`
	g.d[0].set(answers(replies(400, said)))
	a := g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 400, a.status)
	assert.JSONEq(t, said, a.body)
	assert.Equal(t, "remote", a.header.Get("X-Dpserve-Prefill"))
	g.d[0].set(answers(sends(said, doneEvent)))
	a = g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 400, a.status)
	assert.JSONEq(t, said, a.body)
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="rejected",way="remote"}`, "2")
	assert.Equal(t, 2, total(g.p), "nothing is done again")
}

// TestDialFailed: parameters of which no engine has seen a byte go to another decode rank.
func TestDialFailed(t *testing.T) {
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 2})
	g.decodes[0].mu.Lock()
	g.decodes[0].url = "http://127.0.0.1:1"
	g.decodes[0].incarnation++ // nothing listens at the new address
	g.decodes[0].seq = 0
	g.decodes[0].mu.Unlock()
	g.d[0].mu.Lock()
	g.d[0].isMute = true
	g.d[0].mu.Unlock()
	g.decodes[0].publish()
	g.in.findPair("demo").router.Update(func(tab *routing.PairTable) {
		tab.SetMet(g.prefills[0].ref(), g.decodes[0].ref())
	})
	for range 4 {
		a := g.post("/v1/chat/completions", streamBody)
		g.served(a, "remote")
		assert.Equal(t, "1", a.header.Get("X-Dpserve-Rank"))
	}
	assert.Equal(t, 4, total(g.p), "no prompt is computed twice")
	assert.Len(t, g.d[1].taken(), 4)
	d := g.decodes[0].lastDone(t)
	assert.Equal(t, msg.FailedOutcome, d.Outcome)
	assert.True(t, d.Probe)
}

// TestSplitClientLeaves: a client that leaves in the queue, in the prefill leg, in the decode leg or in the
// stream ends the engines' requests, and both tickets come back once.
func TestSplitClientLeaves(t *testing.T) {
	for _, far := range []bool{false, true} {
		for name, at := range map[string]int{"prefill": 0, "decode": 1, "stream": 2, "queue": 3} {
			t.Run(name, func(t *testing.T) {
				var h hangingEngine
				g := newPairRig(t, pairOptions{prefills: 1, decodes: 1, far: far, max: 1})
				switch at {
				case 0, 3:
					g.p[0].set(answers(h.sends()))
				case 1:
					g.d[0].set(answers(h.sends()))
				case 2:
					g.d[0].set(answers(h.sends(roleChunk, textChunk)))
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				gone := make(chan answer, 2)
				go func() { gone <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
				eventually(t, func() bool { return h.came.Load() == 1 }, "the engine is asked")
				if at == 3 {
					go func() { gone <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
					eventually(t, func() bool { return g.in.QueueLen("demo.decode") == 1 }, "one waits")
				}
				if at == 2 {
					eventually(t, func() bool { return g.decodes[0].firstTokens() == 1 }, "it streams")
				}
				cancel()
				<-gone
				if at == 3 {
					<-gone
				}
				eventually(t, func() bool { return h.left.Load() >= 1 }, "the engine sees it")
				for _, r := range g.replicas {
					eventually(t, func() bool { return r.inFlight() == 0 }, "tickets are back")
				}
				d := g.decodes[0].lastDone(t)
				if at == 0 || at == 3 {
					assert.Equal(t, msg.Refused, d.Outcome, "its engine was not asked")
				} else {
					assert.Equal(t, msg.Cancelled, d.Outcome)
				}
				eventually(t, func() bool { _, _, n := g.in.Totals(); return n == 0 }, "no request is left")
				g.requireMetric(`dpserve_pd_legs_total{app="demo",ending="error",side="prefill"}`, "")
			})
		}
	}
}

func (r *replica) ref() routing.RankRef {
	r.mu.Lock()
	defer r.mu.Unlock()
	return routing.RankRef{ID: r.id, Incarnation: r.incarnation}
}

func (r *replica) firstTokens() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.firsts
}

// TestNoPrefill: without a prefill rank the decode rank computes the prompt, or the request is refused at
// once. Pools of unequal sizes work.
func TestNoPrefill(t *testing.T) {
	t.Parallel()
	for _, fallback := range []string{app.FallbackLocal, app.FallbackFail} {
		t.Run(fallback, func(t *testing.T) {
			g := newPairRig(t, pairOptions{prefills: 2, decodes: 3, change: func(p, d *app.Application) {
				p.Disaggregation.Fallback, d.Disaggregation.Fallback = fallback, fallback
			}})
			g.served(g.post("/v1/chat/completions", streamBody), "remote")
			for _, r := range g.prefills {
				r.say(false, true, "exit_1")
			}
			a := g.post("/v1/chat/completions", streamBody)
			if fallback == app.FallbackLocal {
				g.served(a, "fallback")
				g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="ok",way="fallback"}`, "1")
				return
			}
			assert.Equal(t, 503, a.status, a.body)
			assert.Equal(t, "no_ready_rank", a.code(t))
			assert.Contains(t, a.body, "fallback")
			assert.NotContains(t, a.body, "no room")

			pool := app.PoolName("demo", app.PoolPrefill)
			g.in.TakeWaiting([]msg.Waiting{{
				App: pool, Revision: 1, Reason: noRoomReason, Units: map[string]uint64{pool + "/0/0": 1},
			}}, time.Minute)
			eventually(t, func() bool {
				a = g.post("/v1/chat/completions", streamBody)
				return strings.Contains(a.body, "there is no room to start one: "+noRoomReason)
			}, "the reason of the placement")
			_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1}})
			require.ErrorContains(t, err, "no prefill rank can compute the prompt")
			require.ErrorContains(t, err, "and there is no room to start one: "+noRoomReason)
		})
	}
}

// TestPrefillFenced: a prefill rank that is lost in its leg is not waited for, and nobody is charged.
func TestPrefillFenced(t *testing.T) {
	t.Parallel()
	var h hangingEngine
	g := newPairRig(t, pairOptions{prefills: 2, decodes: 1})
	g.p[0].set(answers(h.sends()))
	got := make(chan answer, 2)
	for range 2 {
		go func() { got <- g.post("/v1/chat/completions", streamBody) }()
	}
	eventually(t, func() bool { return h.came.Load() >= 1 }, "the leg runs")
	began := time.Now()
	g.prefills[0].say(false, true, "exit_1")
	for range 2 {
		g.served(<-got, "remote")
	}
	assert.Less(t, time.Since(began), 4*time.Second)
	d := g.prefills[0].lastDone(t)
	assert.Equal(t, msg.Cancelled, d.Outcome)
	assert.False(t, d.Trip || d.Probe)
}

// TestDecodeFenced: the parameters for a decode rank that is lost in its prefill leg go to another one; those
// that a lost rank has got are not used again.
func TestDecodeFenced(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		g := newPairRig(t, pairOptions{prefills: 1, decodes: 2})
		next := make(chan struct{})
		g.p[0].set(onlyPrefill(answersLater(next, g.p[0])))
		got := make(chan answer, 1)
		go func() { got <- g.post("/v1/chat/completions", streamBody) }()
		eventually(t, func() bool { return total(g.p) == 1 }, "the prefill leg runs")
		eventually(t, func() bool { return g.decodes[0].inFlight()+g.decodes[1].inFlight() == 1 },
			"a decode rank is reserved")
		lost := 0
		if g.decodes[1].inFlight() == 1 {
			lost = 1
		}
		g.decodes[lost].say(false, true, "exit_1")
		eventually(t, func() bool { return g.decodes[lost].inFlight() == 0 }, "its loss is noticed")
		close(next)
		a := <-got
		g.served(a, "remote")
		assert.Equal(t, 1, total(g.p))
		assert.Empty(t, g.d[lost].taken())
	})
	t.Run("after", func(t *testing.T) {
		var h hangingEngine
		g := newPairRig(t, pairOptions{prefills: 1, decodes: 2})
		g.d[0].set(onlyOnce(h.sends()))
		g.d[1].set(onlyOnce(h.sends()))
		got := make(chan answer)
		go func() { got <- g.post("/v1/chat/completions", streamBody) }()
		eventually(t, func() bool { return h.came.Load() == 1 }, "the decode leg runs")
		lost := 0
		if len(g.d[1].taken()) == 1 {
			lost = 1
		}
		g.d[1-lost].set(nil)
		g.decodes[lost].say(false, true, "exit_1")
		g.served(<-got, "remote")
		assert.Equal(t, 2, total(g.p), "the prompt is computed again")
	})
}

// answersLater answers a prefill leg when next is closed.
func answersLater(next chan struct{}, e *pdEngine) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-next:
			replies(http.StatusOK, e.prefillAnswer(77))(w, r)
		case <-r.Context().Done():
		}
	}
}

// TestStreamBreaks: a decode rank that breaks off in the stream ends the answer with an error event.
func TestStreamBreaks(t *testing.T) {
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 1})
	g.d[0].set(answers(func(w http.ResponseWriter, _ *http.Request) {
		sse(w, roleChunk, textChunk)
		panic(http.ErrAbortHandler)
	}))
	a := g.post("/v1/chat/completions", streamBody)
	require.Error(t, a.err)
	assert.Contains(t, a.body, "upstream_lost")
	d := g.decodes[0].oneDone(t)
	assert.Equal(t, msg.FailedOutcome, d.Outcome)
	assert.True(t, d.Probe)
	assert.Equal(t, msg.OK, g.prefills[0].lastDone(t).Outcome)
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="stream_lost",way="remote"}`, "1")
}

// TestSplitDeadline: a request whose own deadline is over leaves nothing behind, whatever leg runs.
func TestSplitDeadline(t *testing.T) {
	t.Parallel()
	var h hangingEngine
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 1})
	g.p[0].set(answers(h.sends()))
	a := g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", "50")
	assert.Equal(t, "deadline_exceeded", a.code(t))
	g.p[0].set(nil)
	g.d[0].set(answers(h.sends()))
	a = g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", "100")
	assert.Equal(t, "deadline_exceeded", a.code(t))
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="deadline",way="remote"}`, "2")
}
