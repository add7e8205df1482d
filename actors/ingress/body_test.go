package ingress

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/memnet"
)

// liveHeap is the memory in bytes that is still referenced.
func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what pools held over the first one
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// RP7: 100 clients announce 16 MiB, send a byte and wait. Memory is taken as bytes arrive.
func TestAnnouncedBodiesCostNothing(t *testing.T) {
	const clients = 100
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	before := liveHeap()
	conns := make([]net.Conn, clients)
	for i := range conns {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(g.url, "http://"))
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		_, err = fmt.Fprintf(conn,
			"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n{", DefaultMaxBody)
		require.NoError(t, err)
		conns[i] = conn
	}
	eventually(t, func() bool { _, _, n := g.in.Totals(); return n == clients }, "all have begun")
	assert.Less(t, liveHeap()-before, int64(20<<20))
	assert.LessOrEqual(t, g.in.bodies.taken.Load(), int64(clients*bodySizes[0]))
	for _, conn := range conns {
		require.NoError(t, conn.Close())
	}
	eventually(t, func() bool { _, _, n := g.in.Totals(); return n == 0 }, "all have left")
}

// RP7: a stream keeps no memory of its request, whichever way it took to the engine.
func TestBodiesAreGivenBackAtTheFirstByte(t *testing.T) {
	const streams = 6
	for name, size := range map[string]int{"small": 10, "direct": 400 << 10, "transport": 3 << 19} {
		t.Run(name, func(t *testing.T) {
			var h hangingEngine
			g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}})
			body := `{"model":"demo","stream":true,"kv_transfer_params":1,"user":"\u0041` +
				strings.Repeat("u", size/8) + `","prompt":"` + strings.Repeat("x", size) + `"}`
			before := liveHeap()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan answer, streams)
			for range streams {
				go func() { ended <- g.postCtx(ctx, "/v1/completions", body) }()
			}
			eventually(t, func() bool { return g.replicas[0].firstsSeen() == streams }, "all stream")
			assert.Zero(t, g.in.bodies.taken.Load())
			assert.Less(t, liveHeap()-before, int64(2<<20+streams*300<<10),
				"with the connections of both sides, and their buffers")
			cancel()
			for range streams {
				<-ended
			}
		})
	}
}

// RP7: bodies that wait for their answer count. Above the budget a request is refused with Retry-After, and
// served once another request has its answer.
func TestBodiesAreHeldToABudget(t *testing.T) {
	var h hangingEngine
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends()}, limits: Limits{BodyBytes: 1 << 20}})
	body := `{"model":"demo","prompt":"` + strings.Repeat("x", 100<<10) + `"}`
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan answer, 3)
	for i := range 3 { // 256 KiB each, and 64 KiB more while they grow
		go func() { ended <- g.postCtx(ctx, "/v1/completions", body) }()
		eventually(t, func() bool { return h.came.Load() == int32(i+1) }, "the engine has it")
	}
	assert.EqualValues(t, 3*256<<10, g.in.bodies.taken.Load())
	a := g.post("/v1/completions", body)
	assert.Equal(t, 503, a.status, a.body)
	assert.Equal(t, "overloaded", a.code(t))
	assert.Equal(t, "1", a.header.Get("Retry-After"))
	assert.EqualValues(t, 3*256<<10, g.in.bodies.taken.Load(), "what it had taken is given back")
	cancel()
	for range 3 {
		<-ended
	}
	eventually(t, func() bool { return g.in.bodies.taken.Load() == 0 }, "given back")
	assert.Equal(t, 404, g.post("/v1/completions", strings.Replace(body, "demo", "nobody", 1)).status)
}

// RP7: a buffer has the smallest size first, is then at most four times as large as its content up to 64 KiB,
// then at most 1 MiB, and twice as large after that; it has room for the body and one byte more.
func TestBodyMemoryFollowsWhatHasCome(t *testing.T) {
	for _, size := range []int{
		0, 1, bodySizes[0] - 1, bodySizes[0], bodySizes[1], 400 << 10, bodySizes[3],
		5<<20 + 3, DefaultMaxBody,
	} {
		m := &bodyMemory{budget: 1 << 30}
		b := m.take(bodySizes[0])
		for n := 0; n < size; n = len(b.b) {
			if n == cap(b.b) {
				b = m.grow(b, size+1)
			}
			b.b = b.b[:min(cap(b.b), size)]
			bound := max(bodySizes[0], 4*n)
			if n >= bodySizes[1] {
				bound = max(bodySizes[3], 2*n)
			}
			require.LessOrEqual(t, cap(b.b), bound, "of %d after %d", size, n)
			require.EqualValues(t, cap(b.b), m.taken.Load())
		}
		if len(b.b) == cap(b.b) {
			b = m.grow(b, size+1)
		}
		assert.Greater(t, cap(b.b), size)
		m.give(b, true)
		m.give(nil, true)
		assert.Zero(t, m.taken.Load())
	}
}

// RP54: the budget follows the largest body, up to 2 GiB, and the memory limit, and always has room for some
// bodies. A body that may be held fits into half of it.
func TestBodyBudget(t *testing.T) {
	for _, c := range []struct{ maxBody, memory, want, held int64 }{
		{DefaultMaxBody, 0, 512 << 20, DefaultMaxBody},
		{64 << 20, 0, 2 << 30, 64 << 20},
		{LargestMaxBody, 0, 2 << 30, LargestMaxBody},
		{LargestMaxBody, 4 << 30, 1 << 30, 512 << 20},
		{LargestMaxBody, 100 << 20, 256 << 20, 128 << 20},
		{1000, 0, 512 << 20, 1000},
		{DefaultMaxBody, 1 << 30, 256 << 20, DefaultMaxBody},
		{DefaultMaxBody, 100 << 20, 64 << 20, DefaultMaxBody},
		{DefaultMaxBody, 64 << 30, 512 << 20, DefaultMaxBody},
	} {
		l := Limits{MaxBody: c.maxBody}
		assert.Equal(t, c.want, l.bodyBudget(c.memory), "%+v", c)
		assert.Equal(t, c.held, l.heldBody(c.want), "%+v", c)
	}
	assert.EqualValues(t, 5, Limits{BodyBytes: 5, MaxBody: DefaultMaxBody}.bodyBudget(1))
}

// RP7: a body may pause for less than a window, must bring the least rate over each window, and must be
// complete after four.
func TestBodyPace(t *testing.T) {
	prompt := func(n int) string { return `{"model":"x","prompt":"` + strings.Repeat("x", n) + `"}` }
	for name, c := range map[string]struct {
		piece  int
		every  time.Duration
		size   int
		status int
		took   time.Duration // 0: as long as the pieces take
	}{
		"steady, over windows": {piece: 10 << 10, every: 3 * time.Second, size: 300 << 10, status: 404},
		"steady, a byte too slow": {
			piece: 1 << 10, every: 1100 * time.Millisecond, size: 300 << 10,
			status: 408, took: 31 * time.Second,
		},
		"stands still": {
			piece: 10 << 10, every: time.Hour, size: 300 << 10, status: 408,
			took: 30 * time.Second,
		},
		"too long for its size": {
			piece: 10 << 10, every: time.Second, size: 2 << 20, status: 408,
			took: 120 * time.Second,
		},
		"16 MiB in nearly two min": {piece: 1 << 20, every: 7 * time.Second, size: 15 << 20, status: 404},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				status, took := drip(t, prompt(c.size), c.piece, c.every)
				assert.Equal(t, c.status, status)
				if c.took != 0 {
					assert.InDelta(t, c.took.Seconds(), took.Seconds(), 1.2)
				}
			})
		})
	}
}

// drip sends a body in pieces over a pipe, and returns the answer's status and time.
func drip(t *testing.T, body string, piece int, every time.Duration) (status int, took time.Duration) {
	t.Helper()
	g := newRig(t, options{noApp: true, network: &memnet.Network{}})
	conn, err := g.network.DialContext(t.Context(), "tcp", "n1:80")
	require.NoError(t, err)
	defer conn.Close()
	began := time.Now()
	go func() {
		_, err := fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
			len(body))
		for len(body) > 0 && err == nil {
			n := min(piece, len(body))
			_, err = io.WriteString(conn, body[:n])
			body = body[n:]
			select {
			case <-time.After(every):
			case <-t.Context().Done():
				return
			}
		}
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	took = time.Since(began)
	require.NoError(t, resp.Body.Close())
	assert.Zero(t, g.in.bodies.taken.Load())
	return resp.StatusCode, took
}

// TestPromptMemoryShrinks: memory that a long prompt made large is not kept by a short one.
func TestPromptMemoryShrinks(t *testing.T) {
	large := prompt{promptMemory: promptMemory{
		ids:    make([]uint32, 10, 100<<10),
		salted: make([]byte, 90<<10, 100<<10), tokenizeBody: make([]byte, 2<<20),
		blocks: make([]uint64, 3, 100),
	}}
	got := large.giveMemory()
	assert.Nil(t, got.ids, "much larger than its use")
	assert.Nil(t, got.tokenizeBody, "too large")
	assert.Equal(t, []int{100 << 10, 100}, []int{cap(got.salted), cap(got.blocks)})
	assert.Empty(t, got.salted)
	assert.Nil(t, large.salted)
	shared := prompt{shared: true, promptMemory: promptMemory{blocks: make([]uint64, 3)}}
	assert.Nil(t, shared.giveMemory().blocks, "an actor may still read them")
}

// RP13: a body above the default limit reaches its engine whole, where the limit allows it.
func TestLargeBodiesPass(t *testing.T) {
	var got atomic.Int64
	g := newRig(t, options{
		limits: Limits{MaxBody: 64 << 20},
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			n, _ := io.Copy(io.Discard, r.Body)
			got.Store(n)
			_, _ = io.WriteString(w, wholeAnswer)
		}},
	})
	body := `{"model":"demo","prompt":"` + strings.Repeat("x", DefaultMaxBody) + `"}`
	assert.Equal(t, 200, g.post("/v1/completions", body).status)
	assert.EqualValues(t, len(body), got.Load())
}
