package ingress

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
)

func policy(name string) func(*app.Application) {
	return func(a *app.Application) { a.Routing.Policy = name }
}

// TestBestWorkerWithoutIDChangesNothing: BestWorker without a request id is a question, however often it is
// asked.
func TestBestWorkerWithoutIDChangesNothing(t *testing.T) {
	b := newDecisionRig(t, "kv", nil)
	var k prompt
	ids := make([]uint32, 80)
	k.fromTokens(b.router, ids, "")
	b.holds(2, k.blocks[:3])
	before := b.router.router.Load().Snapshot()
	for range 3 {
		w, err := b.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: ids})
		require.NoError(t, err)
		assert.Equal(t, client.Worker{
			Worker: "0/2", DPRank: 2, OverlapBlocks: 3, HitTokens: 48, BlockSize: 16, Reason: "lowest_score",
			Node: "n1", URL: "http://127.0.0.1:3", Addressing: "url",
		}, w)
	}
	after := b.router.router.Load().Snapshot()
	assert.Equal(t, before.Ranks, after.Ranks)
	loads, err := b.in.PotentialLoads("demo", ids)
	require.NoError(t, err)
	assert.Equal(t, client.PotentialLoad{Worker: "0/2", DPRank: 2, PrefillTokens: 32, DecodeBlocks: 5},
		loads[2])
	assert.Equal(t, client.PotentialLoad{Worker: "0/4", DPRank: 4, PrefillTokens: 80, DecodeBlocks: 5},
		loads[4])
	loads, err = b.in.PotentialLoads("demo", nil)
	require.NoError(t, err)
	assert.Zero(t, loads[2].PrefillTokens)
}

// RP43: under every policy a question without a request id, a generate call and a client's request are spread
// over the ranks in the same way, and so are reservations.
func TestBestWorkerDraws(t *testing.T) {
	const rounds = 60
	answer := sends(idChunk("stop", 5), doneEvent)
	prompt := []uint32{1, 2, 3}
	for _, name := range append(routing.Names(), "kv at a temperature") {
		if name == "cohorts" || name == "direct" {
			continue // the queue of a lockstep group decides, or the caller
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := newRig(t, options{
					engines: []http.HandlerFunc{answer, answer, answer, answer},
					network: &memnet.Network{},
					app: func(a *app.Application) {
						var isWarm bool
						a.Routing.Policy, _, isWarm = strings.Cut(name, " ")
						if isWarm {
							a.Routing.Params = map[string]any{"router_temperature": 1.0}
						}
					},
				})
				ways := map[string]func(id string) string{
					"asked": func(string) string {
						w, err := g.in.BestWorker(t.Context(), "demo",
							&client.BestWorkerRequest{TokenIDs: prompt})
						require.NoError(t, err)
						return w.Worker
					},
					"reserved": func(id string) string {
						w, err := g.in.BestWorker(t.Context(), "demo",
							&client.BestWorkerRequest{TokenIDs: prompt, RequestID: id})
						require.NoError(t, err)
						require.NoError(t, g.in.Free("demo", id))
						return w.Worker
					},
					"generated": func(string) string {
						parts, err := collect(g, &msg.Generate{TokenIDs: prompt})
						require.NoError(t, err)
						return parts[0].Worker
					},
					"live": func(string) string {
						res := g.post("/v1/completions", `{"model":"demo","prompt":[1,2,3],"stream":true}`)
						return res.header.Get("X-Dpserve-Group") + "/" + res.header.Get("X-Dpserve-Rank")
					},
				}
				names := slices.Sorted(maps.Keys(ways))
				counts := map[string]map[string]int{}
				for i := range rounds {
					for _, way := range names {
						synctest.Wait() // the one before has ended everywhere
						if counts[way] == nil {
							counts[way] = map[string]int{}
						}
						counts[way][ways[way](fmt.Sprint(i))]++
					}
				}
				for _, way := range names {
					assert.Len(t, counts[way], len(counts["live"]), "%v", counts)
					for worker, n := range counts["live"] {
						assert.InDelta(t, n, counts[way][worker], rounds/4, "%s: %v", way, counts)
					}
				}
			})
		})
	}
}

// TestReservation: a reservation is admitted like a request, the next decision counts it, its first token is
// reported, and it is freed once.
func TestReservation(t *testing.T) {
	b := newDecisionRig(t, "kv", nil)
	const tokens = 80_000 // some seconds of prefill
	ids := make([]uint32, tokens)
	w, err := b.in.BestWorker(t.Context(), "demo",
		&client.BestWorkerRequest{TokenIDs: ids, RequestID: "r1", Worker: "0/3"})
	require.NoError(t, err)
	assert.Equal(t, []any{"0/3", "named_by_caller", "r1", 300.0},
		[]any{w.Worker, w.Reason, w.RequestID, w.ExpiresS})
	r := b.replicas[3]
	assert.Equal(t, 1, r.inFlight())
	loads, err := b.in.PotentialLoads("demo", nil)
	require.NoError(t, err)
	assert.Positive(t, loads[3].PrefillTokens)
	assert.LessOrEqual(t, loads[3].PrefillTokens, int64(tokens))
	info, err := b.in.RouterInfo("demo")
	require.NoError(t, err)
	assert.Equal(t, 1, info.Reservations)

	_, err = b.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: ids, RequestID: "r1"})
	require.Equal(t, problem.Conflict, problem.CodeOf(err))
	for range 2 {
		require.NoError(t, b.in.MarkPrefillComplete("demo", "r1"))
	}
	assert.Equal(t, 1, r.firsts)
	loads, err = b.in.PotentialLoads("demo", nil)
	require.NoError(t, err)
	assert.Equal(t, []int64{0, tokens / routing.DefaultBlockSize},
		[]int64{loads[3].PrefillTokens, loads[3].DecodeBlocks})

	require.NoError(t, b.in.Free("demo", "r1"))
	assert.Zero(t, r.inFlight())
	d := r.lastDone(t)
	assert.Equal(t, []any{msg.Cancelled, "freed"}, []any{d.Outcome, d.Cause})
	assert.Positive(t, d.FirstToken)
	require.Equal(t, problem.NotFound, problem.CodeOf(b.in.Free("demo", "r1")))
	require.Equal(t, problem.NotFound, problem.CodeOf(b.in.MarkPrefillComplete("demo", "r1")))
	v := b.router.router.Load().Snapshot()
	assert.Zero(t, v.Ranks[3].Load)
}

// TestReservationExpires: a reservation ends by itself and gives its place back.
func TestReservationExpires(t *testing.T) {
	g := newRig(t, options{
		urls:   []string{"http://127.0.0.1:1"},
		timers: Timers{Reservation: 20 * time.Millisecond},
	})
	_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{
		TokenIDs:  []uint32{1},
		RequestID: "r1",
	})
	require.NoError(t, err)
	eventually(t, func() bool { return g.replicas[0].inFlight() == 0 }, "the ticket is given back")
	assert.Equal(t, "reservation_expired", g.replicas[0].lastDone(t).Cause)
	require.Equal(t, problem.NotFound, problem.CodeOf(g.in.Free("demo", "r1")))
	_, err = g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{
		TokenIDs:  []uint32{1},
		RequestID: "r1",
	})
	require.NoError(t, err, "the id is free again")
	require.NoError(t, g.in.Free("demo", "r1"))
}

// RP41: no room, a wrong worker, and a rank that refuses give typed errors, and leave nothing behind.
func TestReservationRefused(t *testing.T) {
	g := newRig(t, options{urls: []string{"http://127.0.0.1:1", "http://127.0.0.1:2"}, max: 1})
	ask := func(id, worker string) (client.Worker, error) {
		return g.in.BestWorker(t.Context(), "demo",
			&client.BestWorkerRequest{TokenIDs: []uint32{1}, RequestID: id, Worker: worker})
	}
	for id, code := range map[string]problem.Code{
		"a b": problem.InvalidArgument, strings.Repeat("x", 200): problem.InvalidArgument,
		"ü": problem.InvalidArgument,
	} {
		_, err := ask(id, "")
		require.Equal(t, code, problem.CodeOf(err))
	}
	_, err := ask("r", "9/9")
	require.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	require.ErrorContains(t, err, "has no rank 9/9 (it has 0/0 to 0/1)")
	_, err = ask("r", "x")
	require.Equal(t, problem.InvalidArgument, problem.CodeOf(err))

	g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal { return msg.Full })
	w, err := ask("r1", "")
	require.NoError(t, err)
	assert.Equal(t, "0/1", w.Worker, "a rank that says no is passed over")
	_, err = ask("r2", "")
	require.Equal(t, problem.Overloaded, problem.CodeOf(err), "%v", err)
	_, err = ask("r2", "0/1")
	require.Equal(t, problem.Unavailable, problem.CodeOf(err))
	assert.Equal(t, 1, g.in.findAppRouter("demo").reservations.Len())
	require.NoError(t, g.in.Free("demo", "r1"))
	g.replicas[0].setRefuse(func(*msg.Admit) msg.Refusal { return msg.Fenced })
	g.replicas[1].setRefuse(func(*msg.Admit) msg.Refusal { return msg.Expired })
	_, err = ask("r3", "0/1")
	require.Equal(t, problem.Unavailable, problem.CodeOf(err))
	assert.Contains(t, err.Error(), "expired")
	assert.Zero(t, g.in.findAppRouter("demo").reservations.Len())
	for _, rk := range g.in.findAppRouter("demo").router.Load().Snapshot().Ranks {
		assert.Zero(t, rk.Load)
	}
}

// TestReservationsAreBounded: the 4,097th is refused; the end of the application releases all.
func TestReservationsAreBounded(t *testing.T) {
	g := newRig(t, options{urls: []string{"http://127.0.0.1:1"}, max: 2 * routerapi.MaxReservations})
	var refused atomic.Int32
	var wg sync.WaitGroup
	for n := range 4 {
		wg.Go(func() {
			for i := range routerapi.MaxReservations/4 + 1 {
				_, err := g.in.BestWorker(t.Context(), "demo",
					&client.BestWorkerRequest{TokenIDs: []uint32{1}, RequestID: fmt.Sprint(n, "-", i)})
				if problem.CodeOf(err) == problem.Overloaded && err != nil {
					refused.Add(1)
				}
			}
		})
	}
	wg.Wait()
	assert.Equal(t, int32(4), refused.Load())
	assert.Equal(t, routerapi.MaxReservations, g.replicas[0].inFlight())
	g.in.findAppRouter("demo").close()
	assert.Zero(t, g.replicas[0].inFlight())
	_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{
		TokenIDs:  []uint32{1},
		RequestID: "late",
	})
	require.Error(t, err)
}

// idChunk is an event of a streamed completion that has token ids.
func idChunk(finish string, ids ...uint32) string {
	text, _ := json.Marshal(ids)
	if finish == "" {
		finish = "null"
	} else {
		finish = `"` + finish + `"`
	}
	return fmt.Sprintf(`{"id":"c","choices":[{"index":0,"text":"t","token_ids":%s,"finish_reason":%s}]}`,
		text, finish)
}

// collect runs a generation and keeps its parts.
func collect(g *rig, q *msg.Generate) (parts []client.Part, err error) {
	err = g.in.Generate(g.t.Context(), "demo", q, func(p *client.Part) error {
		parts = append(parts, *p)
		return nil
	})
	return parts, err
}

// TestGenerate: the request that an engine gets, and the parts that the caller gets.
func TestGenerate(t *testing.T) {
	var body map[string]any
	engine := func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		body = nil
		_ = json.Unmarshal(text, &body)
		sse(w, idChunk("", 5, 6), idChunk("", 7), idChunk("length", 8), usageChunk, doneEvent)
	}
	g := newRig(t, options{engines: []http.HandlerFunc{resets, engine}, app: policy("kv")})
	parts, err := collect(g, &msg.Generate{
		TokenIDs: []uint32{1, 2, 3}, RequestID: "gen", Worker: "0/1",
		Sampling: map[string]json.RawMessage{
			"max_tokens": json.RawMessage("4"),
		},
		StopConditions: map[string]json.RawMessage{
			"min_tokens": json.RawMessage("2"),
			"stop":       json.RawMessage("null"),
		},
		SamplingOptions: map[string]json.RawMessage{
			"temperature": json.RawMessage("0"),
			"n":           json.RawMessage("1"),
		},
	})
	require.NoError(t, err)
	assert.Equal(t, map[string]any{
		"model": "demo", "prompt": []any{1.0, 2.0, 3.0}, "stream": true,
		"stream_options": map[string]any{"include_usage": true}, "return_token_ids": true,
		"max_tokens": 4.0, "min_tokens": 2.0, "temperature": 0.0,
	}, body)
	assert.Equal(t, []client.Part{
		{TokenIDs: []uint32{5, 6}, Text: "t", Worker: "0/1", RequestID: "gen"},
		{TokenIDs: []uint32{7}, Text: "t"},
		{TokenIDs: []uint32{8}, Text: "t", FinishReason: "length"},
		{TokenIDs: []uint32{}, Usage: &client.Usage{Prompt: 5, Cached: 3, Completion: 7}},
	}, parts)
	d := g.replicas[1].lastDone(t)
	assert.Equal(t, []any{msg.OK, 5, 7}, []any{d.Outcome, d.PromptTokens, d.CompletionTokens})
	e, ok := g.in.findAppRouter("demo").decisions.find("gen")
	require.True(t, ok)
	assert.Equal(t, routing.ReasonNamedByCaller, e.reason)

	parts, err = collect(g, &msg.Generate{TokenIDs: []uint32{1}})
	require.NoError(t, err, "a rank that resets is passed over, as for every request")
	assert.Len(t, parts[0].RequestID, 16)
}

// TestGenerateFails: what the inference endpoint would answer is a typed error; a broken stream is no
// success.
func TestGenerateFails(t *testing.T) {
	run := func(t *testing.T, engine http.HandlerFunc, q *msg.Generate) ([]client.Part, error) {
		t.Helper()
		return collect(newRig(t, options{
			engines: []http.HandlerFunc{engine},
			app:     func(a *app.Application) { a.Timeouts.QueueS = 0.2 },
		}), q)
	}
	one := &msg.Generate{TokenIDs: []uint32{1}}
	for name, c := range map[string]struct {
		engine http.HandlerFunc
		code   problem.Code
		text   string
	}{
		"bad request": {
			replies(400, `{"error": {"message": "prompt too long", "code": 400}}`),
			problem.InvalidArgument, "prompt too long",
		},
		"broken": {replies(500, `{"error": {"message": "inside"}}`), problem.Upstream, ""},
		"busy":   {replies(503, busyError), problem.Overloaded, ""},
		"garbage": {sends(`{"choices":[{"index":0,"text":"a","token_ids":"x","finish_reason":"stop"}]}`,
			doneEvent), problem.Upstream, "cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := run(t, c.engine, one)
			require.Equal(t, c.code, problem.CodeOf(err), "%v", err)
			assert.Contains(t, err.Error(), c.text)
		})
	}
	t.Run("cut", func(t *testing.T) {
		parts, err := run(t, cutAfter(idChunk("", 5)), one)
		require.Equal(t, problem.Upstream, problem.CodeOf(err), "%v", err)
		assert.Len(t, parts, 1)
	})
	for name, q := range map[string]*msg.Generate{
		"own member": {TokenIDs: []uint32{1}, Sampling: map[string]json.RawMessage{
			"stream": json.RawMessage("false"),
		}},
		"not json": {TokenIDs: []uint32{1}, Sampling: map[string]json.RawMessage{
			"max_tokens": json.RawMessage("{"),
		}},
		"given twice": {
			TokenIDs:       []uint32{1},
			Sampling:       map[string]json.RawMessage{"max_tokens": json.RawMessage("3")},
			StopConditions: map[string]json.RawMessage{"max_tokens": json.RawMessage("4")},
		},
		"two answers": {TokenIDs: []uint32{1}, SamplingOptions: map[string]json.RawMessage{
			"n": json.RawMessage("2"),
		}},
		"request id": {TokenIDs: []uint32{1}, RequestID: "a b"},
		"worker":     {TokenIDs: []uint32{1}, Worker: "x"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := run(t, replies(200, wholeAnswer), q)
			require.Equal(t, problem.InvalidArgument, problem.CodeOf(err), "%v", err)
		})
	}
}

// TestGenerateEndsWithItsCaller: a caller that stops taking parts frees the rank.
func TestGenerateEndsWithItsCaller(t *testing.T) {
	h := &hangingEngine{}
	g := newRig(t, options{engines: []http.HandlerFunc{h.sends(idChunk("", 5))}})
	enough := errors.New("enough")
	err := g.in.Generate(t.Context(), "demo", &msg.Generate{TokenIDs: []uint32{1}},
		func(*client.Part) error { return enough })
	require.ErrorIs(t, err, enough)
	eventually(t, func() bool { return g.replicas[0].inFlight() == 0 && h.left.Load() == 1 },
		"the engine is left")
}

// TestResetDropsBlockSets: block sets are hidden at once, and shown again with the ranks' answers.
func TestResetDropsBlockSets(t *testing.T) {
	b := newDecisionRig(t, "kv", nil)
	var k prompt
	ids := make([]uint32, 80)
	k.fromTokens(b.router, ids, "")
	b.holds(2, k.blocks)
	require.Len(t, b.dump(), 1)
	_, err := b.in.ResetRouter("demo")
	require.NoError(t, err)
	assert.Empty(t, b.dump(), "the fake ranks answer with snapshots without blocks")
	w, err := b.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: ids})
	require.NoError(t, err)
	assert.Zero(t, w.OverlapBlocks)
	_, err = b.in.ResetRouter("nobody")
	assert.Equal(t, problem.NotFound, problem.CodeOf(err))
}
