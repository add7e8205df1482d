package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
)

// explainedPair is a decision between two pools of two ranks each: the pair 0/1, 0/0 has not met.
func explainedPair() *client.Explanation {
	terms := func(queue, prefill, transfer float64) []client.Term {
		return []client.Term{
			{Name: "queue", Unit: "ms", Raw: queue, Weight: 1, Value: queue},
			{Name: "prefill", Unit: "ms", Raw: prefill, Weight: 1, Value: prefill},
			{Name: "transfer", Unit: "ms", Raw: transfer, Weight: 1, Value: transfer},
		}
	}
	rank := func(n int, picked bool) client.RankExplanation {
		return client.RankExplanation{
			Worker: "0/" + string(rune('0'+n)), Rank: n, Eligible: true, State: "ok", InFlight: n,
			MaxOngoing: 8, Picked: picked, Terms: terms(float64(n), 0, 0)[:1], Score: float(float64(n)),
		}
	}
	return &client.Explanation{
		App: "pd", Policy: "lmetric-1", Tokens: 4000, Decision: "route", Pick: "0/0", Reason: "lowest_score",
		Formula: "queue (ms); lowest wins", Ranks: []client.RankExplanation{rank(0, true), rank(1, false)},
		Notes: []string{"2 requests wait: a new one stands behind them"},
		Pair: &client.PairExplanation{
			Decide: "isl", Way: "remote", Prefill: "0/0", Reason: "long_prefill",
			Why: "decode rank 0/0 would have to compute 3000 of 4000 tokens", UncachedTokens: 3000,
			Candidates: []client.PairCandidate{
				{
					Prefill: "0/0", Decode: "0/0", Terms: terms(0, 120.5, 7.25), CostMs: 127.75,
					Picked: true,
				},
				{
					Prefill: "0/1", Decode: "0/0", Skip: "not_prewarmed", Terms: terms(3, 120.5, 7.25),
					CostMs: 130.75,
				},
				{
					Decode: "0/0", CostMs: 300, Terms: append(terms(10, 290, 0)[:2],
						client.Term{Name: "memory", Unit: "ms", Value: 9e-5}),
				},
			},
			PrefillPool: &client.Explanation{
				App: "pd.prefill", Policy: "kv", Tokens: 4000, Decision: "route", Pick: "0/0",
				Reason: "lowest_score", Ranks: []client.RankExplanation{rank(0, true), rank(1, false)},
				Notes: []string{"ranks above busy_threshold 0.9 get nothing"},
			},
		},
	}
}

// TestPairExplainTables pins the tables of a decision between two pools.
func TestPairExplainTables(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.answer = explainedPair()
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--prompt", "once"}), cli.stderr())
	assert.Equal(t, strings.TrimPrefix(`
PREFILL-RANK  DECODE-RANK  QUEUE  PREFILL  TRANSFER  COST-MS  PICK  WHY-NOT
0/0           0/0          0      120.5    7.25      127.75   <
0/1           0/0          3      120.5    7.25      130.75         not_prewarmed
-             0/0          10     290      -         300

PREFILL-RANK  STATE  IN-FLIGHT  HIT  QUEUE  SCORE  PICK  WHY-NOT
0/0           ok     0/8        0    0      0      <
0/1           ok     1/8        0    1      1

DECODE-RANK  STATE  IN-FLIGHT  HIT  QUEUE  SCORE  PICK  WHY-NOT
0/0          ok     0/8        0    0      0      <
0/1          ok     1/8        0    1      1

pick    prefill rank 0/0 and decode rank 0/0: remote, long_prefill: decode rank 0/0 would have to compute 3000 of 4000 tokens
decide  isl
prompt  4000 tokens, 3000 of them not on the decode rank
policy  prefill kv: lowest_score; decode lmetric-1: lowest_score
note    prefill: ranks above busy_threshold 0.9 get nothing
score   decode: queue (ms); lowest wins
note    decode: 2 requests wait: a new one stands behind them
`, "\n"), cli.stdout())
}

func TestPairExplainDocuments(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.answer = explainedPair()
	require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--prompt", "once", "-o", "json"}))
	assert.Equal(t, explainedPair(), decode[*client.Explanation](t, cli.stdout()))

	for way, want := range map[string]string{
		"remote": "pd.prefill/0/0\npd.decode/0/0\n", "local": "pd.decode/0/0\n", "none": "",
	} {
		cli = newCLI(t)
		x := explainedPair()
		switch way {
		case "local":
			x.Pair.Prefill = ""
		case "none":
			x.Pair.Prefill, x.Pick = "", ""
		}
		cli.cluster.router.answer = x
		require.Equal(t, 0, cli.run([]string{"route", "explain", "demo", "--prompt", "once", "-o", "name"}))
		assert.Equal(t, want, cli.stdout(), way)
	}
}

// The line of the pick says what a person wants to know first.
func TestPairExplainWithoutAPrefillRank(t *testing.T) {
	x := explainedPair()
	p := x.Pair
	p.Way, p.Prefill, p.Reason, p.Why = "fallback", "", "not_prewarmed", "no prefill rank is connected to it"
	x.Replay = &client.Replay{
		RequestID: "abc", At: time.Unix(0, 0), Attempt: 1, Policy: "isl", Pick: "0/1", Reason: "long_prefill",
		HitTokens: 64, Pair: &client.PairReplay{Way: "remote", Prefill: "0/1"},
	}
	lines := describePair(x, statusView{})
	assert.Equal(t, "then    abc at 1970-01-01T00:00:00Z: prefill rank 0/1 and decode rank 0/1 by isl: "+
		"long_prefill, hit 64 tokens; the rest is what it would get now", lines[0])
	assert.Equal(t, "pick    decode rank 0/0 alone: fallback, not_prewarmed: no prefill rank is connected "+
		"to it",
		lines[1])
	x.Pick, x.Decision, p.Reason, p.Why = "", "queue", "no_room", "the decode pool has no rank for it"
	assert.Equal(t, "pick    none: queue, no_room: the decode pool has no rank for it",
		describePair(x, statusView{})[1])
}

// router show has a table per pool, the decode pool's first, with the rule.
func TestPairRouterShow(t *testing.T) {
	cli := newCLI(t)
	cli.cluster.router.info = client.Info{
		App: "pd", Policy: "mex", Preset: "documented", Identity: "text", Ranks: 4, Ready: 4, Imbalance: 1,
		Pair: &client.PairInfo{
			Decide: "uncached>=512", Transfer: "nixl", Fallback: "local", Pairs: client.PairsOn, Met: 7,
			All:       8,
			Decisions: map[string]uint64{"long_prefill": 12, "decode_holds": 3}, TransferMs: 0.0212,
			Links: []client.TransferLink{
				{Prefill: "a", Decode: "b", TokenMs: 0.0212, Spread: 1.5, Transfers: 40},
				{Prefill: "a", Decode: "c", TokenMs: 0.0839, Spread: 1.7, Transfers: 9},
			},
			Prefill: &client.Info{App: "pd.prefill", Policy: "kv", Ranks: 2, Ready: 1, Imbalance: 1},
		},
	}
	require.Equal(t, 0, cli.run([]string{"router", "show", "demo"}))
	out := cli.stdout()
	assert.True(t, strings.HasPrefix(out, strings.TrimPrefix(`
ROUTER         pd
decide         uncached>=512
transfer       nixl
fallback       local
pairs          on, 7 of 8 connected
transfer time  0.021 ms per token, measured on 2 links; a to c 0.084 ms (spread 1.7, 9 transfers)
decisions      decode_holds 3, long_prefill 12
pool           decode
policy         mex
`, "\n")), out)
	assert.Contains(t, out, "\n\nROUTER        pd.prefill\npolicy        kv\n")
	assert.Contains(t, out, "ranks ready   1/2\n")
}

// status has a line for each adapter, which names the ranks that have it.
func TestStatusOfAdapters(t *testing.T) {
	ranks := []client.RankStatus{
		{Rank: 0, Adapters: []string{"fr"}}, {Rank: 1, Adapters: []string{"fr", "sql"}}, {Rank: 2},
	}
	a := client.AppStatus{Name: "chat", Units: []client.UnitStatus{{Unit: "chat/0", Ranks: ranks}}}
	assert.Equal(t, []string{"chat: adapter fr on 0/0, 0/1", "chat: adapter sql on 0/1"},
		adapterNotes([]client.AppStatus{a}))
	ranks[2].Adapters = []string{"fr"}
	for i := range maxAdapterNotes {
		ranks[0].Adapters = append(ranks[0].Adapters, fmt.Sprintf("z%02d", i))
	}
	notes := adapterNotes([]client.AppStatus{a})
	assert.Len(t, notes, maxAdapterNotes+1)
	assert.Equal(t, "chat: adapter fr on all ranks", notes[0])
	assert.Equal(t, "chat: 2 more adapters; `dpserve status chat -o json` has all", notes[maxAdapterNotes])
}

// status has one line about the pools of an application.
func TestStatusOfTwoPools(t *testing.T) {
	a := client.AppStatus{Name: "pd", PD: &client.PDStatus{
		Pairs: client.PairsOn, Met: 5, All: 6, Remote: 12, Local: 3, Fallbacks: 1, TransferMs: 1.25,
		TransferBytes: 64 << 20,
	}}
	assert.Equal(t, []string{
		"pd: requests 12 remote, 3 local, 1 fall-back; pairs 5/6 connected; transfers 1.2ms, 64.0 MiB",
	}, statusNotes([]client.AppStatus{a, {Name: "plain"}}))
	a.PD = &client.PDStatus{Pairs: "off: no prefill rank is ready"}
	assert.Equal(t, []string{
		"pd: requests 0 remote, 0 local, 0 fall-back; pairs off: no prefill rank is ready",
	}, statusNotes([]client.AppStatus{a}))
}
