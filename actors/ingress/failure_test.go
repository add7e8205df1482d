package ingress

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/test/memnet"
)

// TestAClientThatLeavesDuringItsAdmissionIsNoTimeout: the rank calls the request expired; the ingress logs
// and counts it as a client that left.
func TestAClientThatLeavesDuringItsAdmissionIsNoTimeout(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{sends(textChunk)}})
	for range 10 { // the end of the request and the answer come at once: either may be seen first
		ctx, cancel := context.WithCancel(t.Context())
		g.replicas[0].setRefuse(func(m *msg.Admit) msg.Refusal {
			cancel()
			<-m.Ctx.Done()
			return msg.Expired
		})
		require.Error(t, g.postCtx(ctx, "/v1/chat/completions", streamBody).err)
	}
	eventually(t, func() bool { return strings.Count(g.logs.String(), "\n") == 10 }, "one line each")
	assert.Equal(t, 10, strings.Count(g.logs.String(), "code=499"), g.logs.String())
}

// RP50: a rank is fenced whose engine failed its probe. Each stream of it is cut at once, also those of the
// other ranks of its lockstep unit; any other fence leaves them.
func TestStalledStream(t *testing.T) {
	for name, isLockstep := range map[string]bool{"independent": false, "lockstep": true} {
		t.Run(name, func(t *testing.T) {
			var h hangingEngine
			engine := h.sends(textChunk)
			var g *rig
			if isLockstep {
				g = lockstepRig(t, engine, engine, engine)
			} else {
				g = newRig(t, options{engines: []http.HandlerFunc{engine, engine, engine}})
			}
			answers := make(chan answer, 3)
			for range 3 {
				go func() { answers <- g.post("/v1/chat/completions", streamBody) }()
			}
			for _, r := range g.replicas {
				eventually(t, func() bool { return r.hasFirstTokens(1) }, "a stream on each rank")
			}
			lost := 1
			if isLockstep {
				lost = 3
			} else {
				g.replicas[1].say(false, true, "its node has no lease")
			}
			g.replicas[0].say(false, true, msg.CauseStalled)
			for range lost {
				a := <-answers
				require.Error(t, a.err)
				assert.Contains(t, a.body, `"code":"stalled"`)
			}
			for _, r := range g.replicas[:lost] {
				assert.Equal(t, "stalled", r.lastDone(t).Cause)
			}
			for _, r := range g.replicas[lost:] {
				assert.Equal(t, 1, r.inFlight())
			}
		})
	}
}

func TestRequestDeadline(t *testing.T) {
	t.Parallel()
	for name, list := range map[string][]string{"before": nil, "after": {textChunk}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var h hangingEngine
				g := newRig(t, options{
					engines: []http.HandlerFunc{h.sends(list...)}, network: &memnet.Network{},
				})
				a := g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", "100")
				if list == nil {
					assert.Equal(t, 504, a.status)
				} else {
					require.Error(t, a.err)
				}
				assert.Contains(t, a.body, `"code":"deadline_exceeded"`)
				assert.Equal(t, msg.Cancelled, g.replicas[0].lastDone(t).Outcome)
			})
		})
	}
}

// TestSlowReader: a client that does not read is cut, its engine is freed, and the collected bytes are
// bounded.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	big := `{"choices":[{"index":0,"text":"` + strings.Repeat("z", 8<<10) + `","finish_reason":null}]}`
	var sent atomic.Int64
	freed := make(chan struct{})
	g := newRig(t, options{
		timers: Timers{SlowReader: 200 * time.Millisecond},
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			defer close(freed)
			for r.Context().Err() == nil {
				sse(w, big)
				sent.Add(int64(len(big)))
			}
		}},
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+"/v1/completions",
		strings.NewReader(`{"model":"demo","stream":true,"prompt":"x"}`))
	require.NoError(t, err)
	if resp, err := g.client.Do(req); err == nil { // else it was cut before it had read the header
		defer func() { _ = resp.Body.Close() }()
	}
	select {
	case <-freed:
	case <-time.After(soon):
		t.Fatal("the engine is still writing")
	}
	assert.Less(t, sent.Load(), int64(32<<20))
	eventually(t, func() bool { return strings.Contains(g.logs.String(), "slow_reader") }, "named in the log")
}

// RP2: a client that opens the flow-control windows wide and does not read its socket is cut like one of
// HTTP/1.
func TestSlowReaderOverHTTP2(t *testing.T) {
	t.Parallel()
	const streams = 3
	big := `{"choices":[{"index":0,"text":"` + strings.Repeat("z", 8<<10) + `","finish_reason":null}]}`
	freed := make(chan struct{}, streams)
	g := newRig(t, options{
		timers: Timers{SlowReader: 200 * time.Millisecond},
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			for r.Context().Err() == nil {
				sse(w, big)
			}
			freed <- struct{}{}
		}},
	})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(t, err)
	fr := http2.NewFramer(conn, nil)
	require.NoError(t, fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1}))
	require.NoError(t, fr.WriteSettingsAck())
	require.NoError(t, fr.WriteWindowUpdate(0, 1<<30))
	for i := range uint32(streams) {
		require.NoError(t, fr.WriteHeaders(http2.HeadersFrameParam{
			StreamID: 2*i + 1, BlockFragment: headersOf(t, http2Post("/v1/completions")...), EndHeaders: true,
		}))
		require.NoError(t, fr.WriteData(2*i+1, true, []byte(`{"model":"demo","stream":true,"prompt":"x"}`)))
	}
	for range streams {
		select {
		case <-freed:
		case <-time.After(soon):
			t.Fatal("an engine is still writing")
		}
	}
}

// RP2: the requests of many users may share one connection of a proxy, so a refused request does not close
// it.
func TestARefusedRequestLeavesItsHTTP2Connection(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
		limits:  Limits{MaxBody: 1000},
	})
	var dials atomic.Int32
	tr := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
	}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	ask := func(path, body string) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, g.url+path,
			strings.NewReader(body))
		require.NoError(t, err)
		resp, err := tr.RoundTrip(req)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
	for range 3 {
		assert.Equal(t, 403, ask("/sleep", chatBody))
		assert.Equal(t, 413, ask("/v1/chat/completions", strings.Repeat(" ", 2000)))
		assert.Equal(t, 200, ask("/v1/chat/completions", chatBody))
	}
	assert.EqualValues(t, 1, dials.Load())
}

// RP4: two ranks that have a request disappear with their nodes; a third rank serves it.
func TestRanksThatAreGoneAreNoDeathsOfARequest(t *testing.T) {
	for name, c := range map[string]struct {
		ends   func(r *replica)
		status int
	}{
		"gone":   {func(r *replica) { r.gone() }, 200},
		"fenced": {func(r *replica) { r.say(false, true, "engine exited with code 1") }, 502},
	} {
		t.Run(name, func(t *testing.T) {
			var g *rig
			ready := make(chan struct{})
			var calls atomic.Int32
			engine := func(w http.ResponseWriter, r *http.Request) {
				drain(r)
				<-ready
				if calls.Add(1) > 2 {
					replies(200, wholeAnswer)(w, r)
					return
				}
				for _, one := range g.replicas {
					if one.inFlight() > 0 {
						c.ends(one)
					}
				}
				<-r.Context().Done()
			}
			g = newRig(t, options{engines: []http.HandlerFunc{engine, engine, engine}})
			close(ready)
			a := g.post("/v1/chat/completions", chatBody)
			assert.Equal(t, c.status, a.status, a.body)
		})
	}
}

func TestCloseCutsWithDrained(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}})
	got := make(chan answer, 1)
	go func() { got <- g.postCtx(t.Context(), "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].inFlight() == 1 && g.replicas[0].firstsSeen() == 1 },
		"streams")
	g.in.Drain()
	assert.False(t, g.in.Ready())
	assert.Equal(t, 503, g.get("/health").status)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.NoError(t, g.in.Close(ctx))
	a := <-got
	require.Error(t, a.err)
	assert.Contains(t, a.body, `"code":"drained"`)
	assert.False(t, g.replicas[0].lastDone(t).Charge)
}

func (r *replica) firstsSeen() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.firsts
}

// RP15: a clean end of its connection would be the end of a complete answer, so the connection is reset.
func TestAClientOfHTTP10SeesThatItsStreamWasCut(t *testing.T) {
	for name, c := range map[string]struct {
		engine http.HandlerFunc
		cut    bool
	}{
		"whole": {engine: sends(textChunk, stopChunk, doneEvent)},
		"cut":   {engine: cutAfter(textChunk), cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			g := newRig(t, options{engines: []http.HandlerFunc{c.engine}})
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
			require.NoError(t, err)
			defer func() { _ = conn.Close() }()
			_, err = fmt.Fprintf(
				conn, "POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"+
					"Content-Length: %d\r\n\r\n%s", len(streamBody), streamBody)
			require.NoError(t, err)
			answer, err := io.ReadAll(conn)
			if !c.cut {
				require.NoError(t, err)
				assert.True(t, strings.HasSuffix(string(answer), "data: [DONE]\n\n"), string(answer))
				return
			}
			require.ErrorIs(t, err, syscall.ECONNRESET)
			assert.NotContains(t, string(answer), "[DONE]")
		})
	}
}
