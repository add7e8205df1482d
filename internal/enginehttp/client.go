// Package enginehttp is an HTTP/1.1 client for one engine, or for one node's data port, made for a relay: it
// writes a request in one piece, reads the answer on the caller's goroutine, and returns all chunks of a body
// that one read of the socket brought. docs/performance.md has what this saves against http.Transport, whose
// two goroutines per connection hand every request over four times.
//
// It is strict where net/http is lenient, because a message that two parsers understand differently allows
// request smuggling: lines end in CRLF, there are no folded fields, Content-Length and chunked exclude each
// other, repeated lengths must agree. A connection is used again only if its answer was read to the end, no
// bytes follow that end, the request was written whole and not aborted, and the peer has sent nothing since
// (checked by a look into the socket before each reuse, where the system allows it).
//
// Over TLS (Secure) it is as strict. What it does not do: HTTP/2, proxies, redirects, compression, Expect,
// upgrades, requests of unknown length, and sending a request twice: the caller decides that, from
// the fields of SendError.
package enginehttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"
)

// Config of a Client. Every field but Port and MaxHead must be set.
type Config struct {
	// host and port, or host alone: the Host field, and where to dial
	Host string
	Port string // of a Host without one; "": 80
	Dial Dialer // bounds its own time
	// how long a connection may wait for its next request
	Idle time.Duration
	// connections kept; more are closed
	MaxIdle int
	// bytes of an answer's status line and fields, interim answers before it included; 0: 64 KiB
	MaxHead int
	// the longest dial of a spare connection: one is dialled in the background when an answer has begun and
	// no connection waits, so that the next request does not wait for a dial. 0: none is
	Spare time.Duration
}

// Client sends requests to one engine. Safe for concurrent use. A goroutine writes a large request, and ends
// before Send does; the pool's timer ends with Close.
type Client struct {
	host string
	addr string
	dial Dialer
	pool pool
	head int          // bytes of an answer's head
	busy atomic.Int64 // requests whose connection is not given back, and dials of spares

	spare      time.Duration
	life       context.Context //nolint:containedctx // until Close: it ends the dial of a spare
	end        context.CancelFunc
	mu         sync.Mutex
	dialsSpare bool           // at most one at a time; under mu
	isClosed   bool           // under mu
	spareDials sync.WaitGroup // added to under mu, not after isClosed

	buffers  sync.Pool // *[]byte of readBuffer
	requests sync.Pool // *[]byte
}

// New makes a client; it dials when a request needs it.
func New(c Config) *Client {
	out := &Client{
		host: withoutZone(c.Host), addr: address(c.Host, cmp.Or(c.Port, "80")), dial: c.Dial,
		pool: pool{idle: c.Idle, most: c.MaxIdle}, head: c.MaxHead, spare: c.Spare,
	}
	out.life, out.end = context.WithCancel(context.Background())
	if out.head == 0 {
		out.head = maxHead
	}
	out.buffers.New = func() any { b := make([]byte, readBuffer); return &b }
	out.requests.New = func() any { return new([]byte) }
	return out
}

// withoutZone is the host without the zone of an IPv6 address, which says nothing to the peer.
func withoutZone(host string) string {
	zone, end := strings.IndexByte(host, '%'), strings.LastIndexByte(host, ']')
	if zone < 0 || end < zone {
		return host
	}
	return host[:zone] + host[end:]
}

// address adds the port where there is none.
func address(host, port string) string {
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	if n := len(host); n > 1 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	return net.JoinHostPort(host, port)
}

// Unused reports that the client holds no connection.
func (c *Client) Unused() bool { return c.busy.Load() == 0 && c.pool.empty() }

// dialSpare dials a connection for the next request in the background. Send calls it when the engine has
// answered, so that nothing dials an engine that does not answer or gets no requests. A failed dial is not
// reported, because the next request dials itself.
func (c *Client) dialSpare() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isClosed || c.dialsSpare {
		return
	}
	c.dialsSpare = true
	c.busy.Add(1)
	c.spareDials.Go(func() {
		ctx, cancel := context.WithTimeout(c.life, c.spare)
		defer cancel()
		if n, err := c.dial(ctx, "tcp", c.addr); err == nil {
			c.Add(n)
		}
		c.busy.Add(-1)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.dialsSpare = false
	})
}

// Reach dials, and closes the connection: an error says that the engine takes none.
func (c *Client) Reach(ctx context.Context) error {
	n, err := c.dial(ctx, "tcp", c.addr)
	if err == nil {
		_ = n.Close()
	}
	return err
}

// Add gives the client a connection to the engine. It waits in the pool like one that has served a request.
func (c *Client) Add(n net.Conn) {
	if cn := newConn(n, c.head); !c.pool.put(cn) {
		cn.close()
	}
}

// Close closes the waiting connections and keeps none from now on. Requests under way go on; their callers
// end them. It is idempotent.
func (c *Client) Close() {
	c.mu.Lock()
	c.isClosed = true
	c.mu.Unlock()
	c.end()
	c.spareDials.Wait()
	c.pool.close()
}

// Send writes a request and reads the answer's head. target is the path with its query. header and body are
// only read, and no more once Send has returned. Of header the fields that frame the message or belong to the
// connection are left out, and nothing is added but Host and Content-Length.
//
// The caller closes the answer's body and reads it from one goroutine. The end of ctx ends Send and Read at
// once. The answer's header must not be changed: answers share it. Errors are *SendError. After one without a
// byte of an answer on a connection that had waited, all waiting connections are closed too (they have waited
// longer), so that a second Send dials.
func (c *Client) Send(ctx context.Context, method, target string, header http.Header,
	body []byte,
) (*http.Response, error) {
	return c.SendGuarded(ctx, method, target, header, body, Guard{})
}

// Guard watches the writing of one request, and may bring a part of its body. Its functions must not block;
// nil is allowed.
type Guard struct {
	// Rest follows body, in RestSize bytes; nil: nothing does. It is read while the request is written, and
	// no more once Send has returned. EndRest ends a read that waits: an answer has come.
	Rest     io.Reader
	RestSize int64
	EndRest  func()

	// Before is called directly before the first byte is written, when the connection is there. If it fails,
	// nothing is written, and Send fails with its error.
	Before func() error
	// Written is called directly after the last byte is written.
	Written func()
}

// SendGuarded is Send for a request that must not be written too late.
func (c *Client) SendGuarded(ctx context.Context, method, target string, header http.Header, body []byte,
	g Guard,
) (*http.Response, error) {
	if ctx.Err() != nil {
		return nil, &SendError{Err: context.Cause(ctx)}
	}
	mem, _ := c.requests.Get().(*[]byte)
	defer c.keepRequest(mem)
	req, err := appendRequest((*mem)[:0], method, target, c.host, header, int64(len(body))+g.RestSize)
	*mem = req
	if err != nil {
		return nil, &SendError{Err: err}
	}
	n := min(len(body), max(packed-len(req), 0))
	req = append(req, body[:n]...)
	*mem = req
	return c.exchange(ctx, method, req, body[n:], g)
}

func (c *Client) keepRequest(mem *[]byte) {
	if cap(*mem) <= keptRequest {
		c.requests.Put(mem)
	}
}

func (c *Client) exchange(ctx context.Context, method string, req, rest []byte, g Guard) (
	*http.Response, error,
) {
	c.busy.Add(1)
	cn, err := c.connect(ctx)
	if err != nil {
		c.busy.Add(-1)
		return nil, &SendError{Err: cause(ctx, err)}
	}
	if g.Before != nil {
		if err := g.Before(); err != nil {
			c.giveBack(cn)
			return nil, &SendError{Err: err}
		}
	}
	cn.mem, _ = c.buffers.Get().(*[]byte)
	cn.buf, cn.r, cn.w = *cn.mem, 0, 0
	x := &exchange{client: c, conn: cn, stop: context.AfterFunc(ctx, cn.abort)}
	h, whole, err := cn.roundTrip(req, rest, g)
	if err != nil {
		return nil, c.failed(ctx, x, err)
	}
	resp := x.answer(h, method, whole)
	if c.spare > 0 && c.pool.empty() {
		c.dialSpare() //nolint:contextcheck // it outlives the request
	}
	return resp, nil
}

// connect takes a waiting connection, or dials.
func (c *Client) connect(ctx context.Context) (*conn, error) {
	if cn := c.pool.get(); cn != nil {
		return cn, nil
	}
	n, err := c.dial(ctx, "tcp", c.addr)
	if err != nil {
		return nil, err
	}
	return newConn(n, c.head), nil
}

// giveBack returns a connection on which nothing was written.
func (c *Client) giveBack(cn *conn) {
	if !c.pool.put(cn) {
		cn.close()
	}
	c.busy.Add(-1)
}

// roundTrip writes the request and reads the head of the answer, also if writing failed: a peer that refuses
// a request may answer and close before it has read it all.
func (c *conn) roundTrip(req, rest []byte, g Guard) (h *head, whole bool, err error) {
	c.wrote, c.before = time.Now(), c.sent
	c.sent += uint64(len(req)+len(rest)) + uint64(g.RestSize)
	var unwritten error
	if len(rest) == 0 && g.Rest == nil && c.probe != nil {
		// it fits into the kernel's buffers, so the write does not wait
		unwritten = c.write(req, nil, g)
		h, err = c.readHead()
	} else {
		over := make(chan error, 1)
		go func() { over <- c.write(req, rest, g) }()
		h, err = c.readHead()
		c.writeBy(time.Unix(1, 0)) // a write that still waits ends
		if g.Rest != nil {
			g.EndRest()
		}
		unwritten = <-over
		c.writeBy(time.Time{})
	}
	if unwritten == nil {
		return h, true, err
	}
	c.readBy(time.Time{})
	isOurs := errors.Is(unwritten, os.ErrDeadlineExceeded) && !errors.Is(unwritten, ErrRest)
	if err != nil && c.w == 0 && !isOurs {
		err = unwritten
	}
	return h, false, err
}

// failed ends an exchange without an answer.
func (c *Client) failed(ctx context.Context, x *exchange, err error) error {
	cn := x.conn
	e := &SendError{Reused: cn.waited, Begun: cn.w > 0, Err: err}
	if e.Reused && !e.Begun && !errors.Is(err, ErrRest) {
		e.Unseen = cn.isUnseen()
		e.Stale = e.Unseen || time.Since(cn.wrote) <= staleWithin
	}
	if !x.stop() {
		e.Err = cause(ctx, err)
	}
	c.done(cn, false)
	if e.Reused && !e.Begun && ctx.Err() == nil {
		c.pool.drop()
	}
	return e
}

// cause returns the context's cause if the context has ended, instead of the connection's error that follows
// from it.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// answer makes the response and begins its body. An empty body is at its end already.
func (x *exchange) answer(h *head, method string, whole bool) *http.Response {
	x.resp = http.Response{
		Status: h.text, StatusCode: h.status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: h.minor,
		Header: h.header, ContentLength: h.length, Body: x,
	}
	if h.minor == 0 {
		x.resp.Proto = "HTTP/1.0"
	}
	x.keep = h.keep && whole
	switch {
	case h.hasNoBody(method):
		if method != http.MethodHead {
			x.resp.ContentLength = 0
		}
		x.keep = x.keep && h.reusable(method)
		x.finish(io.EOF)
	case h.chunked:
		x.read = chunked
	case h.length > 0:
		x.read, x.left = sized, h.length
	case h.length == 0:
		x.finish(io.EOF)
	default:
		x.read, x.keep = unsized, false
	}
	return &x.resp
}

// done returns a connection from its request to the pool, or closes it.
func (c *Client) done(cn *conn, reusable bool) {
	c.buffers.Put(cn.mem) // the original buffer: a larger one for a large head is other memory
	cn.mem, cn.buf = nil, nil
	if !reusable || !c.pool.put(cn) {
		cn.close()
	}
	c.busy.Add(-1)
}

// ErrAborted is returned by a body's Read when the request's context has ended. The context has the cause.
var ErrAborted = errors.New("the request was given up")

// ErrRest is in the error of a request whose Rest could not be read to its end.
var ErrRest = errors.New("the rest of the body did not come")

// errClosed is returned by a body's Read after Close.
var errClosed = errors.New("read of a closed body")

// SendError is the reason why Send returned no answer. Err tells an end of file (io.EOF) from a reset
// (syscall.ECONNRESET), and is a *net.OpError of op "dial" if no connection came about; after the context's
// end it is the context's cause.
type SendError struct {
	Reused bool // the connection had waited for a request: behind another one, or as a spare
	Begun  bool // a byte of an answer has come
	// of a Reused connection without an answer: its end was on its way when the request was written, or the
	// request is Unseen. It may be sent once more
	Stale bool
	// the peer's system has acknowledged no byte of the request, so that the engine has none
	Unseen bool
	Err    error
}

// Error implements error.
func (e *SendError) Error() string { return "engine: " + e.Err.Error() }

// Unwrap gives the reason.
func (e *SendError) Unwrap() error { return e.Err }

// ProtocolError reports an answer that is no well-formed HTTP/1.1 by this package's rules.
type ProtocolError struct{ What string }

// Error implements error.
func (e *ProtocolError) Error() string { return "malformed answer: " + e.What }

func malformed(what string) error { return &ProtocolError{What: what} }

// appendRequest writes the head of a request. The fields that frame a message or belong to the connection are
// this package's alone: they are left out of header, however they are spelt.
func appendRequest(b []byte, method, target, host string, header http.Header, length int64) ([]byte, error) {
	if !validTarget(target) {
		return b, fmt.Errorf("request target %q must begin with / and hold no blanks or control characters",
			target)
	}
	b = append(append(append(b, method...), ' '), target...)
	b = append(append(append(b, " HTTP/1.1\r\nHost: "...), host...), '\r', '\n')
	for name, values := range header {
		if framing(name) {
			continue
		}
		if !httpguts.ValidHeaderFieldName(name) {
			return b, fmt.Errorf("invalid header field name %q", name)
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return b, fmt.Errorf("invalid value of header field %s", name)
			}
			b = append(append(append(append(b, name...), ':', ' '), v...), '\r', '\n')
		}
	}
	if length > 0 || method == http.MethodPost || method == http.MethodPut || method == http.MethodPatch {
		b = strconv.AppendInt(append(b, "Content-Length: "...), length, 10)
		b = append(b, '\r', '\n')
	}
	return append(b, '\r', '\n'), nil
}

func validTarget(s string) bool {
	if s == "" || s[0] != '/' {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// framing reports that a field is set by this package alone.
func framing(name string) bool {
	switch len(name) {
	case len("Host"):
		return strings.EqualFold(name, "Host")
	case len("Expect"):
		return strings.EqualFold(name, "Expect")
	case len("Trailer"): // and Upgrade
		return strings.EqualFold(name, "Trailer") || strings.EqualFold(name, "Upgrade")
	case len("Connection"):
		return strings.EqualFold(name, "Connection")
	case len("Content-Length"):
		return strings.EqualFold(name, "Content-Length")
	case len("Transfer-Encoding"):
		return strings.EqualFold(name, "Transfer-Encoding")
	}
	return false
}
