package enginehttp

import (
	"bytes"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"
)

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
