package ingress

import (
	"fmt"
	"net/http"
	"sync"
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
