package rankleg

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// fakeEngine is an engine behind pipes: it counts the dials, and answers until it is told otherwise. A
// request for /stream gets a head and then nothing, until its client closes.
type fakeEngine struct {
	t    *testing.T
	legs engines

	mu      sync.Mutex
	dials   int
	refuses bool  // dials fail
	refusal error // of all dials; nil: none
	hangs   bool  // dials last until their context ends
	slow    bool  // dials take a second
	dead    bool  // it closes connections without an answer
	ends    bool  // it ends the connection of the next request without an answer …
	after   time.Duration
	dies    bool // … and takes no others
	asked   int  // requests that it got
	open    []net.Conn
}

// newFakeEngine needs a bubble of synctest around it.
func newFakeEngine(t *testing.T) *fakeEngine {
	t.Helper()
	e := &fakeEngine{t: t}
	e.legs = newEngines(
		Timers{Dial: 5 * time.Second, IdleOwned: time.Minute, IdleAttached: 4 * time.Second}, e.dial)
	t.Cleanup(e.legs.close)
	return e
}

func (e *fakeEngine) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	e.mu.Lock()
	e.dials++
	refuses, hangs, slow := e.refuses, e.hangs, e.slow
	e.mu.Unlock()
	switch {
	case e.refusal != nil:
		return nil, &net.OpError{Op: "dial", Err: e.refusal}
	case refuses:
		return nil, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}
	case hangs:
		<-ctx.Done()
	case slow:
		time.Sleep(time.Second)
	}
	if ctx.Err() != nil {
		return nil, &net.OpError{Op: "dial", Err: ctx.Err()}
	}
	here, there := net.Pipe()
	e.mu.Lock()
	e.open = append(e.open, there)
	e.mu.Unlock()
	go e.serve(there)
	return here, nil
}

func (e *fakeEngine) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	for r := bufio.NewReader(c); ; {
		req, err := http.ReadRequest(r)
		if err != nil || e.is(&e.dead) || e.endsThis() {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		answer := "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
		if req.URL.Path == "/stream" {
			answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
		}
		if _, err := io.WriteString(c, answer); err != nil {
			return
		}
	}
}

// endsThis counts a request, and reports whether its connection ends now.
func (e *fakeEngine) endsThis() bool {
	e.mu.Lock()
	ends, after := e.ends, e.after
	e.asked++
	e.ends, e.refuses = false, e.refuses || ends && e.dies
	e.mu.Unlock()
	if ends {
		time.Sleep(after)
	}
	return ends
}

// rank is a rank whose engine it is.
func (e *fakeEngine) rank() *Rank {
	e.t.Helper()
	r, err := NewRank(&msg.Record{Snapshot: &msg.Snapshot{Target: msg.Target{URL: "http://engine:1"}}})
	require.NoError(e.t, err)
	return r
}

func (e *fakeEngine) is(flag *bool) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return *flag
}

func (e *fakeEngine) set(flag *bool, to bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	*flag = to
}

func (e *fakeEngine) dialled() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dials
}

// closeAll closes the engine's side of all its connections.
func (e *fakeEngine) closeAll() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.open {
		_ = c.Close()
	}
}

// send sends a request and lets what it has begun in the background end.
func (e *fakeEngine) send(path string) (*http.Response, *engineRequest, error) {
	e.t.Helper()
	r := &engineRequest{
		URL: &url.URL{Scheme: "http", Host: "engine:1", Path: path}, Header: http.Header{},
		Body: []byte("{}"),
	}
	resp, err := e.legs.attached.send(e.t.Context(), r)
	synctest.Wait()
	return resp, r, err
}

// stream begins a stream that stays open until the test ends.
func (e *fakeEngine) stream() {
	e.t.Helper()
	resp, _, err := e.send("/stream")
	require.NoError(e.t, err)
	e.t.Cleanup(func() { _ = resp.Body.Close() })
}

// whole sends a request and reads its answer.
func (e *fakeEngine) whole() {
	e.t.Helper()
	resp, _, err := e.send("/")
	require.NoError(e.t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(e.t, err)
	require.NoError(e.t, resp.Body.Close())
}

// RC2: however many streams run, the next request finds a connection.
func TestARequestBesideOthersNeedsNoDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newFakeEngine(t)
		for n := 1; n <= 8; n++ {
			e.stream()
			assert.Equal(t, n+1, e.dialled(), "one spare connection and no more")
		}
		e.set(&e.refuses, true)
		e.stream()
	})
}

// RC2: a spare connection that nobody used is closed when its time is over, and no other one takes its place
// before the next request.
func TestNothingIsDialledWithoutRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newFakeEngine(t)
		e.whole()
		assert.Equal(t, 2, e.dialled())
		time.Sleep(5 * time.Second)
		assert.True(t, e.legs.attached.clients[engineKey{"http", "engine:1", nil}].Unused())
		time.Sleep(time.Hour)
		assert.Equal(t, 2, e.dialled())
		e.whole()
		assert.Equal(t, 4, e.dialled())
		e.whole()
		assert.Equal(t, 4, e.dialled(), "a connection waits already")
	})
}

// RC2: no spare connection is dialled to an engine that refuses connections, or takes them and does not
// answer.
func TestADeadEngineIsDialledByItsRequestsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, kind := range []func(*fakeEngine) *bool{
			func(e *fakeEngine) *bool { return &e.dead }, func(e *fakeEngine) *bool { return &e.refuses },
		} {
			e := newFakeEngine(t)
			e.stream()
			e.set(kind(e), true)
			e.closeAll()
			_, r, err := e.send("/")
			require.Error(t, err)
			assert.True(t, r.isStale, "the spare connection was closed: nobody's fault")
			before := e.dialled()
			for range 100 {
				_, _, err := e.send("/")
				require.Error(t, err)
			}
			time.Sleep(time.Hour)
			assert.Equal(t, before+100, e.dialled())
		}
	})
}

// RC2: the request may be sent again, and finds the engine.
func TestASpareThatTheEngineClosedIsAFreeResend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newFakeEngine(t)
		e.stream()
		e.closeAll()
		_, r, err := e.send("/")
		require.Error(t, err)
		assert.True(t, r.isStale)
		e.whole()
	})
}

// RC2: one at a time per engine, for as long as a dial may take; and none outlives the legs.
func TestDialsOfSparesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newFakeEngine(t)
		for range 3 {
			e.stream() // the third one uses the spare connection of the second one
		}
		require.Equal(t, 4, e.dialled())
		e.set(&e.hangs, true)
		e.stream()
		assert.Equal(t, 5, e.dialled(), "a dial that hangs")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r := &engineRequest{URL: &url.URL{Scheme: "http", Host: "engine:1", Path: "/"}}
		_, err := e.legs.attached.send(ctx, r)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, 6, e.dialled(), "the request's own dial")
		time.Sleep(5 * time.Second)

		e.set(&e.hangs, false)
		e.stream()
		e.set(&e.hangs, true)
		e.stream() // uses the spare connection
		begun := time.Now()
		e.legs.close()
		assert.Zero(t, time.Since(begun), "Close ends the dial")
		dials := e.dialled()
		e.set(&e.hangs, false)
		e.stream()
		assert.Equal(t, dials+1, e.dialled(), "closed legs still send, and keep nothing")
	})
}

// TestTheDialOfASpareOutlivesItsRequest: a request that is given up leaves the dial alone.
func TestTheDialOfASpareOutlivesItsRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newFakeEngine(t)
		e.set(&e.slow, true)
		ctx, cancel := context.WithCancel(t.Context())
		r := &engineRequest{
			URL: &url.URL{Scheme: "http", Host: "engine:1", Path: "/stream"}, Body: []byte("{}"),
		}
		resp, err := e.legs.attached.send(ctx, r)
		require.NoError(t, err)
		cancel()
		require.NoError(t, resp.Body.Close())
		time.Sleep(2 * time.Second)
		e.set(&e.refuses, true)
		e.stream()
	})
}
