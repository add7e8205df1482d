package ingress

import (
	"fmt"
	"log/slog"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
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
	var network memnet.Network
	l, err := network.Listen("engine:80")
	require.NoError(t, err)
	engine := &http.Server{
		ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			for r.Context().Err() == nil {
				sse(w, textChunk)
				time.Sleep(rest)
			}
		}),
	}
	served := make(chan error, 2)
	go func() { served <- engine.Serve(l) }()
	f := &feed{}
	rank := &replica{
		feed: f, app: "demo", unit: "demo/0/0", id: routing.ID(0, 0), url: "http://engine:80", max: 8,
		owned: true, stopped: make(chan struct{}),
		epoch: 1, incarnation: 1000, accepting: true, open: map[uint64]msg.Admit{},
	}
	f.replicas = []*replica{rank}
	s := newStore()
	deploy(t, s, demoApp(), 1)
	in, err := New(Config{
		Node: "n1", Store: s, Feed: f, Metrics: telemetry.New(),
		Log: slog.New(slog.DiscardHandler), Dial: network.DialContext,
	})
	require.NoError(t, err)
	front, err := network.Listen("ingress:80")
	require.NoError(t, err)
	require.NoError(t, in.Attach(front))
	go func() { served <- in.Serve() }()

	conn, err := network.DialContext(t.Context(), "tcp", "ingress:80")
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
	require.NoError(t, in.Close(t.Context()))
	require.NoError(t, engine.Close())
	<-served
	<-served
	time.Sleep(rest)
	synctest.Wait() // the engine's handler sees that its client has left
	assert.Zero(t, rank.inFlight())
	return ended
}
