package rankleg

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"sync/atomic"
	"time"

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

	reader  *bytes.Reader // of Body, on the transport
	reused  atomic.Bool   // the connection had waited for a request, behind another one or as a spare
	begun   atomic.Bool   // a byte of the answer has arrived
	writing atomic.Int32  // connections that may still read Body
}

// isSettled says that no goroutine reads the request's memory any more.
func (r *engineRequest) isSettled() bool { return r.writing.Load() == 0 }

// isStale says that a failed request used a connection that had waited for a request and that the engine had
// closed. The engine got nothing, so the request may be sent once more.
func (r *engineRequest) isStale() bool { return r.reused.Load() && !r.begun.Load() }

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

// close closes idle connections, and those in use when their requests end. It ends the dials of spare
// connections.
func (e engines) close() {
	e.owned.close()
	e.attached.close()
}

// cappedDial dials connections that are capped.
func cappedDial(dial Dialer) Dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return capped(c), nil
	}
}

// capped limits the connection's receive buffer, which bounds the bytes that a stuck client makes pile up in
// the kernel, and returns a rawconn connection over it.
func capped(c net.Conn) net.Conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		if tcp.SetReadBuffer(kernelBuffer) != nil {
			return c // already closed: the first use fails
		}
	}
	return rawconn.Conn(c)
}

// transport sends through net/http: for TLS, and for large bodies.
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
	return t.inner.RoundTrip(r.WithContext(httptrace.WithClientTrace(ctx, o.trace())))
}

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
