package ingress

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// raw sends bytes on one connection and returns all bytes that come back.
func raw(t *testing.T, g *rig, text string) string {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	_, err = io.WriteString(conn, text)
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(soon)))
	all, err := io.ReadAll(conn)
	require.NoError(t, err, "the connection is closed")
	return string(all)
}

// RP3, RP39: a request with two lengths is answered 400, its connection is closed, and its body is not served
// as a request.
func TestAmbiguousLengthsAreRefused(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	const inner = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
	for name, head := range map[string]string{
		"both":                   "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
		"both, the other way":    "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
		"both, apart, odd case":  "content-LENGTH: 4\r\nA: b\r\ntransfer-ENCODING:chunked\r\n",
		"a folded line":          "A: b\r\n c\r\nContent-Length: 0\r\n",
		"a folded line by a tab": "Content-Length: 0\r\nA: b\r\n\tTransfer-Encoding: chunked\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			got := raw(t, g, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"+head+"\r\n0\r\n\r\n"+inner)
			assert.Equal(t, 1, strings.Count(got, "HTTP/1.1 "), got)
			assert.True(t, strings.HasPrefix(got, "HTTP/1.1 400 "), got)
		})
	}
	t.Run("chunked over HTTP/1.0", func(t *testing.T) {
		got := raw(t, g, "POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
		assert.Contains(t, got, " 400 ")
	})
	t.Run("behind a preface that is none", func(t *testing.T) {
		got := raw(t, g, "PRI * HTTP/2.0\r\nHost: x\r\n\r\n"+inner+inner)
		assert.Equal(t, 1, strings.Count(got, "HTTP/1.1 "), got)
		assert.True(t, strings.HasPrefix(got, "HTTP/1.1 400 "), got)
	})
	admits := 0
	for _, r := range g.replicas {
		admits += r.admits
	}
	assert.Zero(t, admits)
}

// RP3, RP49b: requests with one length are served, also several of them in one read.
func TestFramedRequestsPass(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	b := chatBody
	plain := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + strconv.Itoa(len(b)) +
		"\r\n\r\n" + b
	chunked := "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" +
		"3;ext=1\r\n" + b[:3] + "\r\n" + strconv.FormatInt(int64(len(b)-3), 16) + "\r\n" +
		b[3:] + "\r\n0\r\n\r\n"
	last := "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	asks := strings.Replace(plain, "Host: x", "Host: x\r\nExpect: 100-continue", 1)
	got := raw(t, g, plain+chunked+"\r\n"+plain+asks+chunked+last)
	assert.Equal(t, 6, strings.Count(got, "HTTP/1.1 200 "), got)
}

// RP3, RP39: no request that net/http accepts has two lengths or a folded line, however its bytes are cut,
// and a request with one length passes unchanged.
func FuzzFraming(f *testing.F) {
	for _, s := range []string{
		"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nA: b\r\n\r\n" +
			"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"POST / HTTP/1.0\nTransfer-Encoding: chunked\n\n0\n\n", "\r\n\nGET / HTTP/1.1\nHost: x\nA: b\n c\n\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"PRI * HTTP/2.0\r\nHost: x\r\n\r\nPOST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n" +
			"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	} {
		f.Add([]byte(s), byte(1))
		f.Add([]byte(s), byte(200))
	}
	f.Fuzz(func(t *testing.T, data []byte, cut byte) {
		if len(data) > 1<<16 {
			return
		}
		c := &cutReader{data: bytes.Clone(data), cut: int(cut) + 1}
		br := bufio.NewReader(c)
		for {
			if peek, _ := br.Peek(4); len(peek) > 0 { // as net/http behind a POST
				for len(peek) > 0 && (peek[0] == '\r' || peek[0] == '\n') {
					_, _ = br.Discard(1)
					peek = peek[1:]
				}
			}
			from := c.at - br.Buffered()
			req, err := http.ReadRequest(br)
			if err != nil || c.framing.part == partUnframed && req.Method == "PRI" && len(req.Header) == 0 &&
				req.Host == "" {
				return
			}
			head := data[from : c.at-br.Buffered()]
			chunks, length := len(req.TransferEncoding) > 0, false
			for i, line := range bytes.Split(head, []byte("\n")) {
				name, _, _ := bytes.Cut(line, []byte(":"))
				length = length || i > 0 && bytes.EqualFold(bytes.TrimSpace(name), []byte("content-length"))
				require.False(t, i > 0 && len(line) > 0 && (line[0] == ' ' || line[0] == '\t'),
					"a folded line: %q", head)
			}
			require.False(t, chunks && length, "two lengths: %q", head)
			if _, err := io.Copy(io.Discard, req.Body); err != nil {
				return // the server closes the connection
			}
		}
	})
}

// cutReader gives its data in small pieces, as framedConn does.
type cutReader struct {
	framing framing
	data    []byte
	cut     int
	at      int
}

func (c *cutReader) Read(p []byte) (int, error) {
	if c.at == len(c.data) || c.framing.part == partEnded {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), c.cut)], c.data[c.at:])
	c.framing.scan(p[:n])
	c.at += n
	return n, nil
}

// BenchmarkFraming is the cost of one request: head and a body of 400 KB.
func BenchmarkFraming(b *testing.B) {
	head := []byte("POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n" +
		"Accept: application/json\r\nContent-Type: application/json\r\n" +
		"User-Agent: OpenAI/Python 2.11.0\r\nAuthorization: Bearer x\r\n" +
		"X-Stainless-Lang: python\r\nContent-Length: 400000\r\n\r\n")
	body := make([]byte, 400_000)
	var f framing
	b.ReportAllocs()
	for b.Loop() {
		f.scan(head)
		for rest := body; len(rest) > 0; rest = rest[min(len(rest), 32<<10):] {
			f.scan(rest[:min(len(rest), 32<<10)])
		}
	}
}
