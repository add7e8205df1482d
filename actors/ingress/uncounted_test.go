package ingress

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/app"
)

// RP39: more wait, at most queue_s, also those that name the rank. Requests for tokens do not wait for them.
func TestARankTokenizesFewRequestsAtOnce(t *testing.T) {
	const body = `{"model":"demo","prompt":"x"}`
	var asked atomic.Int32
	leave := make(chan struct{})
	g := newRig(t, options{
		app: func(a *app.Application) { a.Timeouts.QueueS = 0.05 },
		engines: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "tokenize") {
				asked.Add(1)
				<-leave
			}
			replies(200, wholeAnswer)(w, r)
		}},
	})
	var all sync.WaitGroup
	for range uncountedPerRank {
		all.Go(func() { assert.Equal(t, 200, g.post("/tokenize", body).status) })
	}
	eventually(t, func() bool { return asked.Load() == uncountedPerRank }, "the first are asked")
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	for _, path := range []string{"/tokenize", "/detokenize"} {
		for _, headers := range [][]string{nil, {"X-Dpserve-Rank", "0/0"}} {
			a := g.post(path, body, headers...)
			assert.Equal(t, 503, a.status, a.body)
			assert.Equal(t, "overloaded", a.code(t))
			assert.Equal(t, "1", a.header.Get("Retry-After"))
		}
	}
	assert.EqualValues(t, uncountedPerRank, asked.Load())

	long := *g.in.table.Load().root.models["demo"].app
	long.Timeouts.QueueS = 60
	g.deploy(&long, 2)
	eventually(t, func() bool { return g.in.table.Load().root.models["demo"].app.Timeouts.QueueS == 60 }, "")
	for range 2 * uncountedPerRank {
		all.Go(func() { assert.Equal(t, 200, g.post("/tokenize", body).status) })
	}
	ar := g.in.findAppRouter("demo")
	eventually(t, func() bool {
		ar.mu.Lock()
		defer ar.mu.Unlock()
		return ar.uncounted.n == 2*uncountedPerRank
	}, "they wait")
	for range 3 * uncountedPerRank {
		leave <- struct{}{}
		assert.LessOrEqual(t, g.uncounted(), uncountedPerRank)
	}
	all.Wait()
	eventually(t, func() bool { return g.uncounted() == 0 }, "each has given its place back")
	assert.Zero(t, ar.uncounted.n)
}

func (g *rig) uncounted() int {
	ar := g.in.findAppRouter("demo")
	ar.mu.Lock()
	defer ar.mu.Unlock()
	n := 0
	for _, r := range ar.ranks {
		n += r.uncounted
	}
	return n
}
