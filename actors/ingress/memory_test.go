package ingress

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/parallel"
)

func TestPressure(t *testing.T) {
	for _, c := range []struct {
		used, limit int64
		want        pressure
	}{
		{1 << 40, 0, pressureNone},
		{0, 1000, pressureNone},
		{850, 1000, pressureNone},
		{851, 1000, pressureFull},
		{950, 1000, pressureFull},
		{951, 1000, pressureOverfull},
		{2000, 1000, pressureOverfull},
	} {
		assert.Equal(t, c.want, pressureOf(c.used, c.limit), "%+v", c)
	}
}

// RP12: one sample serves the requests of 100 ms, a change writes one log line, and a process that refuses
// requests and therefore collects no garbage starts a collection.
func TestMemoryGuardSamples(t *testing.T) {
	var reads, collects int
	use := memoryUse{bytes: 10, collections: 1}
	logs := &parallel.Buffer{}
	g := &memoryGuard{
		limit: 100, read: func() memoryUse { reads++; return use }, collect: func() { collects++ },
		base: time.Now(),
		log:  slog.New(slog.NewTextHandler(logs, nil)),
	}
	at := func(d time.Duration) pressure { return g.pressure(g.base.Add(d)) }
	for i := range 100 {
		assert.Equal(t, pressureNone, at(time.Duration(i)*time.Millisecond))
	}
	assert.Equal(t, 1, reads)
	use.bytes = 90
	assert.Equal(t, pressureNone, at(99*time.Millisecond), "the sample still serves")
	assert.Equal(t, pressureFull, at(100*time.Millisecond))
	assert.Equal(t, pressureFull, at(300*time.Millisecond))
	assert.Equal(t, 1, strings.Count(logs.String(), "level=WARN"), logs)
	use.bytes = 96
	assert.Equal(t, pressureOverfull, at(time.Second))
	assert.Zero(t, collects)
	at(5 * time.Second)
	assert.Equal(t, 1, collects, "none since the beginning")
	at(9 * time.Second)
	assert.Equal(t, 1, collects)
	use.collections = 2
	at(10 * time.Second)
	at(14 * time.Second)
	assert.Equal(t, 1, collects, "there was one meanwhile")
	use.bytes = 20
	assert.Equal(t, pressureNone, at(16*time.Second))
	at(time.Hour)
	assert.Equal(t, 1, collects)
	none := &memoryGuard{read: func() memoryUse { panic("there is no limit to compare with") }}
	assert.Equal(t, pressureNone, none.pressure(time.Now()))
}

// RP12: the measure follows the referenced memory and does not contain garbage.
func TestMemoryIsWhatTheProcessNeeds(t *testing.T) {
	const block, grows, stays = 256 << 20, 240 << 20, 16 << 20
	var before, with, after memoryUse
	for range 10 { // what tests before this one have left behind may go at any moment
		runtime.GC()
		runtime.GC() // pools lose their memory with the second one
		before = readMemory()
		needed := make([]byte, block)
		runtime.GC()
		with = readMemory()
		runtime.KeepAlive(needed) // garbage from here on
		runtime.GC()
		after = readMemory()
		if with.bytes-before.bytes > grows && after.bytes-before.bytes < stays {
			break
		}
	}
	assert.Greater(t, with.bytes-before.bytes, int64(grows))
	assert.Greater(t, with.collections, before.collections)
	assert.Less(t, after.bytes-before.bytes, int64(stays))
}

// RP12, RP38: requests are refused with Retry-After, running ones go on, and health is answered; at the limit
// new connections are closed at once.
func TestNearTheMemoryLimit(t *testing.T) {
	var used atomic.Int64
	goOn := make(chan struct{})
	g := newRig(t, options{
		memory: func() memoryUse { return memoryUse{bytes: used.Load()} },
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			drain(r)
			sse(w, textChunk)
			<-goOn
			sse(w, stopChunk, doneEvent)
		}},
	})
	got := make(chan answer, 1)
	go func() { got <- g.post("/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.replicas[0].firstsSeen() == 1 }, "streams")

	used.Store(900)
	eventually(t, func() bool { return g.in.memory.pressure(time.Now()) == pressureFull }, "seen")
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 503, a.status, a.body)
	assert.Equal(t, "overloaded", a.code(t))
	assert.Equal(t, "1", a.header.Get("Retry-After"))
	assert.Equal(t, 200, g.get("/health").status)
	assert.EqualValues(t, 900, g.in.Usage().MemoryBytes)

	used.Store(990)
	eventually(t, func() bool { return g.in.memory.pressure(time.Now()) == pressureOverfull }, "seen")
	dial := func() net.Conn {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
		require.NoError(t, err)
		require.NoError(t, conn.SetDeadline(time.Now().Add(soon)))
		return conn
	}
	probe := dial()
	_, err := io.WriteString(probe, "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	text, err := io.ReadAll(probe)
	require.NoError(t, err)
	assert.Contains(t, string(text), "HTTP/1.1 200", "a probe has its answer")
	assert.Contains(t, string(text), "Connection: close", "and makes room for the next one")
	require.NoError(t, probe.Close())
	eventually(t, func() bool { return g.in.Usage().Connections <= 2 }, "it has left its place")
	var silent []net.Conn
	for range probeConns {
		silent = append(silent, dial())
	}
	last := dial()
	text, err = io.ReadAll(last)
	require.NoError(t, err, "closed without an answer")
	assert.Empty(t, text)
	for _, c := range append(silent, last) {
		require.NoError(t, c.Close())
	}

	used.Store(10)
	eventually(t, func() bool { return g.in.memory.pressure(time.Now()) == pressureNone }, "seen")
	close(goOn)
	assert.Contains(t, (<-got).body, doneEvent)
	assert.Equal(t, 200, g.post("/v1/chat/completions", streamBody).status)
}

// RP38: clients that send again at once need no new connection.
func TestARefusedSmallBodyKeepsItsConnection(t *testing.T) {
	g := newRig(t, options{
		memory:  func() memoryUse { return memoryUse{bytes: 900} },
		engines: []http.HandlerFunc{replies(200, wholeAnswer)},
	})
	for _, c := range []struct {
		name, head string
		size       int
		status     int
		closes     bool
	}{
		{"small", "Host: x\r\n", skippedBody, 503, false},
		{"to no route", "Host: x\r\n", 100, 403, false},
		{"large", "Host: x\r\n", skippedBody + 1, 503, true},
		{"not sent yet", "Host: x\r\nExpect: 100-continue\r\n", 100, 503, true},
	} {
		conn := g.connect(t)
		path := "/v1/completions"
		if c.status == 403 {
			path = "/sleep"
		}
		for range 2 {
			_, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s", path, c.head,
				c.size, strings.Repeat("x", c.size))
			require.NoError(t, err, c.name)
			resp, err := http.ReadResponse(conn.r, nil)
			require.NoError(t, err, c.name)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err, c.name)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, c.status, resp.StatusCode, c.name)
			if assert.Equal(t, c.closes, resp.Close, c.name); resp.Close {
				break
			}
		}
	}
}
