package sim

import (
	"net"
	"sync"
)

// gate is a listener that can refuse connections for a while: the real one behind it is closed and opened
// again.
type gate struct {
	open func() (net.Listener, error) // the same address again

	mu     sync.Mutex
	inner  net.Listener // nil while refusing
	closed bool
	change chan struct{} // closed and replaced with inner
	addr   net.Addr
}

func newGate(first net.Listener, open func() (net.Listener, error)) *gate {
	return &gate{open: open, inner: first, change: make(chan struct{}), addr: first.Addr()}
}

// Addr implements net.Listener.
func (g *gate) Addr() net.Addr { return g.addr }

// Accept implements net.Listener; it waits while the gate refuses.
func (g *gate) Accept() (net.Conn, error) {
	for {
		g.mu.Lock()
		inner, closed, change := g.inner, g.closed, g.change
		g.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		if inner == nil {
			<-change
			continue
		}
		conn, err := inner.Accept()
		if err == nil {
			return conn, nil
		}
		g.mu.Lock()
		same := g.inner == inner && !g.closed
		g.mu.Unlock()
		if same {
			return nil, err
		}
	}
}

// Close implements net.Listener.
func (g *gate) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	return g.swap(nil)
}

// swap needs the lock.
func (g *gate) swap(next net.Listener) error {
	old := g.inner
	g.inner = next
	close(g.change)
	g.change = make(chan struct{})
	if old != nil {
		return old.Close()
	}
	return nil
}

// refuse closes the listener until admit.
func (g *gate) refuse() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.inner == nil {
		return nil
	}
	return g.swap(nil)
}

// admit opens the listener again.
func (g *gate) admit() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed || g.inner != nil {
		return nil
	}
	l, err := g.open()
	if err != nil {
		return err
	}
	return g.swap(l)
}

// inflight counts requests and says when there are none.
type inflight struct {
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed while n is 0
}

func newInflight() *inflight {
	f := &inflight{zero: make(chan struct{})}
	close(f.zero)
	return f
}

func (f *inflight) enter() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == 0 {
		f.zero = make(chan struct{})
	}
	f.n++
}

func (f *inflight) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n--
	if f.n == 0 {
		close(f.zero)
	}
}

func (f *inflight) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

// idle is closed as soon as nothing is in flight.
func (f *inflight) idle() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.zero
}
