package nodeport

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/enginehttp"
)

// HTTP/1.1 of the data port. One request has one connection, which saves the hand-overs and the coding of
// HTTP/2. The connections belong to an HTTP/2 connection with the same node: its pings find a silent node,
// and at both ends they are closed when it is lost.
const (
	maxHTTP1     = 256 // connections with one node; the requests beyond go over HTTP/2
	maxHTTP1Body = 256 << 10
	maxHTTP1Head = 128 << 10 // bytes of an answer's header: twice that of an engine's
	keptBody     = 64 << 10  // bytes of a buffer; larger ones are left to the garbage collector
	http1Idle    = time.Minute
	// The server waits longer than the client keeps a connection, so it never closes one that gets a request.
	http1ServerIdle = 5 * time.Minute
)

var (
	// errNoneWaits says that no HTTP/1.1 connection waits for a request. Nothing was sent.
	errNoneWaits = errors.New("no HTTP/1.1 connection is free")
	// errOnlyHTTP2 is the error of a node that does not serve the data port over HTTP/1.1.
	errOnlyHTTP2 = errors.New("the node serves only HTTP/2")
)

// http1Pool holds the HTTP/1.1 connections of a Transport that belong to one HTTP/2 connection. Safe for
// concurrent use.
type http1Pool struct {
	dial     func(ctx context.Context) (net.Conn, error)
	dials    *sync.WaitGroup
	client   *enginehttp.Client
	bodies   sync.Pool       // *[]byte
	closing  context.Context //nolint:containedctx // ends the dial under way
	stop     context.CancelFunc
	isServed atomic.Bool // a connection was made: the node serves HTTP/1.1

	mu        sync.Mutex
	conns     map[*http1Conn]struct{}
	isDialing bool // addConnection runs: at most one at a time, and until DialTimeout or stop
	isOver    bool // it makes no more connections
}

// newHTTP1Pool makes a pool whose dials dials waits for.
func newHTTP1Pool(dials *sync.WaitGroup, dial func(ctx context.Context) (net.Conn, error)) *http1Pool {
	p := &http1Pool{dial: dial, dials: dials, conns: map[*http1Conn]struct{}{}}
	p.closing, p.stop = context.WithCancel(context.Background())
	p.bodies.New = func() any { return new([]byte) }
	p.client = enginehttp.New(enginehttp.Config{
		Host: anyHost, Idle: http1Idle, MaxIdle: maxHTTP1, MaxHead: maxHTTP1Head,
		Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errNoneWaits },
	})
	return p
}

// roundTrip sends a request over a connection that waits. Its error is errNoneWaits if there is none, or the
// request's body is large; the body is unread then.
func (p *http1Pool) roundTrip(r *http.Request) (*http.Response, error) {
	if r.ContentLength < 0 || r.ContentLength > maxHTTP1Body || r.ContentLength > 0 && r.GetBody == nil {
		return nil, errNoneWaits
	}
	if !p.client.HasIdle() {
		p.widen()
		return nil, errNoneWaits
	}
	mem, _ := p.bodies.Get().(*[]byte)
	defer p.keepBody(mem)
	body, err := readBody((*mem)[:0], r)
	*mem = body
	if err != nil {
		return nil, err
	}
	resp, err := p.client.Send(r.Context(), r.Method, r.URL.RequestURI(), r.Header, body)
	if !p.client.HasIdle() {
		p.widen()
	}
	if err != nil {
		if e, ok := errors.AsType[*enginehttp.SendError](err); ok {
			err = e.Err
		}
		return nil, err
	}
	if r.Body != nil {
		_ = r.Body.Close() // RoundTripper demands it
	}
	return resp, nil
}

// readBody reads a request's body, and leaves r.Body unread.
func readBody(b []byte, r *http.Request) ([]byte, error) {
	n := int(r.ContentLength)
	if n == 0 {
		return b, nil
	}
	body, err := r.GetBody()
	if err != nil {
		return b, err
	}
	if cap(b) < n {
		b = make([]byte, n)
	}
	b = b[:n]
	_, err = io.ReadFull(body, b)
	return b, errors.Join(err, body.Close())
}

func (p *http1Pool) keepBody(mem *[]byte) {
	if cap(*mem) <= keptBody {
		p.bodies.Put(mem)
	}
}

// widen dials one more connection in the background, for a later request.
func (p *http1Pool) widen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.isOver || p.isDialing || len(p.conns) >= maxHTTP1 {
		return
	}
	p.isDialing = true
	p.dials.Go(p.addConnection)
}

func (p *http1Pool) addConnection() {
	ctx, cancel := context.WithTimeout(p.closing, DialTimeout)
	defer cancel()
	conn, err := p.dial(ctx)
	p.mu.Lock()
	p.isDialing = false
	p.isOver = p.isOver || errors.Is(err, errOnlyHTTP2)
	isOver := p.isOver
	var c *http1Conn
	if err == nil && !isOver {
		p.isServed.Store(true)
		c = &http1Conn{Conn: conn, pool: p}
		p.conns[c] = struct{}{}
	}
	p.mu.Unlock()
	switch {
	case c != nil:
		p.client.Add(c)
	case err == nil:
		abortConn(conn)
	}
}

// retire lets the running requests end, and takes no new ones.
func (p *http1Pool) retire() {
	p.mu.Lock()
	p.isOver = true
	p.mu.Unlock()
	p.stop()
	p.client.Close()
}

// close ends all connections and their requests.
func (p *http1Pool) close() {
	p.retire()
	p.mu.Lock()
	conns := slices.Collect(maps.Keys(p.conns))
	p.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// http1Conn is a connection as package enginehttp uses it.
type http1Conn struct {
	net.Conn
	pool *http1Pool
}

// Close ends the connection without TLS's closing message, because sending it could block.
func (c *http1Conn) Close() error {
	c.pool.mu.Lock()
	delete(c.pool.conns, c)
	c.pool.mu.Unlock()
	abortConn(c.Conn)
	return nil
}

// SyscallConn gives the socket to a look whether the node has closed the connection, which reads nothing.
func (c *http1Conn) SyscallConn() (syscall.RawConn, error) {
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

// onlyHTTP1 allows HTTP/1.1 alone.
func onlyHTTP1() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	return p
}

// peerWatch closes the HTTP/1.1 connections of a peer when its last HTTP/2 connection has ended, which has
// pings. Safe for concurrent use.
type peerWatch struct {
	mu    sync.Mutex
	peers map[string]*watchedPeer // by UID
}

// watchedPeer has the connections of a peer.
type watchedPeer struct {
	http2 int
	http1 map[*Conn]struct{}
}

// peer returns the entry of a connection's peer; nil for a connection of another package. The caller holds
// mu.
func (w *peerWatch) peer(c net.Conn) (*watchedPeer, *Conn) {
	plain, _ := c.(plainConn)
	own, ok := plain.Conn.(*Conn)
	if !ok {
		return nil, nil
	}
	p := w.peers[own.Peer.UID]
	if p == nil {
		p = &watchedPeer{http1: map[*Conn]struct{}{}}
		w.peers[own.Peer.UID] = p
	}
	return p, own
}

// onHTTP2 follows the state of an HTTP/2 connection.
func (w *peerWatch) onHTTP2(c net.Conn, state http.ConnState) {
	w.follow(c, state, func(p *watchedPeer, _ *Conn) {
		p.http2++
	}, func(p *watchedPeer, _ *Conn) {
		if p.http2--; p.http2 == 0 {
			for c := range p.http1 {
				c.abort()
			}
		}
	})
}

// onHTTP1 follows the state of an HTTP/1.1 connection. One without an HTTP/2 connection is closed at once.
func (w *peerWatch) onHTTP1(c net.Conn, state http.ConnState) {
	w.follow(c, state, func(p *watchedPeer, own *Conn) {
		p.http1[own] = struct{}{}
		if p.http2 == 0 {
			own.abort()
		}
	}, func(p *watchedPeer, own *Conn) {
		delete(p.http1, own)
	})
}

// follow calls opened or closed, with mu held, when a peer's connection begins or ends.
func (w *peerWatch) follow(c net.Conn, state http.ConnState, opened, closed func(*watchedPeer, *Conn)) {
	if state != http.StateNew && state != http.StateClosed {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	p, own := w.peer(c)
	switch {
	case p == nil:
	case state == http.StateNew:
		opened(p, own)
	default:
		closed(p, own)
		w.forget(p, own)
	}
}

// forget drops a peer without connections. The caller holds mu.
func (w *peerWatch) forget(p *watchedPeer, own *Conn) {
	if p.http2 == 0 && len(p.http1) == 0 {
		delete(w.peers, own.Peer.UID)
	}
}
