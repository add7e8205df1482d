package memnet

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHTTPOverMemory(t *testing.T) {
	var n Network
	l, err := n.Listen("127.0.0.1:0")
	require.NoError(t, err)
	_, err = n.Listen(l.Addr().String())
	require.ErrorContains(t, err, "already in use")

	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hi")
	})}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	tr := &http.Transport{DialContext: n.DialContext}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+l.Addr().String()+"/", nil)
	require.NoError(t, err)
	resp, err := tr.RoundTrip(req)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, "hi", string(b))
	tr.CloseIdleConnections()
	require.NoError(t, srv.Close())
	<-done

	_, err = n.DialContext(t.Context(), "tcp", l.Addr().String())
	require.ErrorIs(t, err, ErrRefused)
}

// meet connects host a with host b.
func meet(t *testing.T, n *Network) (here, there net.Conn) {
	t.Helper()
	l, err := n.Host("b").Listen("b:1")
	require.NoError(t, err)
	defer l.Close()
	here, err = n.Host("a").DialContext(t.Context(), "tcp", "b:1")
	require.NoError(t, err)
	there, err = l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = here.Close(), there.Close() })
	return here, there
}

// hear reads what comes next, and when.
func hear(t *testing.T, c net.Conn) (text string, at time.Time) {
	t.Helper()
	b := make([]byte, 100)
	k, err := c.Read(b)
	require.NoError(t, err)
	return string(b[:k]), time.Now()
}

func TestSilenceHoldsBackWhatTCPSendsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Network{}
		here, there := meet(t, n)
		n.Silence("a", "b")
		began := time.Now()
		_, err := here.Write([]byte("one"))
		require.NoError(t, err)
		_, err = there.Write([]byte("back"))
		require.NoError(t, err)
		text, at := hear(t, here)
		assert.Equal(t, "back", text, "the other way is open")
		assert.Equal(t, began, at)
		time.Sleep(time.Second)
		_, err = here.Write([]byte(" two"))
		require.NoError(t, err)
		require.NoError(t, there.SetReadDeadline(time.Now().Add(time.Second)))
		_, err = there.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, there.SetReadDeadline(time.Time{}))
		n.Heal("a", "b")
		text, at = hear(t, there)
		assert.Equal(t, "one two", text)
		assert.Equal(t, 3*time.Second, at.Sub(began), "0.2, 0.6, 1.4 and 3 s after it was sent first")
	})
}

func TestDelayKeepsOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Network{}
		here, there := meet(t, n)
		n.Delay("a", "b", time.Second)
		began := time.Now()
		_, _ = here.Write([]byte("one"))
		n.Delay("a", "b", 0)
		_, _ = here.Write([]byte(" two"))
		text, at := hear(t, there)
		assert.Equal(t, "one two", text)
		assert.Equal(t, time.Second, at.Sub(began))
		require.NoError(t, here.Close())
		_, err := there.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		_, err = there.Write([]byte("x"))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		_, err = here.Read(make([]byte, 1))
		require.ErrorIs(t, err, net.ErrClosed)
		assert.Empty(t, n.wires)
	})
}

func TestWindowIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Network{}
		here, there := meet(t, n)
		require.NoError(t, here.SetWriteDeadline(time.Now().Add(time.Second)))
		k, err := here.Write(make([]byte, 2*window))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		assert.Equal(t, window, k)
		require.NoError(t, here.SetWriteDeadline(time.Time{}))
		go func() { _, _ = here.Write(make([]byte, 2*window)) }()
		_, err = io.CopyN(io.Discard, there, 3*window)
		require.NoError(t, err)
	})
}

func TestCutAndDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Network{}
		here, there := meet(t, n)
		n.Cut("b", "a")
		_, err := here.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		_, err = there.Write([]byte("x"))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		l, err := n.Host("b").Listen("b:2")
		require.NoError(t, err)
		_, err = n.Host("a").DialContext(t.Context(), "tcp", "b:2")
		require.ErrorIs(t, err, ErrRefused)
		n.Heal("a", "b")

		here, there = meet(t, n)
		n.Silence("b", "a") // its power is cut: nobody is told
		n.Host("b").Down()
		_, err = there.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.NoError(t, here.SetReadDeadline(time.Now().Add(time.Hour)))
		_, err = here.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		_, err = l.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		_, err = n.Host("a").DialContext(ctx, "tcp", "b:2")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		_, err = n.Host("b").Listen("b:3")
		require.Error(t, err)
		n.Heal("a", "b")
		_, err = n.Host("a").DialContext(t.Context(), "tcp", "b:2")
		require.ErrorIs(t, err, ErrRefused)
	})
}

func TestDialWaitsForTheNextSYN(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Network{}
		l, err := n.Host("b").Listen("b:1")
		require.NoError(t, err)
		defer l.Close()
		n.Silence("b", "a")
		began := time.Now()
		time.AfterFunc(2*time.Second, func() { n.Heal("a", "b") })
		c, err := n.Host("a").DialContext(t.Context(), "tcp", "b:1")
		require.NoError(t, err)
		assert.Equal(t, 3*time.Second, time.Since(began))
		there, err := l.Accept()
		require.NoError(t, err)
		require.NoError(t, c.Close())
		_, err = there.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, there.Close())
	})
}
