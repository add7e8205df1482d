package rankleg

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/test/ports"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func openEngines(t *testing.T) engines {
	t.Helper()
	l := newEngines(Timers{Dial: 5 * time.Second, IdleOwned: time.Minute, IdleAttached: time.Second}, nil)
	t.Cleanup(l.close)
	return l
}

func parsed(t *testing.T, s string) *url.URL {
	t.Helper()
	u, err := url.Parse(s)
	require.NoError(t, err)
	return u
}

// RP27: they share connections, and nobody reads a body once its answer has begun.
func TestBodiesOfAnySize(t *testing.T) {
	seen := make(chan string, 8)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		seen <- r.RemoteAddr
	}))
	defer srv.Close()
	l, conns := openEngines(t), map[string]bool{}
	for _, size := range []int{10, 3 << 20, 10, 3 << 20, 10, 3 << 20} {
		o := &engineRequest{URL: parsed(t, srv.URL+"/x"), Header: http.Header{}, Body: make([]byte, size)}
		resp, err := l.owned.send(t.Context(), o)
		require.NoError(t, err)
		_, err = io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		conns[<-seen] = true
	}
	assert.LessOrEqual(t, len(conns), 2, "one and a spare")
	assert.Len(t, l.owned.clients, 1)
	assert.Empty(t, l.attached.clients)
}

// RP27: an engine that answers before it has read the body is heard.
func TestALargeBodyMayBeRefusedEarly(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusRequestEntityTooLarge)
	}))
	defer srv.Close()
	o := &engineRequest{
		URL: parsed(t, srv.URL+"/x"), Header: http.Header{}, Body: make([]byte, 64<<20),
	}
	resp, err := openEngines(t).owned.send(t.Context(), o)
	require.NoError(t, err)
	assert.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
	require.NoError(t, resp.Body.Close())
}

// TestForgottenClients: engines that are gone leave no client behind once another one comes.
func TestForgottenClients(t *testing.T) {
	l := openEngines(t)
	for _, host := range []string{"a:1", "b:1", "c:1"} {
		u := parsed(t, "http://"+host+"/")
		first := l.owned.client(u, nil)
		assert.Same(t, first, l.owned.client(u, nil))
		assert.Len(t, l.owned.clients, 1)
	}
}

// TestRefused tells a connection that did not come about from one that broke.
func TestRefused(t *testing.T) {
	_, err := openEngines(t).attached.send(t.Context(),
		&engineRequest{URL: parsed(t, "http://"+ports.TakeAddr(t)+"/")})
	require.Error(t, err)
	assert.True(t, IsRefused(err))
	assert.False(t, IsRefused(&net.OpError{Op: "read", Err: errors.New("reset")}))
}

// TestStale: a connection that was closed while it waited is told from one that fails at its first use.
func TestStale(t *testing.T) {
	var n atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if n.Add(1) == 2 {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, "ok")
	}))
	defer srv.Close()
	l := openEngines(t)
	send := func() (*engineRequest, error) {
		o := &engineRequest{URL: parsed(t, srv.URL+"/"), Body: []byte("{}")}
		resp, err := l.owned.send(context.Background(), o)
		if err == nil {
			_, _ = io.ReadAll(resp.Body)
			_ = resp.Body.Close()
		}
		return o, err
	}
	_, err := send()
	require.NoError(t, err)
	o, err := send()
	require.Error(t, err)
	assert.True(t, o.isStale)
	_, err = send()
	require.NoError(t, err)
}

// RP7: no body is kept for as long as its answer lasts.
func TestAWrittenBodyIsFree(t *testing.T) {
	over := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-over
	}))
	defer srv.Close()
	defer close(over)
	body := make([]byte, 2<<20)
	alive := weak.Make(&body[0])
	o := &engineRequest{URL: parsed(t, srv.URL+"/"), Header: http.Header{}, Body: body}
	body = nil // the garbage collector must not find it here
	resp, err := openEngines(t).owned.send(t.Context(), o)
	require.NoError(t, err)
	assert.Eventually(t, func() bool {
		runtime.GC()
		return alive.Value() == nil
	}, 30*time.Second, 10*time.Millisecond)
	runtime.KeepAlive(o)
	require.NoError(t, resp.Body.Close())
}
