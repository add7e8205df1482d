package enginehttp

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/rawconn"
)

// cpu is the process's CPU time.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkClient compares CPU per small request with http.Transport in the same run, slices in turn. Both
// over quiet connections; the peer's cost, which is small, is in both.
func BenchmarkClient(b *testing.B) {
	const answer = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\n" +
		"content-length: 2\r\n\r\nok"
	body := []byte(`{"model":"demo","messages":[{"role":"user","content":"hi"}]}`)
	peer := server(b, func(_ int, c *net.TCPConn, _ *bufio.Reader) {
		q, p := rawconn.Conn(c), make([]byte, 4<<10)
		for {
			if n, err := q.Read(p); err != nil || !strings.HasSuffix(string(p[:n]), string(body)) {
				return
			}
			if _, err := q.Write([]byte(answer)); err != nil {
				return
			}
		}
	})
	dial := func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return rawconn.Conn(c), nil
	}
	own := New(Config{Host: peer.host, Dial: dial, Idle: time.Minute, MaxIdle: 8})
	defer own.Close()
	std := &http.Transport{DialContext: dial, DisableCompression: true}
	defer std.CloseIdleConnections()
	header := http.Header{
		"Content-Type": {"application/json"}, "X-Request-Id": {"0123456789abcdef"},
		"User-Agent": {"bench"},
	}
	ways := []func(context.Context) (*http.Response, error){
		func(ctx context.Context) (*http.Response, error) {
			return own.Send(ctx, http.MethodPost, "/v1/chat/completions", header, body)
		},
		func(ctx context.Context) (*http.Response, error) {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost,
				"http://"+peer.host+"/v1/chat/completions", strings.NewReader(string(body)))
			if err != nil {
				return nil, err
			}
			req.Header = header
			return std.RoundTrip(req)
		},
	}
	var total [2]time.Duration
	p := make([]byte, 64)
	b.ReportAllocs()
	for done := 0; done < b.N; done += 50 {
		for i, way := range ways {
			before := cpu()
			for range 50 {
				ctx, cancel := context.WithCancel(context.Background())
				resp, err := way(ctx)
				require.NoError(b, err)
				for err == nil {
					_, err = resp.Body.Read(p)
				}
				require.Equal(b, io.EOF, err)
				require.NoError(b, resp.Body.Close())
				cancel()
			}
			total[i] += cpu() - before
		}
	}
	n := float64((b.N + 49) / 50 * 50)
	b.ReportMetric(float64(total[0].Microseconds())/n, "us-own")
	b.ReportMetric(float64(total[1].Microseconds())/n, "us-transport")
	b.ReportMetric(float64(total[0])/float64(total[1]), "ratio")
}

// TestFewAllocations: a request costs a handful, most of them the context's.
func TestFewAllocations(t *testing.T) {
	c := server(t, func(_ int, c *net.TCPConn, _ *bufio.Reader) {
		p := make([]byte, 4<<10)
		for {
			if _, err := c.Read(p); err != nil {
				return
			}
			if _, err := c.Write([]byte(okAnswer)); err != nil {
				return
			}
		}
	})
	p, header, ctx := make([]byte, 64), http.Header{"Content-Type": {"application/json"}}, t.Context()
	n := testing.AllocsPerRun(200, func() {
		resp, err := c.Send(ctx, http.MethodPost, "/", header, p)
		for err == nil {
			_, err = resp.Body.Read(p)
		}
	})
	require.LessOrEqual(t, n, 8.0)
}
