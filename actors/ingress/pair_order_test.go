package ingress

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

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

// TestPush: the decode leg is written first, both legs carry one fresh request id, and the decode leg names
// the prefill engine. A prefill leg that fails ends the decode leg.
func TestPush(t *testing.T) {
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 1, change: attachPools(app.TransferNIXLPush,
		app.AttachPD{EngineID: "e1", SideChannel: "10.0.0.1:5600", TPSize: 2})})
	g.p[0].set(func(http.ResponseWriter, *http.Request, pdCall) bool {
		assert.Eventually(t, func() bool { return len(g.d[0].taken()) == 1 }, soon, time.Millisecond,
			"the decode leg came first")
		return false
	})
	g.d[0].set(func(http.ResponseWriter, *http.Request, pdCall) bool {
		assert.Eventually(t, func() bool { return g.prefills[0].firstTokens() == 1 }, soon, time.Millisecond,
			"the engine waits for the push")
		return false
	})
	g.served(g.post("/v1/chat/completions", streamBody, "X-Request-Id", "mine"), "remote")
	p, d := g.p[0].taken()[0], g.d[0].taken()[0]
	id := d.header.Get("X-Request-Id")
	assert.NotEqual(t, "mine", id)
	assert.Equal(t, id, p.header.Get("X-Request-Id"))
	assert.Equal(t, map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e1",
		"remote_host": "10.0.0.1", "remote_port": 5600.0, "tp_size": 2.0, "pp_size": 1.0,
		"remote_request_id": id,
	}, d.params)
	eventually(t, func() bool { return g.prefills[0].inFlight() == 0 }, "the prefill ticket is back")
	assert.Equal(t, msg.OK, g.prefills[0].lastDone(t).Outcome)

	var h hangingEngine
	g.p[0].set(onlyPrefill(replies(500, `{}`)))
	g.d[0].set(func(w http.ResponseWriter, r *http.Request, c pdCall) bool {
		if c.params == nil {
			return false
		}
		h.sends()(w, r)
		return true
	})
	g.served(g.post("/v1/chat/completions", streamBody), "fallback")
	eventually(t, func() bool { return h.left.Load() == 1 }, "no decode leg waits for a prefill that failed")
	for _, done := range g.decodes[0].allDones() {
		assert.NotEqual(t, msg.FailedOutcome, done.Outcome)
	}
}

// TestMooncake: both legs run at once and meet by a transfer id.
func TestMooncake(t *testing.T) {
	bootstrap := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/query", r.URL.Path)
		replies(200, `{"0":{"engine_id":"e7","worker_addr":{"0":{"0":"tcp://10.0.0.1:1"}}}}`)(w, r)
	}))
	defer bootstrap.Close()
	g := newPairRig(t, pairOptions{prefills: 1, decodes: 1, change: attachPools(app.TransferMooncake,
		app.AttachPD{Bootstrap: bootstrap.URL})})
	g.d[0].set(func(http.ResponseWriter, *http.Request, pdCall) bool {
		assert.Eventually(t, func() bool { return len(g.p[0].taken()) == len(g.d[0].taken()) }, soon,
			time.Millisecond, "a decode engine waits for the other leg")
		return false
	})
	for range 2 {
		g.served(g.post("/v1/chat/completions", chatBody), "remote")
	}
	require.Equal(t, 2, total(g.p))
	ids := map[any]bool{}
	for i, d := range g.d[0].taken() {
		p := g.p[0].taken()[i]
		ids[d.params["transfer_id"]] = true
		assert.Equal(t, "e7", d.params["remote_engine_id"])
		assert.Equal(t, bootstrap.URL, d.params["remote_bootstrap_addr"])
		assert.Equal(t, true, p.body["ignore_eos"])
	}
	for _, p := range g.p[0].taken() {
		assert.True(t, ids[p.params["transfer_id"]])
	}
	assert.Len(t, ids, 2, "each request has its own")
}

// TestRooms: SGLang's legs meet in a room of the prefill rank, whatever rank was named.
func TestRooms(t *testing.T) {
	t.Parallel()
	bootstrap := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/route", r.URL.Path)
		replies(200, `{"dp_size":4,"page_size":1}`)(w, r)
	}))
	defer bootstrap.Close()
	change := attachPools(app.TransferSGLang, app.AttachPD{Bootstrap: bootstrap.URL})
	g := newPairRig(t, pairOptions{
		prefills: 4, decodes: 2, change: change, address: msg.Target{Addressing: "body", Selector: 3},
	})
	for _, e := range g.d { // a decode engine waits for the other leg
		e.set(func(_ http.ResponseWriter, _ *http.Request, c pdCall) bool {
			assert.Eventually(t, func() bool {
				for _, p := range g.p {
					for _, other := range p.taken() {
						if other.body["bootstrap_room"] == c.body["bootstrap_room"] {
							return true
						}
					}
				}
				return false
			}, soon, time.Millisecond)
			return false
		})
	}
	for i := range 8 {
		rank := fmt.Sprintf("0/%d", i%4)
		a := g.post("/v1/chat/completions", streamBody, "X-Dpserve-Prefill-Rank", rank, "X-Dpserve-Rank",
			fmt.Sprintf("0/%d", i%2))
		g.served(a, "remote")
		assert.Equal(t, rank, a.header.Get("X-Dpserve-Prefill-Rank"))
		assert.Equal(t, fmt.Sprint(i%2), a.header.Get("X-Dpserve-Rank"))
	}
	rooms := map[float64]bool{}
	for i, e := range g.p {
		require.Len(t, e.taken(), 2)
		for _, c := range e.taken() {
			room := c.body["bootstrap_room"].(float64)
			rooms[room] = true
			assert.InDelta(t, i, c.body["disagg_prefill_dp_rank"], 0)
			assert.InDelta(t, 3, c.body["routed_dp_rank"], 0, "the address of the leg's rank")
			assert.Equal(t, true, c.body["stream"])
		}
	}
	for _, e := range g.d {
		for _, c := range e.taken() {
			assert.True(t, rooms[c.body["bootstrap_room"].(float64)], "both legs have the room")
			assert.InDelta(t, 3, c.body["routed_dp_rank"], 0)
		}
	}
	assert.Len(t, rooms, 8, "no room is used twice")
	a := g.post("/v1/chat/completions",
		`{"model":"demo","n":2,"messages":[{"role":"user","content":"hi"}]}`)
	assert.Equal(t, 503, a.status)
	assert.Contains(t, a.body, "several_choices")
	assert.Contains(t, a.body, "role both")
}

// TestHeldAddressing: an engine that hosts several ranks is told which one a leg is for.
func TestHeldAddressing(t *testing.T) {
	for _, far := range []bool{false, true} {
		for _, mode := range []string{"header", "body"} {
			t.Run(fmt.Sprint(mode, far), func(t *testing.T) {
				g := newPairRig(t, pairOptions{
					prefills: 1, decodes: 1, far: far, address: msg.Target{Addressing: mode, Selector: 6},
				})
				g.served(g.post("/v1/chat/completions", streamBody), "remote")
				for _, c := range append(g.p[0].taken(), g.d[0].taken()...) {
					if mode == "header" {
						assert.Equal(t, "6", c.header.Get("X-Data-Parallel-Rank"))
						assert.NotContains(t, c.raw, "routed_dp_rank")
					} else {
						assert.InDelta(t, 6, c.body["routed_dp_rank"], 0)
					}
				}
			})
		}
	}
}
