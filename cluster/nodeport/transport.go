package nodeport

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// settingsWait bounds how long a new connection waits for the server's settings, which limit its streams.
const settingsWait = time.Second

// maxDials bounds how often one request waits for a new connection.
const maxDials = 3

// anyHost is the address that net/http demands. Connections go to the node of the transport.
const anyHost = "node:80"

var _ http.RoundTripper = (*Transport)(nil)

// Transport sends requests to one node over one HTTP/2 connection. It makes a second one while the first
// accepts no more requests, because its server is stopping, but still has streams. URLs are
// "http://node/path": scheme and host have no meaning.
type Transport struct {
	port *Port
	http *http.Transport

	mu      sync.Mutex
	conn    *http.ClientConn
	retired map[*http.ClientConn]struct{} // they accept no more requests but have streams
	dialing chan struct{}                 // closed when the dial under way has ended
	failed  error                         // of the last dial
	closed  bool
}

// Transport makes a transport to a node. It dials when it is used, and again when the connection is gone. The
// caller closes it.
func (p *Port) Transport(alpn, addr, uid string) *Transport {
	t := &Transport{port: p, retired: map[*http.ClientConn]struct{}{}}
	t.http = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn,
			error) {
			return p.Dial(ctx, alpn, addr, uid)
		},
		Protocols: onlyHTTP2(),
		HTTP2:     &http.HTTP2Config{SendPingTimeout: http2Ping, PingTimeout: http2PingWait},
		// The ingress passes an engine's compressed bytes on unchanged. Proxy stays nil.
		DisableCompression: true,
	}
	return t
}

// RoundTrip sends a request. An error before the request was sent is an error of Dial.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	conn, err := t.reserve(r.Context())
	if err != nil {
		if r.Body != nil {
			_ = r.Body.Close() // RoundTripper demands it
		}
		return nil, err
	}
	return conn.RoundTrip(r)
}

// Close ends all connections of the transport and their requests.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.closed = true
	conns := make([]*http.ClientConn, 0, 1+len(t.retired))
	if t.conn != nil {
		conns = append(conns, t.conn)
	}
	for c := range t.retired {
		conns = append(conns, c)
	}
	t.conn = nil
	clear(t.retired)
	t.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
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
		go t.dial(t.dialing)
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
	old := t.conn
	t.conn = nil
	if old == nil || old.Err() != nil {
		return
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

// dial makes the next connection.
func (t *Transport) dial(done chan struct{}) {
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
	}
	close(done)
}

// awaitSettings waits until the server has said how many streams it accepts. Before that, net/http assumes
// 100, and a burst of requests would make the transport dial again.
func awaitSettings(conn *http.ClientConn) {
	changed := make(chan struct{}, 1)
	conn.SetStateHook(func(*http.ClientConn) {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	timer := time.NewTimer(settingsWait)
	defer timer.Stop()
	select {
	case <-changed:
	case <-timer.C:
	}
	conn.SetStateHook(nil)
}
