package ingress

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// keepAlive is a client with one connection of HTTP/1.
type keepAlive struct {
	t *testing.T
	net.Conn
	r *bufio.Reader
}

func (g *rig) connect(t *testing.T) *keepAlive {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(soon)))
	return &keepAlive{t, conn, bufio.NewReader(conn)}
}

// health requests /health over the connection.
func (k *keepAlive) health() {
	k.t.Helper()
	_, err := io.WriteString(k, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(k.t, err)
	resp, err := http.ReadResponse(k.r, nil)
	require.NoError(k.t, err)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(k.t, err)
	assert.Equal(k.t, 200, resp.StatusCode)
}

// isClosed reports whether the other side has closed the connection.
func (k *keepAlive) isClosed() bool {
	_ = k.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err := k.r.Peek(1)
	_ = k.SetReadDeadline(time.Now().Add(soon))
	var timeout net.Error
	return err != nil && (!errors.As(err, &timeout) || !timeout.Timeout())
}

func (g *rig) idleConns() (n int) {
	l := g.in.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		if c.idleSince.Load() != 0 {
			n++
		}
	}
	return n
}

// RP12: idle and silent connections that take all places do not block a health check. The connection that was
// idle for longest is closed, and none that has a request.
func TestTheLongestIdleConnectionMakesRoom(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}, limits: Limits{MaxConns: 4}})
	g.client.Transport = &http.Transport{DisableKeepAlives: true}
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan answer, 1)
	// the oldest, but it has a request
	go func() { got <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].firstsSeen() == 1 }, "streams")
	silent, first, second := g.connect(t), g.connect(t), g.connect(t)
	first.health()
	second.health()
	// an answer is read before its connection counts as idle
	eventually(t, func() bool { return g.idleConns() == 3 }, "three are idle")
	first.health() // idle for less long than second
	eventually(t, func() bool { return g.idleConns() == 3 }, "three are idle again")

	g.connect(t).health()
	eventually(t, silent.isClosed, "the silent one makes room")
	assert.False(t, second.isClosed())
	assert.Equal(t, 200, g.get("/health").status)
	eventually(t, second.isClosed, "then the second one")
	first.health()
	assert.Zero(t, h.left.Load(), "the stream goes on")
	assert.LessOrEqual(t, g.in.Usage().Connections, 4)
	cancel()
	<-got
}

// SP5: a connection that was opened in advance waits for its first request as long as one that is idle. From
// the first byte on it has the time for a header.
func TestAConnectionThatWasOpenedInAdvance(t *testing.T) {
	t.Parallel()
	const header = 50 * time.Millisecond
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)}, timers: Timers{ReadHeader: header},
	})
	waits, begins := g.connect(t), g.connect(t)
	_, err := io.WriteString(begins, "GET /health HTTP/1.1\r\n")
	require.NoError(t, err)
	eventually(t, begins.isClosed, "the header takes too long")
	time.Sleep(2 * header)
	waits.health()

	g = newRig(t, options{timers: Timers{Idle: header}})
	silent := g.connect(t)
	eventually(t, silent.isClosed, "idle for too long")
}

// RP12: if every connection has a request, a new connection waits until one request ends.
func TestAFullPortServesOnceARequestEnds(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}, limits: Limits{MaxConns: 2}})
	g.client.Transport = &http.Transport{DisableKeepAlives: true}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, leave := context.WithCancel(t.Context())
	got := make(chan answer, 2)
	go func() { got <- g.postCtx(first, "/v1/chat/completions", streamBody) }()
	go func() { got <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].firstsSeen() == 2 }, "stream")
	waits := g.connect(t)
	health := make(chan struct{})
	go func() { defer close(health); waits.health() }()
	select {
	case <-health:
		t.Error("served without a place")
	case <-time.After(50 * time.Millisecond):
	}
	leave()
	<-health
	cancel()
	<-got
	<-got
}

// RP12: its connection keeps its place, and loses it when nothing runs on it.
func TestAStreamOverHTTP2IsNotIdle(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}, limits: Limits{MaxConns: 1}})
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	g.client.Transport = tr
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan answer, 1)
	go func() { got <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].firstsSeen() == 1 }, "streams")
	waits := g.connect(t)
	health := make(chan struct{})
	go func() { defer close(health); waits.health() }()
	select {
	case <-health:
		t.Error("served without a place")
	case <-time.After(50 * time.Millisecond):
	}
	assert.Zero(t, h.left.Load())
	cancel()
	<-got
	<-health
	eventually(t, func() bool { _, _, n := g.in.Totals(); return n == 0 },
		"its handler has ended, behind its connection")
}
