package ingress

import (
	"fmt"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
)

// RP13: a client that takes a few bytes of its stream at intervals, so that no write lasts long, is cut
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
