package nodeport

import (
	"net"
	"sync"
)

// listener is one protocol of the port.
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

// hasRoom says that a connection would be taken, if nothing else came in between.
func (l *listener) hasRoom() bool { return len(l.conns) < cap(l.conns) }

// give hands a connection over; false if there is no room or the listener is closed.
func (l *listener) give(c *Conn) bool {
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
	case <-l.done: // closed meanwhile: whoever empties the queue last, nothing stays in it
		l.empty()
	default:
	}
	return true
}

func (l *listener) Close() error {
	l.port.forget(l)
	l.end()
	return nil
}

func (l *listener) end() {
	l.once.Do(func() {
		close(l.done)
		l.empty()
	})
}

func (l *listener) empty() {
	for {
		select {
		case c := <-l.conns:
			c.port.drop(c)
			c.abort()
		default:
			return
		}
	}
}

// Addr is that of the port.
func (l *listener) Addr() net.Addr {
	if a := l.port.Addr(); a != nil {
		return a
	}
	return &net.TCPAddr{}
}

func (p *Port) forget(l *listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.listeners[l.alpn] == l {
		delete(p.listeners, l.alpn)
	}
}
