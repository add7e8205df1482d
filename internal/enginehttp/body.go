package enginehttp

import (
	"errors"
	"io"
	"net/http"
	"strings"
)

// exchange is an answer whose body is being read. It is one allocation per request. Not for concurrent use.
type exchange struct {
	resp   http.Response
	client *Client
	conn   *conn // nil: given back
	stop   func() bool
	keep   bool
	read   func(x *exchange, p []byte) (int, error) // by the kind of body
	left   int64                                    // bytes of the body, or of the chunk
	place  place
	extra  int   // bytes of the trailer
	err    error // why there is nothing more to read
}

// Read returns the buffered bytes, else those of one read of the socket; of a chunked body all payloads in
// them. The body's end may come with the last bytes.
func (x *exchange) Read(p []byte) (int, error) {
	if x.err != nil || len(p) == 0 {
		return 0, x.err
	}
	n, err := x.read(x, p)
	if err != nil {
		x.finish(err)
	}
	return n, x.err
}

// HasBuffered reports that bytes of the body are here already, or that it is empty.
func (x *exchange) HasBuffered() bool { return x.err != nil || x.conn.r < x.conn.w }

// Close ends the exchange. The connection of a body that was not read to its end is closed.
func (x *exchange) Close() error {
	if x.err == nil {
		x.finish(errClosed)
	}
	return nil
}

// finish gives the connection back: io.EOF means that the body's end was read.
func (x *exchange) finish(err error) {
	c := x.conn
	x.conn, x.err = nil, err
	mine := x.stop() // false: abort has run or runs
	if !mine && !errors.Is(err, io.EOF) && !errors.Is(err, errClosed) {
		x.err = ErrAborted
	}
	boundary := errors.Is(err, io.EOF) && x.keep && c.r == c.w
	x.client.done(c, boundary && mine)
}

// sized reads a body of known length: past the buffer, straight into p.
func sized(x *exchange, p []byte) (n int, err error) {
	c := x.conn
	if c.r < c.w {
		n = c.take(p, x.left)
	} else {
		n, err = c.net.Read(p[:min(int64(len(p)), x.left)])
	}
	x.left -= int64(n)
	switch {
	case x.left == 0:
		return n, io.EOF
	case errors.Is(err, io.EOF):
		return n, io.ErrUnexpectedEOF
	}
	return n, err
}

// unsized reads a body that ends with its connection.
func unsized(x *exchange, p []byte) (int, error) {
	c := x.conn
	if c.r < c.w {
		return c.take(p, int64(len(p))), nil
	}
	return c.net.Read(p)
}

// place is the position of the next byte in the grammar of a chunked body.
type place uint8

const (
	atSize    place = iota // in the line that gives a chunk's size
	inData                 // left bytes of the chunk are to come
	behind                 // in the CRLF behind a chunk
	atTrailer              // in the lines behind the last chunk
)

const (
	maxChunkLine = 1 << 10  // size and extensions, bytes
	maxTrailer   = 16 << 10 // all its lines, bytes
)

// chunked reads the payloads of as many chunks as are buffered, and waits for more only if there are none.
func chunked(x *exchange, p []byte) (n int, err error) {
	c := x.conn
	for n < len(p) {
		if x.place == inData && c.r < c.w {
			m := c.take(p[n:], x.left)
			n += m
			x.data(m)
			continue
		}
		going := false
		if x.place != inData {
			if going, err = x.frame(); err != nil {
				return n, err
			}
		}
		switch {
		case going:
		case n > 0:
			return n, nil
		default:
			if n, err = x.wait(p); n > 0 || err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// wait reads the socket: into the buffer, or of a chunk that is larger than that straight into p.
func (x *exchange) wait(p []byte) (int, error) {
	c := x.conn
	if x.place != inData || x.left < int64(len(c.buf)) {
		return 0, c.fill()
	}
	n, err := c.net.Read(p[:min(int64(len(p)), x.left)])
	x.data(n)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (x *exchange) data(n int) {
	if x.left -= int64(n); x.left == 0 {
		x.place = behind
	}
}

// frame reads the next element between payloads. It returns false if not enough bytes are buffered, and
// io.EOF at the body's end.
func (x *exchange) frame() (bool, error) {
	limit, c := maxChunkLine, x.conn
	switch {
	case x.place == atTrailer:
		limit = min(len(c.buf), maxTrailer-x.extra)
	case x.place == behind && c.r < c.w && c.buf[c.r] != '\r': // not to be waited for
		return false, malformed("a chunk is longer than its size")
	}
	line, err := c.line(limit)
	if line == nil || err != nil {
		return false, err
	}
	switch x.place {
	case behind:
		if len(line) > 0 {
			return false, malformed("a chunk is longer than its size")
		}
		x.place = atSize
	case atSize:
		if x.left, err = chunkSize(line); err != nil {
			return false, err
		}
		x.place = inData
		if x.left == 0 {
			x.place = atTrailer
		}
	default:
		return true, x.trailer(line)
	}
	return true, nil
}

// trailer takes a line of the trailer.
func (x *exchange) trailer(line []byte) error {
	if len(line) == 0 {
		return io.EOF
	}
	x.extra += len(line) + len("\r\n")
	name, value, err := field(string(line))
	if err != nil {
		return err
	}
	if x.resp.Trailer == nil {
		x.resp.Trailer = http.Header{}
	}
	x.resp.Trailer.Add(name, value)
	return nil
}

// maxSizeDigits keeps a chunk's size within 60 bits.
const maxSizeDigits = 15

// chunkSize reads a line before a chunk. Extensions are ignored.
func chunkSize(line []byte) (int64, error) {
	digits, n := 0, int64(0)
	for digits < len(line) {
		d := strings.IndexByte("0123456789abcdef", lower(line[digits]))
		if d < 0 {
			break
		}
		n, digits = n<<4|int64(d), digits+1
		if digits > maxSizeDigits {
			return 0, malformed("a chunk's size is too large")
		}
	}
	if digits == 0 || !extension(line[digits:]) {
		return 0, malformed("bad chunk size")
	}
	return n, nil
}

func lower(b byte) byte {
	if 'A' <= b && b <= 'F' {
		return b + ('a' - 'A')
	}
	return b
}

// extension reports that what stands behind a size is blank, or begins with a semicolon; control characters
// are in neither.
func extension(b []byte) bool {
	began := false
	for _, x := range b {
		switch {
		case x == ' ' || x == '\t':
		case x < ' ' || x == 0x7f:
			return false
		case x == ';':
			began = true
		case !began:
			return false
		}
	}
	return true
}
