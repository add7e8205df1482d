package ingress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
)

// countedConn records each write.
type countedConn struct {
	net.Conn

	mu     sync.Mutex
	writes [][]byte
	err    error // of the next write
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.writes = append(c.writes, bytes.Clone(p))
	return c.Conn.Write(p)
}

// countedListener gives countedConns.
type countedListener struct {
	net.Listener

	conns chan *countedConn
}

func (l countedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	counted := &countedConn{Conn: c}
	l.conns <- counted
	return counted, nil
}

// RC3: a piece of an answer that is larger than net/http's buffer is one write to the client, whatever its
// size, and the client reads the same bytes.
func TestAPieceLeavesInOneWrite(t *testing.T) {
	for _, size := range []int{100, gatheredFrom, 5000, relayBuffer, relayBuffer + 700, 3 * relayBuffer} {
		var network memnet.Network
		l, err := network.Listen("ingress:80")
		require.NoError(t, err)
		conns := make(chan *countedConn, 1)
		piece, broken := bytes.Repeat([]byte("Z"), size), errors.New("broken")
		results := make(chan error, 3)
		server := &http.Server{
			ConnContext: withConn,
			Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for range 2 {
					conn := startGather(r, len(piece))
					_, err := w.Write(piece)
					results <- errors.Join(err, http.NewResponseController(w).Flush(), conn.sendGathered())
				}
				c, _ := r.Context().Value(connKey{}).(*clientConn)
				counted, _ := c.Conn.(*countedConn)
				counted.mu.Lock()
				counted.err = broken
				counted.mu.Unlock()
				conn := startGather(r, len(piece))
				_, err := w.Write(piece)
				results <- errors.Join(err, http.NewResponseController(w).Flush(), conn.sendGathered())
				panic(http.ErrAbortHandler)
			}),
		}
		served := make(chan error, 1)
		in := &Ingress{}
		in.limits.MaxConns, in.timers = 4, Timers{}.withDefaults()
		front := newClientConns(in, countedListener{l, conns})
		front.refuse = func() bool { return false }
		go func() { served <- server.Serve(front) }()
		client, err := network.DialContext(t.Context(), "tcp", "ingress:80")
		require.NoError(t, err)
		_, err = io.WriteString(client, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		got, err := io.ReadAll(client)
		require.NoError(t, err)
		assert.Equal(t, 2*size, bytes.Count(got, []byte("Z")))
		require.NoError(t, <-results)
		require.NoError(t, <-results)
		require.ErrorIs(t, <-results, broken, "a write that fails is told although net/http has not seen it")
		counted := <-conns
		if size <= relayBuffer+700 {
			assert.Len(t, counted.writes, 2, "%d bytes", size)
		}
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-served, http.ErrServerClosed)
	}
}

// listen binds a free port of an ingress.
func listen(ctx context.Context, in *Ingress) (net.Addr, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return l.Addr(), in.Attach(l)
}
