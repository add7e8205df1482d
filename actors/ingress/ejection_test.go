package ingress

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

const poisonBody = `{"model":"demo","messages":[{"role":"user","content":"poison"}]}`

// poisoned is an engine that answers requests with poison in them with the status, others as it should. It
// says a number of texts in turn.
func poisoned(status, says int) http.HandlerFunc {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		if strings.Contains(string(body), "poison") {
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, `{"error":{"message":"it cannot be served, %d"}}`, n.Add(1)%int64(says))
			return
		}
		_, _ = io.WriteString(w, wholeAnswer)
	}
}

// leftOut counts the ranks that are ejected, and those of them that get nothing.
func (g *rig) leftOut() (ejected, out int) {
	for _, rk := range g.in.ensureAppRouter("demo").router.Load().Snapshot().Ranks {
		if rk.Ejected > 0 {
			ejected++
		}
		if rk.LeftOut {
			out++
		}
	}
	return ejected, out
}

// RP11: requests that each engine fails eject one rank at most, and failed answers count as load.
func TestRequestsThatEveryEngineFailsTakeOneRankOut(t *testing.T) {
	e := poisoned(500, 1000)
	g := newRig(t, options{engines: []http.HandlerFunc{e, e, e}})
	for _, r := range g.replicas {
		r.ejects = true
	}
	for range 5 {
		assert.Equal(t, 500, g.post("/v1/chat/completions", poisonBody).status)
	}
	failed := 0
	for _, rk := range g.in.ensureAppRouter("demo").router.Load().Snapshot().Ranks {
		failed += rk.Failed.O()
	}
	assert.Positive(t, failed, "their ranks do not look idle")
	ejected, out := g.leftOut()
	assert.LessOrEqual(t, ejected, 1, "each request counts on one rank")
	assert.LessOrEqual(t, out, 1)
	for i := range 30 { // a victim beside them
		require.Equal(t, 500, g.post("/v1/chat/completions", poisonBody).status,
			"they get what the engines say, request %d", i)
		a := g.post("/v1/chat/completions", chatBody)
		require.Equal(t, 200, a.status, a.body)
		assert.Equal(t, 200, g.get("/health").status)
	}
	for range 30 { // nobody else
		require.Equal(t, 500, g.post("/v1/chat/completions", poisonBody).status)
	}
	ejected, out = g.leftOut()
	assert.GreaterOrEqual(t, ejected, 2)
	assert.Equal(t, 1, out, "one of three")
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, 200, a.status, a.body)
	assert.Equal(t, 200, g.get("/health").status)
	info, err := g.in.RouterInfo("demo")
	require.NoError(t, err)
	assert.Equal(t, [3]int{2, ejected, 1}, [3]int{info.Ready, info.Ejected, info.LeftOut})
}

// RP44: it is about the request.
func TestWhatTwoRanksSayAlikeEjectsNone(t *testing.T) {
	forEachTransport(t, func(t *testing.T, far bool) {
		e := poisoned(500, 1)
		g := newRig(t, options{far: far, engines: []http.HandlerFunc{e, e, e}})
		for _, r := range g.replicas {
			r.ejects = true
		}
		for range 30 {
			a := g.post("/v1/chat/completions", poisonBody)
			require.Equal(t, 500, a.status)
			require.Contains(t, a.body, "it cannot be served, 0", "the engine's own words")
		}
		eventually(t, func() bool {
			failures := 0
			for _, r := range g.replicas {
				r.mu.Lock()
				failures += r.failures
				r.mu.Unlock()
			}
			return failures == 0
		}, "every failure is taken back")
		ejected, _ := g.leftOut()
		assert.Zero(t, ejected)
	})
}

func TestTheOnlyRankIsNeverLeftOut(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{poisoned(500, 1)}})
	g.replicas[0].ejects = true
	for range 8 {
		assert.Equal(t, 500, g.post("/v1/chat/completions", poisonBody).status)
	}
	ejected, out := g.leftOut()
	assert.Equal(t, [2]int{1, 0}, [2]int{ejected, out})
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
}

// RP11: answers of 408 and 429 eject no rank.
func TestAnEnginesOwnLimitsEjectNoRank(t *testing.T) {
	for _, status := range []int{408, 429} {
		e := poisoned(status, 1)
		g := newRig(t, options{
			engines: []http.HandlerFunc{e, e},
			app:     func(a *app.Application) { a.Retries.Attempts, a.Timeouts.QueueS = 1, 0.02 },
		})
		for _, r := range g.replicas {
			r.ejects = true
		}
		for range 12 {
			assert.Equal(t, status, g.post("/v1/chat/completions", poisonBody).status)
			for _, r := range g.replicas {
				r.endBusy()
			}
		}
		ejected, _ := g.leftOut()
		assert.Zero(t, ejected, status)
	}
}

// eject ejects the rank, and reports it in a snapshot.
func (r *replica) eject() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepting, r.ejected = false, true
	r.snapshot()
}

// RP46: a snapshot reports an ejection, like a change of state does.
func TestASubscriberOfAnEjectedRankKnowsIt(t *testing.T) {
	e := poisoned(500, 1)
	g := newRig(t, options{engines: []http.HandlerFunc{e, e, e}})
	r := g.replicas[1]
	r.eject()
	ejected, out := g.leftOut()
	assert.Equal(t, [2]int{1, 1}, [2]int{ejected, out})
	a := g.post("/v1/chat/completions", chatBody, "X-Dpserve-Rank", "0/1")
	assert.Equal(t, 200, a.status, "a request that names it tries it: %s", a.body)
	r.mu.Lock()
	r.accepting, r.ejected = true, false
	r.emit(&msg.Record{Kind: msg.RecState, RankState: msg.RankState{Accepting: true}})
	r.mu.Unlock()
	ejected, out = g.leftOut()
	assert.Equal(t, [2]int{0, 0}, [2]int{ejected, out})
}

// RP46: of one pool under policy direct, and of a decode pool.
func TestANamedRankThatIsEjectedIsAsked(t *testing.T) {
	ok := replies(200, wholeAnswer)
	g := newRig(t, options{
		engines: []http.HandlerFunc{ok, ok, ok},
		app:     func(a *app.Application) { a.Routing.Policy = "direct" },
	})
	g.replicas[1].eject()
	pair := newPairRig(t, options{prefills: 1, decodes: 3})
	pair.decodes[1].eject()
	for _, g := range []*rig{g, pair.rig} {
		a := g.post("/v1/chat/completions", chatBody, "X-Dpserve-Rank", "0/1")
		assert.Equal(t, [...]any{200, "1"}, [...]any{a.status, a.header.Get("X-Dpserve-Rank")}, a.body)
	}
}

// RP46: also if others wait in the queue, for a rank that is full.
func TestAnEmptyBudgetEndsNoRequestWhileARankIsIdle(t *testing.T) {
	var h hangingEngine
	bad := replies(500, `{"error":{"message":"never"}}`)
	g := newRig(t, options{max: 1, engines: []http.HandlerFunc{bad, h.sends(textChunk), poisoned(500, 1000)}})
	budget := g.in.ensureAppRouter("demo").retryBudget
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	post := func(body string, headers ...string) {
		wg.Go(func() { g.postCtx(ctx, "/v1/chat/completions", body, headers...) })
	}
	post(chatBody, "X-Dpserve-Rank", "0/1")
	eventually(t, func() bool { return h.came.Load() == 1 }, "rank 1 is full")
	post(poisonBody) // both other ranks fail it
	eventually(t, func() bool { return g.in.QueueLen("demo") == 1 }, "it waits for rank 1")
	for budget.draw(g.in.clock()) {
	}
	for range 6 {
		a := g.post("/v1/chat/completions", chatBody)
		assert.Equal(t, 200, a.status, a.body)
	}
	a := g.post("/v1/chat/completions", poisonBody)
	assert.Equal(t, 500, a.status, "it may not wait for the third rank: %s", a.body)
	cancel()
	wg.Wait()
}
