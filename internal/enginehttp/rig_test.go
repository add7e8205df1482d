package enginehttp

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// script is a connection that swallows the request and gives the pieces of an answer, one per read.
type script struct {
	net.Conn
	pieces [][]byte
	end    error // behind them
	reads  int
	closed atomic.Bool
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.pieces) == 0 {
		return 0, s.end
	}
	s.reads++
	n := copy(p, s.pieces[0])
	if s.pieces[0] = s.pieces[0][n:]; len(s.pieces[0]) == 0 {
		s.pieces = s.pieces[1:]
	}
	return n, nil
}

func (s *script) Write(p []byte) (int, error)      { return len(p), nil }
func (s *script) Close() error                     { s.closed.Store(true); return nil }
func (s *script) SetReadDeadline(time.Time) error  { return nil }
func (s *script) SetWriteDeadline(time.Time) error { return nil }

// split cuts b behind every n bytes.
func split(b string, n int) [][]byte {
	var out [][]byte
	for len(b) > n {
		out, b = append(out, []byte(b[:n])), b[n:]
	}
	if b != "" {
		out = append(out, []byte(b))
	}
	return out
}

// scripted is a client of one scripted connection; a second dial fails.
func scripted(tb testing.TB, s *script) *Client {
	tb.Helper()
	if s.end == nil {
		s.end = io.EOF
	}
	dialled := false
	c := New(Config{
		Host: "engine:1", Idle: time.Minute, MaxIdle: 4,
		Dial: func(context.Context, string, string) (net.Conn, error) {
			if dialled {
				return nil, &net.OpError{Op: "dial", Err: errors.New("one is enough")}
			}
			dialled = true
			return s, nil
		},
	})
	tb.Cleanup(c.Close)
	return c
}

// secured is a client over TLS of one connection whose peer answers a request with raw, and ends it.
func secured(tb testing.TB, raw string) *Client {
	tb.Helper()
	c, _ := overTLS(tb, func(_ int, c net.Conn, r *bufio.Reader) {
		if _, err := take(r); err == nil {
			say(c, raw)
		}
	})
	return c
}

// certificate is that of all peers behind TLS.
var certificate = sync.OnceValue(func() tls.Certificate {
	srv := httptest.NewUnstartedServer(nil)
	srv.StartTLS()
	defer srv.Close()
	return srv.TLS.Certificates[0]
})

// overTLS is server behind TLS. The second result counts the connections.
func overTLS(tb testing.TB, serve func(n int, c net.Conn, r *bufio.Reader)) (*Client, *atomic.Int32) {
	tb.Helper()
	var conns atomic.Int32
	c := server(tb, func(n int, raw *net.TCPConn, _ *bufio.Reader) {
		conns.Add(1)
		c := tls.Server(raw, &tls.Config{Certificates: []tls.Certificate{certificate()}})
		serve(n, c, bufio.NewReader(c))
	})
	conf := &tls.Config{RootCAs: x509.NewCertPool()}
	leaf, err := x509.ParseCertificate(certificate().Certificate[0])
	require.NoError(tb, err)
	conf.RootCAs.AddCert(leaf)
	c.dial = Secure(c.dial, conf, 10*time.Second)
	return c, &conns
}

// result is an answer read to its end.
type result struct {
	status int
	header http.Header
	length int64
	body   string
	err    error // of Send or Read
	pooled bool
}

func post(tb testing.TB, c *Client, body string) (*http.Response, error) {
	tb.Helper()
	return c.Send(tb.Context(), http.MethodPost, "/v1/x", http.Header{"Content-Type": {"application/json"}},
		[]byte(body))
}

func outcome(tb testing.TB, c *Client) result {
	tb.Helper()
	resp, err := post(tb, c, "{}")
	if err != nil {
		return result{err: err}
	}
	defer func() { assert.NoError(tb, resp.Body.Close()) }()
	b, err := io.ReadAll(resp.Body)
	return result{
		status: resp.StatusCode, header: resp.Header, length: resp.ContentLength, body: string(b),
		err: err, pooled: !c.pool.empty(),
	}
}

// server accepts on loopback; serve is called per connection, with its number from 0.
func server(tb testing.TB, serve func(n int, c *net.TCPConn, r *bufio.Reader)) *Client {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []net.Conn
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			all = append(all, c)
			mu.Unlock()
			wg.Go(func() {
				serve(n, c.(*net.TCPConn), bufio.NewReader(c)) //nolint:forcetypeassert // it is TCP
				_ = c.Close()
			})
		}
	})
	c := New(Config{Host: l.Addr().String(), Idle: time.Minute, MaxIdle: 64, Dial: (&net.Dialer{}).
		DialContext})
	tb.Cleanup(func() {
		c.Close()
		_ = l.Close()
		mu.Lock()
		for _, c := range all {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return c
}

// take reads one request off a connection.
func take(r *bufio.Reader) (string, error) {
	req, err := http.ReadRequest(r)
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(req.Body)
	return string(b), err
}

func say(c net.Conn, s string) { _, _ = io.WriteString(c, s) }

const (
	okAnswer = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\nok"
	chunkTop = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
