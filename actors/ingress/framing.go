package ingress

import (
	"bytes"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// framedConn is a client's connection on which every request states its length in exactly one way. net/http
// accepts Transfer-Encoding in a request that also has Content-Length, and joins folded header lines. A proxy
// in front of dpserve that decides differently sees other requests than dpserve, and a client behind it can
// smuggle a request past it. RFC 9112 wants such requests refused and their connections closed. net/http
// hides both cases from handlers, so framedConn inspects the bytes and corrupts the header line: net/http
// then answers 400 and closes the connection.
type framedConn struct {
	net.Conn

	framing framing
	reset   atomic.Bool // Close resets the connection
}

// resetAtClose is a write deadline that asks for a TCP reset when the connection is closed. If an answer ends
// with its connection, as every stream of HTTP/1.0 does, a client takes a close for the end of the answer,
// and only a reset shows that the answer was cut. net/http gives a handler no access to the connection, but
// it passes deadlines on.
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
		_ = l.SetLinger(0) // fails only if the connection is closed already
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

// part is the syntactic part of a request to which the next byte belongs.
type part uint8

const (
	partPreface     part = iota // the first line of the connection
	partPrefaceEnd              // the empty line after the first line of HTTP/2's preface
	partRequestLine             // or an empty line before it
	partHeaderLine
	partBody
	partChunkSize
	partChunkEnd
	partTrailerLine
	partUnframed // the connection is HTTP/2, or a header line was corrupted: scan ignores the rest
	partEnded    // net/http refuses the request: it gets no further byte
)

// framing tracks where the requests of an HTTP/1 connection begin and end, as net/http reads them. The zero
// value is the beginning of a connection.
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

// scan inspects the bytes of one read, and may change one of them.
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

// take adds to the current line, and corrupts a header line that makes the length ambiguous. A header line
// after the first line of HTTP/2's preface is corrupted, too: net/http would take the request for HTTP/1.
func (f *framing) take(piece []byte) {
	if f.part == partPrefaceEnd && f.n == 0 && piece[0] != '\r' && piece[0] != '\n' {
		f.spoil(&piece[0])
		return
	}
	if f.part == partHeaderLine {
		if f.n == 0 && (piece[0] == ' ' || piece[0] == '\t') {
			f.spoil(&piece[0])
			return
		}
		if i := bytes.IndexByte(piece, ':'); i >= 0 && !f.colon {
			f.colon, f.name = true, f.nameOf(piece[:i])
			both := f.name == contentLength && f.chunks || f.name == transferEncoding &&
				(f.length >= 0 || f.http10)
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

// spoil corrupts a header line so that net/http refuses it: the line then has no colon, or contains a byte
// that no name may contain.
func (f *framing) spoil(b *byte) { *b, f.part = 0, partUnframed }

// nameOf is the field that a header line names: the bytes collected so far and rest.
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

// endLine handles a complete line.
func (f *framing) endLine() {
	line := bytes.TrimRight(f.line[:f.n], "\r\n")
	empty := len(line) == 0 && !f.long
	switch f.part {
	case partPreface, partRequestLine:
		switch {
		case f.part == partPreface && string(line) == "PRI * HTTP/2.0":
			f.part = partPrefaceEnd
		case empty:
			f.part = partRequestLine
		default:
			f.part, f.length, f.chunks = partHeaderLine, -1, false
			f.http10 = !bytes.HasSuffix(bytes.TrimRight(f.tail[:], "\r\n"), []byte("HTTP/1.1"))
		}
	case partPrefaceEnd: // take has let only an empty line pass, and net/http reads the rest of the preface
		f.part = partUnframed
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

// noteField handles a header line; false: net/http refuses it.
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

// endHead handles the empty line after the header.
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

// beginChunk handles the line with a chunk's size, which may have an extension.
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
