package rankleg

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/dpserve/dpserve/internal/enginehttp"
)

// maxDirect is the largest body for the own client, in bytes. It writes before it reads, so a large body
// stays with http.Transport, whose second goroutine reads meanwhile: an engine that answers before it has
// read the whole body would otherwise block both sides.
const maxDirect = 1 << 20

// direct sends plain HTTP requests through enginehttp and the others through the transport.
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
	if len(o.Body) > maxDirect || !plain(o.URL) {
		return l.transport.send(ctx, o)
	}
	c := l.client(o.URL.Host)
	resp, err := c.SendGuarded(ctx, http.MethodPost, o.URL.RequestURI(), o.Header, o.Body, o.watch())
	if err != nil {
		var e *enginehttp.SendError
		if errors.As(err, &e) {
			o.reused.Store(e.Reused)
			o.begun.Store(e.Begun)
		}
		return nil, err
	}
	o.begun.Store(true)
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
