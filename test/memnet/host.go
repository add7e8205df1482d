package memnet

import (
	"context"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// Host is one machine on a Network. The links between two hosts can be cut, silenced and delayed; connections
// inside a host are not affected. Safe for concurrent use.
type Host struct {
	net  *Network
	name string
}

// link is one direction between two hosts.
type link struct{ from, to string }

func (l link) back() link { return link{l.to, l.from} }

// Pauses of TCP before it resends unacknowledged data; each is twice the one before.
const (
	firstRetransmit = 200 * time.Millisecond
	firstSYN        = time.Second
)

// Listen binds addr; it fails once the host is down.
func (h *Host) Listen(addr string) (net.Listener, error) {
	h.net.mu.Lock()
	down := h.net.down[h.name]
	h.net.mu.Unlock()
	if down {
		return nil, &net.OpError{Op: "listen", Net: "mem", Addr: address(addr), Err: net.ErrClosed}
	}
	return h.net.Listen(addr)
}

// DialContext connects this host with a listener, here or on another host. While either direction is silent
// it waits, as TCP does, until the next SYN gets through.
func (h *Host) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	to, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	if to == h.name {
		return h.net.DialContext(ctx, network, addr)
	}
	way := link{h.name, to}
	if err := h.net.reach(ctx, way, addr); err != nil {
		return nil, err
	}
	here, there, l := h.net.connect(way, addr)
	if l == nil {
		return nil, refused(addr)
	}
	if err := l.take(ctx, there); err != nil {
		_ = there.Close()
		_ = here.Close()
		return nil, err
	}
	return here, nil
}

// Shut closes the listener of an address, as the kernel does when it fails.
func (h *Host) Shut(addr string) {
	h.net.mu.Lock()
	l := h.net.listeners[addr]
	h.net.mu.Unlock()
	_ = l.Close() // never fails
}

// again is the time at which TCP next resends data that it first sent at the given time.
func again(sent, now time.Time, pause time.Duration) time.Time {
	at := sent
	for ; !at.After(now); pause *= 2 {
		at = at.Add(pause)
	}
	return at
}

// Down ends the host: its listeners close, its connections are reset, and it neither receives nor sends.
// Other hosts see the resets unless the direction to them is silent.
func (h *Host) Down() {
	n := h.net
	var bound []*listener
	n.change(func() {
		n.down[h.name] = true
		for addr, l := range n.listeners {
			if host, _, err := net.SplitHostPort(addr); err == nil && host == h.name {
				bound = append(bound, l)
			}
		}
		for w := range n.wires {
			if !w.joins(h.name) {
				continue
			}
			w.reset(h.name)
			if peer := w.other(h.name); !n.silent[link{h.name, peer}] {
				w.reset(peer)
			}
		}
	})
	for _, l := range bound {
		_ = l.Close()
	}
}

// Up lets a host that is down receive and send again.
func (h *Host) Up() { h.net.change(func() { delete(h.net.down, h.name) }) }

// window bounds the unread bytes of one direction, as socket buffers do.
const window = 256 << 10

// wire is a connection between two hosts. All of it is guarded by the network's mu.
type wire struct {
	net  *Network
	ends [2]*end // the dialling and the listening one
}

// end is a host's end of a wire.
type end struct {
	wire          *wire
	way           link // from here to there
	peer          *end
	local, remote address

	in       []chunk // what is on its way here, in order
	size     int     // of in
	changed  chan struct{}
	read     time.Time // deadlines
	write    time.Time
	closed   bool
	wasReset bool
}

// chunk is the data of one write.
type chunk struct {
	data []byte
	fin  bool      // nothing comes after it
	held bool      // it did not get through
	sent time.Time // the first time
	at   time.Time // of its arrival, unless held
}

var _ net.Conn = (*end)(nil)

func (w *wire) joins(host string) bool {
	return w.ends[0].way.from == host || w.ends[1].way.from == host
}

func (w *wire) other(host string) string {
	if w.ends[0].way.from == host {
		return w.ends[1].way.from
	}
	return w.ends[0].way.from
}

// reset breaks a host's end. Under mu.
func (w *wire) reset(host string) {
	for _, e := range w.ends {
		if e.way.from == host {
			e.wasReset = true
			e.in, e.size = nil, 0
			e.wake()
		}
	}
	w.forget()
}

// forget drops the wire once both ends are over. Under mu.
func (w *wire) forget() {
	if w.ends[0].over() && w.ends[1].over() {
		delete(w.net.wires, w)
	}
}

func (e *end) over() bool { return e.closed || e.wasReset }

// hold keeps back the data of that direction that has not arrived. Under mu.
func (w *wire) hold(l link) {
	for _, e := range w.ends {
		if e.way.back() != l {
			continue
		}
		for i := range e.in {
			if e.in[i].at.After(time.Now()) {
				e.in[i].held = true
			}
		}
	}
}

// release resends the held data. Under mu.
func (w *wire) release(l link) {
	now := time.Now()
	for _, e := range w.ends {
		if e.way.back() != l {
			continue
		}
		var at time.Time
		for i := range e.in {
			c := &e.in[i]
			if c.held && at.IsZero() {
				at = again(c.sent, now, firstRetransmit)
			}
			if c.held {
				c.held, c.at = false, at
			}
		}
		if e.over() && !at.IsZero() { // this end is closed, so the sender gets a reset
			e.peer.wasReset = true
			w.forget()
			e.peer.wake()
		}
		e.wake()
	}
}

// wake wakes the calls that wait at this end. Under mu.
func (e *end) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

func (e *end) fail(op string, err error) error {
	return &net.OpError{Op: op, Net: "mem", Source: e.local, Addr: e.remote, Err: err}
}

// broken is the reason why this end cannot be used any more. Under mu.
func (e *end) broken(op string, deadline time.Time) error {
	switch {
	case e.closed:
		return e.fail(op, net.ErrClosed)
	case e.wasReset:
		return e.fail(op, syscall.ECONNRESET)
	case !deadline.IsZero() && !deadline.After(time.Now()):
		return e.fail(op, os.ErrDeadlineExceeded)
	}
	return nil
}

// Read implements net.Conn.
func (e *end) Read(b []byte) (int, error) {
	for {
		e.wire.net.mu.Lock()
		n, err := e.take(b)
		changed, until := e.changed, earliest(e.read, e.arrival())
		e.wire.net.mu.Unlock()
		if n > 0 || err != nil || len(b) == 0 {
			return n, err
		}
		await(changed, until)
	}
}

// take reads the data that has arrived. Under mu.
func (e *end) take(b []byte) (int, error) {
	if err := e.broken("read", e.read); err != nil {
		return 0, err
	}
	n := 0
	for n < len(b) && len(e.in) > 0 && !e.in[0].held && !e.in[0].at.After(time.Now()) {
		c := &e.in[0]
		if c.fin {
			if n > 0 {
				break
			}
			return 0, io.EOF
		}
		k := copy(b[n:], c.data)
		n, e.size, c.data = n+k, e.size-k, c.data[k:]
		if len(c.data) == 0 {
			e.in = e.in[1:]
		}
	}
	if n > 0 {
		e.peer.wake() // there is room
	}
	return n, nil
}

// arrival is the time at which the next chunk can be read; zero: unknown. Under mu.
func (e *end) arrival() time.Time {
	if len(e.in) == 0 || e.in[0].held {
		return time.Time{}
	}
	return e.in[0].at
}

// Write implements net.Conn.
func (e *end) Write(b []byte) (int, error) {
	sent := 0
	for {
		e.wire.net.mu.Lock()
		n, err := e.put(b[sent:])
		changed, until := e.changed, e.write
		e.wire.net.mu.Unlock()
		sent += n
		if err != nil || sent == len(b) {
			return sent, err
		}
		if n == 0 {
			await(changed, until)
		}
	}
}

// put sends as many bytes as there is room for. Under mu.
func (e *end) put(b []byte) (int, error) {
	if err := e.broken("write", e.write); err != nil {
		return 0, err
	}
	n := e.wire.net
	if e.peer.over() && !n.silent[e.way] && !n.silent[e.way.back()] {
		e.wasReset = true
		e.wire.forget()
		e.wake()
		return 0, e.fail("write", syscall.ECONNRESET)
	}
	k := min(len(b), window-e.peer.size)
	if k > 0 {
		e.send(chunk{data: append([]byte(nil), b[:k]...)})
	}
	return k, nil
}

// send puts a chunk on its way. Under mu.
func (e *end) send(c chunk) {
	n, p := e.wire.net, e.peer
	c.sent = time.Now()
	c.at, c.held = c.sent.Add(n.delays[e.way]), n.silent[e.way]
	if k := len(p.in); k > 0 { // in order
		last := p.in[k-1]
		c.held = c.held || last.held
		if last.at.After(c.at) {
			c.at = last.at
		}
	}
	p.in, p.size = append(p.in, c), p.size+len(c.data)
	p.wake()
}

// Close implements net.Conn.
func (e *end) Close() error {
	n := e.wire.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if e.closed {
		return nil
	}
	e.closed = true
	if !e.wasReset && !e.peer.over() {
		e.send(chunk{fin: true})
	}
	e.wire.forget()
	e.wake()
	return nil
}

// LocalAddr implements net.Conn.
func (e *end) LocalAddr() net.Addr { return e.local }

// RemoteAddr implements net.Conn.
func (e *end) RemoteAddr() net.Addr { return e.remote }

// SetDeadline implements net.Conn.
func (e *end) SetDeadline(t time.Time) error {
	return e.set(func() { e.read, e.write = t, t })
}

// SetReadDeadline implements net.Conn.
func (e *end) SetReadDeadline(t time.Time) error { return e.set(func() { e.read = t }) }

// SetWriteDeadline implements net.Conn.
func (e *end) SetWriteDeadline(t time.Time) error { return e.set(func() { e.write = t }) }

func (e *end) set(alter func()) error {
	e.wire.net.mu.Lock()
	defer e.wire.net.mu.Unlock()
	if e.closed {
		return e.fail("set", net.ErrClosed)
	}
	alter()
	e.wake()
	return nil
}

// earliest returns the earlier of two times; a zero time does not count.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// await waits for a change, or until the given time if it is not zero.
func await(changed <-chan struct{}, until time.Time) {
	if until.IsZero() {
		<-changed
		return
	}
	t := time.NewTimer(time.Until(until))
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	}
}
