package ingress

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

// The tests of this file hold for every request, whatever its policy, its ranks and its connections.

// mortal is an engine that dies of a request with "poison" in it, as a process does: its connections end, and
// it takes no others.
type mortal struct {
	http.Handler
	url    string
	isDead atomic.Bool
	die    func()
}

func newMortal(t *testing.T, inner http.Handler) *mortal {
	t.Helper()
	e := &mortal{Handler: inner}
	srv := httptest.NewUnstartedServer(e)
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	srv.Config.ConnState = func(c net.Conn, s http.ConnState) {
		mu.Lock()
		defer mu.Unlock()
		open[c] = s != http.StateClosed
	}
	srv.Start()
	e.url = srv.URL
	e.die = func() {
		e.isDead.Store(true)
		_ = srv.Listener.Close()
		mu.Lock()
		defer mu.Unlock()
		for c := range open {
			_ = c.Close()
		}
	}
	t.Cleanup(func() { e.die(); srv.Close() })
	return e
}

func (e *mortal) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	if strings.Contains(string(body), "poison") {
		e.die()
		return
	}
	r.Body = io.NopCloser(strings.NewReader(string(body)))
	e.Handler.ServeHTTP(w, r)
}

func deaths(engines []*mortal) (n int) {
	for _, e := range engines {
		if e.isDead.Load() {
			n++
		}
	}
	return n
}

// TestARequestKillsAtMostTwoRanks: whether its connections are new or were used, and wherever the ranks are.
func TestARequestKillsAtMostTwoRanks(t *testing.T) {
	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("warm %v", warm), func(t *testing.T) {
			forEachTransport(t, func(t *testing.T, far bool) {
				var engines []*mortal
				o := options{far: far, app: func(a *app.Application) { a.Retries.Attempts = 8 }}
				for range 4 {
					e := newMortal(t, replies(200, wholeAnswer))
					engines, o.urls = append(engines, e), append(o.urls, e.url)
				}
				g := newRig(t, o)
				for range 8 {
					if warm {
						require.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
					}
				}
				a := g.post("/v1/chat/completions", poisonBody)
				assert.Equal(t, 502, a.status)
				assert.Contains(t, a.body, "two ranks died while they had this request")
				assert.Equal(t, 2, deaths(engines))
			})
		})
	}
}

// TestASplitRequestKillsAtMostTwoRanks: of both pools together.
func TestASplitRequestKillsAtMostTwoRanks(t *testing.T) {
	for _, warm := range []bool{false, true} {
		t.Run(fmt.Sprintf("warm %v", warm), func(t *testing.T) {
			var engines []*mortal
			g := newPairRig(t, pairOptions{prefills: 2, decodes: 3, wrap: func(h http.Handler) string {
				e := newMortal(t, h)
				engines = append(engines, e)
				return e.url
			}})
			for range 12 {
				if warm {
					require.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
				}
			}
			a := g.post("/v1/chat/completions", poisonBody)
			assert.Equal(t, 502, a.status)
			assert.Contains(t, a.body, "two ranks died while they had this request")
			assert.Equal(t, 2, deaths(engines))
		})
	}
}

// loop sends n requests from 12 clients, and counts the answers by status.
func (g *rig) loop(n int, body string) map[int]int {
	var mu sync.Mutex
	var wg sync.WaitGroup
	out, left := map[int]int{}, atomic.Int64{}
	left.Store(int64(n))
	for range 12 {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				a := g.postCtx(g.t.Context(), "/v1/chat/completions", body)
				mu.Lock()
				out[a.status]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return out
}

// isPassed says that an engine's status is an answer to the client's request, which another rank would give
// as well.
func isPassed(status int) bool {
	switch status {
	case 401, 403, 404, 405, 408, 429:
		return false
	case 501, 505:
		return true
	}
	return status >= 400 && status < 500
}

// TestARankThatFailsQuicklyIsNoBlackHole: one rank of three answers every request with a failure at once. The
// clients get the answers of the others, unless the failure is the request's own.
func TestARankThatFailsQuicklyIsNoBlackHole(t *testing.T) {
	for _, policy := range []string{"round-robin", "least-loaded", "mex"} {
		t.Run(policy, func(t *testing.T) {
			var status atomic.Int32
			good := replies(200, wholeAnswer)
			bad := func(w http.ResponseWriter, r *http.Request) {
				if n := int(status.Load()); n != 200 {
					replies(n, fmt.Sprintf(`{"error":{"message":"no, %d","code":%d}}`, n, n))(w, r)
					return
				}
				good(w, r)
			}
			g := newRig(t, options{
				engines: []http.HandlerFunc{good, bad, good},
				app:     func(a *app.Application) { a.Routing.Policy = policy },
			})
			status.Store(200)
			require.Equal(t, map[int]int{200: 24}, g.loop(24, chatBody))
			for n := 300; n < 600; n++ {
				status.Store(int32(n))
				got := g.loop(12, chatBody)
				if isPassed(n) {
					assert.Equal(t, 12, got[200]+got[n], "status %d: %v", n, got)
				} else {
					assert.Equal(t, map[int]int{200: 12}, got, "status %d", n)
				}
			}
		})
	}
}

// TestARankOfAPoolThatFailsIsNoBlackHole: the same for each pool of an application with two.
func TestARankOfAPoolThatFailsIsNoBlackHole(t *testing.T) {
	for _, side := range []string{"prefill", "decode"} {
		t.Run(side, func(t *testing.T) {
			t.Parallel()
			g := newPairRig(t, pairOptions{prefills: 2, decodes: 3, max: 32})
			require.Equal(t, map[int]int{200: 24}, g.loop(24, chatBody))
			bad := g.p[0]
			if side == "decode" {
				bad = g.d[0]
			}
			for _, status := range []int{401, 404, 408, 429, 500, 502, 503} {
				bad.set(answers(replies(status, `{"error":{"message":"no"}}`)))
				got := g.loop(100, chatBody)
				assert.GreaterOrEqual(t, got[200], 95, "status %d: %v", status, got)
			}
			bad.set(answers(breaksOff))
			got := g.loop(100, chatBody)
			assert.GreaterOrEqual(t, got[200], 95, "reset: %v", got)
		})
	}
}

// TestRefusalsOfASplitRequest: ranks that refuse are no attempts, and a full one is waited for, as for a
// request of one pool.
func TestRefusalsOfASplitRequest(t *testing.T) {
	g := newPairRig(t, pairOptions{prefills: 2, decodes: 8})
	for _, r := range g.decodes[:6] {
		r.setRefuse(func(*msg.Admit) msg.Refusal { return msg.NoLease })
	}
	for range 20 {
		assert.Equal(t, 200, g.post("/v1/chat/completions", streamBody).status)
	}
}
