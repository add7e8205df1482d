package nodeport

import (
	"container/list"
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
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

// New makes a port that can dial. Listen or Attach let it serve.
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
	p.Attach(socket)
	return nil
}

// Attach serves a listener that the caller has bound. The port closes it.
func (p *Port) Attach(socket net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.socket = socket
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
