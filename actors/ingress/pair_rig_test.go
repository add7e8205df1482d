package ingress

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// pdEngine is an engine of a pool. It answers prefill legs with parameters, and all other requests with a
// stream or a whole answer that says what it was given.
type pdEngine struct {
	name string

	mu     sync.Mutex
	n      int
	calls  []pdCall                                                    // without those of prewarming
	answer func(w http.ResponseWriter, r *http.Request, c pdCall) bool // true: it has answered
	isMute bool                                                        // it does not prewarm

	hangs   chan struct{} // gets a prewarm leg, and none is answered; nil: they are
	dropped int           // resets of its prefix cache
}

// pdCall is a request that an engine got.
type pdCall struct {
	body   map[string]any
	raw    string
	header http.Header
	params map[string]any // kv_transfer_params
}

func (c *pdCall) isPrefill() bool { return c.params["do_remote_decode"] == true }

func (e *pdEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if r.URL.Path == "/reset_prefix_cache" {
		e.mu.Lock()
		e.dropped++
		e.mu.Unlock()
		replies(http.StatusOK, `{"success":true}`)(w, r)
		return
	}
	c := pdCall{raw: string(raw), header: r.Header}
	_ = json.Unmarshal(raw, &c.body)
	c.params, _ = c.body["kv_transfer_params"].(map[string]any)
	prompt, _ := c.body["prompt"].(string)
	isPrewarm := strings.HasPrefix(prompt, "dpserve ")
	e.mu.Lock()
	e.n++
	n, answer := e.n, e.answer
	mute, hangs := e.isMute, e.hangs
	if !isPrewarm {
		e.calls = append(e.calls, c)
	}
	e.mu.Unlock()
	switch {
	case isPrewarm && hangs != nil:
		select {
		case hangs <- struct{}{}:
		default:
		}
		<-r.Context().Done()
	case isPrewarm && mute:
		replies(http.StatusInternalServerError, `{"error":{"message":"no peer","code":500}}`)(w, r)
	case !isPrewarm && answer != nil && answer(w, r, c):
	case c.isPrefill():
		replies(http.StatusOK, e.prefillAnswer(n))(w, r)
	case c.body["stream"] == true:
		sse(w, roleChunk, textChunk, stopChunk, usageChunk, doneEvent)
	default:
		replies(http.StatusOK, wholeAnswer)(w, r)
	}
}

func (e *pdEngine) prefillAnswer(n int) string {
	return fmt.Sprintf(`{"id":"p","choices":[{"index":0,"text":"x","finish_reason":"length"}],`+
		`"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1,`+
		`"prompt_tokens_details":{"cached_tokens":2}},"kv_transfer_params":{"do_remote_prefill":true,`+
		`"do_remote_decode":false,"remote_block_ids":[[%d]],"remote_engine_id":%q,"remote_request_id":"r%d",`+
		`"remote_host":"h","remote_port":5600,"remote_num_tokens":5,"odd":{"a":[1,"x",null]}}}`, n, e.name, n)
}

func (e *pdEngine) taken() []pdCall {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]pdCall(nil), e.calls...)
}

func (e *pdEngine) set(answer func(w http.ResponseWriter, r *http.Request, c pdCall) bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = answer
}

// pairRig is an ingress with an application of two pools.
type pairRig struct {
	*rig
	prefills, decodes []*replica
	p, d              []*pdEngine
}

func newPairRig(t testing.TB, o options) *pairRig {
	t.Helper()
	g := &pairRig{rig: newFrame(t, &o)}
	if o.wrap == nil {
		o.wrap = g.serve
	}
	specs, counts := [2]*app.Application{demoApp(), demoApp()}, [2]int{o.prefills, o.decodes}
	for side, pool := range [...]string{app.PoolPrefill, app.PoolDecode} {
		a, n := specs[side], counts[side]
		a.Pool = pool
		a.Disaggregation = &app.Disaggregation{
			Transfer: app.TransferSim, Decide: app.DecideAlways, Fallback: app.FallbackLocal,
		}
		a.DataParallel.DPSize, a.NumReplicas = n, n
	}
	if o.change != nil {
		o.change(specs[0], specs[1])
	}
	var engines []*pdEngine
	for side, a := range specs {
		for i := range counts[side] {
			e := &pdEngine{name: fmt.Sprintf("%s-%d", a.Pool, i)}
			engines = append(engines, e)
			unit := fmt.Sprintf("%s/0/%d", a.PoolName(), i)
			if a.DataParallel.Coupling == app.Lockstep {
				unit = a.PoolName() + "/0"
			}
			g.feed.add(a.PoolName(), unit, routing.ID(0, i), o.wrap(e), o.max).address = o.address
		}
		g.deploy(a, 1)
	}
	g.p, g.d = engines[:o.prefills], engines[o.prefills:]
	g.prefills, g.decodes = g.feed.replicas[:o.prefills], g.feed.replicas[o.prefills:]
	g.start(&o)
	if !o.cold {
		g.awaitPairs(o.prefills * o.decodes)
	}
	return g
}

// attachPools makes both pools attached engines of a transfer. pd is what the file says of each prefill rank.
func attachPools(transfer string, pd app.AttachPD) func(p, d *app.Application) {
	return func(p, d *app.Application) {
		for _, a := range []*app.Application{p, d} {
			a.Engine = app.Engine{Kind: app.KindAttach, Family: app.FamilyVLLM}
			a.Disaggregation.Transfer = transfer
			for i := range a.NumReplicas {
				r := app.AttachRank{URL: fmt.Sprintf("http://127.0.0.1:%d", i+1), Role: a.Pool}
				if a.Pool == app.PoolPrefill {
					r.PD = &pd
				}
				a.Engine.Ranks = append(a.Engine.Ranks, r)
			}
		}
	}
}

// awaitPairs waits until as many pairs have met.
func (g *pairRig) awaitPairs(n int) {
	g.t.Helper()
	eventually(g.t, func() bool {
		p := g.in.findPair("demo")
		if p == nil {
			return false
		}
		_, count := p.state()
		return count.met == n && count.all == n
	}, "pairs have met")
}

// total is the number of calls that the engines of a side got.
func total(engines []*pdEngine) int {
	n := 0
	for _, e := range engines {
		n += len(e.taken())
	}
	return n
}

// leased is what the pair decisions count as held by a prefill rank.
func (g *pairRig) leased(r *replica) (n int64) {
	g.in.findPair("demo").router.Update(func(t *routing.PairTable) {
		n = t.Leased(&routing.Rank{ID: r.id, Incarnation: r.incarnation})
	})
	return n
}

// page is all series.
func (g *rig) page() string {
	rec := httptest.NewRecorder()
	g.metrics.Handler().ServeHTTP(rec,
		httptest.NewRequestWithContext(context.Background(), http.MethodGet, "/metrics", nil))
	return rec.Body.String()
}

// metric is the value of a series, "" if there is none.
func (g *rig) metric(series string) string {
	for _, line := range strings.Split(g.page(), "\n") {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return value
		}
	}
	return ""
}

func (g *rig) requireMetric(series, value string) {
	g.t.Helper()
	assert.Equal(g.t, value, g.metric(series), series)
}

// served requires an answer of the stub engines, and the way of its prompt.
func (g *pairRig) served(a answer, way string) {
	g.t.Helper()
	require.NoError(g.t, a.err)
	require.Equal(g.t, http.StatusOK, a.status, a.body)
	assert.Equal(g.t, way, a.header.Get("X-Dpserve-Prefill"))
	assert.Equal(g.t, way == "remote", a.header.Get("X-Dpserve-Prefill-Rank") != "")
	assert.Equal(g.t, "demo", a.header.Get("X-Dpserve-App"))
}

// newEpoch puts the rank's epoch into the state, with its unit ready.
func newEpoch(r *replica) func(st *state.State) {
	r.mu.Lock()
	defer r.mu.Unlock()
	unit, epoch, owner := r.unit, r.epoch, r.app
	return func(st *state.State) {
		st.Units[unit] = &state.Unit{ID: unit, App: owner, Epoch: epoch, Phase: state.Ready}
		st.Epochs[unit] = epoch
	}
}

func deleteApps(st *state.State) {
	clear(st.Apps)
	clear(st.Units)
}

// status reports how many prompts were read from the engine after their lease.
func (r *replica) status(lateReads int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emit(&msg.Record{Kind: msg.RecStatus, Status: msg.Status{LateReads: lateReads}})
}

// resets is how often the engine was asked to drop its prefix cache.
func (e *pdEngine) resets() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.dropped
}
