package ingress

import (
	"bytes"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// framedConn is a client's connection on which every request says in one way how long it is. net/http takes Transfer-Encoding where a
// request has Content-Length as well, and joins header lines that are folded; a proxy in front of dpserve that takes the other one
// sees other requests than dpserve does, and a client behind it can slip one past it. The standard wants such requests refused and
// their connections closed. net/http shows its handlers neither, so this looks at the bytes, and spoils the header line: net/http
// then answers 400 and closes.
type framedConn struct {
	net.Conn

	framing framing
	reset   atomic.Bool // Close resets the connection
}

// resetAtClose is a write deadline that asks for the connection to be reset when it is closed. Where an answer ends with its connection,
// as all streams of HTTP/1.0 do, a client takes a close for the end of the answer, and only a reset says that the answer was cut.
// net/http hands a handler no connection, but it passes deadlines on.
var resetAtClose = time.Unix(1, 0)

// SetWriteDeadline implements net.Conn.
func (c *framedConn) SetWriteDeadline(t time.Time) error {
	if t.Equal(resetAtClose) {
		c.reset.Store(true)
	}
	return c.Conn.SetWriteDeadline(t)
}

// Close implements net.Conn.
func (c *framedConn) Close() error {
	if l, ok := c.Conn.(interface{ SetLinger(sec int) error }); ok && c.reset.Load() {
		_ = l.SetLinger(0) // closed already: nothing is left to say
	}
	return c.Conn.Close()
}

// Read implements net.Conn.
func (c *framedConn) Read(p []byte) (int, error) {
	if c.framing.part == partEnded {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p)
	c.framing.scan(p[:n])
	return n, err
}

// part is what the next byte of a connection belongs to.
type part uint8

const (
	partPreface     part = iota // the first line of the connection
	partRequestLine             // or an empty line in front of it
	partHeaderLine
	partBody
	partChunkSize
	partChunkEnd
	partTrailerLine
	partUnframed // the connection is HTTP/2, or a header line was spoiled: scan looks at nothing more
	partEnded    // net/http refuses what was read: no further byte is given to it
)

// framing follows where the requests of an HTTP/1 connection begin and end, as net/http reads them. The zero value is at the beginning
// of a connection.
type framing struct {
	part part
	then part  // the part after the body
	left int64 // remaining bytes of the body or the chunk

	line  [64]byte // the beginning of the current line, as far as it has arrived
	n     int      // bytes of the current line that are in line
	long  bool     // the current line does not fit into line
	tail  [10]byte // the last bytes of a request line
	name  field    // of the current header line, once its colon has arrived
	colon bool     // the current header line has a colon

	http10 bool
	length int64 // from Content-Length; -1: none
	chunks bool  // Transfer-Encoding is chunked
}

type field uint8

const (
	otherField field = iota
	contentLength
	transferEncoding
)

// scan takes the bytes of one read, and may change one of them.
func (f *framing) scan(p []byte) {
	for len(p) > 0 && f.part < partUnframed {
		if f.part == partBody {
			n := min(int64(len(p)), f.left)
			p, f.left = p[n:], f.left-n
			if f.left == 0 {
				f.part = f.then
			}
			continue
		}
		piece, whole := p, false
		if end := bytes.IndexByte(p, '\n'); end >= 0 {
			piece, whole = p[:end+1], true
		}
		p = p[len(piece):]
		f.take(piece)
		if whole && f.part < partUnframed {
			f.endLine()
			f.n, f.long, f.colon, f.name = 0, false, false, otherField
		}
	}
}

// take adds to the present line, and spoils a header line that makes the length ambiguous.
func (f *framing) take(piece []byte) {
	if f.part == partHeaderLine {
		if f.n == 0 && (piece[0] == ' ' || piece[0] == '\t') {
			f.spoil(&piece[0])
			return
		}
		if i := bytes.IndexByte(piece, ':'); i >= 0 && !f.colon {
			f.colon, f.name = true, f.nameOf(piece[:i])
			both := f.name == contentLength && f.chunks || f.name == transferEncoding && (f.length >= 0 || f.http10)
			if both {
				f.spoil(&piece[i])
				return
			}
		}
	}
	if f.part == partRequestLine || f.part == partPreface {
		keep := max(0, len(f.tail)-len(piece))
		copy(f.tail[:], f.tail[len(f.tail)-keep:])
		copy(f.tail[keep:], piece[max(0, len(piece)-len(f.tail)):])
	}
	n := copy(f.line[f.n:], piece)
	f.n += n
	f.long = f.long || n < len(piece)
}

// spoil makes a header line one that net/http refuses: it has no colon then, or a byte that no name may hold.
func (f *framing) spoil(b *byte) { *b, f.part = 0, partUnframed }

// nameOf is the field of a header line by its name: what came before, and the rest of it.
func (f *framing) nameOf(rest []byte) field {
	var name [len("Transfer-Encoding")]byte
	n := f.n + len(rest)
	if f.long || n > len(name) {
		return otherField
	}
	copy(name[copy(name[:], f.line[:f.n]):], rest)
	switch {
	case bytes.EqualFold(name[:n], []byte("Content-Length")):
		return contentLength
	case bytes.EqualFold(name[:n], []byte("Transfer-Encoding")):
		return transferEncoding
	default:
		return otherField
	}
}

// endLine takes a line that is whole.
func (f *framing) endLine() {
	line := bytes.TrimRight(f.line[:f.n], "\r\n")
	empty := len(line) == 0 && !f.long
	switch f.part {
	case partPreface, partRequestLine:
		switch {
		case f.part == partPreface && string(line) == "PRI * HTTP/2.0":
			f.part = partUnframed
		case empty:
			f.part = partRequestLine
		default:
			f.part, f.length, f.chunks = partHeaderLine, -1, false
			f.http10 = !bytes.HasSuffix(bytes.TrimRight(f.tail[:], "\r\n"), []byte("HTTP/1.1"))
		}
	case partHeaderLine:
		if empty {
			f.endHead()
		} else if !f.noteField(line) {
			f.part = partEnded
		}
	case partChunkSize:
		f.beginChunk(line)
	case partChunkEnd:
		f.part = partChunkSize
		if f.n != 2 || f.long || !empty {
			f.part = partEnded
		}
	case partTrailerLine:
		if empty {
			f.part = partRequestLine
		}
	case partBody, partUnframed, partEnded: // have no lines
	}
}

// noteField takes a header line. false: net/http refuses it.
func (f *framing) noteField(line []byte) bool {
	if f.name == otherField {
		return true
	}
	_, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.Trim(value, " \t")
	if f.name == transferEncoding {
		again := f.chunks
		f.chunks = true
		return !f.long && !again && bytes.EqualFold(value, []byte("chunked"))
	}
	n, err := strconv.ParseUint(string(value), 10, 63)
	again := f.length >= 0
	was := f.length
	f.length = int64(n)
	return !f.long && err == nil && (!again || was == f.length)
}

// endHead is behind the empty line.
func (f *framing) endHead() {
	switch {
	case f.chunks:
		f.part = partChunkSize
	case f.length > 0:
		f.part, f.then, f.left = partBody, partRequestLine, f.length
	default:
		f.part = partRequestLine
	}
}

// beginChunk takes the line with a chunk's size, which may have an extension.
func (f *framing) beginChunk(line []byte) {
	size, _, extended := bytes.Cut(line, []byte(";"))
	n, err := strconv.ParseUint(string(bytes.TrimRight(size, " \t")), 16, 63)
	switch {
	case err != nil || f.long && !extended:
		f.part = partEnded
	case n == 0:
		f.part = partTrailerLine
	default:
		f.part, f.then, f.left = partBody, partChunkEnd, int64(n)
	}
}
