package nodeport_test

import (
	"context"
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

// dataPair is a server of the data port with a transport to it, and how many connections it made.
func dataPair(t testing.TB, h http.HandlerFunc) (*node, *nodeport.Transport, *atomic.Int32) {
	t.Helper()
	w := newWorld(t, "c1")
	a := newNode(t, w.member(t, "a", "control", "worker"), nil).serve(t)
	a.handleOn(t, nodeport.Data, h)
	var dials atomic.Int32
	b := newNode(t, w.member(t, "b", "ingress"), func(c *nodeport.Config) {
		c.Connect = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	})
	tr := b.Transport(nodeport.Data, a.addr(), "uid-a")
	t.Cleanup(func() { assert.NoError(t, tr.Close()) })
	return a, tr, &dials
}

// toHTTP1 sends requests until one goes over HTTP/1.1.
func toHTTP1(t testing.TB, tr http.RoundTripper) {
	t.Helper()
	require.Eventually(t, func() bool { return version(t, tr) == 1 }, 10*time.Second, time.Millisecond,
		"a connection for HTTP/1.1")
}

// version is that of the next small request.
func version(t testing.TB, tr http.RoundTripper) int {
	t.Helper()
	res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("quick")))
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	return res.ProtoMajor
}

// TestSmallRequestsGoOverHTTP1: from a member to a known peer, while a large body takes HTTP/2.
func TestSmallRequestsGoOverHTTP1(t *testing.T) {
	_, tr, _ := dataPair(t, func(w http.ResponseWriter, r *http.Request) {
		id, ok := nodeport.PeerFromContext(r.Context())
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d %v %s %s %s %d", r.ProtoMajor, ok, id.Node, id.UID, r.URL.Path, n)
	})
	toHTTP1(t, tr)
	for n, want := range map[int]string{0: "1", 7: "1", 200 << 10: "1", 2 << 20: "2"} {
		got, err := fetch(t, tr, strings.Repeat("x", n))
		require.NoError(t, err)
		assert.Equal(t, fmt.Sprintf("%s true b uid-b /v1/completions %d", want, n), got)
	}
}

// TestABurstOverHTTP1: requests that find no connection free go over HTTP/2 at once, and the number of
// connections is bounded.
func TestABurstOverHTTP1(t *testing.T) {
	all := make(chan struct{})
	var inside atomic.Int32
	_, tr, dials := dataPair(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); string(body) == "quick" {
			return
		}
		if inside.Add(1) == 500 {
			close(all)
		}
		<-all
		_, _ = io.WriteString(w, "ok")
	})
	toHTTP1(t, tr)
	for range 3 {
		inside.Store(0)
		all = make(chan struct{})
		var wg sync.WaitGroup
		for range 500 {
			wg.Go(func() {
				got, err := fetch(t, tr, "x")
				assert.Equal(t, "ok <nil>", fmt.Sprint(got, " ", err))
			})
		}
		wg.Wait()
	}
	assert.LessOrEqual(t, dials.Load(), int32(1+256))
}

// TestAnOlderNodeGetsHTTP2: a node that serves only Data gets one connection more, once, and refuses nothing.
func TestAnOlderNodeGetsHTTP2(t *testing.T) {
	a, tr, dials := dataPair(t, func(http.ResponseWriter, *http.Request) {})
	require.NoError(t, a.Listener(nodeport.DataHTTP1).Close())
	for range 50 {
		require.Equal(t, 2, version(t, tr))
		time.Sleep(time.Millisecond)
	}
	assert.EqualValues(t, 2, dials.Load())
	assert.Zero(t, a.count(nodeport.BadALPN))
}

// TestHTTP1StalledReadersStopNobody: each stalled reader has its own connection.
func TestHTTP1StalledReadersStopNobody(t *testing.T) {
	_, tr, _ := dataPair(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); string(body) == "quick" {
			return
		}
		for chunk := make([]byte, 64<<10); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	toHTTP1(t, tr)
	for range 16 {
		res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("endless")))
		require.NoError(t, err)
		defer res.Body.Close()
		_, err = io.CopyN(io.Discard, res.Body, 1<<20)
		require.NoError(t, err)
		toHTTP1(t, tr)
	}
}

// TestHTTP1RequestsReachTheirEnd: a client that leaves is seen by the handler, and a server that closes by
// the client.
func TestHTTP1RequestsReachTheirEnd(t *testing.T) {
	gone := make(chan struct{}, 2)
	a, tr, _ := dataPair(t, func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); string(body) == "quick" {
			return
		}
		_, _ = io.WriteString(w, "begin")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		gone <- struct{}{}
	})
	toHTTP1(t, tr)
	ctx, cancel := context.WithCancel(t.Context())
	res, err := tr.RoundTrip(request(t, ctx, strings.NewReader("x")))
	require.NoError(t, err)
	require.Equal(t, 1, res.ProtoMajor)
	cancel()
	<-gone
	require.NoError(t, res.Body.Close())

	toHTTP1(t, tr)
	res, err = tr.RoundTrip(request(t, t.Context(), strings.NewReader("x")))
	require.NoError(t, err)
	require.Equal(t, 1, res.ProtoMajor)
	a.Disconnect("uid-b")
	<-gone
	_, err = io.ReadAll(res.Body)
	require.Error(t, err)
	require.NoError(t, res.Body.Close())
}

// TestASilentPeerIsFoundOverHTTP1: the pings of the HTTP/2 connection find a peer that falls silent without a
// reset, at both ends: 5 s and 3 s. Then the requests over HTTP/1.1 end too.
func TestASilentPeerIsFoundOverHTTP1(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var network memnet.Network
		w := newWorld(t, "c1")
		frozen, left := make(chan struct{}), make(chan time.Time, 1)
		a := newNode(t, w.member(t, "a", "control"), func(c *nodeport.Config) {
			c.Bind = func(_ context.Context, addr string) (net.Listener, error) {
				return network.Listen(addr)
			}
		})
		require.NoError(t, a.Listen(t.Context(), "10.0.0.1:7947"))
		done := make(chan error, 1)
		go func() { done <- a.Serve() }()
		a.handleOn(t, nodeport.Data, func(w http.ResponseWriter, r *http.Request) {
			if body, _ := io.ReadAll(r.Body); string(body) == "quick" {
				return
			}
			_, _ = io.WriteString(w, "begin")
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			left <- time.Now()
		})
		b := newNode(t, w.member(t, "b", "ingress"), func(c *nodeport.Config) {
			c.Connect = func(ctx context.Context, n, addr string) (net.Conn, error) {
				c, err := network.DialContext(ctx, n, addr)
				return &stoppableConn{Conn: c, frozen: frozen, closed: make(chan struct{})}, err
			}
		})
		tr := b.Transport(nodeport.Data, "10.0.0.1:7947", "uid-a")
		for version(t, tr) != 1 {
			time.Sleep(time.Millisecond)
		}
		res, err := tr.RoundTrip(request(t, t.Context(), strings.NewReader("x")))
		require.NoError(t, err)
		require.Equal(t, 1, res.ProtoMajor)
		_, err = io.ReadFull(res.Body, make([]byte, 5))
		require.NoError(t, err)
		time.Sleep(10 * time.Minute) // longer than any idle time
		began := time.Now()
		close(frozen)
		_, err = io.ReadAll(res.Body)
		require.Error(t, err)
		assert.LessOrEqual(t, time.Since(began), 8*time.Second)
		assert.LessOrEqual(t, (<-left).Sub(began), 8*time.Second)
		require.NoError(t, res.Body.Close())
		require.NoError(t, tr.Close())
		require.NoError(t, b.Close())
		require.NoError(t, a.Close())
		require.NoError(t, <-done)
	})
}

// BenchmarkRoundTripHTTP1 is BenchmarkRoundTrip over HTTP/1.1.
func BenchmarkRoundTripHTTP1(b *testing.B) {
	_, tr, _ := dataPair(b, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "ok")
	})
	toHTTP1(b, tr)
	b.ReportAllocs()
	for b.Loop() {
		res, err := tr.RoundTrip(request(b, context.Background(), strings.NewReader("hello")))
		require.NoError(b, err)
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
	}
}
