package nodeport

import (
	"container/list"
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rawconn"
)

// Port is a node's port and its way to connect to other nodes' ports. It is safe for concurrent use.
type Port struct {
	cfg        Config
	refusalLog refusalLog
	wg         sync.WaitGroup // handshakes
	room       chan struct{}  // one slot: a handshake has ended

	mu        sync.Mutex
	socket    net.Listener
	listeners map[string]*listener
	shaking   *list.List     // of *handshake, oldest first
	ends      map[any]func() // what Close must end: connections, dials, transports
	closed    bool
}

// New makes a port that can dial. Listen lets it serve.
func New(cfg Config) *Port {
	cfg = cfg.withDefaults()
	return &Port{
		cfg:        cfg,
		refusalLog: refusalLog{log: cfg.Log, last: map[Reason]time.Time{}, left: map[Reason]int{}},
		room:       make(chan struct{}, 1),
		listeners:  map[string]*listener{},
		shaking:    list.New(),
		ends:       map[any]func(){},
	}
}

// Listen binds an address (HOST:PORT; port 0 picks a free one).
func (p *Port) Listen(ctx context.Context, addr string) error {
	socket, err := p.cfg.Bind(ctx, addr)
	if err != nil {
		return problem.New(problem.Unavailable, "the node port cannot listen on %s: %w", addr, err).
			WithHint("is another dpserve running there? choose another --advertise, or stop it")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.socket = socket
	return nil
}

// Addr returns the bound address, nil before Listen.
func (p *Port) Addr() net.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.socket == nil {
		return nil
	}
	return p.socket.Addr()
}

// Serve accepts connections until Close and then returns nil.
func (p *Port) Serve() error {
	p.mu.Lock()
	socket := p.socket
	p.mu.Unlock()
	if socket == nil {
		return problem.New(problem.Internal, "the node port is not bound")
	}
	pause := time.Duration(0)
	for {
		raw, err := socket.Accept()
		switch {
		case err == nil:
			pause = 0
			p.startHandshake(raw)
		case p.isClosed():
			return nil
		case errors.Is(err, net.ErrClosed):
			return problem.New(problem.Unavailable, "the node port's socket is gone: %w", err)
		default: // no file descriptors or memory: other connections go on, and so does the port
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			p.refusalLog.logRefusal(Overload, socket.Addr(), err)
			time.Sleep(pause)
		}
	}
}

// Listener returns the listener of one protocol. Its connections are *Conn after their handshake. The port
// serves a protocol from the first call of Listener until that listener is closed. The same name gives the
// same listener.
func (p *Port) Listener(alpn string) net.Listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.listeners[alpn]
	if l == nil {
		l = &listener{port: p, alpn: alpn, conns: make(chan *Conn, backlog), done: make(chan struct{})}
		if p.closed {
			l.shutDown()
			return l
		}
		p.listeners[alpn] = l
	}
	return l
}

// Disconnect ends every connection with a node that was removed.
func (p *Port) Disconnect(uid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key := range p.ends {
		if c, ok := key.(*Conn); ok && c.Peer.UID == uid {
			c.abort()
		}
	}
}

// Close ends the port and all its connections, and waits for handshakes.
func (p *Port) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		p.wg.Wait()
		return nil
	}
	p.closed = true
	var err error
	if p.socket != nil {
		err = p.socket.Close()
	}
	for e := p.shaking.Front(); e != nil; e = e.Next() {
		e.Value.(*handshake).abort() //nolint:errcheck // nothing else is in the list
	}
	listeners, ends := p.listeners, p.ends
	p.listeners, p.ends = map[string]*listener{}, map[any]func(){}
	p.mu.Unlock()
	p.signalRoom()

	for _, l := range listeners {
		l.shutDown()
	}
	for _, end := range ends {
		end()
	}
	p.wg.Wait()
	return err
}

func (p *Port) isClosed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

// track remembers what Close must end; false if the port is closed already.
func (p *Port) track(key any, end func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.ends[key] = end
	return true
}

func (p *Port) untrack(key any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.ends, key)
}

// firstServed returns the first of the offered protocols that has a listener.
func (p *Port) firstServed(offered []string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, alpn := range offered {
		if p.listeners[alpn] != nil {
			return alpn
		}
	}
	return ""
}

// errNoCredentials is the error of a node that has not joined yet.
var errNoCredentials = problem.New(problem.Unavailable, "this node has no certificate yet").
	WithHint("wait until it has joined")

// handshake is a connection whose peer is not verified yet.
type handshake struct {
	raw     net.Conn
	began   time.Time
	place   *list.Element // in Port.shaking
	evicted atomic.Bool   // it was ended to make room
	creds   *pki.Credentials
}

func (h *handshake) abort() { _ = h.raw.Close() }

// startHandshake makes a handshake in a goroutine, so that a slow peer delays no other connection.
func (p *Port) startHandshake(raw net.Conn) {
	p.makeRoom()
	h := &handshake{raw: raw, began: time.Now()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		h.abort()
		return
	}
	h.place = p.shaking.PushBack(h)
	p.wg.Go(func() { p.runHandshake(h) })
}

// makeRoom waits while too many handshakes are under way, until one ends or the oldest one has used its time;
// then the oldest one is ended. So a flood of half-open connections delays members, which need milliseconds,
// but does not keep them out. Other connections wait in the kernel.
func (p *Port) makeRoom() {
	for {
		left := p.timeUntilRoom()
		if left <= 0 {
			return
		}
		timer := time.NewTimer(left)
		select {
		case <-p.room:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// timeUntilRoom returns how long the oldest handshake may still take, 0 if there is room.
func (p *Port) timeUntilRoom() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.shaking.Len() < maxHandshakes {
		return 0
	}
	oldest := p.shaking.Front().Value.(*handshake) //nolint:errcheck // nothing else is in the list
	if left := patience - time.Since(oldest.began); left > 0 {
		return left
	}
	p.shaking.Remove(oldest.place)
	oldest.evicted.Store(true)
	oldest.abort()
	return 0
}

func (p *Port) runHandshake(h *handshake) {
	_ = h.raw.SetDeadline(time.Now().Add(p.cfg.HandshakeTimeout))
	secure := tls.Server(rawconn.Conn(h.raw), p.serverConfig(h))
	err := secure.HandshakeContext(context.Background()) // bounded by the deadline
	if err != nil {
		p.refuse(h, p.failureReason(h, err), err)
		return
	}
	c := &Conn{Conn: secure, ALPN: secure.ConnectionState().NegotiatedProtocol, port: p}
	reason, err := p.authorize(h, c)
	if reason == welcome {
		reason, err = p.accept(h, c)
	} else {
		_, _ = c.Write([]byte{greeting(reason)})
	}
	if reason != welcome {
		p.refuse(h, reason, err)
	}
}

func (p *Port) failureReason(h *handshake, err error) Reason {
	if h.evicted.Load() {
		return Overload
	}
	return reasonOf(err)
}

// authorize decides about a peer whose certificate was verified.
func (p *Port) authorize(h *handshake, c *Conn) (Reason, error) {
	l := p.listenerOf(c.ALPN)
	if l == nil {
		return BadALPN, nil
	}
	if c.ALPN != Join {
		var err error
		chain := c.ConnectionState().PeerCertificates
		if c.ALPN == Renew {
			c.Peer, err = verifyExpired(h.creds.Pool, chain[0])
		} else {
			c.Peer, err = pki.IdentityOf(chain[0])
		}
		if err != nil {
			return reasonOfCertificate(err), err
		}
		switch {
		case c.Peer.Cluster != h.creds.Identity.Cluster:
			return BadCluster, nil
		case p.cfg.Revoked(c.Peer.UID):
			return Revoked, nil
		case !mayUse(c.ALPN, c.Peer):
			return BadRole, nil
		}
	}
	if !l.hasRoom() {
		return Overload, nil
	}
	return welcome, nil
}

// accept sends the greeting to the peer and gives the connection to its listener.
func (p *Port) accept(h *handshake, c *Conn) (Reason, error) {
	if _, err := c.Write([]byte{greeting(welcome)}); err != nil {
		return p.failureReason(h, err), err
	}
	_ = c.SetDeadline(time.Time{})
	l := p.listenerOf(c.ALPN)
	if l == nil || !p.track(c, c.abort) {
		return BadALPN, nil
	}
	p.endHandshake(h) // from here on an eviction would end a member's connection
	if !l.enqueue(c) {
		p.untrack(c)
		return Overload, nil
	}
	return welcome, nil
}

func (p *Port) refuse(h *handshake, reason Reason, err error) {
	h.abort()
	p.endHandshake(h)
	if p.isClosed() {
		return
	}
	p.cfg.Refused(reason)
	p.refusalLog.logRefusal(reason, h.raw.RemoteAddr(), err)
}

func (p *Port) endHandshake(h *handshake) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shaking.Remove(h.place) // no effect if it was removed before
	p.signalRoom()
}

// signalRoom wakes makeRoom.
func (p *Port) signalRoom() {
	select {
	case p.room <- struct{}{}:
	default:
	}
}

func (p *Port) listenerOf(alpn string) *listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.listeners[alpn]
}

// serverConfig demands what the offered protocol needs. Sessions are not resumed, so that every connection
// shows a certificate that is valid now.
func (p *Port) serverConfig(h *handshake) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			h.creds = p.cfg.Credentials()
			if h.creds == nil {
				return nil, errNoCredentials
			}
			return p.configFor(hello.SupportedProtos, h.creds), nil
		},
	}
}

func (p *Port) configFor(offered []string, creds *pki.Credentials) *tls.Config {
	cfg := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Certificates:           []tls.Certificate{creds.Certificate},
		NextProtos:             []string{p.firstServed(offered)},
	}
	if cfg.NextProtos[0] == "" { // no client offers this name, so TLS refuses with its own alert
		cfg.NextProtos[0] = "dpserve"
	}
	switch cfg.NextProtos[0] {
	case Join:
	case Renew: // the handshake proves the key; authorize checks the certificate, which may have expired
		cfg.ClientAuth = tls.RequireAnyClientCert
	default:
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, creds.Pool
	}
	return cfg
}

// listener serves one protocol of the port.
type listener struct {
	port  *Port
	alpn  string
	conns chan *Conn
	done  chan struct{}
	once  sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case <-l.done:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) hasRoom() bool { return len(l.conns) < cap(l.conns) }

// enqueue queues a connection; false if there is no room or the listener is closed.
func (l *listener) enqueue(c *Conn) bool {
	select {
	case <-l.done:
		return false
	default:
	}
	select {
	case l.conns <- c:
	default:
		return false
	}
	select {
	case <-l.done: // it was closed meanwhile: either this call or Close empties the queue
		l.dropQueued()
	default:
	}
	return true
}

func (l *listener) Close() error {
	l.port.removeListener(l)
	l.shutDown()
	return nil
}

func (l *listener) shutDown() {
	l.once.Do(func() {
		close(l.done)
		l.dropQueued()
	})
}

func (l *listener) dropQueued() {
	for {
		select {
		case c := <-l.conns:
			c.port.untrack(c)
			c.abort()
		default:
			return
		}
	}
}

func (l *listener) Addr() net.Addr {
	if a := l.port.Addr(); a != nil {
		return a
	}
	return &net.TCPAddr{}
}

func (p *Port) removeListener(l *listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listeners[l.alpn] == l {
		delete(p.listeners, l.alpn)
	}
}

// ServeHTTP makes a server of a protocol. From now on the port accepts its connections; they wait for Serve.
func (p *Port) ServeHTTP(alpn string, handler http.Handler) *HTTPServer {
	return &HTTPServer{
		server: &http.Server{
			Handler: handler, ConnContext: withPeer, ReadHeaderTimeout: serverIdle, IdleTimeout: serverIdle,
			ErrorLog: slog.NewLogLogger(p.cfg.Log.Handler(), slog.LevelDebug),
		},
		listener: plainListener{p.Listener(alpn)},
	}
}
