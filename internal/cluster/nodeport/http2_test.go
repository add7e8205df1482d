package nodeport_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/test/memnet"
)

// handle serves HTTP/2 on the admin protocol until the test ends.
func (n *node) handle(t testing.TB, h http.HandlerFunc) *nodeport.HTTPServer {
	return n.handleOn(t, nodeport.Admin, h)
}

// handleOn serves a protocol until the test ends.
func (n *node) handleOn(t testing.TB, alpn string, h http.HandlerFunc) *nodeport.HTTPServer {
	t.Helper()
	s := n.ServeHTTP(alpn, h)
	done := make(chan error, 1)
	go func() { done <- s.Serve() }()
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		assert.NoError(t, <-done)
	})
	return s
}

// pair is a server with a transport to it, and how many connections it made.
func pair(t testing.TB, h http.HandlerFunc) (*node, *nodeport.HTTPServer, *nodeport.Transport,
	*atomic.Int32,
) {
	t.Helper()
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control", "worker"), nil).serve(t)
	s := a.handle(t, h)
	var dials atomic.Int32
	b := newNode(t, w.member(t, "b", "ingress"), func(c *nodeport.Config) {
		c.Connect = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	})
	tr := b.Transport(nodeport.Admin, a.addr(), "uid-a")
	t.Cleanup(func() { assert.NoError(t, tr.Close()) })
	return a, s, tr, &dials
}

func request(t testing.TB, ctx context.Context, body io.Reader) *http.Request { //nolint:revive // t first
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://node/v1/completions", body)
	require.NoError(t, err)
	return r
}

// fetch sends a request and reads the whole answer.
func fetch(t testing.TB, tr http.RoundTripper, body string) (string, error) {
	t.Helper()
	res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader(body)))
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	return string(data), err
}

func TestHTTP2KnowsItsPeer(t *testing.T) {
	_, _, tr, dials := pair(t, func(w http.ResponseWriter, r *http.Request) {
		id, ok := nodeport.PeerFromContext(r.Context())
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%d %v %s %s %s %s", r.ProtoMajor, ok, id.Node, id.UID, r.URL.Path, body)
	})
	got, err := fetch(t, tr, "hi")
	require.NoError(t, err)
	assert.Equal(t, "2 true b uid-b /v1/completions hi", got)
	assert.EqualValues(t, 1, dials.Load())
	_, ok := nodeport.PeerFromContext(t.Context())
	assert.False(t, ok)
}

// TestABurstMakesOneConnection: 500 requests at once share one connection, also those that came before it
// existed.
func TestABurstMakesOneConnection(t *testing.T) {
	all := make(chan struct{})
	var inside atomic.Int32
	_, _, tr, dials := pair(t, func(w http.ResponseWriter, _ *http.Request) {
		if inside.Add(1) == 500 {
			close(all)
		}
		<-all
		_, _ = io.WriteString(w, "ok")
	})
	var wg sync.WaitGroup
	for range 500 {
		wg.Go(func() {
			got, err := fetch(t, tr, "x")
			assert.Equal(t, "ok <nil>", fmt.Sprint(got, " ", err))
		})
	}
	wg.Wait()
	assert.EqualValues(t, 1, dials.Load())
}

type countingReader struct{ n atomic.Int64 }

func (c *countingReader) Read(p []byte) (int, error) {
	c.n.Add(int64(len(p)))
	return len(p), nil
}

// TestUploadWindows: a handler that does not read holds 1 MiB of its stream, and many of them do not block
// the others: the connection accepts more than the 4 MiB that net/http documents as its limit.
func TestUploadWindows(t *testing.T) {
	release := make(chan struct{})
	_, _, tr, dials := pair(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength < 0 {
			<-release
			return
		}
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})
	ctx, cancel := context.WithCancel(t.Context())
	var bodies [12]countingReader
	var wg sync.WaitGroup
	for i := range bodies {
		wg.Go(func() {
			if res, err := tr.RoundTrip(request(t, ctx, &bodies[i])); err == nil {
				_ = res.Body.Close()
			}
		})
	}
	require.Eventually(t, func() bool {
		for i := range bodies {
			if bodies[i].n.Load() < 1<<20 {
				return false
			}
		}
		return true
	}, 10*time.Second, time.Millisecond, "every stream has its MiB")
	got, err := fetch(t, tr, strings.Repeat("x", 400<<10))
	require.NoError(t, err)
	assert.Equal(t, fmt.Sprint(400<<10), got)
	for i := range bodies {
		assert.Less(t, bodies[i].n.Load(), int64(2<<20), "and no more")
	}
	assert.EqualValues(t, 1, dials.Load())
	cancel()
	close(release)
	wg.Wait()
}

// TestStalledReadersStopNobody: 16 clients that stop reading do not stop the seventeenth.
func TestStalledReadersStopNobody(t *testing.T) {
	_, _, tr, dials := pair(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if string(body) == "quick" {
			_, _ = io.WriteString(w, "done")
			return
		}
		chunk := make([]byte, 64<<10)
		for {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	for range 16 {
		res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("endless")))
		require.NoError(t, err)
		defer res.Body.Close()
		_, err = io.CopyN(io.Discard, res.Body, 1<<20)
		require.NoError(t, err)
	}
	got, err := fetch(t, tr, "quick")
	require.NoError(t, err)
	assert.Equal(t, "done", got)
	assert.EqualValues(t, 1, dials.Load())
}

func TestACancelledRequestReachesTheHandler(t *testing.T) {
	gone := make(chan struct{})
	_, _, tr, _ := pair(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "begin")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	})
	ctx, cancel := context.WithCancel(t.Context())
	res, err := tr.RoundTrip(request(t, ctx, strings.NewReader("x")))
	require.NoError(t, err)
	defer res.Body.Close()
	cancel()
	<-gone
}

// TestLeavingInPeace: a server that shuts down lets its streams end, while new requests go to its successor
// over a second connection.
func TestLeavingInPeace(t *testing.T) {
	began, release := make(chan struct{}), make(chan struct{})
	a, first, tr, dials := pair(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "old")
		_ = http.NewResponseController(w).Flush()
		close(began)
		<-release
		_, _ = io.WriteString(w, " end")
	})
	res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("x")))
	require.NoError(t, err)
	defer res.Body.Close()
	<-began
	left := make(chan error, 1)
	go func() { left <- first.Shutdown(t.Context()) }()
	require.Eventually(t, func() bool { // the old server's listener is gone
		_, err := newNode(t, a.creds.Load(), nil).Dial(t.Context(), nodeport.Admin, a.addr(), "")
		return err != nil
	}, 10*time.Second, time.Millisecond)
	a.handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "new") })
	require.Eventually(t, func() bool {
		got, err := fetch(t, tr, "y")
		return err == nil && got == "new"
	}, 10*time.Second, 10*time.Millisecond)
	assert.EqualValues(t, 2, dials.Load())
	close(release)
	data, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	assert.Equal(t, "old end", string(data))
	require.NoError(t, <-left)
}

func TestTheWayComesBack(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control"), nil).serve(t)
	a.handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "first") })
	addr := a.addr()
	b := newNode(t, w.member(t, "b", "ingress"), nil)
	tr := b.Transport(nodeport.Admin, addr, "uid-a")
	got, err := fetch(t, tr, "x")
	require.NoError(t, err)
	assert.Equal(t, "first", got)
	require.NoError(t, a.Close())
	_, err = fetch(t, tr, "x")
	require.Error(t, err)

	// Another node takes over its address. The transport does not take it for the first node.
	other := newNode(t, w.member(t, "x", "control"), nil)
	require.NoError(t, other.Listen(t.Context(), addr))
	done := make(chan error, 1)
	go func() { done <- other.Serve() }()
	other.Listener(nodeport.Admin)
	require.Eventually(t, func() bool {
		_, err = fetch(t, tr, "x")
		return errors.Is(err, nodeport.ErrWrongPeer)
	}, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, other.Close())
	require.NoError(t, <-done)

	again := newNode(t, w.member(t, "a", "control"), nil)
	require.NoError(t, again.Listen(t.Context(), addr))
	go func() { done <- again.Serve() }()
	again.handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "second") })
	require.Eventually(t, func() bool { got, err = fetch(t, tr, "x"); return err == nil }, 10*time.Second,
		10*time.Millisecond)
	assert.Equal(t, "second", got)
	require.NoError(t, tr.Close())
	require.NoError(t, tr.Close())
	_, err = fetch(t, tr, "x")
	require.ErrorContains(t, err, "closed")
	require.NoError(t, again.Close())
	require.NoError(t, <-done)
}

// TestASilentPeerIsFound: pings find a peer that falls silent without a reset: 5 s and 3 s.
func TestASilentPeerIsFound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network memnet.Network
		w := newWorld(t, "c1")
		frozen := make(chan struct{})
		a := newNode(t, w.member(t, "a", "control"), func(c *nodeport.Config) {
			c.Bind = func(_ context.Context, addr string) (net.Listener,
				error,
			) {
				return network.Listen(addr)
			}
		})
		require.NoError(t, a.Listen(t.Context(), "10.0.0.1:7947"))
		done := make(chan error, 1)
		go func() { done <- a.Serve() }()
		a.handle(t, func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "begin")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		})
		b := newNode(t, w.member(t, "b", "ingress"), func(c *nodeport.Config) {
			c.Connect = func(ctx context.Context, n, addr string) (net.Conn, error) {
				c, err := network.DialContext(ctx, n, addr)
				return &stoppableConn{Conn: c, frozen: frozen, closed: make(chan struct{})}, err
			}
		})
		tr := b.Transport(nodeport.Admin, "10.0.0.1:7947", "uid-a")
		res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("x")))
		require.NoError(t, err)
		_, err = io.ReadFull(res.Body, make([]byte, 5))
		require.NoError(t, err)
		time.Sleep(time.Minute) // pings keep it alive
		began := time.Now()
		close(frozen)
		_, err = io.ReadAll(res.Body)
		require.Error(t, err)
		assert.LessOrEqual(t, time.Since(began), 8*time.Second)
		require.NoError(t, res.Body.Close())
		require.NoError(t, tr.Close())
		require.NoError(t, b.Close())
		require.NoError(t, a.Close())
		require.NoError(t, <-done)
	})
}

// stoppableConn is a connection that can stop carrying bytes.
type stoppableConn struct {
	net.Conn
	frozen, closed chan struct{}
	once           sync.Once
}

func (f *stoppableConn) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	select {
	case <-f.frozen:
		<-f.closed
		return 0, net.ErrClosed
	default:
		return n, err
	}
}

func (f *stoppableConn) Write(p []byte) (int, error) {
	select {
	case <-f.frozen:
		return len(p), nil
	default:
		return f.Conn.Write(p)
	}
}

func (f *stoppableConn) Close() error {
	f.once.Do(func() { close(f.closed) })
	return f.Conn.Close()
}

func BenchmarkRoundTrip(b *testing.B) {
	_, _, tr, _ := pair(b, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "ok")
	})
	b.ReportAllocs()
	for b.Loop() {
		res, err := tr.RoundTrip(request(b, context.Background(), strings.NewReader("hello")))
		require.NoError(b, err)
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
	}
}

func BenchmarkDial(b *testing.B) {
	w := newWorld(b, "c1")
	a := newNode(b, w.member(b, "a", "control"), nil).serve(b)
	a.echo(b, nodeport.GRPC)
	c := newNode(b, w.member(b, "b", "control"), nil)
	for b.Loop() {
		conn, err := c.Dial(context.Background(), nodeport.GRPC, a.addr(), "")
		require.NoError(b, err)
		_ = conn.Close()
	}
}
