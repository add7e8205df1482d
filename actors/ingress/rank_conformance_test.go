package ingress

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
)

// The tests of this file say how a rank is asked. Each runs for a rank of this node and for one of another
// node. Neither the client nor the rank may see a difference.

// forEachTransport runs test for near and far ranks.
func forEachTransport(t *testing.T, test func(t *testing.T, far bool)) {
	t.Helper()
	for name, far := range map[string]bool{"near": false, "far": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, far)
		})
	}
}

// oneAttempt makes the first failure final.
func oneAttempt(a *app.Application) { a.Retries.Attempts, a.Timeouts.QueueS = 1, 0.2 }

// oneDone returns the only Done that the rank got, and requires that its ticket is back. The end of the rig
// looks for a second one.
func (r *replica) oneDone(t *testing.T) msg.Done {
	t.Helper()
	d := r.lastDone(t)
	eventually(t, func() bool { return r.inFlight() == 0 }, "the ticket is back")
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Len(t, r.dones, 1)
	return d
}

// writesRaw is an engine that answers with bytes of its own.
func writesRaw(raw string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_, _ = io.WriteString(conn, raw)
			_ = conn.Close()
		}
	}
}

// FS8: whatever an engine answers, the rank hears it in exactly one Done, and the client gets a status. What
// follows for other ranks is in the rows of package dispatch.
func TestRankOutcome(t *testing.T) {
	t.Parallel()
	var h hangingEngine
	redirect := func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		w.Header().Set("Location", "http://127.0.0.1:1/elsewhere")
		w.WriteHeader(http.StatusTemporaryRedirect)
	}
	for _, c := range []struct {
		name   string
		engine http.HandlerFunc // nil: nothing listens
		body   string
		status int
		cause  string
		says   string // charge, check, busy
	}{
		{"stream", sends(roleChunk, textChunk, stopChunk, usageChunk, doneEvent), streamBody, 200, "ok", ""},
		{"whole", replies(200, wholeAnswer), chatBody, 200, "ok", ""},
		{"400", replies(400, `{"a":1}`), chatBody, 400, msg.CauseClientError, ""},
		{"408", replies(408, `{}`), streamBody, 408, "engine_timeout", ""},
		{"429", replies(429, `{}`), streamBody, 429, "engine_busy", "busy"},
		{"500", replies(500, `{}`), chatBody, 500, "engine_error", "charge"},
		{
			"400 as event", sends(`{"error":{"message":"m","code":400}}`, doneEvent), streamBody, 400,
			msg.CauseClientError, "",
		},
		{
			"500 as event", sends(`{"error":{"message":"m","code":500}}`, doneEvent), streamBody, 500,
			"engine_error", "charge",
		},
		{
			"error event without code", sends(`{"error":{"message":"m"}}`, doneEvent), streamBody, 500,
			"engine_error", "charge",
		},
		{"busy", replies(503, busyError), chatBody, 503, "engine_busy", "busy"},
		{
			"busy, no blanks", replies(503, strings.ReplaceAll(busyError, ": ", ":")), streamBody, 503,
			"engine_busy", "busy",
		},
		{"busy as event", sends(busyError, doneEvent), streamBody, 503, "engine_busy", "busy"},
		{"other 503", replies(503, `{"error":"scaling"}`), streamBody, 503, "engine_busy", "busy"},
		{"dead core", replies(500, deadCore), chatBody, 500, "engine_dead", "check"},
		{"redirect", redirect, chatBody, 502, "redirect", "charge"},
		{"reset", resets, chatBody, 502, "reset", "check"},
		{"refuses", nil, chatBody, 502, "connection_refused", "check"},
		{"malformed", writesRaw("HTTP/9 what\r\n\r\n"), chatBody, 502, "malformed_answer", "charge"},
		{"a head that is too large", largeHead, streamBody, 502, "malformed_answer", "charge"},
		{"empty", sends(), streamBody, 502, "empty", "charge"},
		{"empty, whole", replies(200, ``), streamBody, 502, "empty", "charge"},
		{"bare [DONE]", sends(doneEvent), streamBody, 502, "empty", "charge"},
		{"ends after its role", sends(roleChunk), streamBody, 502, "empty", "charge"},
		{"breaks off after its role", cutAfter(roleChunk), streamBody, 502, "empty", "charge"},
		{"hangs", h.sends(), streamBody, 504, "first_token_timeout", "charge"},
		{"hangs after its role", h.sends(roleChunk), streamBody, 504, "first_token_timeout", "charge"},
		{"breaks off", cutAfter(textChunk), streamBody, 200, "upstream_lost", "charge check"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			forEachTransport(t, func(t *testing.T, far bool) {
				o := options{far: far, app: func(a *app.Application) {
					oneAttempt(a)
					if c.cause == "first_token_timeout" { // of the others a slow machine is none
						a.Timeouts.FirstTokenS, a.Timeouts.BetweenTokensS = 0.5, 0.5
					}
				}}
				if c.engine == nil {
					o.urls = []string{"http://127.0.0.1:1"}
				} else {
					o.engines = []http.HandlerFunc{c.engine}
				}
				g := newRig(t, o)
				a := g.post("/v1/chat/completions", c.body)
				for try := 0; try < 5 && g.replicas[0].granted() == 0; try++ { // not asked in time
					a = g.post("/v1/chat/completions", c.body)
				}
				assert.Equal(t, c.status, a.status)
				assert.Empty(t, a.header.Get("Location"), "it would lead the client to an address inside")
				assert.NotContains(t, a.body, "elsewhere")
				d := g.replicas[0].oneDone(t)
				want := msg.FailedOutcome
				if c.cause == "ok" || c.cause == msg.CauseClientError {
					want = msg.OK
				}
				assert.Equal(t, want, d.Outcome)
				assert.Equal(t, c.cause, d.Cause)
				var says []string
				for i, is := range []bool{d.Charge, d.CheckHealth, d.BusyFor > 0} {
					if is {
						says = append(says, []string{"charge", "check", "busy"}[i])
					}
				}
				assert.Equal(t, c.says, strings.Join(says, " "))
				if c.name == "stream" {
					assert.Equal(t, []int{5, 3, 7}, []int{d.PromptTokens, d.CachedTokens, d.CompletionTokens})
					assert.Positive(t, d.FirstToken)
				}
			})
		})
	}
}

// TestRankRefuses: a rank that refuses is not asked further, gets no Done, and another rank serves.
func TestRankRefuses(t *testing.T) {
	for r := msg.Full; r <= msg.Overloaded; r++ {
		if r == msg.Expired { // no other rank is tried
			continue
		}
		t.Run(r.String(), func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				var asked atomic.Int32
				g := newRig(t, options{far: far, engines: []http.HandlerFunc{
					func(http.ResponseWriter, *http.Request) { asked.Add(1) }, replies(200, wholeAnswer),
				}})
				g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal { return r })
				for range 2 {
					a := g.post("/v1/chat/completions", chatBody)
					require.Equal(t, 200, a.status, a.body)
					assert.Equal(t, "1", a.header.Get("X-Dpserve-Rank"))
				}
				k := g.replicas[0]
				k.mu.Lock()
				defer k.mu.Unlock()
				assert.Positive(t, k.admits)
				assert.Empty(t, k.dones)
				assert.Zero(t, asked.Load())
			})
		})
	}
}

// TestRankMailboxStopped: a rank whose actor has ended counts as gone, also while a request waits for it.
func TestRankMailboxStopped(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		g := newRig(t, options{far: far, app: oneAttempt, urls: []string{"http://127.0.0.1:1"}})
		r := g.replicas[0]
		r.setMute(true)
		answers := make(chan answer)
		go func() { answers <- g.post("/v1/chat/completions", chatBody) }()
		eventually(t, func() bool { return r.heldAdmits() == 1 }, "the rank is asked")
		close(r.stopped)
		assert.Equal(t, 503, (<-answers).status)
		assert.Contains(t, g.page(), `"gone"`)
		assert.Zero(t, r.granted())
	})
}

// TestRankLateTicket: the ticket of a request that has left before it was admitted comes back, unused.
func TestRankLateTicket(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		var asked atomic.Int32
		g := newRig(t, options{far: far, app: oneAttempt, engines: []http.HandlerFunc{
			func(http.ResponseWriter, *http.Request) { asked.Add(1) },
		}})
		r := g.replicas[0]
		r.setMute(true)
		ctx, cancel := context.WithCancel(t.Context())
		answers := make(chan answer)
		go func() { answers <- g.postCtx(ctx, "/v1/chat/completions", chatBody) }()
		eventually(t, func() bool { return r.heldAdmits() == 1 }, "the rank is asked")
		cancel()
		require.Error(t, (<-answers).err)
		eventually(t, func() bool { return r.firstHeld().Ctx.Err() != nil }, "the rank can see it")
		r.answerHeld()
		d := r.oneDone(t)
		assert.Equal(t, msg.Refused, d.Outcome)
		assert.Equal(t, "late_ticket", d.Cause)
		assert.Zero(t, asked.Load())
	})
}

// FS6: a client that leaves while the engine works ends the engine's request and the ticket, before the first
// token and in mid-stream.
func TestRankClientLeaves(t *testing.T) {
	for name, c := range map[string]struct {
		body string
		list []string
		seen int // tokens
	}{
		"before a stream": {body: streamBody}, "before a whole answer": {body: chatBody},
		"in mid-stream": {streamBody, []string{roleChunk + "\n\ndata: " + textChunk}, 2}, // in one write
	} {
		t.Run(name, func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				var h hangingEngine
				g := newRig(t, options{far: far, engines: []http.HandlerFunc{h.sends(c.list...)}})
				ctx, cancel := context.WithCancel(t.Context())
				answers := make(chan answer)
				go func() { answers <- g.postCtx(ctx, "/v1/chat/completions", c.body) }()
				eventually(t, func() bool { return h.came.Load() == 1 }, "the engine is asked")
				if c.list != nil {
					eventually(t, func() bool { return g.replicas[0].hasFirstTokens(1) }, "the first token")
				}
				cancel()
				<-answers
				d := g.replicas[0].oneDone(t)
				assert.Equal(t, msg.Cancelled, d.Outcome)
				assert.Equal(t, "client_gone", d.Cause)
				assert.False(t, d.Charge)
				assert.Equal(t, c.seen, d.CompletionTokens, "what was seen of it")
				eventually(t, func() bool { return h.left.Load() == 1 }, "the engine sees it")
			})
		})
	}
}

// TestRankSlowAdmission: a rank that does not answer in time counts as overloaded, and its late ticket comes
// back.
func TestRankSlowAdmission(t *testing.T) {
	t.Parallel()
	forEachTransport(t, func(t *testing.T, far bool) {
		o := options{far: far, app: oneAttempt, urls: []string{"http://127.0.0.1:1"}}
		o.timers.Admit = 50 * time.Millisecond
		g := newRig(t, o)
		r := g.replicas[0]
		r.setMute(true)
		assert.Equal(t, 503, g.post("/v1/chat/completions", chatBody).status)
		r.answerHeld()
		d := r.oneDone(t)
		assert.Equal(t, msg.Refused, d.Outcome)
		assert.Equal(t, "late_ticket", d.Cause)
	})
}

// TestRankResend: a request is sent twice to an engine that has closed a waiting connection, and only then.
func TestRankResend(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		var mu sync.Mutex
		seen, broken := map[string]bool{}, 0
		g := newRig(t, options{far: far, app: oneAttempt, engines: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				again := seen[r.RemoteAddr]
				seen[r.RemoteAddr] = true
				if again {
					broken++
				}
				mu.Unlock()
				if again {
					resets(w, r)
					return
				}
				replies(200, wholeAnswer)(w, r)
			},
		}})
		for range 4 {
			a := g.post("/v1/chat/completions", chatBody)
			require.Equal(t, 200, a.status, a.body)
			assert.Equal(t, "1", a.header.Get("X-Dpserve-Attempts"), "not an attempt")
		}
		mu.Lock()
		defer mu.Unlock()
		assert.Positive(t, broken)
		for _, d := range g.replicas[0].allDones() { // another node's may still come
			assert.Equal(t, "ok", d.Cause)
		}
		assert.Contains(t, g.page(), `keepalive_resend`)
	})
}

// RP39, SP4: an answer passes byte for byte. The engine gets the client's header fields without those of the
// connection and of dpserve, spelled with `-` or `_`, and the client gets the engine's in the same way.
func TestRankHeaders(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		seen := make(chan http.Header, 1)
		g := newRig(t, options{far: far, engines: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				seen <- r.Header
				h := w.Header()
				h["X-Engine"] = []string{"a", "b"}
				h["Connection"], h["X-Hop"] = []string{"X-Hop"}, []string{"1"}
				h["Dpserve-Cause"] = []string{"refused"}
				h["X-Dpserve-Rank"], h["X-Request-Id"] = []string{"9"}, []string{"engine"}
				replies(200, wholeAnswer)(w, r)
			},
		}})
		a := g.post("/v1/chat/completions", chatBody, "Authorization", "Bearer x", "X-Custom", "1",
			"X-Request-Id", "r1", "Connection", "X-Hop, Api-Key", "X-Hop", "1", "Api-Key", "k",
			"X-Dpserve-Session", "s", "X-Session-Id", "t", "X-Forwarded-For", "1.2.3.4",
			"X-Data-Parallel-Rank", "7", "Dpserve-Rank", "9/9", "Te", "trailers",
			"Content-Type", "application/json", "User-Agent", "client",
			"X_dpserve_rank", "0/0", "Transfer_encoding", "chunked", "X_hop", "1", "X_mine", "m")
		require.Equal(t, 200, a.status, a.body)
		requireBytes(t, wholeAnswer, a.body)
		assert.Equal(t, http.Header{
			"Authorization": {"Bearer x"}, "X-Custom": {"1"}, "X-Request-Id": {"r1"},
			"User-Agent": {"client"}, "Content-Type": {"application/json"}, "Content-Length": {"60"},
			"X-Session-Id": {"t"}, "Via": {"1.1 dpserve-n1"},
			"X_mine": {"m"}, // which has no meaning for dpserve
		}, <-seen)
		assert.Equal(t, []string{"a", "b"}, a.header["X-Engine"])
		assert.Empty(t, a.header["X-Hop"])
		assert.Empty(t, a.header["Dpserve-Cause"])
		for name, want := range map[string]string{
			"X-Request-Id": "r1", "Content-Type": "application/json", "X-Dpserve-App": "demo",
			"X-Dpserve-Group": "0", "X-Dpserve-Rank": "0", "X-Dpserve-Attempts": "1",
		} {
			assert.Equal(t, []string{want}, a.header[name])
		}
		d := g.replicas[0].oneDone(t)
		assert.Equal(t, []int{5, 1}, []int{d.PromptTokens, d.CompletionTokens})
		requests, tokens, _ := g.in.Totals()
		assert.Equal(t, []uint64{1, 1}, []uint64{requests, tokens})
	})
}

// TestRankAddressing: an engine that hosts several ranks is told which one is meant.
func TestRankAddressing(t *testing.T) {
	for mode, want := range map[string][2]string{"header": {"6", ""}, "body": {"", `,"routed_dp_rank":6}`}} {
		t.Run(mode, func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				seen := make(chan [2]string, 1)
				g := newRig(t, options{
					far: far, address: msg.Target{Addressing: mode, Selector: 6},
					engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
						b, _ := io.ReadAll(r.Body)
						seen <- [2]string{r.Header.Get("X-Data-Parallel-Rank"), string(b)}
						replies(200, wholeAnswer)(w, r)
					}},
				})
				require.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
				body := chatBody
				if want[1] != "" {
					body = chatBody[:len(chatBody)-1] + want[1]
				}
				assert.Equal(t, [2]string{want[0], body}, <-seen)
			})
		})
	}
}

// TestRankReservation: a ticket without a request lives until it is freed; one that comes too late goes back.
func TestRankReservation(t *testing.T) {
	t.Parallel()
	forEachTransport(t, func(t *testing.T, far bool) {
		o := options{far: far, urls: []string{"http://127.0.0.1:1"}}
		o.timers.Admit = 2 * time.Second // the first one opens a connection
		g := newRig(t, o)
		r := g.replicas[0]
		reserve := func(id string) error {
			_, err := g.in.BestWorker(t.Context(), "demo",
				&client.BestWorkerRequest{TokenIDs: []uint32{1}, RequestID: id})
			return err
		}
		r.setMute(true)
		require.Error(t, reserve("late"))
		if far {
			eventually(t, func() bool { return r.heldAdmits() == 1 && r.firstHeld().Ctx.Err() != nil },
				"its node knows")
		}
		r.answerHeld()
		assert.Equal(t, "late_ticket", r.oneDone(t).Cause)
		r.setMute(false)
		require.NoError(t, reserve("held"))
		require.Equal(t, 1, r.inFlight())
		require.NoError(t, g.in.Free("demo", "held"))
		eventually(t, func() bool { return r.inFlight() == 0 }, "freed")
		assert.Equal(t, msg.Cancelled, r.lastDone(t).Outcome)
	})
}

func (r *replica) setMute(mute bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mute = mute
}

func (r *replica) heldAdmits() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.held)
}

func (r *replica) firstHeld() *msg.Admit {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held[0]
}

// answerHeld answers every held Admit.
func (r *replica) answerHeld() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range slices.Backward(r.held) {
		r.admit(m)
	}
	r.held = nil
}
