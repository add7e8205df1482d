package ingress

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

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/quietnet"
)

// Dialer opens a connection to an engine.
type Dialer func(ctx context.Context, network, addr string) (net.Conn, error)

// engineLeg sends one request to an engine and gives the head of its answer. An interface, so that a hand-written client
// can take the place of http.Transport (HOTPATH 4).
type engineLeg interface {
	// send returns when the answer's header is there. It never follows redirects and never sends twice. The caller closes
	// the answer's body. The request's memory may still be read after send has returned, until settled says otherwise.
	send(ctx context.Context, o *outgoing) (*http.Response, error)
}

// outgoing is a request on its way to an engine. One per send; not reused.
type outgoing struct {
	url    *url.URL
	header http.Header // read only
	body   []byte

	reused  atomic.Bool  // the connection had served a request before
	begun   atomic.Bool  // a byte of the answer has arrived
	writing atomic.Int32 // connections that may still read body
}

// settled says that nobody reads the request's memory any more.
func (o *outgoing) settled() bool { return o.writing.Load() == 0 }

func (o *outgoing) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			o.reused.Store(info.Reused)
			o.writing.Add(1)
		},
		WroteRequest:         func(httptrace.WroteRequestInfo) { o.writing.Add(-1) },
		GotFirstResponseByte: func() { o.begun.Store(true) },
	}
}

// maxIdlePerEngine must not be below max_ongoing_requests, or a burst dials once per request (TRAPS 4).
const maxIdlePerEngine = 4096

// legs are the two ways to an engine: one that dpserve started keeps idle connections for longer.
type legs struct{ owned, attached *transportLeg }

func newLegs(t Timers, dial Dialer) *legs {
	if dial == nil {
		dial = (&net.Dialer{Timeout: t.Dial, KeepAlive: -1}).DialContext
	}
	return &legs{owned: newTransportLeg(dial, t.Dial, t.IdleOwned), attached: newTransportLeg(dial, t.Dial, t.IdleAttached)}
}

func (l *legs) to(t *msg.Target) engineLeg {
	if t.Owned {
		return l.owned
	}
	return l.attached
}

func (l *legs) close() {
	l.owned.transport.CloseIdleConnections()
	l.attached.transport.CloseIdleConnections()
}

// transportLeg is engineLeg on net/http.
type transportLeg struct{ transport *http.Transport }

var _ engineLeg = (*transportLeg)(nil)

// newTransportLeg sets by hand what the defaults get wrong (TRAPS 4): no compression, no proxy from the environment.
func newTransportLeg(dial Dialer, patience, idle time.Duration) *transportLeg {
	return &transportLeg{&http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return capped(c), nil
		},
		DisableCompression:     true,
		Proxy:                  nil,
		IdleConnTimeout:        idle,
		MaxIdleConns:           0,
		MaxIdleConnsPerHost:    maxIdlePerEngine,
		MaxResponseHeaderBytes: DefaultMaxHeaderBytes,
		TLSHandshakeTimeout:    patience,
	}}
}

// capped bounds what a stuck client makes pile up in the kernel on the engine's side, and gives a quiet connection.
func capped(c net.Conn) net.Conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		if tcp.SetReadBuffer(kernelBuffer) != nil {
			return c // closing already: the first use will say so
		}
	}
	return quietnet.Conn(c)
}

// send implements engineLeg. The body goes in as a bytes.Reader, which the transport knows: it writes header and body in one
// piece. GetBody stays unset, or the transport would resend by itself, uncounted.
func (l *transportLeg) send(ctx context.Context, o *outgoing) (*http.Response, error) {
	r := http.Request{
		Method: http.MethodPost, URL: o.url, Host: o.url.Host, Header: o.header,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Body: io.NopCloser(bytes.NewReader(o.body)), ContentLength: int64(len(o.body)),
	}
	return l.transport.RoundTrip(r.WithContext(httptrace.WithClientTrace(ctx, o.trace())))
}
