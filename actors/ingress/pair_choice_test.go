package ingress

import (
	"cmp"
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/pairengine"
)

// noPeer is an engine that does not find the other one.
func noPeer(l *pairengine.Leg) bool { return l.Fail(http.StatusInternalServerError) }

// TestRoutesThatAreNotSplit: every route but chats and completions stays on one decode rank, is counted with
// reason route if the engine computes for it, and explain says the same and counts nothing. A 4xx counts as
// rejected.
func TestRoutesThatAreNotSplit(t *testing.T) {
	var asked, status atomic.Int32 // of the prefill rank's engine; of the decode rank's answers
	status.Store(200)
	g := newPairRig(t, options{prefills: 1, decodes: 1, wrap: func(e http.Handler) string {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Path == openai.Completions.Path(): // the two engines meet
				e.ServeHTTP(w, r)
				return
			case e.(*pairengine.Engine).Role == pairengine.Prefill:
				asked.Add(1)
			}
			replies(int(status.Load()), wholeAnswer)(w, r)
		}))
		t.Cleanup(srv.Close)
		return srv.URL
	}})
	sound, formType := form(t, "file", "RIFF", "model", "demo")
	body, counted := `{"model":"demo","input":"x","messages":[],"text":"x"}`, 0
	for r := openai.Tokenize; int(r) < openai.NumRoutes; r++ {
		path := strings.ReplaceAll(cmp.Or(r.Path(), "/invocations"), "{id}", "resp_1")
		switch r {
		case openai.Models:
			continue
		case openai.Transcriptions, openai.Translations:
			assert.Equal(t, 200, g.send("POST", path, formType, sound).status, path)
		default:
			x, err := g.in.ExplainRoute(t.Context(), "demo",
				&client.Query{Request: []byte(body), Route: path})
			if r.Computes() && assert.NoError(t, err, path) {
				assert.Equal(t, []string{"local", "0/0"}, []string{x.Pair.Way, x.Pick}, path)
			}
			assert.Equal(t, 200, g.send(r.Method(), path, "application/json", body).status, path)
		}
		if r.Computes() {
			counted++
			g.requireMetric(`dpserve_pd_not_split_total{app="demo",reason="route"}`, strconv.Itoa(counted))
		}
	}
	assert.Greater(t, counted, 10)
	assert.Zero(t, asked.Load(), "no prefill rank was asked")
	status.Store(400)
	assert.Equal(t, 400, g.post("/v1/embeddings", body).status)
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="rejected",way="local"}`, "1")
}

// RP42: a pair takes requests only after it has met, and again after a restart of either rank.
func TestPrewarm(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 1, decodes: 1, cold: true})
	g.awaitPairs(1)
	g.served(g.post("/v1/chat/completions", streamBody), "remote")
	for i, e := range []*pairengine.Engine{g.d[0], g.p[0]} {
		e.DoFirst(noPeer)
		r := []*replica{g.decodes[0], g.prefills[0]}[i]
		r.reborn()
		g.store.set(newEpoch(r))
		eventually(t, func() bool {
			p := g.in.findPair("demo")
			_, count := p.state()
			return p.decode.canServe() && p.prefill.canServe() && count.all == 1 && count.why != ""
		}, "the pair has not met")
		g.served(g.post("/v1/chat/completions", streamBody), "fallback")
		e.DoFirst(nil)
		g.awaitPairs(1)
		g.served(g.post("/v1/chat/completions", streamBody), "remote")
	}
	assert.Contains(t, g.logs.String(), "did not meet")
}

// RP42: a rank that is lost ends the warm-up at once. A warm-up takes no ticket and is not counted.
func TestPrewarmOfALostRank(t *testing.T) {
	t.Parallel()
	for _, transfer := range []string{app.TransferNIXL, app.TransferNIXLPush} {
		for _, isDecode := range []bool{false, true} {
			g := newPairRig(t, options{prefills: 1, decodes: 1, transfer: transfer})
			e, r, side := g.p[0], g.prefills[0], "prefill"
			if isDecode {
				e, r, side = g.d[0], g.decodes[0], "decode"
			}
			hangs := make(chan struct{}, 1)
			e.DoFirst(func(l *pairengine.Leg) bool {
				select {
				case hangs <- struct{}{}:
				default:
				}
				return l.Stall()
			})
			b, done := g.in.findPair("demo").backend, make(chan error, 1)
			for runs := false; !runs; {
				go func() { done <- b.Prewarm(t.Context(), g.prefills[0].ref(), g.decodes[0].ref()) }()
				select {
				case <-hangs:
					runs = true
				case <-done: // the process stood still
				}
			}
			r.say(false, true, "exit_1")
			require.EqualError(t, <-done, side+" rank: engine: the rank's unit was fenced", transfer)
			for _, r := range g.replicas {
				r.mu.Lock()
				assert.Empty(t, r.dones)
				assert.Zero(t, r.admits)
				r.mu.Unlock()
			}
			page := g.page()
			assert.NotContains(t, page, "dpserve_pd_legs_total{")
			assert.NotContains(t, page, "dpserve_pd_requests_total{")
			assert.NotContains(t, page, "dpserve_pd_notes_total{")
		}
	}
}

// TestBadPairs: ranks whose engines differ are not paired, and the log says which and why.
func TestBadPairs(t *testing.T) {
	g := newPairRig(t, options{prefills: 1, decodes: 1, cold: true})
	p := g.in.findPair("demo")
	p.prefill.mu.Lock()
	p.prefill.ranks[routing.ID(0, 0)].blockSize = 16
	p.prefill.mu.Unlock()
	p.decode.mu.Lock()
	p.decode.ranks[routing.ID(0, 0)].blockSize = 32
	p.decode.mu.Unlock()
	require.Error(t, p.backend.CannotPair(g.prefills[0].ref(), g.decodes[0].ref()))
	assert.ErrorContains(t, p.backend.CannotPair(g.prefills[0].ref(), g.decodes[0].ref()), "16 and 32")
}

// TestAlarm: a reset of the decode ranks' caches follows when a prefill engine has heard of blocks after the
// end of their lease.
func TestAlarm(t *testing.T) {
	for _, far := range []bool{false, true} {
		g := newPairRig(t, options{prefills: 1, decodes: 2, far: far})
		g.prefills[0].status(1) // it was so before
		g.prefills[0].status(1)
		g.decodes[0].status(1)
		g.decodes[0].status(2) // a decode rank's engine counts none
		assert.Zero(t, g.d[0].Resets()+g.d[1].Resets())
		g.prefills[0].status(2)
		eventually(t, func() bool { return g.d[0].Resets() == 1 && g.d[1].Resets() == 1 }, "both are reset")
		g.requireMetric(`dpserve_pd_notes_total{app="demo",note="alarm"}`, "2")
		assert.Zero(t, g.p[0].Resets())
		assert.Contains(t, g.logs.String(), "prefill rank 0/0 heard of blocks after the end of their lease")
	}
}

// TestUnknownPrefillRank: x-dpserve-prefill-rank is checked.
func TestUnknownPrefillRank(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 1})
	a := g.post("/v1/chat/completions", streamBody, "X-Dpserve-Prefill-Rank", "0/1")
	g.served(a, "remote")
	assert.Equal(t, "0/1", a.header.Get("X-Dpserve-Prefill-Rank"))
	assert.Equal(t, 400, g.post("/v1/chat/completions", streamBody, "X-Dpserve-Prefill-Rank", "x").status)
	a = g.post("/v1/chat/completions", streamBody, "X-Dpserve-Prefill-Rank", "0/7")
	assert.Equal(t, 400, a.status, a.body)
	assert.Contains(t, a.body, "0/0 to 0/1")
	g.prefills[1].say(false, true, "exit_1")
	a = g.post("/v1/chat/completions", streamBody, "X-Dpserve-Prefill-Rank", "0/1")
	assert.Equal(t, 503, a.status, a.body)
}

// TestDeletedPair: requests of an application that is deleted go on, and its proxy ends after them.
func TestDeletedPair(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 1, decodes: 1})
	next := make(chan struct{})
	g.d[0].Do(func(l *pairengine.Leg) bool { return l.AnswerAfterFirst(l.Prompt, next) })
	got := make(chan answer)
	go func() { got <- g.postCtx(context.Background(), "/v1/chat/completions", streamBody) }()
	eventually(t, func() bool { return g.decodes[0].firstTokens() == 1 }, "it streams")
	g.store.set(deleteApps)
	eventually(t, func() bool { return g.in.findPair("demo") == nil }, "it is gone")
	close(next)
	g.served(<-got, "remote")
}
