package ingress

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/routing"
)

// decide gives both pools a decider.
func decide(rule string) func(p, d *app.Application) {
	return func(p, d *app.Application) { p.Disaggregation.Decide, d.Disaggregation.Decide = rule, rule }
}

// happen is one random event of a rank of either pool, or of the table of pairs.
func (g *pairRig) happen(r *rand.Rand, open map[*replica][]uint64) {
	rk := g.replicas[r.IntN(len(g.replicas))]
	rec := msg.Record{
		Ingress: "other", ReqID: r.Uint64() >> 1, Tokens: 1 + r.IntN(30_000), Out: r.IntN(50),
	}
	switch n := r.IntN(12); {
	case n < 4 && len(open[rk]) < 9: // of 8 at most
		rec.Kind = msg.RecAdmitted
		open[rk] = append(open[rk], rec.ReqID)
	case n < 8 && len(open[rk]) > 0:
		rec.ReqID = open[rk][0]
		rec.Kind = []msg.RecordKind{msg.RecFirstToken, msg.RecDone, msg.RecDone}[r.IntN(3)]
		if rec.Kind == msg.RecDone {
			open[rk] = open[rk][1:]
		}
	case n < 9:
		rec.Kind, rec.Accepting = msg.RecState, r.IntN(4) > 0
	case n < 10:
		rec.Kind, rec.Status = msg.RecStatus, msg.Status{
			KVUsage: r.Float64(), HasKVUsage: true, Capacity: 60_000, BlockSize: routing.DefaultBlockSize,
		}
	default:
		g.changeTable(r)
		return
	}
	rk.mu.Lock()
	defer rk.mu.Unlock()
	rk.emit(&rec)
}

// changeTable lets a prefill rank hold more or nothing, and a pair meet or part.
func (g *pairRig) changeTable(r *rand.Rand) {
	ref := func(rk *replica) routing.RankRef {
		return routing.RankRef{ID: rk.id, Incarnation: rk.incarnation}
	}
	p, d := ref(g.prefills[r.IntN(len(g.prefills))]), ref(g.decodes[r.IntN(len(g.decodes))])
	g.in.findPair("demo").router.Update(func(t *routing.PairTable) {
		switch r.IntN(5) {
		case 0:
			t.Lease(p, r.IntN(20_000))
		case 1:
			t.Release(p, 1<<30)
		case 2:
			t.ForgetDecode(d)
		default:
			t.SetMet(p, d)
		}
	})
}

// live decides for a body as request.handle does, with all candidates.
func (g *pairRig) live(body []byte, h http.Header) *request {
	req := newRequest(g.in)
	req.app = g.in.table.Load().root.models["demo"]
	req.route, _ = routerapi.RouteOf("", body)
	req.r = (&http.Request{Header: h}).WithContext(g.t.Context())
	req.body = &bodyBuffer{b: body}
	require.NoError(g.t, req.scan.Scan(req.route, body))
	require.Nil(g.t, req.prepare())
	req.split.choice.Explain = true
	_, _, _ = search{req}.decide()
	return req
}

// undo takes a decision of live back.
func (g *pairRig) undo(req *request) {
	s := req.split
	switch d := &s.choice; {
	case req.choice.Kind == routing.Route && d.Reason == "":
		s.undo(&bump{router: req.attempt.router, id: req.choice.Ranked[0], reqID: req.query.ID})
	case d.Reason != "" && d.Kind == routing.Route:
		s.undoChoice()
	}
}

// randomPairBody is a random request: short or long, with beginnings that recur; some cannot be split.
func randomPairBody(r *rand.Rand) []byte {
	ids := make([]uint32, 16*(1+r.IntN(6)))
	if r.IntN(2) == 0 {
		ids = make([]uint32, 1000*(1+r.IntN(9)))
	}
	for i := range ids {
		ids[i] = uint32(i/16 + 7*r.IntN(2)*(i/64))
	}
	body := map[string]any{"model": "demo", "prompt": ids}
	if r.IntN(8) == 0 {
		body["n"] = 2
	}
	text, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return text
}

// RP43: in random states, under every decider, the live path takes the pair that explain has said, for the
// same reason and with the same terms, bit for bit. The policies are those whose view does not change with
// time alone.
func TestLivePairEqualsExplain(t *testing.T) {
	t.Parallel()
	policies := []string{
		"round-robin", "random", "power-of-two", "least-loaded", "scoring", "session-affinity",
		"prefix-aware", "cache-aware",
	}
	for i, rule := range []string{"isl", "prefill-load", "uncached>=512", "always", "mex"} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(uint64(i), 5))
			ways := map[string]int{}
			for k := range 3 {
				policy, other := policies[(3*i+k)%len(policies)], policies[(3*i+2*k+4)%len(policies)]
				g := newPairRig(t, options{prefills: 3, decodes: 4, change: func(p, d *app.Application) {
					decide(rule)(p, d)
					busy := 0.8
					p.Routing.Policy, d.Routing.Policy, p.Routing.BusyThreshold = policy, other, &busy
				}})
				open := map[*replica][]uint64{}
				for range 50 {
					for range 4 {
						g.happen(r, open)
					}
					body, h, said := randomPairBody(r), http.Header{}, map[string]string{}
					for _, name := range []string{headerRank, headerPrefillRank} {
						if r.IntN(10) == 0 {
							said[name] = fmt.Sprintf("0/%d", r.IntN(3))
							h[name] = []string{said[name]}
						}
					}
					x, err := g.in.ExplainRoute(t.Context(), "demo",
						&client.Query{Request: body, Headers: said})
					require.NoError(t, err)
					req := g.live(body, h)
					g.samePair(x, req)
					ways[x.Pair.Way]++
					g.undo(req)
				}
			}
			assert.Positive(t, ways["remote"], ways)
			assert.Positive(t, ways["local"], ways)
			assert.Positive(t, ways["fallback"]+ways["none"], ways)
		})
	}
}

// samePair compares an explanation with the decision that was made right after it.
func (g *pairRig) samePair(x *client.Explanation, req *request) {
	t, d := g.t, &req.split.choice
	if req.split.body.Reason != 0 { // it went to the decode pool's Router alone
		require.Equal(t, routerapi.KindName(req.choice.Kind), x.Decision)
		want := []string{"", req.choice.Reason}
		if req.choice.Kind == routing.Route {
			want = []string{req.choice.Ranked[0].String(), routing.PairCannotSplit}
		}
		require.Equal(t, want, []string{x.Pick, x.Pair.Reason})
		return
	}
	require.Equal(t, routerapi.KindName(d.Kind), x.Decision)
	require.Equal(t, d.Reason, x.Pair.Reason)
	way := "none"
	if d.Kind == routing.Route {
		way = wayNames[req.split.way]
	}
	require.Equal(t, way, x.Pair.Way)
	var again client.Explanation
	routerapi.ExplainPair(&again, &client.Explanation{}, &routerapi.PairFacts{
		Decision: d, Why: &routing.PairWhy{Decode: routing.Decision{Kind: routing.Reject}},
	})
	require.Equal(t, again.Pair.Candidates, x.Pair.Candidates)
	prefill, decode := "", ""
	if d.Kind == routing.Route {
		decode = d.Decode.String()
	}
	if d.Remote {
		prefill = d.Prefill.String()
	}
	require.Equal(t, []string{prefill, decode, prefill},
		[]string{x.Pair.Prefill, x.Pick, x.Pair.PrefillPool.Pick})
	require.NotEmpty(t, x.Pair.Why)
	marks := 0
	for _, c := range x.Pair.Candidates {
		if c.Picked {
			marks++
		}
		sum := 0.0
		for _, term := range c.Terms {
			sum += term.Value
		}
		require.Equal(t, sum, c.CostMs) //nolint:testifylint // bit for bit
	}
	if d.Kind == routing.Route {
		require.Equal(t, 1, marks, "%+v", x.Pair.Candidates)
	}
}

// RP43: both pools and what is counted stay as they were.
func TestExplainPairChangesNothing(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 2, change: decide("isl")})
	p := g.in.findPair("demo")
	prefill, decode := p.router.Routers()
	look := func() []any {
		return []any{prefill.Snapshot().Ranks, decode.Snapshot().Ranks, p.router.Counts()}
	}
	before := look()
	text := "once upon a time"
	for range 3 {
		x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Prompt: &text})
		require.NoError(t, err)
		assert.Equal(t, []any{"demo", "demo.prefill", "isl"},
			[]any{x.App, x.Pair.PrefillPool.App, x.Pair.Decide})
		_, err = g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1, 2}})
		require.NoError(t, err)
	}
	assert.Equal(t, before, look())
	g.requireMetric(`dpserve_pd_decisions_total{app="demo",reason="always"}`, "")

	x, err := g.in.ExplainRoute(t.Context(), "demo.prefill", &client.Query{TokenIDs: []uint32{1}})
	require.NoError(t, err)
	assert.Nil(t, x.Pair, "the name of a pool is that pool alone")
}

// TestExplainWithoutPrefillRanks: what live requests get is local, not a fall-back, and it says why.
func TestExplainWithoutPrefillRanks(t *testing.T) {
	g := newPairRig(t, options{prefills: 0, decodes: 2, change: func(p, _ *app.Application) {
		p.Engine.Kind = app.KindAttach
	}})
	x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: []uint32{1, 2, 3}})
	require.NoError(t, err)
	assert.Equal(t, []any{"local", "no_prefill_rank", "", true},
		[]any{x.Pair.Way, x.Pair.Reason, x.Pair.Prefill, x.Pick != ""})
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, x.Pair.Way, a.header.Get("X-Dpserve-Prefill"))
	st, ok := g.in.PairStatus("demo")
	require.True(t, ok)
	assert.Equal(t, "off: there is no prefill rank", st.Pairs)
	assert.Equal(t, uint64(1), st.Local)
}

// TestReplayPair: a replay shows the pair that a live request got, and what it would get now.
func TestReplayPair(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 2, change: func(p, d *app.Application) {
		decide("always")(p, d)
		p.Routing.Policy, d.Routing.Policy = "scoring", "scoring"
	}})
	a := g.post("/v1/chat/completions", chatBody, "X-Request-Id", "mine")
	g.served(a, "remote")
	x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Replay: "mine"})
	require.NoError(t, err)
	require.NotNil(t, x.Replay)
	decode := a.header.Get("X-Dpserve-Group") + "/" + a.header.Get("X-Dpserve-Rank")
	assert.Equal(t, []any{"always", "always", decode},
		[]any{x.Replay.Policy, x.Replay.Reason, x.Replay.Pick})
	assert.Equal(t, &client.PairReplay{Way: "remote", Prefill: a.header.Get("X-Dpserve-Prefill-Rank")},
		x.Replay.Pair)
	assert.Equal(t, "remote", x.Pair.Way)
	assert.Equal(t, x.Tokens, x.Pair.PrefillPool.Tokens)
	assert.Equal(t, x.Blocks, x.Pair.PrefillPool.Blocks)

	body := `{"model":"demo","n":2,"messages":[{"role":"user","content":"hi"}]}`
	g.post("/v1/chat/completions", body, "X-Request-Id", "two")
	x, err = g.in.ExplainRoute(t.Context(), "demo", &client.Query{Replay: "two"})
	require.NoError(t, err)
	assert.Nil(t, x.Replay.Pair)
	assert.Equal(t, []string{"local", "cannot_split"}, []string{x.Pair.Way, x.Pair.Reason})

	_, err = g.in.ExplainRoute(t.Context(), "demo", &client.Query{Replay: "nobody"})
	require.Equal(t, problem.NotFound, problem.CodeOf(err))
	assert.ErrorContains(t, err, "of app demo")
}

// TestPairInfo: router show has the rule, and both pools.
func TestPairInfo(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 3, change: decide("uncached>=5")})
	g.served(g.post("/v1/completions", `{"model":"demo","prompt":[1,2,3,4,5,6,7,8]}`), "remote")
	g.served(g.post("/v1/completions", `{"model":"demo","prompt":[1,2,3]}`), "local")
	info, err := g.in.RouterInfo("demo")
	require.NoError(t, err)
	assert.Equal(t, []any{"demo", 3, 3}, []any{info.App, info.Ranks, info.Ready})
	p := info.Pair
	require.NotNil(t, p)
	assert.Equal(t, []any{"uncached>=5", "sim", "local", "on", 6, 6},
		[]any{p.Decide, p.Transfer, p.Fallback, p.Pairs, p.Met, p.All})
	assert.Equal(t, map[string]uint64{"long_prefill": 1, "short_prefill": 1}, p.Decisions)
	assert.Equal(t, []any{"demo.prefill", 2, 2}, []any{p.Prefill.App, p.Prefill.Ranks, p.Prefill.Ready})
	st, ok := g.in.PairStatus("demo")
	require.True(t, ok)
	assert.Equal(t, client.PDStatus{
		Transfer: "sim", Decide: "uncached>=5", Fallback: "local", Pairs: "on", Met: 6, All: 6, Remote: 1,
		Local: 1,
	}, st)
	_, ok = g.in.PairStatus("nobody")
	assert.False(t, ok)
	reset, err := g.in.ResetRouter("demo")
	require.NoError(t, err)
	assert.Equal(t, client.ResetResult{App: "demo", Ranks: 5}, reset)
}

// RP41: a reservation takes a place on both ranks. The first token gives the prefill rank's back, the end the
// decode rank's, and each is given back once.
func TestPairReservation(t *testing.T) {
	for name, far := range map[string]bool{"near": false, "far": true} {
		t.Run(name, func(t *testing.T) {
			g := newPairRig(t, options{prefills: 1, decodes: 1, far: far})
			p, d := g.prefills[0], g.decodes[0]
			ids := make([]uint32, 100)
			q := &client.BestWorkerRequest{TokenIDs: ids, RequestID: "r1"}
			w, err := g.in.BestWorker(t.Context(), "demo", q)
			require.NoError(t, err)
			require.NotNil(t, w.PrefillWorker)
			assert.Equal(t, []string{"0/0", d.url, "0/0", p.url, "r1", "always"},
				[]string{w.Worker, w.URL, w.PrefillWorker.Worker, w.PrefillWorker.URL, w.RequestID, w.Reason})
			assert.Equal(t, []int{1, 1}, []int{p.inFlight(), d.inFlight()})
			assert.Equal(t, int64(100), g.leased(p))
			_, err = g.in.BestWorker(t.Context(), "demo", q)
			require.Equal(t, problem.Conflict, problem.CodeOf(err))

			dones := func(r *replica) int {
				r.mu.Lock()
				defer r.mu.Unlock()
				return len(r.dones)
			}
			before := []int{dones(p), dones(d)}
			for range 2 {
				require.NoError(t, g.in.MarkPrefillComplete("demo", "r1"))
			}
			eventually(t, func() bool { return p.inFlight() == 0 }, "the prefill place is back")
			assert.Equal(t, 1, d.inFlight())
			assert.Zero(t, g.leased(p))
			require.NoError(t, g.in.Free("demo", "r1"))
			eventually(t, func() bool { return d.inFlight() == 0 }, "the decode place is back")
			require.Equal(t, problem.NotFound, problem.CodeOf(g.in.Free("demo", "r1")))
			assert.Equal(t, []int{before[0] + 1, before[1] + 1}, []int{dones(p), dones(d)})

			_, err = g.in.BestWorker(t.Context(), "demo", q)
			require.NoError(t, err)
			require.NoError(t, g.in.Free("demo", "r1"))
			eventually(t, func() bool { return p.inFlight()+d.inFlight() == 0 }, "both places are back")
			assert.Zero(t, g.leased(p))
			prefill, decode := g.in.findPair("demo").router.Routers()
			eventually(t, func() bool {
				return prefill.Snapshot().Ranks[0].Load.O() == 0 && decode.Snapshot().Ranks[0].Load.O() == 0
			}, "no Router counts anything")
		})
	}
}

// RP41: if a rank does not admit, nothing stays counted on the other.
func TestPairReservationIsRefused(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 1})
	refuse := func(*msg.Admit) msg.Refusal { return msg.Draining }
	q := &client.BestWorkerRequest{TokenIDs: make([]uint32, 100), RequestID: "r1"}
	g.prefills[0].setRefuse(refuse)
	for range 4 { // whichever is asked first
		w, err := g.in.BestWorker(t.Context(), "demo", q)
		require.NoError(t, err)
		assert.Equal(t, "0/1", w.PrefillWorker.Worker)
		require.NoError(t, g.in.Free("demo", "r1"))
	}
	g.decodes[0].setRefuse(refuse)
	_, err := g.in.BestWorker(t.Context(), "demo", q)
	require.Equal(t, problem.Unavailable, problem.CodeOf(err))
	g.decodes[0].setRefuse(nil)
	for _, r := range g.prefills {
		assert.Zero(t, r.inFlight())
		assert.Zero(t, g.leased(r))
	}
	prefill, decode := g.in.findPair("demo").router.Routers()
	for _, v := range []routing.View{prefill.Snapshot(), decode.Snapshot()} {
		for i := range v.Ranks {
			assert.Zero(t, v.Ranks[i].Load.O(), v.Ranks[i].ID)
		}
	}
	_, err = g.in.BestWorker(t.Context(), "demo", q)
	require.NoError(t, err, "the id is free again")
	require.NoError(t, g.in.Free("demo", "r1"))
}

// RP43: a rank of role both gets what is not split, and explain says so.
func TestExplainWhereEnginesTakeNoPlainRequest(t *testing.T) {
	o := options{prefills: 1, decodes: 3, cold: true, transfer: app.TransferSGLang}
	o.change = func(p, d *app.Application) {
		p.Engine.Ranks[0].PD.Bootstrap = "http://127.0.0.1:1" // so that no pair meets
		d.Engine.Ranks[1].Role = app.RoleBoth
		d.Routing.Policy = "least-loaded"
	}
	g := newPairRig(t, o)
	for body, way := range map[string]string{
		`{"model":"demo","prompt":[1,2,3]}`: "fallback", `{"model":"demo","prompt":[1,2,3],"n":2}`: "local",
	} {
		for range 4 {
			x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Request: []byte(body)})
			require.NoError(t, err)
			assert.Equal(t, []string{way, "0/1"}, []string{x.Pair.Way, x.Pick})
			req := g.live([]byte(body), http.Header{})
			g.samePair(x, req)
			g.undo(req)
		}
	}
	w, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1}})
	require.NoError(t, err)
	assert.Equal(t, "0/1", w.Worker)
}

// RP41: both places come back by themselves.
func TestPairReservationExpires(t *testing.T) {
	g := newPairRig(t, options{
		prefills: 1, decodes: 1, timers: Timers{Reservation: 20 * time.Millisecond},
	})
	_, err := g.in.BestWorker(t.Context(), "demo",
		&client.BestWorkerRequest{TokenIDs: []uint32{1}, RequestID: "r1"})
	require.NoError(t, err)
	eventually(t, func() bool { return g.prefills[0].inFlight()+g.decodes[0].inFlight() == 0 }, "expired")
	assert.Equal(t, "reservation_expired", g.prefills[0].lastDone(t).Cause)
	assert.Equal(t, "reservation_expired", g.decodes[0].lastDone(t).Cause)
	assert.Zero(t, g.leased(g.prefills[0]))
}

// TestExplainWhereFallbackFails: a decode rank that has met a prefill rank is taken before the request is
// refused, by live requests and by explain.
func TestExplainWhereFallbackFails(t *testing.T) {
	g := newPairRig(t, options{prefills: 1, decodes: 3, change: func(p, d *app.Application) {
		d.Routing.Policy = "least-loaded"
		p.Disaggregation.Fallback, d.Disaggregation.Fallback = app.FallbackFail, app.FallbackFail
	}})
	forget := func(ranks ...*replica) {
		g.in.findPair("demo").router.Update(func(t *routing.PairTable) {
			for _, r := range ranks {
				t.ForgetDecode(routing.RankRef{ID: r.id, Incarnation: r.incarnation})
			}
		})
	}
	body := []byte(`{"model":"demo","prompt":[1,2,3]}`)
	forget(g.decodes[0], g.decodes[1])
	for range 3 {
		x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Request: body})
		require.NoError(t, err)
		assert.Equal(t, []string{"remote", "0/0", "0/2"}, []string{x.Pair.Way, x.Pair.Prefill, x.Pick})
		req := g.live(body, http.Header{})
		g.samePair(x, req)
		g.undo(req)
	}
	forget(g.decodes[2])
	x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Request: body})
	require.NoError(t, err)
	assert.Equal(t, []string{"none", "not_prewarmed", "reject"},
		[]string{x.Pair.Way, x.Pair.Reason, x.Decision})
	_, err = g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1}})
	require.Equal(t, problem.Unavailable, problem.CodeOf(err))
	_, err = g.in.BestWorker(t.Context(), "demo",
		&client.BestWorkerRequest{TokenIDs: []uint32{1}, RequestID: "r1"})
	require.Equal(t, problem.Unavailable, problem.CodeOf(err))
	assert.ErrorContains(t, err, "no prefill rank can compute the prompt")
}
