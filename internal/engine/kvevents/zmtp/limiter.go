package zmtp

import (
	"encoding/binary"
	"errors"
)

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
	if announced > uint64(l.lim.Frame) || l.frames > l.lim.Frames { //nolint:gosec // limits are not negative
		return ErrTooLarge
	}
	n := int(announced) //nolint:gosec // not above Frame
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
