package nodeport

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// HTTP/2 of the data port and of the admin API. Clients keep Go's windows, 1 GiB per connection and 4 MiB per
// stream: with smaller ones a few slow readers would stop every stream to a node.
const (
	maxStreams    = 10_000 // per connection; admission limits requests before this does
	uploadStream  = 1 << 20
	uploadConn    = 64 << 20
	http2Ping     = 5 * time.Second
	http2PingWait = 3 * time.Second
	headerTimeout = 5 * time.Second
)

// HTTPServer serves HTTP/2 on one protocol of the port, and HTTP/1.1 on a second one if the protocol is Data.
// PeerFromContext returns the peer of a request.
type HTTPServer struct {
	parts []httpPart
}

// httpPart is a server of one version of HTTP.
type httpPart struct {
	server   *http.Server
	listener net.Listener
}

func serverHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:      maxStreams,
		MaxReceiveBufferPerStream: uploadStream,
		// more than net/http documents; TestUploadWindows checks it
		MaxReceiveBufferPerConnection: uploadConn,
		SendPingTimeout:               http2Ping,
		PingTimeout:                   http2PingWait,
	}
}

// onlyHTTP2 allows HTTP/2 without TLS: the connections are encrypted already, which net/http does not see.
func onlyHTTP2() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
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

// Serve serves until Close or Shutdown and then returns nil.
func (s *HTTPServer) Serve() error {
	ends := make(chan error, len(s.parts))
	for _, p := range s.parts {
		go func() { ends <- p.server.Serve(p.listener) }()
	}
	var all error
	for range s.parts {
		if err := <-ends; !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			all = errors.Join(all, err)
		}
	}
	return all
}

// Shutdown accepts no more requests and waits for running ones.
func (s *HTTPServer) Shutdown(ctx context.Context) error {
	var all error
	for _, p := range s.parts { // HTTP/1.1 first, because its requests end with the last HTTP/2 connection
		_ = p.listener.Close()
		all = errors.Join(all, p.server.Shutdown(ctx))
	}
	return all
}

// Close ends everything at once.
func (s *HTTPServer) Close() error {
	var all error
	for _, p := range s.parts {
		_ = p.listener.Close()
		all = errors.Join(all, p.server.Close())
	}
	return all
}

// settingsWait bounds how long a new connection waits for the server's settings, which limit its streams.
const settingsWait = time.Second

// maxDials bounds how often one request waits for a new connection.
const maxDials = 3

// anyHost is the address that net/http demands. Connections go to the node of the transport.
const anyHost = "node:80"

var _ http.RoundTripper = (*Transport)(nil)

// Dialer connects to a node for one of the offered protocols, and says which one it is.
type Dialer func(ctx context.Context, offered ...string) (conn net.Conn, alpn string, err error)

// Transport sends requests to one node over one HTTP/2 connection. It makes a second one while the first
// accepts no more requests, because its server is stopping, but still has streams. Small requests to the data
// port go over HTTP/1.1 if one of these connections waits. URLs are "http://node/path": scheme and host have
// no meaning.
type Transport struct {
	dial     Dialer
	protocol string
	http     *http.Transport

	mu      sync.Mutex
	conn    *http.ClientConn
	http1   *http1Pool                    // belongs to conn; nil: there is no conn, or not for this protocol
	retired map[*http.ClientConn]struct{} // they accept no more requests but have streams
	dialing chan struct{}                 // closed when the dial under way has ended
	failed  error                         // of the last dial
	closed  bool
	dials   sync.WaitGroup // of all HTTP/1.1 pools
}

// NewTransport makes a transport. It dials when it is used, and again when the connection is gone. The caller
// closes it.
func NewTransport(protocol string, dial Dialer) *Transport {
	return &Transport{
		dial: dial, protocol: protocol, retired: map[*http.ClientConn]struct{}{},
		http: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				conn, _, err := dial(ctx, protocol)
				return conn, err
			},
			Protocols: onlyHTTP2(),
			HTTP2:     &http.HTTP2Config{SendPingTimeout: http2Ping, PingTimeout: http2PingWait},
			// The ingress passes an engine's compressed bytes on unchanged. Proxy stays nil.
			DisableCompression: true,
		},
	}
}

// RoundTrip sends a request. An error before the request was sent is an error of Dial.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if pool := t.currentHTTP1(); pool != nil {
		if resp, err := pool.roundTrip(r); !errors.Is(err, errNoneWaits) {
			return resp, err
		}
	}
	conn, err := t.reserve(r.Context())
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // RoundTripper demands it
		}
		return nil, err
	}
	return conn.RoundTrip(r)
}

// ServesHTTP1 reports that the node is known to serve HTTP/1.1 too.
func (t *Transport) ServesHTTP1() bool {
	pool := t.currentHTTP1()
	return pool != nil && pool.isServed.Load()
}

func (t *Transport) currentHTTP1() *http1Pool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.http1
}

// Close ends all connections of the transport and their requests, and the dials under way.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.closed = true
	conns := slices.Collect(maps.Keys(t.retired))
	if t.conn != nil {
		conns = append(conns, t.conn)
	}
	pool := t.http1
	t.conn, t.http1 = nil, nil
	clear(t.retired)
	t.mu.Unlock()
	if pool != nil {
		pool.close()
	}
	for _, c := range conns {
		_ = c.Close()
	}
	t.dials.Wait()
	return nil
}

// reserve returns a connection with room for one request.
func (t *Transport) reserve(ctx context.Context) (*http.ClientConn, error) {
	for range maxDials {
		conn, wait := t.current() //nolint:contextcheck // all requests share the connection
		switch {
		case conn != nil:
			return conn, nil
		case wait == nil:
			return nil, problem.New(problem.Unavailable, "the way to this node is closed")
		}
		if err := t.await(ctx, wait); err != nil {
			return nil, err
		}
	}
	return nil, problem.New(problem.Unavailable, "the node takes connections and breaks them")
}

// current returns the connection with room reserved, or the dial to wait for. It returns neither after Close.
func (t *Transport) current() (*http.ClientConn, chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, nil
	}
	if t.conn != nil && t.conn.Reserve() == nil {
		return t.conn, nil
	}
	if t.dialing == nil {
		t.retire()
		t.dialing = make(chan struct{})
		go t.connect(t.dialing)
	}
	return nil, t.dialing
}

// await waits for the dial under way.
func (t *Transport) await(ctx context.Context, wait chan struct{}) error {
	select {
	case <-wait:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.failed
}

// retire puts aside a connection that accepts no more requests. It is closed when its streams end. The caller
// holds mu.
func (t *Transport) retire() {
	old, pool := t.conn, t.http1
	t.conn, t.http1 = nil, nil
	if old == nil || old.Err() != nil { // then watch closes the pool
		return
	}
	if pool != nil {
		pool.retire()
	}
	t.retired[old] = struct{}{}
	go func() { // the hook may run at once, and it locks mu
		old.SetStateHook(t.closeIdle)
		t.closeIdle(old)
	}()
}

// closeIdle closes a retired connection without streams.
func (t *Transport) closeIdle(c *http.ClientConn) {
	if c.InFlight() > 0 && c.Err() == nil {
		return
	}
	t.mu.Lock()
	delete(t.retired, c)
	t.mu.Unlock()
	_ = c.Close()
}

// connect makes the next connection.
func (t *Transport) connect(done chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), DialTimeout)
	defer cancel()
	conn, err := t.http.NewClientConn(ctx, "http", anyHost)
	if err == nil {
		awaitSettings(conn)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed, t.dialing = err, nil
	if err == nil && t.closed {
		go func() { _ = conn.Close() }()
	} else if err == nil {
		t.conn = conn
		if t.protocol == Data {
			t.http1 = t.newHTTP1(conn)
		}
	}
	close(done)
}

// newHTTP1 makes a pool that is closed when conn is lost.
func (t *Transport) newHTTP1(conn *http.ClientConn) *http1Pool {
	pool := newHTTP1Pool(&t.dials, func(ctx context.Context) (net.Conn, error) {
		c, alpn, err := t.dial(ctx, DataHTTP1, Data)
		if err == nil && alpn != DataHTTP1 {
			abortConn(c)
			return nil, errOnlyHTTP2
		}
		return c, err
	})
	conn.SetStateHook(func(c *http.ClientConn) {
		if c.Err() != nil {
			pool.close()
		}
	})
	return pool
}

// assumedStreams is how many streams net/http takes a server to accept until the server's settings are there.
const assumedStreams = 100

// awaitSettings waits until the server has said how many streams it accepts. Before that, net/http goes by
// assumedStreams, and a burst of requests would make the transport dial again.
func awaitSettings(conn *http.ClientConn) {
	changed := make(chan struct{}, 1)
	conn.SetStateHook(func(*http.ClientConn) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	if conn.Available() == assumedStreams { // the hook says nothing of settings that were there before it
		timer := time.NewTimer(settingsWait)
		defer timer.Stop()
		select {
		case <-changed:
		case <-timer.C:
		}
	}
	conn.SetStateHook(nil)
}
