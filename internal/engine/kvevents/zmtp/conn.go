// Package zmtp is one ZeroMQ connection at a time, with limits. The wire protocol is go-zeromq's (zmq4.Open);
// listening, dialling, queues and reconnects stay with the caller, because the library's sockets cannot be
// bounded: they have no high-water mark, accept frames of any size a peer announces, handshake inside the
// accept loop, die with a peer's malformed handshake, and leave goroutines behind. Used by the event
// subscriber and by the simulated engine's publisher.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// Role is the kind of socket this side plays.
type Role string

// The roles.
const (
	Pub    Role = "PUB"
	Sub    Role = "SUB"
	Dealer Role = "DEALER"
	Router Role = "ROUTER"
)

// Sizes and times of a connection.
const (
	readBuffer       = 32 << 10
	handshakeTimeout = 5 * time.Second // for the peer's whole handshake
)

// errHandshake stands for a handshake that made the library panic: hostile metadata.
var errHandshake = errors.New("zmtp: malformed handshake")

// Conn is one connection after its handshake. One goroutine may receive while others send; Close ends both.
type Conn struct {
	stream *stream
	zmq    *zmq4.Conn
	out    []byte // guarded by stream.mu
}

// Open performs the handshake on raw and owns raw from then on: on an error it closes raw. server is the side
// that accepted the connection.
func Open(raw net.Conn, role Role, server bool, lim Limits) (*Conn, error) {
	s := &stream{Conn: raw, in: bufio.NewReaderSize(raw, readBuffer), lim: newLimiter(lim)}
	z, err := shake(s, role, server)
	if err != nil {
		_ = raw.Close()
		s.awaitHandshakeWritten()
		return nil, err
	}
	s.open = true
	return &Conn{stream: s, zmq: z}, nil
}

// shake performs the handshake with a deadline and recovers from panics: the library indexes a peer's
// metadata without a check.
func shake(s *stream, role Role, server bool) (z *zmq4.Conn, err error) {
	defer func() {
		if recover() != nil {
			z, err = nil, errHandshake
		}
	}()
	if err := s.SetDeadline(time.Now().Add(handshakeTimeout)); err != nil {
		return nil, fmt.Errorf("zmtp: handshake: %w", err)
	}
	z, err = zmq4.Open(s, null.Security(), zmq4.SocketType(role), nil, server, nil)
	if err != nil {
		return nil, fmt.Errorf("zmtp: handshake: %w", err)
	}
	s.awaitHandshakeWritten()
	return z, s.SetDeadline(time.Time{})
}

// Recv is the next message; its frames belong to the caller. Commands of the protocol (heartbeats) are
// answered and skipped.
func (c *Conn) Recv() ([][]byte, error) {
	for {
		msg, err := c.zmq.RecvMsg()
		if err != nil {
			return nil, err
		}
		if msg.Type == zmq4.UsrMsg {
			return msg.Frames, nil
		}
	}
}

// Send writes one message of the given frames, whole or not at all unless the connection breaks.
func (c *Conn) Send(frames ...[]byte) error {
	c.stream.mu.Lock()
	defer c.stream.mu.Unlock()
	c.out = c.out[:0]
	for i, f := range frames {
		c.out = appendFrame(c.out, f, i < len(frames)-1)
	}
	_, err := c.stream.Conn.Write(c.out)
	if cap(c.out) > maxKept {
		c.out = nil
	}
	return err
}

// maxKept bounds the send buffer that a connection keeps.
const maxKept = 256 << 10

func appendFrame(dst, body []byte, more bool) []byte {
	var flags byte
	if more {
		flags |= flagMore
	}
	if len(body) > 255 {
		dst = append(dst, flags|flagLong)
		dst = binary.BigEndian.AppendUint64(dst, uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

// Subscribe asks a publisher for the topics that begin with prefix.
func (c *Conn) Subscribe(prefix string) error { return c.Send(append([]byte{1}, prefix...)) }

// SetReadDeadline bounds the next Recv. After a timeout the connection is of no more use.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.stream.SetReadDeadline(t) }

// SetWriteDeadline bounds the next Send. After a timeout the connection is of no more use.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.stream.SetWriteDeadline(t) }

// Close ends the connection and all calls that wait on it. It is idempotent.
func (c *Conn) Close() error { return c.stream.Close() }

// stream is the library's side of the connection: reads are buffered and limited, writes are whole commands.
type stream struct {
	net.Conn
	in   *bufio.Reader
	lim  limiter
	open bool          // after the handshake
	said chan struct{} // closed when the last part of the handshake is written; nil before the first

	mu   sync.Mutex // one message or command at a time
	held []byte     // head of a command whose body follows
}

// Read implements io.Reader with the limits.
func (s *stream) Read(p []byte) (int, error) {
	n, err := s.in.Read(p)
	if tooLarge := s.lim.pass(p[:n]); tooLarge != nil {
		_ = s.Close()
		return 0, tooLarge
	}
	return n, err
}

// Write is called by the library alone. After the handshake it writes commands, in two calls each for head
// and body. They must not get between the frames of a message that another goroutine sends.
func (s *stream) Write(p []byte) (int, error) {
	if !s.open {
		return s.writeHandshake(p)
	}
	if s.held == nil {
		s.held = append([]byte{}, p...)
		return len(p), nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.Conn.Write(append(s.held, p...))
	s.held = nil
	return len(p), err
}

// writeHandshake writes a part of the handshake on its own goroutine: both peers write first, and on a
// transport without a buffer (a pipe) they would wait for each other. A failed write closes the connection,
// which the reader notices; the handshake's deadline bounds both.
func (s *stream) writeHandshake(p []byte) (int, error) {
	part, before, done := bytes.Clone(p), s.said, make(chan struct{})
	s.said = done
	go func() {
		defer close(done)
		if before != nil {
			<-before
		}
		if _, err := s.Conn.Write(part); err != nil {
			_ = s.Close()
		}
	}()
	return len(p), nil
}

// awaitHandshakeWritten waits until all parts of the handshake are written.
func (s *stream) awaitHandshakeWritten() {
	if s.said != nil {
		<-s.said
	}
}

// ErrTooLarge: a peer announced a frame or a message beyond the limits. The connection cannot be used any
// more.
var ErrTooLarge = errors.New("zmtp: frame or message beyond the limit")

// Defaults of Limits.
const (
	defaultFrame   = 16 << 20
	defaultMessage = 32 << 20
	defaultFrames  = 16
)

// Limits bounds what a peer can make this side allocate.
type Limits struct {
	Frame   int // bytes of one frame
	Message int // bytes of one message, all its frames
	Frames  int // frames of one message
}

// DefaultLimits fits KV event batches: a full prefill step of the largest models is below 1 MiB.
func DefaultLimits() Limits {
	return Limits{Frame: defaultFrame, Message: defaultMessage, Frames: defaultFrames}
}

// ZMTP 3.0 framing.
const (
	greetingBytes = 64
	flagMore      = 0x1
	flagLong      = 0x2
	flagCommand   = 0x4
)

// limiter parses the framing of the bytes that pass, so that it refuses a frame when its length is known,
// before the library allocates it.
type limiter struct {
	lim    Limits
	part   part
	left   int     // bytes left of this part
	size   [8]byte // of the length
	have   int
	more   bool // the frame is not the last one of its message
	bytes  int  // of the message so far
	frames int
}

type part uint8

const (
	partGreeting part = iota
	partFlags
	partLength
	partBody
)

func newLimiter(lim Limits) limiter {
	return limiter{lim: lim, part: partGreeting, left: greetingBytes}
}

// pass takes the next bytes of the stream.
func (l *limiter) pass(p []byte) error {
	for len(p) > 0 {
		switch l.part {
		case partFlags:
			l.flags(p[0])
			p = p[1:]
		case partLength:
			n := copy(l.size[l.have:], p[:min(len(p), l.left)])
			l.have, l.left, p = l.have+n, l.left-n, p[n:]
			if l.left == 0 {
				if err := l.begin(); err != nil {
					return err
				}
			}
		case partGreeting, partBody:
			n := min(len(p), l.left)
			l.left, p = l.left-n, p[n:]
			if l.left == 0 {
				l.end()
			}
		}
	}
	return nil
}

func (l *limiter) flags(b byte) {
	l.part, l.more, l.size = partLength, b&flagMore != 0, [8]byte{}
	l.left, l.have = 1, 7
	if b&flagLong != 0 {
		l.left, l.have = 8, 0
	}
}

// begin knows the length of a frame.
func (l *limiter) begin() error {
	announced := binary.BigEndian.Uint64(l.size[:])
	l.frames++
	if announced > uint64(l.lim.Frame) || l.frames > l.lim.Frames {
		return ErrTooLarge
	}
	n := int(announced)
	if l.bytes += n; l.bytes > l.lim.Message {
		return ErrTooLarge
	}
	l.part, l.left = partBody, n
	if n == 0 {
		l.end()
	}
	return nil
}

func (l *limiter) end() {
	if l.part == partBody && !l.more {
		l.bytes, l.frames = 0, 0
	}
	l.part = partFlags
}
