package ingress

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/pairengine"
)

// pairRig is an ingress with an application of two pools, in front of stub engines that check each leg.
type pairRig struct {
	*rig
	fleet             *pairengine.Fleet
	prefills, decodes []*replica
	p, d              []*pairengine.Engine
}

func newPairRig(t testing.TB, o options) *pairRig {
	t.Helper()
	transfer := cmp.Or(o.transfer, app.TransferSim)
	g := &pairRig{rig: newFrame(t, &o), fleet: pairengine.New(t, transfer, model1)}
	g.fleet.Mark = ""
	if o.wrap == nil {
		o.wrap = g.serve
	}
	specs, counts := [2]*app.Application{demoApp(), demoApp()}, [2]int{o.prefills, o.decodes}
	var engines []*pairengine.Engine
	var urls []string
	for side, pool := range [...]string{app.PoolPrefill, app.PoolDecode} {
		a, n := specs[side], counts[side]
		a.Pool = pool
		a.Disaggregation = &app.Disaggregation{
			Transfer: transfer, Decide: app.DecideAlways, Fallback: app.FallbackLocal,
		}
		a.DataParallel.DPSize, a.NumReplicas = n, n
		for range n {
			e := g.fleet.Make(pool, 1)
			url := o.wrap(e)
			e.Addr = strings.TrimPrefix(url, "http://")
			engines, urls = append(engines, e), append(urls, url)
		}
		if o.transfer != "" {
			attach(a, engines[len(engines)-n:])
		}
	}
	if o.change != nil {
		o.change(specs[0], specs[1])
	}
	for side, a := range specs {
		for i := range counts[side] {
			unit := fmt.Sprintf("%s/0/%d", a.PoolName(), i)
			if a.DataParallel.Coupling == app.Lockstep {
				unit = a.PoolName() + "/0"
			}
			url := urls[side*o.prefills+i]
			g.feed.add(a.PoolName(), unit, routing.ID(0, i), url, o.max).address = o.address
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

// attach makes a pool one of attached engines.
func attach(a *app.Application, engines []*pairengine.Engine) {
	a.Engine = app.Engine{Kind: app.KindAttach, Family: app.FamilyVLLM}
	for _, e := range engines {
		r := app.AttachRank{URL: "http://" + e.Addr, Role: a.Pool}
		if a.Pool == app.PoolPrefill {
			switch a.Disaggregation.Transfer {
			case app.TransferNIXLPush:
				r.PD = &app.AttachPD{EngineID: e.Name, SideChannel: "127.0.0.1:5600", TPSize: 1}
			case app.TransferMooncake, app.TransferSGLang:
				r.PD = &app.AttachPD{Bootstrap: r.URL}
			}
		}
		a.Engine.Ranks = append(a.Engine.Ranks, r)
	}
}

// answers makes an engine answer every leg of a client's request with h.
func answers(h http.HandlerFunc) func(l *pairengine.Leg) bool {
	return func(l *pairengine.Leg) bool { return l.Handle(h) }
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
