package nodeport

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/internal/problem"
)

// HTTP/1.1 of the data port and of the admin API. A request has a connection of its own, which saves the
// hand-overs and the coding of HTTP/2 (docs/performance.md has the numbers). HTTP/1.1 has no pings: who uses
// a Transport cuts it when the node is not heard any more.
const (
	maxIdle     = 4096 // connections that wait, so that a burst does not dial once per request
	maxDials    = 64   // at once to one node: fewer than the handshakes that its port makes at once
	maxHead     = 128 << 10
	idleTimeout = time.Minute
	// The server waits longer than the client keeps a connection, so it never closes one that gets a request.
	// A spare connection has had no request yet.
	serverIdle = 5 * time.Minute

	// anyHost is the Host field. Connections go to the node of the transport.
	anyHost = "node:80"
)

// HTTPServer serves HTTP/1.1 on one protocol of the port. PeerFromContext returns the peer of a request.
type HTTPServer struct {
	server   *http.Server
	listener net.Listener
}

// Serve serves until Close or Shutdown and then returns nil.
func (s *HTTPServer) Serve() error {
	err := s.server.Serve(s.listener)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Close ends everything at once.
func (s *HTTPServer) Close() error {
	_ = s.listener.Close()
	return s.server.Close()
}

// plainListener hides from net/http that its connections are TLS: net/http would look for its own ALPN and
// give up.
type plainListener struct{ net.Listener }

func (l plainListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return plainConn{c}, nil
}

// plainConn has only the methods of net.Conn.
type plainConn struct{ net.Conn }

// withPeer puts the peer of a connection into the context of its requests.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if plain, ok := c.(plainConn); ok {
		c = plain.Conn
	}
	id, _ := PeerOf(c)
	return context.WithValue(ctx, peerKey{}, id)
}

// Transport sends requests to the data port of one node. Safe for concurrent use.
type Transport struct {
	dial   func(ctx context.Context) (net.Conn, error)
	client *enginehttp.Client
	dials  chan struct{} // a place for each dial under way

	mu     sync.Mutex
	conns  map[*transportConn]struct{}
	closed bool
}

// NewTransport makes a transport, which dials when it is used. The caller closes it.
func NewTransport(dial func(ctx context.Context) (net.Conn, error)) *Transport {
	t := &Transport{
		dial: dial, dials: make(chan struct{}, maxDials), conns: map[*transportConn]struct{}{},
	}
	t.client = enginehttp.New(enginehttp.Config{
		Host: anyHost, Idle: idleTimeout, MaxIdle: maxIdle, MaxHead: maxHead, Spare: DialTimeout,
		Dial: func(ctx context.Context, _, _ string) (net.Conn, error) { return t.connect(ctx) },
	})
	return t
}

// Send posts a request and returns when the head of the answer is here: see enginehttp.Client.
func (t *Transport) Send(
	ctx context.Context, path string, header http.Header, body []byte, g enginehttp.Guard,
) (*http.Response, error) {
	return t.client.SendGuarded(ctx, http.MethodPost, path, header, body, g)
}

func (t *Transport) connect(ctx context.Context) (net.Conn, error) {
	select {
	case t.dials <- struct{}{}:
		defer func() { <-t.dials }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	conn, err := t.dial(ctx)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		abortConn(conn)
		return nil, problem.New(problem.Unavailable, "the way to this node is closed")
	}
	c := &transportConn{Conn: conn, transport: t}
	t.conns[c] = struct{}{}
	return c, nil
}

// Cut ends all connections and their requests, because the node is not heard any more.
func (t *Transport) Cut() {
	t.mu.Lock()
	conns := slices.Collect(maps.Keys(t.conns))
	t.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// Close is Cut, and the transport makes no more connections.
func (t *Transport) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.client.Close()
	t.Cut()
}

// transportConn is a connection as package enginehttp uses it.
type transportConn struct {
	net.Conn
	transport *Transport
}

// Close ends the connection without TLS's closing message, because sending it could block.
func (c *transportConn) Close() error {
	c.transport.mu.Lock()
	delete(c.transport.conns, c)
	c.transport.mu.Unlock()
	abortConn(c.Conn)
	return nil
}

// SyscallConn gives the socket to a look whether the node has closed the connection, which reads nothing.
func (c *transportConn) SyscallConn() (syscall.RawConn, error) {
	raw := c.Conn
	if t, ok := raw.(*Conn); ok {
		raw = t.NetConn()
	}
	if s, ok := raw.(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// abortConn closes a connection at once.
func abortConn(c net.Conn) {
	own, ok := c.(*Conn)
	if !ok {
		_ = c.Close()
		return
	}
	if own.port != nil {
		own.port.untrack(own)
	}
	own.abort()
}
