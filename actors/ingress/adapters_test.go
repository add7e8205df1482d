package ingress

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// load says which adapters the rank's engine has.
func (r *replica) load(names ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.adapters = names
	r.emit(&msg.Record{Kind: msg.RecAdapters, Adapters: names})
}

// RP62: a request for an adapter goes only to ranks that have it, near and far, under the engine's name, and
// the answer has the client's. It waits for a rank that starts again, and holds up no other request. An
// adapter that no rank has is 404. /v1/models lists those that engines have loaded, and explain says which
// ranks have none.
func TestRequestsGoWhereTheirAdapterIs(t *testing.T) {
	t.Parallel()
	forEachTransport(t, func(t *testing.T, far bool) {
		var engines []http.HandlerFunc
		for i := range 3 {
			engines = append(engines, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				var q struct{ Model string }
				_ = json.Unmarshal(body, &q)
				w.Header().Set("Content-Type", "application/json")
				_, _ = fmt.Fprintf(w, `{"model":%q,"choices":[{"text":"%d %[1]s","finish_reason":"stop"}]}`,
					q.Model, i)
			})
		}
		g := newRig(t, options{far: far, engines: engines, app: func(a *app.Application) {
			a.Model.Adapters = []app.Adapter{{ID: "gone"}}
		}})
		ask := func(path, model string) answer {
			return g.post(path, fmt.Sprintf(`{"model":%q,"prompt":"a"}`, model))
		}
		g.replicas[1].load("sql")
		g.replicas[2].load("fr", "sql")
		for model, texts := range map[string][]string{
			"demo": {"0 demo", "1 demo", "2 demo"}, "sql": {"1 sql", "2 sql"}, "demo:sql": {"1 sql", "2 sql"},
			"fr": {"2 fr"}, "demo:fr": {"2 fr"}, "none": {}, "demo:none": {}, "gone": {}, "demo:gone": {},
		} {
			for _, path := range []string{"/v1/completions", "/tokenize"} {
				got := map[string]bool{}
				for range 6 {
					a := ask(path, model)
					if len(texts) == 0 {
						assert.Equal(t, http.StatusNotFound, a.status, model)
						continue
					}
					require.Equal(t, http.StatusOK, a.status, a.body)
					var out struct {
						Model   string
						Choices []struct{ Text string }
					}
					require.NoError(t, json.Unmarshal([]byte(a.body), &out))
					assert.Equal(t, model, out.Model)
					got[out.Choices[0].Text] = true
				}
				have := slices.Sorted(maps.Keys(got))
				assert.Subset(t, texts, have, model)
				if path != "/tokenize" { // it takes a rank by chance
					assert.Len(t, have, len(texts), model)
				}
			}
		}
		var list struct{ Data []struct{ ID, Parent string } }
		require.NoError(t, json.Unmarshal([]byte(g.get("/v1/models").body), &list))
		all := []struct{ ID, Parent string }{{"demo", ""}, {"fr", "demo"}, {"sql", "demo"}}
		assert.Equal(t, all, list.Data)
		assert.Equal(t, http.StatusOK, g.get("/v1/models/demo:sql").status)
		assert.Equal(t, http.StatusNotFound, g.get("/v1/models/gone").status)
		x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: []uint32{1}, Model: "fr"})
		require.NoError(t, err)
		assert.Equal(t, []string{"lacking", "lacking", "ok"},
			[]string{x.Ranks[0].State, x.Ranks[1].State, x.Ranks[2].State})

		g.replicas[2].say(false, false, "")
		a := ask("/v1/completions", "fr")
		assert.Equal(t, http.StatusServiceUnavailable, a.status)
		assert.Contains(t, a.body, "no rank that has the adapter fr is ready")

		g.replicas[2].say(false, true, "engine_died") // it is started again
		waits := make(chan answer, 1)
		go func() { waits <- ask("/v1/completions", "fr") }()
		eventually(t, func() bool { return g.in.QueueLen("demo") == 1 }, "it waits")
		assert.Equal(t, http.StatusOK, ask("/v1/completions", "demo").status)
		g.replicas[2].reborn()
		g.phase(g.replicas[2].unit, state.Ready, 2)
		a = <-waits
		assert.Contains(t, a.body, "2 fr")

		g.replicas[2].load()
		assert.Equal(t, http.StatusNotFound, ask("/v1/completions", "fr").status)
	})
}

// vLLM knows an adapter by its name, SGLang behind a colon.
func TestTheEnginesNameOfAnAdapter(t *testing.T) {
	vllm, sglang := app.Engine{Kind: app.KindVLLM}, app.Engine{Kind: app.KindSGLang}
	attached := app.Engine{Kind: app.KindAttach, Family: app.FamilySGLang}
	for _, c := range []struct {
		engine                      app.Engine
		base, adapter, client, want string
	}{
		{vllm, "m", "", "m", ""},
		{vllm, "m", "sql", "sql", ""},
		{vllm, "m", "sql", "m:sql", "sql"},
		{sglang, "m", "sql", "sql", "m:sql"},
		{sglang, "m", "sql", "m:sql", ""},
		{sglang, "m", "sql", "alias:sql", "m:sql"},
		{attached, "a:7b", "sql", "sql", "a:sql"}, // it reads what is behind the first colon
	} {
		s := &appRevision{app: &app.Application{Model: app.Model{ID: c.base}, Engine: c.engine}}
		assert.Equal(t, c.want, s.engineName(c.adapter, c.client), "%+v", c)
	}
}

// RP62: with two pools, both ranks of a pair have the adapter. Where no prefill rank has it, a decode rank
// computes the prompt; where no decode rank has it, it is 404.
func TestPairsHaveTheAdapter(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{"round-robin", "cache-aware"} { // both pools read a prompt alike, or not
		g := newPairRig(t, options{prefills: 2, decodes: 2, change: func(p, _ *app.Application) {
			p.Routing.Policy = policy
		}})
		g.prefills[1].load("both", "prefill")
		g.decodes[0].load("both", "decode")
		for _, model := range []string{"both", "demo:both", "decode", "prefill"} {
			for range 4 {
				a := g.post("/v1/completions", fmt.Sprintf(`{"model":%q,"prompt":"a","max_tokens":3}`, model))
				if model == "prefill" {
					assert.Equal(t, http.StatusNotFound, a.status)
					continue
				}
				way := "remote"
				if model == "decode" {
					way = "fallback"
				}
				g.served(a, way)
				assert.Equal(t, "0", a.header.Get("X-Dpserve-Rank"), model)
				assert.Equal(t, way == "remote", a.header.Get("X-Dpserve-Prefill-Rank") == "0/1", model)
			}
		}
		for _, l := range g.fleet.Legs("") {
			assert.Contains(t, []string{`"both"`, `"decode"`}, string(l.Fields["model"]), l.Side)
		}
	}
}

// RP62: a lockstep group's queue holds what any rank may serve. A request whose adapter only some ranks have
// waits beside it, for those ranks.
func TestLockstepGroupsHoldNoRequestForSomeRanks(t *testing.T) {
	t.Parallel()
	waits := func(a *app.Application) { a.Timeouts.QueueS = 100 }
	inGroupRig(t, groupOptions{ranks: 3, ingresses: 2, max: 2, app: waits}, func(t *testing.T, g *groupRig) {
		for i, r := range g.replicas {
			r.load([]string{"all", "one"}[:1+i/2]...)
		}
		g.fill(2)
		var waiting []<-chan reply
		for _, model := range []string{"demo", "all", "one"} {
			waiting = append(waiting, g.send(t.Context(), "n2", fmt.Sprintf(
				`{"model":%q,"stream":true,"messages":[]}`, model), "X-Request-Id", model))
		}
		time.Sleep(100 * time.Millisecond)
		assert.Equal(t, 2, g.held())
		assert.Equal(t, 3, g.nodes[1].QueueLen("demo"))
		for _, c := range waiting {
			r := <-c
			assert.Equal(t, http.StatusOK, r.status, r.body)
		}
		for _, a := range g.engine.arrivals() {
			assert.True(t, a.id != "one" || a.rank == 2, "%+v", a)
		}
	})
}
