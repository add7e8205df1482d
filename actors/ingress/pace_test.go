package ingress

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
)

// RP13, FS9: a client that takes a few bytes of its stream at intervals, so that no write lasts long, is cut
// within two windows. A client that takes enough is not cut, nor one that waits for its engine.
func TestASlowReaderIsHeldToARate(t *testing.T) {
	for name, c := range map[string]struct {
		take   int // bytes each second
		engine time.Duration
		cut    bool
	}{
		"half a KiB per second": {take: 512, cut: true},
		"two KiB per second":    {take: 2048},
		"a slow engine":         {take: 2048, engine: 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := readSlowly(t, c.take, c.engine, 10*time.Minute)
				if c.cut {
					assert.GreaterOrEqual(t, ended, defaultSlowReader)
					assert.LessOrEqual(t, ended, 2*defaultSlowReader+5*time.Second)
				} else {
					assert.GreaterOrEqual(t, ended, 10*time.Minute)
				}
			})
		})
	}
}

// readSlowly reads an endless stream over a pipe, take bytes each second, and says after what time it was
// cut, at most most. Its engine rests between tokens.
func readSlowly(t *testing.T, take int, rest, most time.Duration) time.Duration {
	t.Helper()
	network := &memnet.Network{}
	newRig(t, options{network: network, engines: []http.HandlerFunc{
		func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			for r.Context().Err() == nil {
				sse(w, textChunk)
				time.Sleep(rest)
			}
		},
	}})
	conn, err := network.DialContext(t.Context(), "tcp", "n1:80")
	require.NoError(t, err)
	_, err = fmt.Fprintf(conn,
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(streamBody),
		streamBody)
	require.NoError(t, err)
	began := time.Now()
	buf := make([]byte, take)
	for err == nil && time.Since(began) < most {
		for n, got := 0, 0; n < take && err == nil; n += got { // what has not come yet is waited for
			got, err = conn.Read(buf[n:])
			if rest > 0 {
				break // the engine is slower
			}
		}
		time.Sleep(time.Second)
	}
	ended := time.Since(began)
	require.NoError(t, conn.Close())
	time.Sleep(rest)
	synctest.Wait() // the engine's handler sees that its client has left
	return ended
}

// FS12: an engine closes its connections after 5 s of rest, at the moment at which the next requests come. Of
// 2,000 requests over 100 connections none fails, and none needs another attempt.
func TestAnEngineClosesIdleConnectionsUnderRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		l, err := network.Listen("engine:80")
		require.NoError(t, err)
		srv := &http.Server{
			Handler: replies(200, wholeAnswer), IdleTimeout: 5 * time.Second, ReadHeaderTimeout: time.Minute,
		}
		go func() { _ = srv.Serve(l) }()
		t.Cleanup(func() { _ = srv.Close() })
		g := newRig(t, options{network: network, urls: []string{"http://engine:80"}, max: 100})
		var clients sync.WaitGroup
		for i := range 100 {
			clients.Go(func() {
				for n := range 20 {
					a := g.postCtx(t.Context(), chatPath, chatBody)
					assert.Equal(t, 200, a.status, a.body)
					assert.Equal(t, "1", a.header.Get("X-Dpserve-Attempts"))
					time.Sleep(4900*time.Millisecond + time.Duration((7*i+31*n)%201)*time.Millisecond)
				}
			})
		}
		clients.Wait()
	})
}

// FS9: of what fast engines send to 200 clients that read 4 KiB/s each, dpserve holds less than 64 KiB for a
// client, because it reads an answer as fast as the client does. No reader is cut, and no request waits.
func TestManySlowReadersHoldLittle(t *testing.T) {
	const readers, rate, seconds, most = 200, 4 << 10, 70, 64 << 10
	big := `{"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("z", rate) + `"}}]}`
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		var sent atomic.Int64
		g := newRig(t, options{network: network, max: readers + 1, engines: []http.HandlerFunc{
			func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("X-Request-Id") == "beside" {
					replies(200, wholeAnswer)(w, r)
					return
				}
				drain(r)
				for r.Context().Err() == nil {
					sse(w, big)
					sent.Add(int64(len(big)))
				}
			},
		}})
		var taken atomic.Int64
		var clients sync.WaitGroup
		for range readers {
			clients.Go(func() {
				conn, err := network.DialContext(t.Context(), "tcp", "n1:80")
				if err == nil {
					_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s",
						chatPath, len(streamBody), streamBody)
				}
				buf := make([]byte, rate)
				for i := 0; i < seconds && err == nil; i++ {
					_, err = io.ReadFull(conn, buf)
					taken.Add(rate)
					time.Sleep(time.Second)
				}
				if err != nil {
					t.Error(err)
					return
				}
				_ = conn.Close()
			})
		}
		for range seconds / 10 {
			time.Sleep(9500 * time.Millisecond)
			synctest.Wait()
			assert.Less(t, sent.Load()-taken.Load(), int64(readers*most))
			asked := time.Now()
			assert.Equal(t, 200, g.postCtx(t.Context(), chatPath, chatBody, "X-Request-Id", "beside").status)
			assert.Zero(t, time.Since(asked))
		}
		assert.Greater(t, taken.Load(), int64(readers*rate*(seconds-10)))
		clients.Wait()
		synctest.Wait() // the engines' handlers see that their clients have left
	})
}

// SP5: clients that send a byte of their header each second are cut after 10 s, and those that send 100 bytes
// of their body each second after 30 s. One that takes 64 s for 64 MiB is answered, and no request beside
// them waits.
func TestSlowWritersAreCut(t *testing.T) {
	const post = "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\nContent-Length: "
	synctest.Test(t, func(t *testing.T) {
		network := &memnet.Network{}
		g := newRig(t, options{
			network: network, engines: []http.HandlerFunc{replies(200, wholeAnswer)},
			limits: Limits{MaxBody: 65 << 20},
		})
		var clients sync.WaitGroup
		// writes sends head, then a part each second, and returns when the other side ends the connection.
		writes := func(head string, parts ...string) (answer string, took time.Duration) {
			conn, err := network.DialContext(t.Context(), "tcp", "n1:80")
			if err != nil {
				t.Error(err)
				return "", 0
			}
			began := time.Now()
			clients.Go(func() {
				_, err := io.WriteString(conn, head)
				for i := 0; i < len(parts) && err == nil; i++ {
					_, err = io.WriteString(conn, parts[i])
					time.Sleep(time.Second)
				}
			})
			all, _ := io.ReadAll(conn)
			took = time.Since(began)
			_ = conn.Close()
			return string(all), took
		}
		for range 200 {
			clients.Go(func() {
				answer, took := writes("", strings.Split("GET /health HTTP/1.1\r\nHost: x\r\n\r\n", "")...)
				assert.NotContains(t, answer, "200 OK")
				assert.InDelta(t, 10, took.Seconds(), 1)
			})
		}
		for range 20 {
			clients.Go(func() {
				parts := slices.Repeat([]string{strings.Repeat("x", 100)}, 60)
				answer, took := writes(post+"100000\r\n\r\n{\"model\":\"", parts...)
				assert.Contains(t, answer, `"code":"slow_request"`)
				assert.InDelta(t, 30, took.Seconds(), 2)
			})
		}
		clients.Go(func() {
			const begin, end = `{"model":"demo","stream":false,"messages":[{"role":"user","content":"`, `"}]}`
			const size = len(begin) + 64<<20 + len(end)
			head := fmt.Sprintf("%s%d\r\nConnection: close\r\n\r\n%s", post, size, begin)
			parts := append(slices.Repeat([]string{strings.Repeat("x", 1<<20)}, 64), end)
			answer, took := writes(head, parts...)
			assert.Contains(t, answer, "HTTP/1.1 200")
			assert.InDelta(t, 64, took.Seconds(), 1)
		})
		for range 13 {
			time.Sleep(5 * time.Second)
			asked := time.Now()
			assert.Equal(t, 200, g.post(chatPath, chatBody).status)
			assert.Zero(t, time.Since(asked))
		}
		clients.Wait()
	})
}
