package ingress

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// decisionRig is a rig whose ranks never answer: tests write their streams, and make decisions without
// serving.
type decisionRig struct {
	*rig
	router *appRouter
	seqs   map[routing.RankID]uint64
	open   map[routing.RankID][]uint64
}

const labRanks = 5

func newDecisionRig(t *testing.T, policy string, change func(*app.Application)) *decisionRig {
	t.Helper()
	urls := make([]string, labRanks)
	for i := range urls {
		urls[i] = fmt.Sprintf("http://127.0.0.1:%d", i+1)
	}
	g := newRig(t, options{urls: urls, app: func(a *app.Application) {
		a.Routing.Policy = policy
		if change != nil {
			change(a)
		}
	}})
	return &decisionRig{
		rig: g, router: g.in.findAppRouter("demo"), seqs: map[routing.RankID]uint64{},
		open: map[routing.RankID][]uint64{},
	}
}

// tell delivers a record of rank i as its stream would.
func (b *decisionRig) tell(i int, rec msg.Record) {
	r := b.replicas[i]
	b.seqs[r.id]++
	rec.App, rec.Unit, rec.Rank, rec.Epoch, rec.Incarnation, rec.Seq = r.app, r.unit, r.id, r.epoch,
		r.incarnation, b.seqs[r.id]
	b.in.Deliver(&rec)
}

// holds makes rank i hold these blocks on its device.
func (b *decisionRig) holds(i int, hashes []uint64) {
	b.tell(i, msg.Record{Kind: msg.RecKVBegin, KV: msg.KV{
		Tier: kvindex.GPU, BlockSize: routing.DefaultBlockSize,
	}})
	b.tell(i, msg.Record{Kind: msg.RecKV, KV: msg.KV{
		Tier: kvindex.GPU, Delta: kvindex.Delta{Change: kvindex.Stored, Hashes: hashes},
	}})
	b.tell(i, msg.Record{Kind: msg.RecKVEnd, KV: msg.KV{Tier: kvindex.GPU}})
}

// happen is one random event.
func (b *decisionRig) happen(r *rand.Rand) {
	i := r.IntN(labRanks)
	id := b.replicas[i].id
	rec := msg.Record{
		Ingress: "other", ReqID: uint64(r.IntN(1000)), Tokens: 1 + r.IntN(3000),
		Hit: r.IntN(500), Out: r.IntN(50),
	}
	switch n := r.IntN(10); {
	case n < 4 && len(b.open[id]) < 9: // of 8 at most
		rec.Kind = msg.RecAdmitted
		b.open[id] = append(b.open[id], rec.ReqID)
	case n < 8 && len(b.open[id]) > 0:
		rec.ReqID = b.open[id][0]
		rec.Kind = []msg.RecordKind{
			msg.RecFirstToken, msg.RecProgress, msg.RecDone, msg.RecDone,
			msg.RecDone,
		}[r.IntN(5)]
		if rec.Kind == msg.RecDone {
			b.open[id] = b.open[id][1:]
		}
	case n < 9:
		rec.Kind, rec.Accepting = msg.RecState, r.IntN(4) > 0
	default:
		rec.Kind, rec.Status = msg.RecStatus, msg.Status{
			KVUsage: 0.7 * r.Float64(), HasKVUsage: true, Capacity: 50_000,
			BlockSize: routing.DefaultBlockSize,
		}
	}
	b.tell(i, rec)
}

// randomBody is a random request and its path: a text or ids, with a few beginnings that recur.
func randomBody(r *rand.Rand) (path string, text []byte) {
	ids := make([]uint32, 16*(1+r.IntN(6))+r.IntN(16))
	for i := range ids {
		ids[i] = uint32(i/16 + 7*r.IntN(2)*(i/64))
	}
	var body map[string]any
	words := strings.Repeat(fmt.Sprint("word ", r.IntN(3)), 1+r.IntN(200))
	switch r.IntN(5) {
	case 0:
		body = map[string]any{"prompt": ids}
	case 1:
		body = map[string]any{
			"prompt": words,
			"user":   fmt.Sprint("u", r.IntN(5)),
		}
	case 2:
		path = []string{"/v1/responses", "/v1/embeddings"}[r.IntN(2)]
		body = map[string]any{"input": words, "instructions": "be brief"}
	case 3:
		path = []string{"/generate", "/v1/audio/speech", "/invocations"}[r.IntN(3)]
		body = map[string]any{"text": words}
	default:
		path = []string{"", "/v1/messages"}[r.IntN(2)]
		body = map[string]any{"messages": []map[string]string{
			{"role": "user", "content": strings.Repeat("x", r.IntN(3000))},
		}}
	}
	text, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return path, text
}

// live decides for a body on a path as request.handle does, with terms.
func (b *decisionRig) live(path string, body []byte, h http.Header) *request {
	req := newRequest(b.in)
	req.app, req.r, req.choice.Explain = &appRoute{appRevision: b.router.revision.Load(), router: b.router},
		&http.Request{Header: h}, true
	req.route, _ = routerapi.RouteOf(path, body)
	req.r = req.r.WithContext(b.t.Context())
	req.body = &bodyBuffer{b: body}
	require.NoError(b.t, req.scanBody(body))
	require.Nil(b.t, req.prepare())
	_, _, _ = search{req}.decide()
	return req
}

// RP43, RT13: in ten thousand random states over every policy, the live path decides what explain has said,
// bit for bit.
func TestRT13LivePickEqualsExplain(t *testing.T) {
	t.Parallel()
	const states = 10_000
	policies := routing.Names()
	each := states/len(policies) + 1
	for _, policy := range policies {
		t.Run(policy, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // the work in front of a request goes down with time
				half := 0.5
				b := newDecisionRig(t, policy, func(a *app.Application) { a.Routing.BusyThreshold = &half })
				r := rand.New(rand.NewPCG(uint64(len(policy)), 5))
				b.seed(r)
				routed := 0
				for range each {
					for range 3 {
						b.happen(r)
					}
					path, body := randomBody(r)
					h, said := http.Header{}, map[string]string{}
					if policy == "direct" || r.IntN(8) == 0 { // the others mostly decide by themselves
						said["x-dpserve-rank"] = fmt.Sprintf("0/%d", r.IntN(labRanks))
						h[headerRank] = []string{said["x-dpserve-rank"]}
					}
					x, err := b.in.ExplainRoute(t.Context(), "demo",
						&client.Query{Request: body, Route: path, Headers: said})
					require.NoError(t, err)
					req := b.live(path, body, h)
					b.same(x, req)
					if req.choice.Kind == routing.Route {
						routed++
						b.router.router.Load().Observe(
							&routing.Event{
								Kind: routing.EvUndo, Rank: req.choice.Ranked[0],
								ReqID: req.query.ID,
							})
					}
				}
				assert.Greater(t, routed, each/5, "many states let something be picked")
			})
		})
	}
}

// seed gives two ranks some blocks.
func (b *decisionRig) seed(r *rand.Rand) {
	if b.router.inputs().cache == nil {
		return
	}
	for i := range 2 {
		var k prompt
		ids := make([]uint32, 64)
		for j := range ids {
			ids[j] = uint32(j / 16)
		}
		k.fromTokens(b.router, ids, "")
		b.holds(i, k.blocks[:1+r.IntN(len(k.blocks))])
	}
}

// same compares an explanation with the decision made right after it.
func (b *decisionRig) same(x *client.Explanation, req *request) {
	t, d := b.t, &req.choice
	require.Equal(t, routerapi.KindName(d.Kind), x.Decision)
	require.Equal(t, d.Reason, x.Reason)
	require.Equal(t, req.query.Tokens, x.Tokens)
	pick := ""
	if d.Kind == routing.Route {
		pick = d.Ranked[0].String()
	}
	require.Equal(t, pick, x.Pick)
	terms := map[string][]client.Term{}
	for _, term := range d.Terms {
		terms[term.Rank.String()] = append(terms[term.Rank.String()],
			client.Term{
				Name: term.Name, Unit: term.Unit, Raw: term.Raw, Weight: term.Weight,
				Value: term.Value,
			})
	}
	for i := range x.Ranks {
		row := &x.Ranks[i]
		require.True(t, slices.Equal(terms[row.Worker], row.Terms), "terms of %s: %v, %v", row.Worker,
			terms[row.Worker], row.Terms)
		require.Equal(t, row.Worker == pick, row.Picked)
		if id, known := rankleg.ParseRankID(row.Worker); known && row.State != "unknown" {
			require.Equal(t, req.query.HitOn(id), row.HitTokens, "hit of %s", row.Worker)
		}
		require.True(t, row.Eligible || row.Terms == nil && !row.Picked,
			"%s was weighed and is called %s: %s", row.Worker, row.State, row.Why)
		if row.Terms != nil {
			sum := 0.0
			for _, term := range row.Terms {
				sum += term.Value
			}
			require.Equal(t, sum, *row.Score) //nolint:testifylint // bit for bit
		}
	}
}

// TestExplainRows: every state that a rank can be in, in words.
func TestExplainRows(t *testing.T) {
	half := 0.5
	b := newDecisionRig(t, "kv", func(a *app.Application) {
		a.Routing.BusyThreshold = &half
		a.DataParallel.DPSize, a.NumReplicas = 6, 6
	})
	b.tell(1, msg.Record{Kind: msg.RecState, RankState: msg.RankState{Draining: true}})
	b.tell(2, msg.Record{Kind: msg.RecState})
	b.tell(3, msg.Record{Kind: msg.RecStatus, Status: msg.Status{KVUsage: 0.75, HasKVUsage: true}})
	for i := range 8 {
		b.tell(4, msg.Record{Kind: msg.RecAdmitted, Ingress: "other", ReqID: uint64(i), Tokens: 10})
	}
	x, err := b.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: []uint32{1, 2, 3}})
	require.NoError(t, err)
	type row struct{ state, why string }
	var got []row
	for _, r := range x.Ranks {
		got = append(got, row{r.State, r.Why})
	}
	assert.Equal(t, []row{
		{"ok", ""},
		{"draining", "it takes nothing new and lets its requests end"},
		{"not-ready", "its unit is not ready, or its engine does not accept"},
		{"busy", "KV usage 0.75, busy_threshold 0.50"},
		{"full", "8 of 8 requests in flight"},
		{"unknown", "it has not started yet, or is gone; see `dpserve status`"},
	}, got)
	assert.Equal(t, []string{"ranks above busy_threshold 0.5 get nothing"}, x.Notes)
	assert.Equal(t, "prefill_blocks (blocks) + decode_blocks (blocks); lowest wins", x.Formula)
	assert.Equal(t, "0/0", x.Pick)
}

// TestExplainSeesWhatRanksHold: explain shows hits by rank, in tokens and blocks, and a note on estimates.
func TestExplainSeesWhatRanksHold(t *testing.T) {
	b := newDecisionRig(t, "scoring", func(a *app.Application) {
		a.Routing.Params = map[string]any{"profile": "locality"}
	})
	ids := make([]uint32, 100)
	var k prompt
	k.fromTokens(b.router, ids, "")
	b.holds(3, k.blocks[:4])
	x, err := b.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: ids})
	require.NoError(t, err)
	assert.Equal(t, []any{"0/3", "highest_score", 64, 4},
		[]any{x.Pick, x.Reason, x.Ranks[3].HitTokens, x.Ranks[3].HitBlocks})
	assert.Equal(t, []any{"tokens", 6, 16, "tokens", false},
		[]any{x.Identity, x.Blocks, x.BlockSize, x.BlockUnit, x.Estimated})
	assert.Equal(t, "0.9 × prefix_score (share) + 0.1 × load_score (share); highest wins", x.Formula)

	forced, err := b.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: ids, Worker: "0/1"})
	require.NoError(t, err)
	assert.Equal(t, []any{"0/1", routing.ReasonNamedByCaller}, []any{forced.Pick, forced.Reason})
	text := "once upon a time"
	x, err = b.in.ExplainRoute(t.Context(), "demo",
		&client.Query{Prompt: &text, Route: "/v1/chat/completions"})
	require.NoError(t, err)
	assert.True(t, x.Estimated)

	runs := b.dump()
	require.Len(t, runs, 1)
	assert.Equal(t, []any{"0/3", "gpu", "", 4}, []any{
		runs[0].Worker, runs[0].Tier, runs[0].Parent, len(runs[0].Blocks),
	})
	assert.Equal(t, hex16(k.blocks[0]), runs[0].Blocks[0])
}

func (b *decisionRig) dump() []client.Run {
	var out []client.Run
	truncated, err := b.in.DumpEvents(b.t.Context(), "demo", func(r *client.Run) error {
		run := *r
		run.Blocks = slices.Clone(r.Blocks)
		out = append(out, run)
		return nil
	})
	require.NoError(b.t, err)
	require.False(b.t, truncated)
	return out
}

// TestExplainRefusesBadInput: errors are typed, and there is never a panic.
func TestExplainRefusesBadInput(t *testing.T) {
	b := newDecisionRig(t, "power-of-two", nil)
	text, weight, bad := "x", 2.0, -1.0
	for name, c := range map[string]struct {
		q    client.Query
		code problem.Code
		text string
	}{
		"not json":      {client.Query{Request: []byte(`{`)}, problem.InvalidArgument, ""},
		"not an object": {client.Query{Request: []byte(`[]`)}, problem.InvalidArgument, "object"},
		"other model": {
			client.Query{Request: []byte(`{"model": "other", "prompt": "x"}`)},
			problem.NotFound, `app demo does not serve the model "other"`,
		},
		"header": {
			client.Query{Prompt: &text, Headers: map[string]string{"x-dpserve-rank": "x"}},
			problem.InvalidArgument, "x-dpserve-rank must be GROUP/RANK",
		},
		"control call": {
			client.Query{Prompt: &text, Route: "/sleep"},
			problem.InvalidArgument,
			"takes no requests",
		},
		"dots": {
			client.Query{Prompt: &text, Route: "/v1/../sleep"},
			problem.InvalidArgument,
			"takes no requests",
		},
		"response": {
			client.Query{Prompt: &text, Route: "/v1/responses/resp_1/cancel"},
			problem.InvalidArgument,
			"takes no requests",
		},
		"models": {
			client.Query{Prompt: &text, Route: "/v1/models"},
			problem.InvalidArgument,
			"takes no requests",
		},
		"worker": {
			client.Query{TokenIDs: []uint32{1}, Worker: "3"},
			problem.InvalidArgument,
			"is not GROUP/RANK",
		},
		"replay": {
			client.Query{Replay: "nobody"},
			problem.NotFound,
			`no request "nobody" among the last 1024`,
		},
		"override": {
			client.Query{
				TokenIDs: []uint32{1},
				Override: &client.Override{RouterTemperature: &weight},
			},
			problem.InvalidArgument,
			"no effect under policy power-of-two",
		},
	} {
		_, err := b.in.ExplainRoute(t.Context(), "demo", &c.q)
		require.Equal(t, c.code, problem.CodeOf(err), name)
		assert.Contains(t, err.Error(), c.text, name)
	}
	_, err := b.in.ExplainRoute(t.Context(), "nobody", &client.Query{TokenIDs: []uint32{1}})
	require.Equal(t, problem.NotFound, problem.CodeOf(err))
	x, err := b.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: []uint32{1}, Worker: "7/7"})
	require.NoError(t, err)
	assert.Equal(t, []any{"reject", "unknown_rank"}, []any{x.Decision, x.Reason})

	kv := newDecisionRig(t, "kv", nil)
	for _, o := range []*client.Override{{OverlapScoreWeight: &bad}, {RouterTemperature: &bad}} {
		_, err := kv.in.ExplainRoute(t.Context(), "demo", &client.Query{TokenIDs: []uint32{1}, Override: o})
		require.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	}
	x, err = kv.in.ExplainRoute(t.Context(), "demo",
		&client.Query{TokenIDs: []uint32{1}, Override: &client.Override{
			OverlapScoreWeight: &weight, RouterTemperature: &weight,
		}})
	require.NoError(t, err)
	assert.Equal(t, "2 × prefill_blocks (blocks) + decode_blocks (blocks); lowest wins", x.Formula)
	assert.Contains(t, x.Notes[0], "the pick is drawn")
}

// TestReplay: a replay shows the inputs of the decision, the attempt, and the decision of now.
func TestReplay(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(500, `{"error": {"message": "no"}}`), replies(200, wholeAnswer)},
		app:     func(a *app.Application) { a.Routing.Policy = "kv" },
	})
	a := g.post("/v1/chat/completions", chatBody, "X-Request-Id", "first")
	require.Equal(t, http.StatusOK, a.status)
	ar := g.in.findAppRouter("demo")
	for range 20 { // the pick is drawn among equals: until the failing rank was first
		if e, _ := ar.decisions.find("first"); e.attempt == 2 {
			break
		}
		require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", chatBody, "X-Request-Id",
			"first").status)
	}
	x, err := g.in.ExplainRoute(t.Context(), "demo", &client.Query{Replay: "first"})
	require.NoError(t, err)
	require.NotNil(t, x.Replay)
	assert.Equal(t, []any{"first", 2, "kv", "0/1", "lowest_score", []string{"0/0"}},
		[]any{
			x.Replay.RequestID, x.Replay.Attempt, x.Replay.Policy, x.Replay.Pick, x.Replay.Reason,
			x.Replay.Tried,
		})
	assert.WithinDuration(t, time.Now(), x.Replay.At, time.Minute)
	assert.Equal(t, "route", x.Decision)
	assert.True(t, x.Estimated)
	for i := range x.Ranks {
		assert.NotEqual(t, "tried", x.Ranks[i].State, "what it would get now is a new request's")
	}
}

// TestRecentIsBounded: the log keeps the newest decisions, cuts their prompts, and allocates nothing once it
// is full.
func TestRecentIsBounded(t *testing.T) {
	var r decisionLog
	p := prompt{
		unit: kvindex.Tokens, size: 16, tokens: 1,
		promptMemory: promptMemory{blocks: make([]uint64, maxRecentBlocks+1)},
	}
	q := routing.Request{Hits: []routing.Hit{{Rank: 1, Tokens: 16}}, Tokens: 20}
	d := routing.Decision{Ranked: []routing.RankID{1}, Reason: routing.ReasonLowestScore}
	ids := make([]string, 2*maxRecent)
	for i := range ids {
		ids[i] = fmt.Sprint(i)
		r.record(ids[i], 1, "kv", &p, &q, &d)
	}
	assert.Len(t, r.ring, maxRecent)
	for i, id := range ids {
		e, ok := r.find(id)
		require.Equal(t, i >= maxRecent, ok, id)
		if ok {
			require.Equal(t, []any{id, 16, false, maxRecentBlocks},
				[]any{e.id, e.hit, e.whole, len(e.prompt.blocks)})
		}
	}
	assert.Zero(t, testing.AllocsPerRun(100, func() { r.record(ids[0], 1, "kv", &p, &q, &d) }))
	var none decisionLog
	_, ok := none.find("x")
	assert.False(t, ok)
}

func BenchmarkRecentNote(b *testing.B) {
	var r decisionLog
	p := prompt{
		unit: kvindex.Tokens, size: 16, tokens: 2048,
		promptMemory: promptMemory{blocks: make([]uint64, 128)},
	}
	q := routing.Request{Hits: make([]routing.Hit, 8), Tokens: 2048}
	d := routing.Decision{Ranked: []routing.RankID{1}, Reason: routing.ReasonLowestScore}
	b.ReportAllocs()
	for b.Loop() {
		r.record("0123456789abcdef", 1, "kv", &p, &q, &d)
	}
}
