package rankleg

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/internal/rawconn"
)

// Dialer opens a connection to an engine.
type Dialer = enginehttp.Dialer

// engineRequest is one request to an engine. It is used for one send only.
type engineRequest struct {
	Method string // "": POST
	URL    *url.URL
	Trust  *tls.Config // of an engine over TLS; nil: as the machine trusts
	Header http.Header // read only
	Body   []byte      // dropped once it is written: an answer may take minutes
	rest   Rest        // follows Body; nil for most requests
	guard  *Guard      // nil for most requests

	// of a request that has failed: its connection had waited, and was being closed when the request was
	// written. So it may be sent once more
	isStale bool
}

// watch is the request's guard for the own client.
func (r *engineRequest) watch() (g enginehttp.Guard) {
	if r.guard != nil {
		g.Before, g.Written = r.guard.allow, r.guard.OnWritten
	}
	if r.rest != nil {
		g.Rest, g.RestSize, g.EndRest = r.rest, r.rest.Size(), r.rest.End
	}
	return g
}

// Limits that cannot be configured.
const (
	// maxIdle connections per engine must not be below max_ongoing_requests, or a burst dials once per
	// request.
	maxIdle = 4096
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

// of are the connections to an engine. owned: dpserve started it.
func (e engines) of(owned bool) *direct {
	if owned {
		return e.owned
	}
	return e.attached
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

// direct is the connections of one idle time.
type direct struct {
	dial     Dialer
	trust    *tls.Config   // of engines over TLS whose application says nothing about it
	patience time.Duration // for the dial of a spare connection, and for a handshake of TLS
	idle     time.Duration

	mu sync.RWMutex
	// by scheme, host and port; one without connections goes when another comes
	clients map[engineKey]*enginehttp.Client
	closed  bool
}

// engineKey is how an engine is reached.
type engineKey struct {
	scheme, host string
	trust        *tls.Config
}

func newDirect(dial Dialer, patience, idle time.Duration) *direct {
	return &direct{
		dial: dial, trust: &tls.Config{MinVersion: tls.VersionTLS12}, patience: patience, idle: idle,
		clients: map[engineKey]*enginehttp.Client{},
	}
}

// send returns when the answer's header is there. It never follows redirects and never sends twice. The
// caller closes the answer's body, and does not change its header. The request is not read any more then.
func (l *direct) send(ctx context.Context, o *engineRequest) (*http.Response, error) {
	c, method := l.client(o.URL, o.Trust), cmp.Or(o.Method, http.MethodPost)
	resp, err := c.SendGuarded(ctx, method, o.URL.RequestURI(), o.Header, o.Body, o.watch())
	if err != nil {
		e, ok := errors.AsType[*enginehttp.SendError](err)
		o.isStale = ok && e.Stale
		return nil, err
	}
	o.Body = nil // it is written: the answer may take minutes
	return resp, nil
}

// reach reports why an engine takes no connection.
func (l *direct) reach(ctx context.Context, o *engineRequest) error {
	return l.client(o.URL, o.Trust).Reach(ctx)
}

// client gives the client of one engine.
func (l *direct) client(u *url.URL, trust *tls.Config) *enginehttp.Client {
	key := engineKey{u.Scheme, u.Host, trust}
	l.mu.RLock()
	c := l.clients[key]
	l.mu.RUnlock()
	if c != nil {
		return c
	}
	return l.add(key)
}

// add makes a client. Engines come and go with their ports, so it also drops the clients that hold no
// connection. A request that has just found one of them goes on; its connection is closed afterwards.
func (l *direct) add(key engineKey) *enginehttp.Client {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c := l.clients[key]; c != nil {
		return c
	}
	for k, c := range l.clients {
		if c.Unused() {
			c.Close()
			delete(l.clients, k)
		}
	}
	conf := enginehttp.Config{Host: key.host, Dial: l.dial, Idle: l.idle, MaxIdle: maxIdle, Spare: l.patience}
	if key.scheme == "https" {
		conf.Port, conf.Dial = "443", enginehttp.Secure(l.dial, cmp.Or(key.trust, l.trust), l.patience)
	}
	c := enginehttp.New(conf)
	if l.closed {
		c.Close()
	}
	l.clients[key] = c
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
	l.mu.Unlock()
}
