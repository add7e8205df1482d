package nodeport

import (
	"net"
	"sync"
)

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

// hasRoom reports whether the queue has room now.
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

// Addr returns the address of the port.
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
