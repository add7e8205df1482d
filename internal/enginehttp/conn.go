package enginehttp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	readBuffer  = 16 << 10 // one read of the socket at most, while chunks or a head are read
	packed      = 64 << 10 // head and body up to here leave in one write; what lies behind is not copied
	keptRequest = 80 << 10 // larger buffers of requests are left to the garbage collector
	keptHead    = 4 << 10  // heads up to this size are remembered for the next answer

	// answerWait bounds the wait for an answer after a failed write: an answer that the peer sent before has
	// arrived already.
	answerWait = time.Second
)

// conn is a connection to the engine. It belongs to one request at a time, or to the pool. Only abort may be
// called from elsewhere.
type conn struct {
	net     net.Conn
	probe   *probe    // nil: the system shows nothing of this connection without reading
	wrote   time.Time // when the write of the last request began
	before  uint64    // bytes of all requests before it …
	sent    uint64    // … and with it
	abort   func()    // bound once: registering it allocates no closure
	aborted atomic.Bool
	waited  bool      // has been in the pool: the peer may have closed it there
	since   time.Time // in the pool since

	mem  *[]byte // of buf, to be given back; nil while idle
	buf  []byte
	r, w int // buf[r:w] is read from the socket and not yet consumed

	most int    // bytes of a head
	raw  []byte // the last head as it came …
	head *head  // … and what it means
}

func newConn(c net.Conn, most int) *conn {
	out := &conn{net: c, probe: newProbe(c), most: most}
	out.abort = out.giveUp
	return out
}

// giveUp ends all calls that wait on the connection. Such a connection never enters the pool.
func (c *conn) giveUp() {
	c.aborted.Store(true)
	c.close()
}

// close ignores an error: the connection is not used again.
func (c *conn) close() { _ = c.net.Close() }

// write writes a request. If that fails, an answer is not waited for much longer.
func (c *conn) write(req, rest []byte, g Guard) error {
	_, err := c.net.Write(req)
	if err == nil && len(rest) > 0 {
		_, err = c.net.Write(rest)
	}
	if err == nil && g.Rest != nil {
		err = c.copyFrom(g.Rest, g.RestSize)
	}
	switch {
	case errors.Is(err, ErrRest):
		c.readBy(time.Unix(1, 0))
	case err != nil:
		c.readBy(time.Now().Add(answerWait))
	case g.Written != nil:
		g.Written()
	}
	return err
}

// copyFrom writes what comes from r.
func (c *conn) copyFrom(r io.Reader, left int64) error {
	buf := make([]byte, packed)
	for left > 0 {
		n, unread := r.Read(buf[:min(left, packed)])
		left -= int64(n)
		if _, err := c.net.Write(buf[:n]); err != nil {
			return err
		}
		if unread != nil && left > 0 {
			return fmt.Errorf("%w: %w", ErrRest, unread)
		}
	}
	return nil
}

// staleWithin is the time after the beginning of a write in which the end of a waiting connection counts as
// one that was on its way already.
const staleWithin = 50 * time.Millisecond

// isQuiet reports that the peer has neither closed nor sent anything, as far as the system shows it.
func (c *conn) isQuiet() bool {
	s, isSecure := c.net.(*secureConn)
	return c.probe.quiet() && (!isSecure || s.isQuiet())
}

// isUnseen reports whether the peer's system is known to have acknowledged no byte of the request.
func (c *conn) isUnseen() bool {
	acked, ok := ackedBytes(c.net)
	return ok && acked <= c.before
}

// readBy sets the deadline of reads; none if t is zero. Of a closed connection the next read tells.
func (c *conn) readBy(t time.Time) { _ = c.net.SetReadDeadline(t) }

// writeBy is readBy for writes.
func (c *conn) writeBy(t time.Time) { _ = c.net.SetWriteDeadline(t) }

// readHead reads to the end of the answer's head.
func (c *conn) readHead() (*head, error) {
	searched := 0
	for interim := 0; ; {
		end, next, err := headEnd(c.buf[c.r:c.w], searched)
		if err != nil {
			return nil, err
		}
		if end == 0 {
			searched = next
			if err := c.more(); err != nil {
				return nil, err
			}
			continue
		}
		h, err := c.parse(c.buf[c.r : c.r+end])
		if err != nil {
			return nil, err
		}
		c.r, searched = c.r+end, 0
		if h.status >= 200 {
			return h, nil
		}
		if interim++; interim > maxInterim || h.status == 101 {
			return nil, malformed("too many interim answers, or a switch of protocols that was not asked for")
		}
	}
}

// parse reuses the parsed form of the last head if the bytes are equal, as an engine's heads within one
// second mostly are.
func (c *conn) parse(raw []byte) (*head, error) {
	if c.head != nil && bytes.Equal(raw, c.raw) {
		return c.head, nil
	}
	h, err := parseHead(raw)
	if err == nil && len(raw) <= keptHead {
		c.head, c.raw = h, append(c.raw[:0], raw...)
	}
	return h, err
}

// more reads on in a head.
func (c *conn) more() error {
	if c.w == len(c.buf) {
		if c.w >= c.most {
			return malformed("its head is too large")
		}
		c.buf = append(c.buf, make([]byte, min(len(c.buf), c.most-c.w))...)
	}
	n, err := c.net.Read(c.buf[c.w:])
	c.w += n
	switch {
	case n > 0:
		return nil
	case errors.Is(err, io.EOF) && c.w > 0:
		return io.ErrUnexpectedEOF
	}
	return err
}

// fill reads more of a body. The bytes that are not consumed stay; they are less than a line, so there is
// room.
func (c *conn) fill() error {
	if c.r == c.w {
		c.r, c.w = 0, 0
	} else if c.w == len(c.buf) {
		c.w = copy(c.buf, c.buf[c.r:c.w])
		c.r = 0
	}
	n, err := c.net.Read(c.buf[c.w:])
	c.w += n
	switch {
	case n > 0:
		return nil
	case errors.Is(err, io.EOF):
		return io.ErrUnexpectedEOF
	}
	return err
}

// take copies what is buffered, up to n bytes.
func (c *conn) take(p []byte, n int64) int {
	m := copy(p, c.buf[c.r:c.r+int(min(n, int64(c.w-c.r)))])
	c.r += m
	return m
}

// line takes a line off the buffer, without its CRLF; nil: it is not all there.
func (c *conn) line(limit int) ([]byte, error) {
	b := c.buf[c.r:c.w]
	i := bytes.IndexByte(b, '\n')
	switch {
	case i < 0 && len(b) < limit:
		return nil, nil
	case i < 0 || i >= limit:
		return nil, malformed("a line between chunks is too long")
	case i == 0 || b[i-1] != '\r':
		return nil, malformed("a line between chunks does not end in CRLF")
	}
	c.r += i + 1
	return b[: i-1 : i-1], nil
}

// pool keeps connections between requests. It takes the one that was used last first, so that the others
// reach their idle time.
type pool struct {
	idle time.Duration // how long a connection may wait
	most int

	mu     sync.Mutex
	free   []*conn // the longest waiting first
	timer  *time.Timer
	armed  bool
	closed bool
}

// get returns a connection that its peer does not seem to have closed; nil if there is none.
func (p *pool) get() *conn {
	for {
		c := p.pop()
		if c == nil || time.Since(c.since) < p.idle && c.isQuiet() {
			return c
		}
		c.close()
	}
}

func (p *pool) pop() *conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.free) - 1
	if n < 0 {
		return nil
	}
	c := p.free[n]
	p.free[n], p.free = nil, p.free[:n]
	return c
}

// put keeps c; false if it must be closed.
func (p *pool) put(c *conn) bool {
	c.since, c.waited = time.Now(), true
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.free) >= p.most {
		return false
	}
	p.free = append(p.free, c)
	if !p.armed {
		p.arm(p.idle)
	}
	return true
}

func (p *pool) arm(after time.Duration) {
	p.armed = true
	if p.timer == nil {
		p.timer = time.AfterFunc(after, p.expire)
		return
	}
	p.timer.Reset(after)
}

// expire closes the connections that have waited too long and sets the timer for the next one.
func (p *pool) expire() { closeAll(p.expired(time.Now())) }

func (p *pool) expired(now time.Time) []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for n < len(p.free) && now.Sub(p.free[n].since) >= p.idle {
		n++
	}
	old := slices.Clone(p.free[:n])
	p.free, p.armed = slices.Delete(p.free, 0, n), false
	if len(p.free) > 0 && !p.closed {
		p.arm(p.free[0].since.Add(p.idle).Sub(now))
	}
	return old
}

func (p *pool) empty() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free) == 0
}

// drop closes the waiting connections.
func (p *pool) drop() { closeAll(p.takeAll(false)) }

// close closes the waiting connections and refuses others.
func (p *pool) close() { closeAll(p.takeAll(true)) }

func (p *pool) takeAll(forEver bool) []*conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.free
	p.free = nil
	p.closed = p.closed || forEver
	if p.timer != nil && forEver {
		p.timer.Stop()
		p.armed = false
	}
	return all
}

func closeAll(all []*conn) {
	for _, c := range all {
		c.close()
	}
}
