package enginehttp

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
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

// maxHead is the default of Config.MaxHead.
const maxHead = 64 << 10

// maxInterim bounds the 1xx answers before the real one.
const maxInterim = 5

// head is a parsed status line with its fields. Immutable: answers that are alike share it.
type head struct {
	status  int
	text    string // "200 OK"
	minor   int    // HTTP/1.minor
	header  http.Header
	length  int64 // Content-Length; -1: none
	chunked bool
	keep    bool // the connection outlives the answer
}

// headEnd finds the length of a head at the beginning of b, of which the lines before from are already looked
// at; 0: not all of it is there, and next is where to look on. A line must end in CRLF, and the first one
// begin as HTTP/1 does: so that the client does not wait for the rest of garbage.
func headEnd(b []byte, from int) (end, next int, err error) {
	const magic = "HTTP/1."
	if n := min(len(b), len(magic)); string(b[:n]) != magic[:n] {
		return 0, 0, malformed("it does not begin with HTTP/1")
	}
	for {
		i := bytes.IndexByte(b[from:], '\n')
		if i < 0 {
			return 0, from, nil
		}
		if i == 0 || b[from+i-1] != '\r' {
			return 0, 0, malformed("a line of the head does not end in CRLF")
		}
		if i == 1 {
			return from + 2, from, nil
		}
		from += i + 1
	}
}

// parseHead reads a whole head, as headEnd found it.
func parseHead(raw []byte) (*head, error) {
	s := string(raw[:len(raw)-len("\r\n")])
	line, fields, _ := strings.Cut(s, "\r\n")
	h := &head{length: -1}
	if err := h.statusLine(line); err != nil {
		return nil, err
	}
	if err := h.fields(fields); err != nil {
		return nil, err
	}
	return h, h.frame()
}

// statusLine reads "HTTP/1.1 200 OK"; the reason, and the blank before it, may be missing.
func (h *head) statusLine(line string) error {
	const status = len("HTTP/1.1 ")
	if len(line) < status+3 || line[status-1] != ' ' || len(line) > status+3 && line[status+3] != ' ' {
		return malformed("bad status line")
	}
	switch line[:status-1] {
	case "HTTP/1.1":
		h.minor = 1
	case "HTTP/1.0":
	default:
		return malformed("neither HTTP/1.1 nor HTTP/1.0")
	}
	h.text = line[status:]
	for i := range 3 {
		d := h.text[i]
		if d < '0' || d > '9' {
			return malformed("bad status code")
		}
		h.status = 10*h.status + int(d-'0')
	}
	if h.status < http.StatusContinue || !httpguts.ValidHeaderFieldValue(h.text) {
		return malformed("bad status code or reason")
	}
	return nil
}

// fields reads the lines behind the status line, each with its CRLF.
func (h *head) fields(s string) error {
	n := strings.Count(s, "\n")
	h.header = make(http.Header, n)
	values := make([]string, 0, n)
	for s != "" {
		var line string
		line, s, _ = strings.Cut(s, "\r\n")
		name, value, err := field(line)
		if err != nil {
			return err
		}
		name = textproto.CanonicalMIMEHeaderKey(name)
		if old, ok := h.header[name]; ok {
			h.header[name] = append(old, value)
			continue
		}
		values = append(values, value)
		i := len(values) - 1
		h.header[name] = values[i : i+1 : i+1] // an append to it copies
	}
	return nil
}

// field takes a line apart. A line that begins with a blank (obs-fold) has no valid name.
func field(line string) (name, value string, err error) {
	name, value, ok := strings.Cut(line, ":")
	if !ok || !httpguts.ValidHeaderFieldName(name) {
		return "", "", malformed("bad field name")
	}
	value = strings.Trim(value, " \t")
	if !httpguts.ValidHeaderFieldValue(value) {
		return "", "", malformed("bad field value")
	}
	return name, value, nil
}

// frame decides where the body ends and whether the connection is kept (RFC 9112, 6.3 and 9.3).
func (h *head) frame() error {
	if codings, ok := h.header["Transfer-Encoding"]; ok {
		if len(codings) != 1 || !strings.EqualFold(codings[0], "chunked") || h.minor == 0 {
			return malformed("a transfer encoding that is not chunked")
		}
		h.chunked = true
	}
	if err := h.contentLength(); err != nil {
		return err
	}
	conn := h.header["Connection"]
	if h.minor == 1 {
		h.keep = !httpguts.HeaderValuesContainsToken(conn, "close")
	} else {
		h.keep = httpguts.HeaderValuesContainsToken(conn, "keep-alive") &&
			!httpguts.HeaderValuesContainsToken(conn, "close")
	}
	delete(h.header, "Transfer-Encoding") // as net/http does: the body comes without it
	delete(h.header, "Trailer")
	return nil
}

func (h *head) contentLength() error {
	lengths, ok := h.header["Content-Length"]
	if !ok {
		return nil
	}
	if h.chunked {
		return malformed("both chunked and Content-Length")
	}
	for _, l := range lengths[1:] {
		if l != lengths[0] {
			return malformed("Content-Lengths that differ")
		}
	}
	n, err := strconv.ParseUint(lengths[0], 10, 63) // takes digits alone: no sign, no blanks
	if err != nil {
		return malformed("bad Content-Length")
	}
	h.header["Content-Length"] = lengths[:1:1]
	h.length = int64(n) // 63 bits
	return nil
}

// hasNoBody reports that an answer ends with its head, whatever its fields say.
func (h *head) hasNoBody(method string) bool {
	return method == http.MethodHead || h.status == http.StatusNoContent || h.status == http.StatusNotModified
}

// reusable reports that a connection is at a boundary behind the end of an answer without a body: a 204 that
// announces one is not trusted to leave it out.
func (h *head) reusable(method string) bool {
	return h.keep && (method == http.MethodHead || !h.chunked && h.length <= 0)
}
