package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// fakeRouter is the Router of the fake cluster.
type fakeRouter struct {
	asked  []*client.Query
	answer *client.Explanation
	info   client.Info
	resets []string
}

func (f *fakeCluster) Explain(_ context.Context, app string, q *client.Query) (*client.Explanation, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.router.asked = append(f.router.asked, q)
	if app != "demo" {
		return nil, &client.Error{
			Code: client.CodeNotFound, Message: fmt.Sprintf("there is no application %q", app),
			Hint: "`dpserve status` lists the applications",
		}
	}
	return f.router.answer, f.down
}

func (f *fakeCluster) Router(context.Context, string) (client.Info, error) {
	return f.router.info, f.down
}

func (f *fakeCluster) CallEngines(
	_ context.Context, _, _, _ string, _ []string, _ []byte,
) (client.RankAnswers, error) {
	return client.RankAnswers{}, f.down
}

func (f *fakeCluster) ResetRouter(_ context.Context, app string) (client.ResetResult, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.router.resets = append(f.router.resets, app)
	return client.ResetResult{App: app, Ranks: 4}, f.down
}

func float(v float64) *float64 { return &v }

// explained returns a decision of policy kv over four ranks, two of which are eligible.
func explained() *client.Explanation {
	terms := func(prefill, decode float64) []client.Term {
		return []client.Term{
			{Name: "prefill_blocks", Unit: "blocks", Raw: prefill, Weight: 32, Value: 32 * prefill},
			{Name: "decode_blocks", Unit: "blocks", Raw: decode, Weight: 1, Value: decode},
		}
	}
	return &client.Explanation{
		App: "demo", Policy: "kv", Identity: "text", Tokens: 1234, Estimated: true, Blocks: 77, BlockSize: 64,
		BlockUnit: "bytes",
		Decision:  "route", Pick: "0/1", Reason: "lowest_score",
		Formula: "32 × prefill_blocks (blocks) + decode_blocks (blocks); lowest wins",
		Ranks: []client.RankExplanation{
			{
				Worker: "0/0", Eligible: true, State: "ok", InFlight: 3, MaxOngoing: 8, HitTokens: 512,
				HitBlocks: 32, KVUsage: float(0.42), Terms: terms(45.125, 120), Score: float(1564),
			},
			{
				Worker: "0/1", Rank: 1, Eligible: true, State: "ok", InFlight: 1, MaxOngoing: 8,
				HitTokens: 1168,
				HitBlocks: 73, HostTokens: 16, Terms: terms(4.125, 78), Score: float(210), Picked: true,
			},
			{
				Worker: "0/2", Rank: 2, State: "busy", Why: "KV usage 0.97, busy_threshold 0.95", InFlight: 7,
				MaxOngoing: 8,
			},
			{
				Worker: "0/3", Rank: 3, State: "unknown",
				Why: "it has not started yet, or is gone; see `dpserve status`",
			},
		},
		Notes: []string{"ranks above busy_threshold 0.95 get nothing"},
	}
}

// TestRouteExplainTable pins the table.
func TestRouteExplainTable(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.answer = explained()
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--prompt", "once upon a time"}),
		cli.stderr())
	assert.Equal(t, strings.TrimPrefix(`
RANK  STATE    IN-FLIGHT  HIT    PREFILL-BLOCKS  DECODE-BLOCKS  SCORE  PICK  WHY-NOT
0/0   ok       3/8        ~512   1444            120            1564
0/1   ok       1/8        ~1168  132             78             210    <
0/2   busy     7/8        0      -               -              -            KV usage 0.97, busy_threshold 0.95
0/3   unknown  0/0        0      -               -              -            it has not started yet, or is gone; see `+"`dpserve status`"+`

pick    0/1: lowest_score
prompt  ~1234 tokens, 77 full blocks of 64 bytes, known by its text
policy  kv
score   32 × prefill_blocks (blocks) + decode_blocks (blocks); lowest wins
note    ranks above busy_threshold 0.95 get nothing
`, "\n"), cli.stdout())
	assert.Equal(t, "once upon a time", *cli.cluster.router.asked[0].Prompt)

	cli = newCLI(t)
	cli.cluster.router.answer = explained()
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--prompt", "", "-o", "wide"}))
	assert.Contains(t, cli.stdout(),
		"RANK  STATE    IN-FLIGHT  HIT    BLOCKS  HOST  DISK  KV-USAGE  PREFILL-BLOCKS")
	assert.Contains(t, cli.stdout(), "0/1   ok       1/8        ~1168  73      ~16   0     -         132")
	assert.NotNil(t, cli.cluster.router.asked[0].Prompt, "an empty prompt is a prompt")
}

// A replay shows the former decision and says that the other lines describe the present.
func TestRouteExplainReplay(t *testing.T) {
	cli := newCLI(t)
	x := explained()
	x.Pick, x.Decision, x.Reason, x.Formula, x.Notes = "", "queue", "no_room", "", nil
	x.Replay = &client.Replay{
		RequestID: "abc", At: time.Unix(0, 0), Attempt: 2, Policy: "kv", Pick: "0/0", Reason: "lowest_score",
		HitTokens: 64, Tried: []string{"0/3"},
	}
	cli.cluster.router.answer = x
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--replay", "abc"}))
	assert.Contains(t, cli.stdout(), `
then    abc at 1970-01-01T00:00:00Z, attempt 2 (tried 0/3): 0/0 by kv: lowest_score, hit 64 tokens; the rest is what it would get now
pick    none: queue, no_room
prompt  `)
	assert.Equal(t, "abc", cli.cluster.router.asked[0].Replay)
}

// JSON has the unformatted numbers; name prints the pick.
func TestRouteExplainDocuments(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.answer = explained()
	require.Equal(t, 0,
		cli.run([]string{"route", "explain", "demo", "--tokens", "1, 2,4294967295", "-o", "json"}))
	assert.Equal(t, explained(), decode[*client.Explanation](t, cli.stdout()))
	assert.Equal(t, []uint32{1, 2, 4294967295}, cli.cluster.router.asked[0].TokenIDs)

	cli = newCLI(t)
	cli.cluster.router.answer = explained()
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--tokens", "1", "-o", "name"}))
	assert.Equal(t, "0/1\n", cli.stdout())
}

func TestRouteExplainRequest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "request.json")
	require.NoError(t, os.WriteFile(path, []byte(`{"messages": []}`), 0o600))
	cli := newCLI(t)
	cli.cluster.router.answer = explained()
	require.Equal(t, 0, cli.run([]string{
		"route", "explain", "demo", "-f", path, "--route", "/v1/chat/completions", "--header",
		"x-session-id: s1", "--header", "X-A:",
	}), cli.stderr())
	q := cli.cluster.router.asked[0]
	assert.JSONEq(t, `{"messages": []}`, string(q.Request))
	assert.Equal(t, "/v1/chat/completions", q.Route)
	assert.Equal(t, map[string]string{"x-session-id": "s1", "X-A": ""}, q.Headers)

	cli = newCLI(t)
	cli.cluster.router.answer = explained()
	cli.stdin.Reset(`{"prompt": "x"}`)
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "-f", "-"}), cli.stderr())
	assert.JSONEq(t, `{"prompt": "x"}`, string(cli.cluster.router.asked[0].Request))
}

// Invalid arguments never reach the cluster.
func TestRouteBadUsage(t *testing.T) {
	notJSON := filepath.Join(t.TempDir(), "x")
	require.NoError(t, os.WriteFile(notJSON, []byte(`{`), 0o600))
	for _, c := range []struct {
		args []string
		text string
	}{
		{[]string{"route", "explain"}, "route explain wants APP"},
		{
			[]string{"route", "explain", "demo"},
			"route explain wants one of --prompt, -f, --tokens and --replay",
		},
		{[]string{"route", "explain", "demo", "--prompt", "a", "--tokens", "1"}, "wants one of"},
		{[]string{"route", "explain", "demo", "--tokens", "1,x"}, `--tokens: "x" is not a token id`},
		{[]string{"route", "explain", "demo", "--tokens", ""}, `--tokens: "" is not a token id`},
		{[]string{"route", "explain", "demo", "--tokens", "-1"}, `--tokens: "-1" is not a token id`},
		{[]string{"route", "explain", "demo", "--replay", ""}, "--replay wants a request id"},
		{
			[]string{"route", "explain", "demo", "--tokens", "1", "--route", "/v1/completions"},
			"--route and --header go with",
		},
		{
			[]string{"route", "explain", "demo", "--prompt", "a", "--header", "nonsense"},
			`--header "nonsense": wanted NAME: VALUE`,
		},
		{[]string{"route", "explain", "demo", "-f", notJSON}, "is not JSON"},
		{[]string{"route", "explain", "demo", "-f", notJSON + "-missing"}, "no such file"},
		{[]string{"route", "explain", "demo", "--promt", "a"}, "did you mean --prompt?"},
		{[]string{"route", "explian"}, "did you mean `dpserve route explain`?"},
		{[]string{"router", "resett"}, "did you mean `dpserve router reset`?"},
		{[]string{"router", "show"}, "router show wants APP"},
	} {
		cli := newCLI(t)
		assert.Equal(t, 2, cli.run(c.args), "%v", c.args)
		assert.Contains(t, cli.stderr(), c.text, "%v", c.args)
		assert.Empty(t, cli.cluster.router.asked, "%v", c.args)
	}
	cli := newCLI(t)
	assert.Equal(t, 1, cli.run([]string{"route", "explain", "other", "--prompt", "a"}))
	assert.Contains(t, cli.stderr(),
		"dpserve: there is no application \"other\"\nhint: `dpserve status` lists the applications\n")
}

func TestRouterShow(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.info = client.Info{
		App: "demo", Policy: "kv", Preset: "documented",
		Params: map[string]any{"overlap_score_weight": 2, "router_temperature": 0.5}, Identity: "text",
		Reads: []string{"hits", "blocks"}, BusyThreshold: float(0.95), Ranks: 4, Ready: 3, Imbalance: 1.25,
		Reservations: 2, Streams: client.Streams{Completions: true, Why: "chat is asked"},
		Index: &client.Index{Blocks: 12345, Bytes: 3 << 20, Cap: 512 << 20},
	}
	require.Equal(t, 0, cli.run([]string{"router", "show", "demo"}))
	assert.Equal(t, strings.TrimPrefix(`
ROUTER                       demo
policy                       kv
preset                       documented
params.overlap_score_weight  2
params.router_temperature    0.5
reads                        load, hits, blocks
identity                     text
busy threshold               0.95
ranks ready                  3/4
queued                       0
imbalance                    1.25
reservations                 2
streams go on                completions (chat is asked)
index                        12345 blocks, 3.0 MiB of 512.0 MiB
`, "\n"), cli.stdout())
}

// LG44: router show says what the queue of a lockstep group holds and why, or where the queue is.
func TestRouterShowDescribesGroups(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.info = client.Info{App: "demo", Policy: "cohorts", Groups: []client.GroupQueue{
		{
			IsHere: true, Held: 5, Why: "waits for 3 more or 180 ms", Open: 96, PaceMs: 37.24, Rate: 29.8,
			Ranks: 8, DecodeBalance: .984, LastMinute: client.Cohorts{Count: 10, Requests: 81, Ranks: 78},
		},
		{Group: 1, IsHere: true, Ranks: 8, DecodeBalance: 1},
		{Group: 2, Owner: "n2", Waiting: 4},
	}}
	require.Equal(t, 0, cli.run([]string{"router", "show", "demo"}))
	_, rows, _ := strings.Cut(cli.stdout(), "group 0 queue")
	assert.Equal(t, `    5 held, the oldest waits for 3 more or 180 ms; 96 in the group
group 0 cohorts  10 in the last minute, of 8.1 requests, on 7.8 of 8 ranks
group 0 pace     37.2 ms between tokens, decode balance 0.98, 29.8 requests/s
group 1 queue    0 held; 0 in the group
group 1 cohorts  none in the last minute
group 1 pace     no tokens, decode balance 1.00, 0.0 requests/s
group 2 queue    at node n2; 4 wait from here
`, rows)
}

// router show prints the times that the Router expects, the number of samples and their error.
func TestRouterShowDescribesTheTimeModel(t *testing.T) {
	fast := client.WorkerSpeed{Worker: "0/0", Slow: 1, LagMs: 12}
	for name, c := range map[string]struct {
		model *client.CostModel
		want  []string
	}{
		"the policy predicts nothing": {nil, nil},
		"before the first sample": {
			&client.CostModel{Preset: "dense", Prefill: 1, Decode: 1},
			[]string{"dense preset, nothing measured yet"},
		},
		"short answers alone": {
			&client.CostModel{Preset: "dense", Prefill: 1, Decode: 0.021},
			[]string{"dense preset; measured decode at most 0.02 x"},
		},
		"both halves": {
			&client.CostModel{
				Preset: "dense", Prefill: 1.841, Decode: 1.02, PrefillSamples: 312, DecodeSamples: 9,
				AgeS: 4.2, Error: 0.0912, Ranks: []client.WorkerSpeed{fast},
			},
			[]string{"dense preset; measured prefill 1.84 x, decode 1.02 x on 312 prompts, error 9 %, " +
				"last sample 4s ago"},
		},
		"prompts alone": {
			&client.CostModel{
				Preset: "moe", Prefill: 0.5, Decode: 1, PrefillSamples: 1, AgeS: 120, Error: 1.5,
			},
			[]string{"moe preset; measured prefill 0.50 x on 1 prompt, error 150 %, last sample 2m ago"},
		},
		"decodes alone": {
			&client.CostModel{Preset: "moe", Prefill: 1, Decode: 0.9, DecodeSamples: 7},
			[]string{"moe preset; measured decode 0.90 x, last sample 0s ago"},
		},
		"a slow rank": {
			&client.CostModel{
				Preset: "dense", Prefill: 1, Decode: 1, PrefillSamples: 2,
				Ranks: []client.WorkerSpeed{fast, {Worker: "0/3", Slow: 4.96, Spread: 1.5}},
			},
			[]string{
				"dense preset; measured prefill 1.00 x on 2 prompts, error 0 %, last sample 0s ago",
				"0/3 5.0 x (spread 1.5)",
			},
		},
		"many slow ranks": {
			&client.CostModel{
				Preset: "dense", Decode: 1,
				Ranks: slices.Repeat([]client.WorkerSpeed{{Worker: "0/3", Slow: 2, Spread: 1.5}}, 9),
			},
			[]string{
				"dense preset, nothing measured yet",
				strings.Repeat("0/3 2.0 x (spread 1.5), ", 8) + "…",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			cli := newCLI(t)
			cli.cluster.router.info = client.Info{App: "demo", Policy: "mex", CostModel: c.model}
			require.Equal(t, 0, cli.run([]string{"router", "show", "demo"}))
			var got []string
			for line := range strings.Lines(cli.stdout()) {
				if rest, ok := strings.CutPrefix(line, "cost model "); ok {
					got = append(got, strings.TrimSpace(rest))
				} else if rest, ok := strings.CutPrefix(line, "slow ranks "); ok {
					got = append(got, strings.TrimSpace(rest))
				}
			}
			assert.Equal(t, c.want, got)
		})
	}
	cli := newCLI(t)
	cli.cluster.router.info = client.Info{
		App: "demo", CostModel: &client.CostModel{Preset: "dense", Prefill: 1, Decode: 1},
	}
	require.Equal(t, 0, cli.run([]string{"router", "show", "demo", "-o", "json"}))
	assert.Contains(t, cli.stdout(), `"prefill_samples": 0`)
}

func TestRouterReset(t *testing.T) {
	cli := newCLI(t)
	require.Equal(t, 0, cli.run([]string{"router", "reset", "demo"}))
	assert.Equal(t, []string{"demo"}, cli.cluster.router.resets)
	assert.Equal(t, "dpserve: the router of demo was reset; 4 ranks listed again\n", cli.stderr())
	assert.Empty(t, cli.stdout())
}

// The table has hit rates; the notes below name only ranks with problems.
func TestStatusShowsCaches(t *testing.T) {
	a := demo(client.StatusRunning, 1, state.Ready, state.Ready, state.Ready)
	a.Identity, a.Index = "text", &client.Index{Blocks: 7, Bytes: 1 << 20, Cap: 512 << 20}
	rank := func(i int) *client.RankStatus { return &a.Units[i].Ranks[0] }
	rank(0).PromptTokens, rank(0).HitRate = 1000, 0.875
	rank(0).KV = &client.KVStatus{Events: &client.EventStatus{State: client.EventsLive}}
	silent := client.EventStatus{State: client.EventsSilent, SilentFor: 34.4, Dropped: 2}
	rank(1).KV = &client.KVStatus{Events: &silent}
	rank(2).KV = &client.KVStatus{Note: "prefix caching is off"}
	a.Imbalances = []client.Imbalance{{
		Pool: "demo", MaxMean: 2.5, Mean: 40_000, Policy: "power-of-two", Policies: []string{"mex"},
		Ranks: []client.RankLoad{{Rank: "demo/0/0", Tokens: 100_000}},
	}}
	cli := newCLI(t)
	cli.cluster.script = [][]client.AppStatus{{a}}
	require.Equal(t, 0, cli.run([]string{"status"}))
	lines := strings.Split(cli.stdout(), "\n")
	assert.Contains(t, lines[3], "RESTARTS  HIT%  REASON")
	assert.True(t, strings.HasSuffix(lines[4], "0         87.5"), lines[4])
	assert.True(t, strings.HasSuffix(lines[5], "0         -"), lines[5])
	assert.Equal(t, []string{
		"", "demo: uneven load, max/mean 2.5: demo/0/0 (100000 tokens); the mean of its ranks is 40000 " +
			"tokens in flight; policy mex would balance it",
		"demo/0/1: KV events silent for 34 s under traffic; 2 KV events dropped",
		"demo/0/2: prefix caching is off",
		"next: `dpserve doctor`: no KV events come from demo/0/1 while requests complete", "",
	}, lines[7:])

	require.Equal(t, 0, cli.run([]string{"status", "-o", "wide"}))
	assert.Contains(t, cli.stdout(),
		"\n\ndemo: index 7 blocks, 1.0 MiB of 512.0 MiB; identity text\ndemo: uneven load")
}

// Numbers of very different size fit one column.
func TestFormatDecimal(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 1: "1", -0.5: "-0.5", 0.55 * 0.3: "0.165", 1.0 / 3: "0.3333", 35184372088833: "3.518e+13",
		1e-9: "1e-09", 9999999.5: "9999999.5", 120: "120",
	} {
		assert.Equal(t, want, formatDecimal(v))
	}
	assert.Equal(t, "last", formatScore(35184372088835), "a rank that is taken only if no other is left")
	assert.Equal(t, "120", formatScore(120))
}
