package rankleg

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/internal/rawconn"
)

// Dialer opens a connection to an engine.
type Dialer func(ctx context.Context, network, addr string) (net.Conn, error)

// engineRequest is one POST to an engine. It is used for one send only.
type engineRequest struct {
	URL    *url.URL
	Header http.Header // read only
	Body   []byte      // the transport drops it once it is written: an answer may take minutes
	guard  *Guard      // nil for most requests

	// of a request that has failed: its connection had waited, and was being closed when the request was
	// written. So it may be sent once more
	isStale bool

	reader  *bytes.Reader // of Body, on the transport
	reused  atomic.Bool   // on the transport: the connection had served a request before
	begun   atomic.Bool   // on the transport: a byte of the answer has arrived
	writing atomic.Int32  // connections that may still read Body
}

// isSettled says that no goroutine reads the request's memory any more.
func (r *engineRequest) isSettled() bool { return r.writing.Load() == 0 }

// watch is the request's guard for the own client.
func (r *engineRequest) watch() enginehttp.Guard {
	if r.guard == nil {
		return enginehttp.Guard{}
	}
	return enginehttp.Guard{Before: r.guard.allow, Written: r.guard.OnWritten}
}

func (r *engineRequest) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			r.reused.Store(info.Reused)
			r.writing.Add(1)
		},
		WroteRequest: func(info httptrace.WroteRequestInfo) {
			if info.Err == nil {
				r.Body = nil
				r.reader.Reset(nil)
				if r.guard != nil && r.guard.OnWritten != nil {
					r.guard.OnWritten()
				}
			}
			r.writing.Add(-1)
		},
		GotFirstResponseByte: func() { r.begun.Store(true) },
	}
}

// Limits that cannot be configured.
const (
	// maxIdle connections per engine must not be below max_ongoing_requests, or a burst dials once per
	// request.
	maxIdle = 4096
	maxHead = 64 << 10 // bytes of an answer's header
	// kernelBuffer is the size in bytes of a connection's receive buffer. It bounds what a stuck reader can
	// pile up. A larger one is slower: at 256 KiB the window never moves, so the kernel acknowledges each
	// segment at once, the engine's writes never join in its send queue, and each token costs the engine a
	// segment of its own (70 % more CPU per answer, 40 % fewer chunks).
	kernelBuffer = 64 << 10
)

// engines are the connections to engines. Those to engines that dpserve started may be idle for longer than
// those to attached ones. Safe for concurrent use.
type engines struct{ owned, attached *direct }

// newEngines makes the connections; a nil dial is TCP.
func newEngines(t Timers, dial Dialer) engines {
	if dial == nil {
		dial = (&net.Dialer{Timeout: t.Dial, KeepAlive: -1, Control: connectNow}).DialContext
	}
	dial = cappedDial(dial)
	return engines{
		owned:    newDirect(dial, t.Dial, t.IdleOwned),
		attached: newDirect(dial, t.Dial, t.IdleAttached),
	}
}

// send returns when the answer's header is there. It never follows redirects and never sends twice. The
// caller closes the answer's body, and does not change its header. The request's memory may still be read
// after send has returned, until isSettled is true. owned: dpserve started the engine.
func (e engines) send(ctx context.Context, owned bool, r *engineRequest) (*http.Response, error) {
	if owned {
		return e.owned.send(ctx, r)
	}
	return e.attached.send(ctx, r)
}

// reach dials the engine of a request, for a later one; an error: the engine takes no connection.
func (e engines) reach(ctx context.Context, owned bool, r *engineRequest) error {
	d := e.attached
	if owned {
		d = e.owned
	}
	return d.client(r.URL.Host).Warm(ctx)
}

// close closes idle connections, and those in use when their requests end. It ends the dials of spare
// connections.
func (e engines) close() {
	e.owned.close()
	e.attached.close()
}

// cappedDial dials rawconn connections whose receive buffer is limited, which bounds the bytes that a stuck
// client makes pile up in the kernel.
func cappedDial(dial Dialer) Dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(kernelBuffer) // fails on a closed one, whose first use fails
		}
		return rawconn.Conn(c), nil
	}
}

// transport sends through net/http, for TLS.
type transport struct{ inner *http.Transport }

// newTransport sets what the defaults of net/http get wrong for a relay: no compression (the transport would
// decode answers on its own), and no proxy from the environment (it would see the prompts).
func newTransport(dial Dialer, patience, idle time.Duration) *transport {
	return &transport{&http.Transport{
		DialContext:            dial,
		DisableCompression:     true,
		Proxy:                  nil,
		IdleConnTimeout:        idle,
		MaxIdleConns:           0,
		MaxIdleConnsPerHost:    maxIdle,
		MaxResponseHeaderBytes: maxHead,
		TLSHandshakeTimeout:    patience,
	}}
}

// send gives the body as a bytes.Reader, which the transport knows: it writes header and body in one piece.
// GetBody stays unset, or the transport would resend by itself, uncounted.
func (t *transport) send(ctx context.Context, o *engineRequest) (*http.Response, error) {
	o.reader = bytes.NewReader(o.Body)
	r := http.Request{
		Method: http.MethodPost, URL: o.URL, Host: o.URL.Host, Header: o.Header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Body: io.NopCloser(o.reader), ContentLength: int64(len(o.Body)),
	}
	if o.guard != nil {
		r.Body = &guardedBody{inner: o.reader, guard: o.guard}
	}
	began := time.Now()
	resp, err := t.inner.RoundTrip(r.WithContext(httptrace.WithClientTrace(ctx, o.trace())))
	switch {
	case err != nil:
		o.isStale = o.reused.Load() && !o.begun.Load() && time.Since(began) <= staleWithin
	case resp.StatusCode < http.StatusOK: // net/http hands the connection out, and no context ends it
		_ = resp.Body.Close()
		return nil, &enginehttp.ProtocolError{What: "a switch of protocols that nobody asked for"}
	}
	return resp, err
}

// staleWithin is the time in which the end of a waiting connection counts as one that was on its way when
// the request was written.
const staleWithin = 50 * time.Millisecond

// guardedBody is the body of a request that must not be written late. The transport reads it when it writes
// the request. If the first read fails, the engine gets no whole request, so it does nothing.
type guardedBody struct {
	inner *bytes.Reader
	guard *Guard
	begun bool
}

func (b *guardedBody) Read(p []byte) (int, error) {
	if !b.begun {
		b.begun = true
		if err := b.guard.allow(); err != nil {
			return 0, err
		}
	}
	return b.inner.Read(p)
}

func (b *guardedBody) Close() error { return nil }

// direct sends plain HTTP requests through enginehttp, and those over TLS through the transport.
type direct struct {
	transport *transport
	dial      Dialer
	patience  time.Duration // for the dial of a spare connection
	idle      time.Duration

	mu sync.RWMutex
	// by host and port; one without connections goes when another comes
	clients map[string]*enginehttp.Client
	// the clients for which a spare connection is being dialled
	spares map[*enginehttp.Client]context.CancelFunc
	closed bool
	dials  sync.WaitGroup // of spare connections
}

func newDirect(dial Dialer, patience, idle time.Duration) *direct {
	return &direct{
		transport: newTransport(dial, patience, idle), dial: dial, patience: patience, idle: idle,
		clients: map[string]*enginehttp.Client{}, spares: map[*enginehttp.Client]context.CancelFunc{},
	}
}

// send sends through the own client. When it returns, the client no longer reads the request, so the request
// is settled.
func (l *direct) send(ctx context.Context, o *engineRequest) (*http.Response, error) {
	if !plain(o.URL) {
		return l.transport.send(ctx, o)
	}
	c := l.client(o.URL.Host)
	resp, err := c.SendGuarded(ctx, http.MethodPost, o.URL.RequestURI(), o.Header, o.Body, o.watch())
	if err != nil {
		e, ok := errors.AsType[*enginehttp.SendError](err)
		o.isStale = ok && e.Stale
		return nil, err
	}
	o.Body = nil // it is written: the answer may take minutes
	if !c.HasIdle() {
		l.dialSpare(ctx, c)
	}
	return resp, nil
}

// dialSpare dials a connection for the next request in the background, so that this request does not wait for
// a dial. send calls it when an engine has answered and no connection waits, so that nothing dials an engine
// that does not answer or gets no requests. An engine has at most one such dial. It ends after the patience
// for a dial, or with close. A failed dial is not reported, because the next request dials itself.
func (l *direct) dialSpare(ctx context.Context, c *enginehttp.Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.spares[c] != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.patience)
	l.spares[c] = cancel
	l.dials.Go(func() {
		_ = c.Warm(ctx)
		cancel()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.spares, c)
	})
}

// plain reports that a URL is plain HTTP to a host in ASCII without a zone. Others go through net/http.
func plain(u *url.URL) bool {
	if u.Scheme != "http" || u.Opaque != "" || strings.Contains(u.Host, "%") {
		return false
	}
	for i := range len(u.Host) {
		if u.Host[i] >= 0x80 {
			return false
		}
	}
	return httpguts.ValidHostHeader(u.Host)
}

// client gives the client of one engine.
func (l *direct) client(host string) *enginehttp.Client {
	l.mu.RLock()
	c := l.clients[host]
	l.mu.RUnlock()
	if c != nil {
		return c
	}
	return l.add(host)
}

// add makes a client. Engines come and go with their ports, so it also drops the clients that hold no
// connection. A request that has just found one of them goes on; its connection is closed afterwards.
func (l *direct) add(host string) *enginehttp.Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.clients[host]; c != nil {
		return c
	}
	for h, c := range l.clients {
		if c.Unused() {
			c.Close()
			delete(l.clients, h)
		}
	}
	c := enginehttp.New(enginehttp.Config{Host: host, Dial: l.dial, Idle: l.idle, MaxIdle: maxIdle})
	if l.closed {
		c.Close()
	}
	l.clients[host] = c
	return c
}

// close closes idle connections, and those in use when their requests end. It ends the dials of spare
// connections.
func (l *direct) close() {
	l.mu.Lock()
	l.closed = true
	for _, c := range l.clients {
		c.Close()
	}
	for _, cancel := range l.spares {
		cancel()
	}
	l.mu.Unlock()
	l.transport.inner.CloseIdleConnections()
	l.dials.Wait()
}
