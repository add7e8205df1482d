package ingress

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/app"
)

// RP48: in whatever words all of them say so, and none is ejected.
func TestRequestsWaitForBusyEngines(t *testing.T) {
	for name, busy := range map[string]http.HandlerFunc{
		"vLLM": replies(503, busyError),
		"text": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, "no room", http.StatusServiceUnavailable)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var isWell atomic.Bool
			engine := func(w http.ResponseWriter, r *http.Request) {
				if isWell.Load() {
					replies(200, wholeAnswer)(w, r)
					return
				}
				busy(w, r)
			}
			g := newRig(t, options{engines: []http.HandlerFunc{engine, engine}})
			status := make(chan int)
			for range 12 {
				go func() { status <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody).status }()
			}
			eventually(t, func() bool { return g.in.QueueLen("demo") == 12 }, "all wait")
			isWell.Store(true)
			for _, r := range g.replicas {
				assert.False(t, r.lastDone(t).Charge)
				r.endBusy()
			}
			for range 12 {
				assert.Equal(t, 200, <-status)
			}
		})
	}
}

// RP48: for as long as it says, up to a minute; its words go to the client that it refused, and others wait
// for room without asking it.
func TestABusyEngineIsFullForEverybody(t *testing.T) {
	for said, want := range map[string]time.Duration{
		"": time.Second, "0": time.Second, "-5": time.Second, "7": 7 * time.Second,
		"99999999999999999999": time.Minute, "86400": time.Minute,
		"Fri, 31 Dec 1999 23:59:59 GMT": time.Second,
	} {
		var asked atomic.Int32
		g := newRig(t, options{
			engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				w.Header().Set("Retry-After", said)
				replies(429, `{"error":{"message":"slow down"}}`)(w, r)
			}},
			app: func(a *app.Application) { a.Timeouts.QueueS = 0.02 },
		})
		a := g.post("/v1/chat/completions", chatBody)
		assert.Equal(t, 429, a.status)
		assert.Equal(t, said, a.header.Get("Retry-After"))
		assert.Equal(t, want, g.replicas[0].lastDone(t).BusyFor, said)
		assert.Equal(t, 503, g.post("/v1/chat/completions", chatBody).status)
		assert.EqualValues(t, 1, asked.Load(), "nobody else asked it")
	}
}
