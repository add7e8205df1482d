package zmtp

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
)

// acceptPause is the wait after a failed accept (out of file descriptors).
const acceptPause = 50 * time.Millisecond

// Server accepts connections for one role and hands each to a goroutine of its own. Slow handshakes do not
// delay other connections.
type Server struct {
	listener net.Listener
	role     Role
	limits   Limits
	slots    chan struct{} // connections at a time, those that shake hands included
	allow    func(net.Addr) bool
	handle   func(*Conn)

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
	wg     sync.WaitGroup
}

// NewServer serves l. At most conns connections exist at a time, further ones are closed at once, as are
// those that allow (nil = everybody) refuses. handle runs in a goroutine per connection; the connection is
// closed when it returns.
func NewServer(l net.Listener, role Role, lim Limits, conns int, allow func(net.Addr) bool,
	handle func(*Conn),
) *Server {
	return &Server{
		listener: l, role: role, limits: lim, slots: make(chan struct{}, conns), allow: allow, handle: handle,
		conns: make(map[net.Conn]struct{}),
	}
}

// Addr is where it listens.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Start begins to accept; Close ends it.
func (s *Server) Start() { s.wg.Go(s.accept) }

func (s *Server) accept() {
	for {
		raw, err := s.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || s.isClosed() {
				return
			}
			time.Sleep(acceptPause)
			continue
		}
		if !s.enter(raw) {
			_ = raw.Close()
		}
	}
}

// enter gives a connection its slot and goroutine.
func (s *Server) enter(raw net.Conn) bool {
	if s.allow != nil && !s.allow(raw.RemoteAddr()) {
		return false
	}
	select {
	case s.slots <- struct{}{}:
	default:
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[raw] = struct{}{}
	s.wg.Go(func() { s.serve(raw) })
	return true
}

func (s *Server) serve(raw net.Conn) {
	defer func() {
		_ = raw.Close()
		s.mu.Lock()
		delete(s.conns, raw)
		s.mu.Unlock()
		<-s.slots
	}()
	c, err := Open(raw, s.role, true, s.limits)
	if err != nil {
		return // not a ZMTP peer, or it has left
	}
	s.handle(c)
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

// DropAll closes every connection; the server goes on.
func (s *Server) DropAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		_ = c.Close()
	}
}

// Close stops accepting, closes every connection and waits for the handlers. It is idempotent.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	err := s.listener.Close()
	s.DropAll()
	s.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Dial connects and shakes hands. dial nil = TCP. ctx bounds the connect and, by closing the socket, the
// handshake.
func Dial(ctx context.Context, dial func(ctx context.Context, addr string) (net.Conn, error), addr string,
	role Role, lim Limits,
) (*Conn, error) {
	if dial == nil {
		dial = func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		}
	}
	raw, err := dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	return Open(raw, role, false, lim)
}
