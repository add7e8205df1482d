package ingress

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/rawconn"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// clientConns is the listener of an ingress. It bounds the connections of clients. When all places are taken,
// a new connection gets the place of the connections that have been idle for longest, so that idle clients
// never block health checks. If every connection has a request, the new one waits, and others wait in the
// kernel's backlog. A limit per address would not work: behind a load balancer all clients have one address.
// At the memory limit it takes probeConns new connections at a time, each for one answer, so that health
// checks are answered then.
// Safe for concurrent use.
type clientConns struct {
	net.Listener

	maxConns int
	timers   Timers
	tls      *tls.Config // nil: connections have none
	refuse   func() bool // of new connections, only probeConns are taken
	clock    func() time.Duration
	answered func(code int) // net/http has answered by itself, without a handler

	waiting  atomic.Bool   // a new connection waits for a place
	roomFree chan struct{} // one slot: a place may be free
	closed   chan struct{} // closed by Close
	once     sync.Once

	mu     sync.Mutex
	conns  map[*clientConn]struct{}
	probes int // of conns that are for one answer; they need no place of maxConns
}

// probeConns is how many connections are taken at the memory limit. Each is for one answer, which a GET gets
// and another request only if there is memory again.
const probeConns = 64

// probeTime is the time of such a connection for its first byte, so that silent clients keep no probe out.
const probeTime = time.Second

func newClientConns(in *Ingress, l net.Listener) *clientConns {
	return &clientConns{
		Listener: l, maxConns: in.limits.MaxConns, timers: in.timers, tls: in.tls,
		refuse: in.memory.refusesConns,
		clock:  in.clock, answered: func(code int) { in.metrics.RequestRefused(telemetry.RouteOther, code) },
		roomFree: make(chan struct{}, 1), closed: make(chan struct{}), conns: map[*clientConn]struct{}{},
	}
}

// Accept implements net.Listener.
func (l *clientConns) Accept() (net.Conn, error) {
	for {
		inner, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &clientConn{framedConn: framedConn{Conn: withTLS(limitWriteBuffer(inner), l.tls)}, conns: l}
		if l.refuse() {
			if l.addProbe(c) {
				return c, nil
			}
			_ = inner.Close() // its client sees the end of the connection
			continue
		}
		if !l.addConn(c) {
			_ = inner.Close()
			return nil, net.ErrClosed
		}
		return c, nil
	}
}

// limitWriteBuffer returns a rawconn connection with a bounded kernel buffer. Without the bound, 8 MB of a
// stream collect there when its client stops reading.
func limitWriteBuffer(c net.Conn) net.Conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetWriteBuffer(kernelBuffer) // fails on a closing connection, whose next read fails
	}
	return rawconn.Conn(c)
}

// Close implements net.Listener. Open connections stay open.
func (l *clientConns) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// addProbe takes c for one answer; it returns false if there are probeConns of this kind already.
func (l *clientConns) addProbe(c *clientConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.probes >= probeConns {
		return false
	}
	l.probes++
	c.isProbe = true
	l.conns[c] = struct{}{}
	return true
}

// addConn gives c a place; it returns false after Close.
func (l *clientConns) addConn(c *clientConn) bool {
	for {
		l.waiting.Store(true) // set before the check, so that a connection that becomes idle later signals it
		l.mu.Lock()
		if len(l.conns)-l.probes < l.maxConns {
			l.conns[c] = struct{}{}
			l.waiting.Store(false)
			l.mu.Unlock()
			return true
		}
		idle := l.longestIdle()
		l.mu.Unlock()
		for _, old := range idle {
			_ = old.Close() // the place is free even if Close fails
		}
		if len(idle) > 0 {
			continue
		}
		select {
		case <-l.roomFree:
		case <-l.closed:
			return false
		}
	}
}

// idleShare is the share (1/idleShare) of the places that are freed at once, because finding the longest idle
// connections scans all connections.
const idleShare = 100

// longestIdle returns the connections that have been idle for longest. The caller holds mu.
func (l *clientConns) longestIdle() []*clientConn {
	type candidate struct {
		conn  *clientConn
		since int64
	}
	var idle []candidate
	for c := range l.conns {
		if since := c.idleSince.Load(); since != 0 {
			idle = append(idle, candidate{c, since})
		}
	}
	slices.SortFunc(idle, func(a, b candidate) int { return cmp.Compare(a.since, b.since) })
	var out []*clientConn
	for _, c := range idle[:min(len(idle), max(1, l.maxConns/idleShare))] {
		out = append(out, c.conn)
	}
	return out
}

// removeConn frees the place of a closed connection. Safe to call twice.
func (l *clientConns) removeConn(c *clientConn) {
	l.mu.Lock()
	if _, has := l.conns[c]; has && c.isProbe {
		l.probes--
	}
	delete(l.conns, c)
	l.mu.Unlock()
	l.signalRoom()
}

// signalRoom tells a waiting connection that a place is free or a connection has become idle.
func (l *clientConns) signalRoom() {
	if l.waiting.Load() {
		signal(l.roomFree)
	}
}

// count is the number of connections.
func (l *clientConns) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns)
}

// trackConn records whether a connection has a request; it is http.Server.ConnState.
func trackConn(conn net.Conn, s http.ConnState) {
	c, ok := conn.(*clientConn)
	if !ok {
		return // a connection of another listener
	}
	switch s {
	case http.StateNew, http.StateIdle:
		c.idleSince.Store(max(1, int64(c.conns.clock())))
		c.conns.signalRoom()
	case http.StateActive:
		c.idleSince.Store(0)
	case http.StateHijacked, http.StateClosed:
	}
}

// clientConn is a connection of a client.
type clientConn struct {
	framedConn

	conns     *clientConns
	isProbe   bool         // it ends with its first answer
	begun     bool         // Read has been called
	idleSince atomic.Int64 // on the clock of conns; 0: the connection has a request
	gathered  *[]byte      // collected writes of one piece; nil: the connection does not collect
}

// Read implements net.Conn. net/http allows a new connection Timers.ReadHeader for its first header, from the
// moment it was accepted. Clients open connections in advance, and the first request on a connection that was
// closed meanwhile fails, so Read allows Timers.Idle for the first byte, as net/http does between requests.
func (c *clientConn) Read(p []byte) (int, error) {
	if c.begun {
		return c.framedConn.Read(p)
	}
	c.begun = true
	patience := c.conns.timers.Idle
	if c.isProbe {
		patience = min(patience, probeTime)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	n, err := c.framedConn.Read(p)
	if err != nil {
		return n, err
	}
	return n, c.SetReadDeadline(time.Now().Add(c.conns.timers.ReadHeader))
}

// Write implements net.Conn. net/http answers input that is not an HTTP request by itself, in one write and
// without a handler; Write counts that answer.
func (c *clientConn) Write(p []byte) (int, error) {
	if ok, err := c.collect(p); ok {
		return len(p), nil
	} else if err != nil {
		return 0, err
	}
	if code := serverErrorStatus(p); code != 0 {
		c.conns.answered(code)
	}
	return c.framedConn.Write(p)
}

// serverErrorStatus is the status of net/http's own answer to input that is not an HTTP request; 0: p is
// another answer or a part of one. Answers of handlers differ by their Date.
func serverErrorStatus(p []byte) int {
	rest, ok := bytes.CutPrefix(p, []byte("HTTP/1.1 "))
	if !ok {
		return 0
	}
	line, header, _ := bytes.Cut(rest, []byte("\r\n"))
	if !bytes.HasPrefix(header,
		[]byte("Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n")) {
		return 0
	}
	for _, code := range [...]int{
		http.StatusBadRequest, http.StatusRequestHeaderFieldsTooLarge,
		http.StatusNotImplemented,
	} {
		if bytes.HasPrefix(line, strconv.AppendInt(nil, int64(code), 10)) {
			return code
		}
	}
	return 0
}

// Close implements net.Conn.
func (c *clientConn) Close() error {
	err := c.framedConn.Close()
	c.conns.removeConn(c)
	return err
}

// gatheredFrom is the size from which the writes of a piece are gathered. net/http has a buffer of 4 KiB in
// front of a connection: it writes a larger piece in three system calls (the rest of the buffer, the piece,
// and the end of its chunk), each of which wakes the client.
const gatheredFrom = 4<<10 - 64

// gatherBuffers are the buffers in which connections collect the writes of one piece.
var gatherBuffers = sync.Pool{New: func() any {
	// one read of an engine, its chunk's length and the answer's header
	b := make([]byte, 0, relayBuffer+1<<10)
	return &b
}}

// connKey is the context key of a request's clientConn.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// connOf is the connection of a request; nil for an in-process one.
func connOf(r *http.Request) *clientConn {
	c, _ := r.Context().Value(connKey{}).(*clientConn)
	return c
}

// startGather begins to collect the writes to the client of r, if a piece of n bytes would take several
// writes; otherwise it returns nil. It does nothing on HTTP/2, where a connection has many writers and its
// own frames.
func startGather(r *http.Request, n int) *clientConn {
	if n < gatheredFrom || r.ProtoMajor != 1 {
		return nil
	}
	c := connOf(r)
	if c == nil {
		return nil
	}
	c.gathered, _ = gatherBuffers.Get().(*[]byte)
	return c
}

// sendGathered writes the collected bytes in one write and stops collecting. c may be nil.
func (c *clientConn) sendGathered() error {
	if c == nil {
		return nil
	}
	b := c.gathered
	c.gathered = nil
	var err error
	if len(*b) > 0 {
		_, err = c.Write(*b)
	}
	*b = (*b)[:0]
	gatherBuffers.Put(b)
	return err
}

// collect adds p to the collected bytes. It returns false if the connection does not collect or has no room;
// it has then written what it had collected.
func (c *clientConn) collect(p []byte) (ok bool, err error) {
	b := c.gathered
	if b == nil {
		return false, nil
	}
	if len(*b)+len(p) <= cap(*b) {
		*b = append(*b, p...)
		return true, nil
	}
	if len(*b) > 0 {
		_, err = c.framedConn.Write(*b)
		*b = (*b)[:0]
	}
	return false, err
}
