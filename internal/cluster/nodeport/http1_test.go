package nodeport_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/enginehttp"
)

// handle serves a protocol until the test ends.
func (n *node) handle(t testing.TB, alpn string, h http.HandlerFunc) {
	t.Helper()
	s := n.ServeHTTP(alpn, h)
	done := make(chan error, 1)
	go func() { done <- s.Serve() }()
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		assert.NoError(t, <-done)
	})
}

// pair is a server of the data port with a transport to it, and how many connections it made.
func pair(t testing.TB, h http.HandlerFunc) (*node, *nodeport.Transport, *atomic.Int32) {
	t.Helper()
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control", "worker"), nil).serve(t)
	a.handle(t, nodeport.Data, h)
	var dials atomic.Int32
	b := newNode(t, w.member(t, "b", "ingress"), func(c *nodeport.Config) {
		c.Connect = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	})
	tr := b.Transport(a.addr(), "uid-a")
	t.Cleanup(tr.Close)
	return a, tr, &dials
}

func send(ctx context.Context, tr *nodeport.Transport, body string) (*http.Response, error) {
	return tr.Send(ctx, "/v1/completions", nil, []byte(body), enginehttp.Guard{})
}

// fetch sends a request and reads the whole answer.
func fetch(t testing.TB, tr *nodeport.Transport, body string) (string, error) {
	t.Helper()
	res, err := send(t.Context(), tr, body)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	return string(data), err
}

// TestHTTPKnowsItsPeer: of requests to the data port, and to the admin API.
func TestHTTPKnowsItsPeer(t *testing.T) {
	echo := func(w http.ResponseWriter, r *http.Request) {
		id, ok := nodeport.PeerFromContext(r.Context())
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%v %s %s %s %d", ok, id.Node, id.UID, r.URL.Path, n)
	}
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control", "worker"), nil).serve(t)
	a.handle(t, nodeport.Data, echo)
	a.handle(t, nodeport.Admin, echo)
	b := newNode(t, w.member(t, "b", "ingress"), nil)
	tr := b.Transport(a.addr(), "uid-a")
	defer tr.Close()
	for _, n := range []int{0, 7, 200 << 10, 2 << 20} {
		got, err := fetch(t, tr, strings.Repeat("x", n))
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprintf("true b uid-b /v1/completions %d", n), got)
	}
	admin := b.AdminTransport(a.addr(), "uid-a")
	defer admin.CloseIdleConnections()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://node/x",
		strings.NewReader("hi"))
	require.NoError(t, err)
	res, err := admin.RoundTrip(r)
	require.NoError(t, err)
	got, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	assert.Equal(t, "true b uid-b /x 2", string(got))
	_, ok := nodeport.PeerFromContext(t.Context())
	assert.False(t, ok)
}

// TestABurst: 20 requests at once, of which each has a connection, which later ones use again.
func TestABurst(t *testing.T) {
	const atOnce = 20
	var inside atomic.Int32
	var all chan struct{}
	_, tr, dials := pair(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if inside.Add(1) == atOnce {
			close(all)
		}
		select {
		case <-all:
		case <-r.Context().Done(): // the client of a request that failed before it came here has left
		}
		_, _ = io.WriteString(w, "ok")
	})
	for range 3 {
		inside.Store(0)
		all = make(chan struct{})
		together, ctx := errgroup.WithContext(t.Context())
		for range atOnce {
			together.Go(func() error {
				res, err := send(ctx, tr, "x")
				if err != nil {
					return err
				}
				defer res.Body.Close()
				got, err := io.ReadAll(res.Body)
				assert.Equal(t, "ok", string(got))
				return err
			})
		}
		require.NoError(t, together.Wait())
	}
	assert.Less(t, dials.Load(), int32(2*atOnce))
}

// TestRequestsReachTheirEnd: a client that leaves is seen by the handler, and a server that closes, or a cut,
// by the client.
func TestRequestsReachTheirEnd(t *testing.T) {
	gone := make(chan struct{}, 1)
	a, tr, _ := pair(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "begin")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		gone <- struct{}{}
	})
	for _, end := range []func(cancel context.CancelFunc){
		func(cancel context.CancelFunc) { cancel() },
		func(context.CancelFunc) { a.Disconnect("uid-b") },
		func(context.CancelFunc) { tr.Cut() },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		res, err := send(ctx, tr, "x")
		require.NoError(t, err)
		end(cancel)
		<-gone
		_, err = io.ReadAll(res.Body)
		require.Error(t, err)
		require.NoError(t, res.Body.Close())
		cancel()
	}
}

func says(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, text) }
}

func TestTheWayComesBack(t *testing.T) {
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "worker"), nil).serve(t)
	a.handle(t, nodeport.Data, says("first"))
	addr := a.addr()
	b := newNode(t, w.member(t, "b", "ingress"), nil)
	tr := b.Transport(addr, "uid-a")
	got, err := fetch(t, tr, "x")
	require.NoError(t, err)
	assert.Equal(t, "first", got)
	require.NoError(t, a.Close())
	_, err = fetch(t, tr, "x")
	require.Error(t, err)

	// Another node takes over its address. The transport does not take it for the first node.
	other := newNode(t, w.member(t, "x", "worker"), nil)
	require.NoError(t, other.Listen(t.Context(), addr))
	done := make(chan error, 1)
	go func() { done <- other.Serve() }()
	other.Listener(nodeport.Data)
	require.Eventually(t, func() bool {
		_, err = fetch(t, tr, "x")
		return errors.Is(err, nodeport.ErrWrongPeer)
	}, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, other.Close())
	require.NoError(t, <-done)

	again := newNode(t, w.member(t, "a", "worker"), nil)
	require.NoError(t, again.Listen(t.Context(), addr))
	go func() { done <- again.Serve() }()
	again.handle(t, nodeport.Data, says("second"))
	require.Eventually(t, func() bool { got, err = fetch(t, tr, "x"); return err == nil }, 30*time.Second,
		10*time.Millisecond)
	assert.Equal(t, "second", got)
	tr.Close()
	tr.Close()
	_, err = fetch(t, tr, "x")
	require.ErrorContains(t, err, "closed")
	require.NoError(t, again.Close())
	require.NoError(t, <-done)
}

func BenchmarkRoundTrip(b *testing.B) {
	_, tr, _ := pair(b, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "ok")
	})
	b.ReportAllocs()
	for b.Loop() {
		_, err := fetch(b, tr, "hello")
		require.NoError(b, err)
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
