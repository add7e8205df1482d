package enginehttp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// FuzzResponse: what both this package and net/http take for an answer, they understand alike; what comes in
// pieces means what it means in one; and nothing panics or hangs.
func FuzzResponse(f *testing.F) {
	for _, s := range []string{
		okAnswer, chunkTop + "3;a=b\r\nabc\r\n0\r\nA: b\r\n\r\n", "HTTP/1.0 200\r\n\r\nabc",
		"HTTP/1.1 204 No Content\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\n" + okAnswer,
		"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n", okAnswer + okAnswer,
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, raw []byte, size uint8) {
		if len(raw) > 32<<10 {
			return
		}
		whole, pieces := exchanged(t, raw, len(raw)+1), exchanged(t, raw, int(size)+1)
		if (whole.err == nil) != (pieces.err == nil) || whole.status != pieces.status ||
			whole.err == nil && whole.body != pieces.body {
			t.Fatalf("whole %+v, in pieces %+v", whole, pieces)
		}
		if whole.err != nil {
			return
		}
		r := bufio.NewReader(bytes.NewReader(raw))
		req := &http.Request{Method: http.MethodPost}
		resp, err := http.ReadResponse(r, req)
		for i := 0; err == nil && resp.StatusCode < 200 && i < maxInterim; i++ {
			resp, err = http.ReadResponse(r, req)
		}
		if err != nil {
			return
		}
		body, err := io.ReadAll(resp.Body)
		switch {
		case err != nil:
			return
		case resp.StatusCode != whole.status || string(body) != whole.body:
			t.Fatalf("net/http: %d %q; here: %d %q", resp.StatusCode, body, whole.status, whole.body)
		case whole.length >= 0 && whole.length != resp.ContentLength:
			t.Fatalf("net/http: length %d, here %d", resp.ContentLength, whole.length)
		case whole.pooled && r.Buffered() > 0:
			t.Fatal("kept, though bytes lie behind the answer")
		}
		for name, values := range whole.header {
			if got := resp.Header[name]; name != "Content-Length" && name != "Connection" &&
				len(got) != len(values) {
				t.Fatalf("field %s: net/http %q, here %q", name, got, values)
			}
		}
	})
}

func exchanged(t *testing.T, raw []byte, size int) result {
	s := &script{pieces: split(string(raw), size), end: io.EOF}
	c := New(Config{
		Host: "h", Idle: time.Minute, MaxIdle: 1,
		Dial: func(context.Context, string, string) (net.Conn, error) { return s, nil },
	})
	defer c.Close()
	got := outcome(t, c)
	if errors.Is(got.err, ErrAborted) {
		t.Fatal("nobody gave it up")
	}
	return got
}
