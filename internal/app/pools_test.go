package app

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

// pd returns a file with one application of two pools. more are further keys of the application.
func pd(engine string, more ...string) string {
	return "applications:\n  - name: pd\n    model: {id: m}\n    engine: {" + engine + "}\n    " +
		strings.Join(more, "\n    ") + "\n"
}

const (
	twoPrefill = "prefill: {data_parallel: {dp_size: 2}}"
	fourDecode = "decode: {data_parallel: {dp_size: 4}}"
)

func TestTwoPools(t *testing.T) {
	t.Parallel()
	f := parsed(t, pd("kind: sim, args: {max_num_seqs: 64, seed: 1}, env: {A: x, B: y}",
		"resources: {cpus: 2, labels: {zone: a}}", "routing: {policy: scoring, params: {profile: load}}",
		"prefill:", "  data_parallel: {dp_size: 2}",
		"  engine: {args: {max-num-seqs: 8, block_size: 32}, env: {B: z}, startup_timeout_s: 5}",
		"  resources: {labels: {disk: ssd}}", "  routing: {policy: random}",
		"decode: {num_replicas: 4, data_parallel: {dp_size: 2, coupling: lockstep}}",
		"disaggregation: {decide: uncached>=512, colocate: no}"))
	require.Len(t, f.Applications, 2)
	p, d := f.Applications[0], f.Applications[1]
	assert.Equal(t, []string{"pd.prefill", "pd.decode"}, []string{p.PoolName(), d.PoolName()})
	assert.Equal(t, []string{PoolPrefill, PoolDecode}, []string{p.Pool, d.Pool})
	assert.Equal(t, []string{"pd.prefill/0/0", "pd.prefill/0/1"}, unitIDs(p))
	assert.Equal(t, []string{"pd.decode/0", "pd.decode/1"}, unitIDs(d))
	assert.Equal(t, Args{{"max-num-seqs", int64(8)}, {"seed", int64(1)}, {"block_size", int64(32)}},
		p.Engine.Args)
	assert.Equal(t, Args{{"max_num_seqs", int64(64)}, {"seed", int64(1)}}, d.Engine.Args)
	assert.Equal(t, map[string]string{"A": "x", "B": "z"}, p.Engine.Env)
	assert.Equal(t, map[string]string{"A": "x", "B": "y"}, d.Engine.Env)
	assert.Equal(t, map[string]string{"zone": "a", "disk": "ssd"}, p.Resources.Labels)
	assert.Equal(t, map[string]string{"zone": "a"}, d.Resources.Labels)
	assert.InDelta(t, 5, p.Engine.StartupTimeoutS, 0)
	assert.InDelta(t, 600, d.Engine.StartupTimeoutS, 0)
	assert.Equal(t, []string{StrategySpread, StrategyPack},
		[]string{p.PlacementGroupStrategy, d.PlacementGroupStrategy}, "by the coupling of each pool")
	assert.Equal(t, "random", p.Routing.Policy)
	assert.Nil(t, p.Routing.Params, "the parameters are those of another policy")
	assert.Equal(t, map[string]any{"profile": "load"}, d.Routing.Params)
	want := &Disaggregation{
		Transfer: TransferSim, Decide: "uncached>=512", Fallback: FallbackLocal, Colocate: ColocateNo,
	}
	assert.Equal(t, want, p.Disaggregation)
	assert.Equal(t, want, d.Disaggregation)
}

func TestAttachedPools(t *testing.T) {
	t.Parallel()
	f := parsed(t, pd(`kind: attach, ranks: [{url: "http://d:1"}, {url: "http://p:1", role: prefill}, `+
		`{url: "http://d:2", role: decode, rank: 4}, {url: "http://p:2", role: prefill}]`,
		"prefill: {routing: {policy: random}}"))
	p, d := f.Applications[0], f.Applications[1]
	assert.Equal(t, []string{"pd.prefill/0/0", "pd.prefill/0/1"}, unitIDs(p))
	assert.Equal(t, []string{"pd.decode/0/0", "pd.decode/0/4"}, unitIDs(d))
	assert.Equal(t, "http://p:2", p.Engine.Rank(0, 1).URL)
	assert.Equal(t, "random", p.Routing.Policy)
	assert.Equal(t, TransferNIXL, d.Disaggregation.Transfer)

	f = parsed(t, pd(`kind: attach, family: sglang, ranks: [{url: "http://d:1"}]`, "disaggregation: {}"))
	p, d = f.Applications[0], f.Applications[1]
	assert.Empty(t, p.Units(), "a prefill pool without a rank")
	assert.Equal(t, []int{0, 0, 0}, []int{p.NumGroups, p.NumReplicas, p.DataParallel.DPSize})
	assert.Equal(t, 1, d.NumReplicas)
	assert.Equal(t, TransferSGLang, d.Disaggregation.Transfer)
	assert.Equal(t, f, parsed(t, string(f.Print())), string(f.Print()))
}

// TestAttachedPoolsChange: prefill ranks come and go, the last one too. The last decode rank stays.
func TestAttachedPoolsChange(t *testing.T) {
	t.Parallel()
	f := parsed(t, pd(`kind: attach, ranks: [{url: "http://d:1", role: decode}]`))
	p, d := f.Applications[0], f.Applications[1]
	r, err := ParseRank([]byte(`{url: "http://p:1", role: prefill}`), "", d.Disaggregation.Transfer)
	require.NoError(t, err)
	require.Error(t, d.CheckAttachable(&AttachRank{URL: "http://d:1"}))
	more, n, err := p.WithRank(r, idle)
	require.NoError(t, err)
	assert.Equal(t, 0, n)
	assert.Equal(t, []string{"pd.prefill/0/0"}, unitIDs(more))
	file := &File{Applications: []*Application{more, d}}
	assert.Equal(t, file, parsed(t, string(file.Print())), string(file.Print()))
	again, _, err := more.WithoutRank(RankRef{URL: "http://p:1"})
	require.NoError(t, err)
	assert.Empty(t, unitIDs(again))
	assert.Equal(t, []int{0, 0, 0}, []int{again.NumGroups, again.NumReplicas, again.DataParallel.DPSize})
	_, _, err = d.WithoutRank(RankRef{URL: "http://d:1"})
	require.ErrorContains(t, err, "is the last one of pd.decode")
	assert.Equal(t, problem.Conflict, problem.CodeOf(err))
}

func TestFaultsOfPools(t *testing.T) {
	t.Parallel()
	attach := func(ranks string, more ...string) string {
		return pd("kind: attach, family: vllm, ranks: ["+ranks+"]", more...)
	}
	const prefill, decode = `{url: "http://p:1", role: prefill}`, `{url: "http://d:1", role: decode}`
	for _, c := range [][2]string{
		{pd("kind: sim", twoPrefill), "5:14: applications[0].decode: prefill without decode: the two stand"},
		{pd("kind: sim", fourDecode), "5:13: applications[0].prefill: decode without prefill"},
		{pd("kind: sim", "disaggregation: {}"), "the application has no prefill and decode ranks"},
		{
			pd("kind: sim", "data_parallel: {dp_size: 4}", twoPrefill, fourDecode),
			"5:20: applications[0].data_parallel: each pool has its own data_parallel; hint: write it under",
		},
		{pd("kind: sim", "num_replicas: 4", twoPrefill, fourDecode), "each pool has its own num_replicas"},
		{pd("kind: sim", "num_groups: 4", twoPrefill, fourDecode), "each pool has its own num_groups"},
		{
			pd("kind: sim", twoPrefill, fourDecode, "disaggregation: {transfer: mooncake}"),
			"7:32: applications[0].disaggregation.transfer: engines of kind sim cannot do this transfer: " +
				"found mooncake, wanted sim | nixl | nixl-push",
		},
		{
			pd("kind: sim", twoPrefill, fourDecode, "disaggregation: {transfer: nixel}"),
			`found "nixel", wanted nixl | nixl-push | mooncake | sglang | sim; hint: did you mean "nixl"?`,
		},
		{
			pd("kind: sim", twoPrefill, fourDecode, "disaggregation: {fallback: never}"),
			"wanted local | fail",
		},
		{pd("kind: sim", twoPrefill, fourDecode, "disaggregation: {colocate: yes}"), "wanted prefer | no"},
		{pd("kind: sim", "prefill: {model: {id: x}}", fourDecode), `unknown key "model"`},
		{pd("kind: sim", "prefill: 2", fourDecode), "applications[0].prefill: found 2, wanted a map"},
		{
			pd("kind: vllm", "prefill: {data_parallel: {dp_size: 2}}",
				"decode: {data_parallel: {dp_size: 4, coupling: independent}}"),
			"applications[0].prefill.data_parallel.coupling: coupling is required for kind vllm",
		},
		{
			pd("kind: sim", "prefill: {num_replicas: 3, data_parallel: {dp_size: 2}}", fourDecode),
			"applications[0].prefill.num_replicas: num_replicas = dp_size × num_groups: found 3",
		},
		{
			pd("kind: sim, args: {kv_transfer_config: {kv_role: kv_producer}}", twoPrefill, fourDecode),
			"4:52: applications[0].engine.args.kv_transfer_config: dpserve writes kv_role of a pool's",
		},
		{
			pd("kind: sim", "prefill: {engine: {args: {kv_transfer_config.kv_connector: X}}}", fourDecode),
			"dpserve writes kv_connector of a pool's engines itself; hint: write disaggregation.transfer",
		},
		{
			pd("kind: sim, args: {block_size: 16}", twoPrefill, "decode: {engine: {args: {block_size: 32}}}"),
			"6:42: applications[0].decode.engine.args.block_size: prefill and decode engines pair only " +
				"with one block size: found prefill 16, decode 32",
		},
		{
			pd("kind: sim", twoPrefill, "decode: {engine: {kind: sglang}}"),
			"applications[0].decode.engine.kind: prefill and decode engines pair only if they are of one " +
				"kind: found prefill sim, decode sglang",
		},
		{
			pd("kind: sim", "prefill: {routing: {policy: mexx}}", fourDecode),
			"applications[0].prefill.routing.policy",
		},
		{
			pd("kind: sim, args: {sim_fial: crash}", twoPrefill, fourDecode),
			"applications[0].engine.args.sim_fial: the simulated engine has no argument",
		},

		{attach(prefill), "applications[0].engine.ranks: the decode pool has no rank"},
		{attach(prefill+", "+decode, "num_replicas: 2"), "leave it out: the ranks of each role are counted"},
		{
			attach(prefill+", "+decode, "data_parallel: {dp_size: 1}"),
			"each pool has its own data_parallel.dp_size",
		},
		{attach(prefill+", "+decode, "decode: {num_replicas: 3}"), "num_replicas = dp_size × num_groups"},
		{attach(decode, "prefill: {num_groups: 3}"), "no attached rank has role: prefill"},
		{attach(decode, "decode: {engine: {family: sglang}}"), "family stands in the application's engine"},
		{attach(decode, "decode: {engine: {env: {A: b}}}"), "env is for engines that dpserve starts"},
		{
			attach(prefill+", "+decode, "disaggregation: {transfer: sglang}"),
			"engines of family vllm cannot do this transfer",
		},
		{
			pd("kind: attach, family: openai, ranks: [" + prefill + ", " + decode + "]"),
			"engines of family openai cannot pass KV blocks on",
		},
		{
			attach(prefill+", "+decode, "disaggregation: {transfer: mooncake}"),
			"4:50: applications[0].engine.ranks[0].pd.bootstrap: transfer mooncake needs pd.bootstrap of " +
				"each prefill rank; hint: write pd: {bootstrap: …}",
		},
		{
			attach(`{url: "http://p:1", role: prefill, pd: {engine_id: a, tp_size: 1}}, `+decode,
				"disaggregation: {transfer: nixl-push}"),
			"pd.side_channel: transfer nixl-push needs pd.side_channel",
		},
		{
			attach(`{url: "http://p:1", role: prefill, pd: {engine_id: a}}, ` + decode),
			"pd.engine_id: transfer nixl takes no pd.engine_id",
		},
		{
			attach(prefill+", "+decode, "disaggregation: {colocate: prefer}"),
			"applications[0].disaggregation.colocate: dpserve does not place attached engines",
		},
		{
			attach(`{url: "http://d:1", role: decode, pd: {engine_id: a}}`),
			"pd is for ranks with role: prefill",
		},
		{
			attach(`{url: "http://p:1", role: prefill, pd: {bootstrap: "p:8998"}}, `+decode,
				"disaggregation: {transfer: mooncake}"),
			`pd.bootstrap: found "p:8998", wanted http://HOST:PORT`,
		},
		{
			attach(`{url: "http://p:1", role: prefill, pd: {engine_id: a, side_channel: "p:70000", `+
				`tp_size: 1}}, `+decode, "disaggregation: {transfer: nixl-push}"),
			"found p:70000, wanted HOST:PORT",
		},
		{
			attach(`{url: "http://p:1", role: prefill, pd: {engine_id: a, side_channel: "p:1", `+
				`tp_size: 1}}, {url: "http://p:2", role: prefill, pd: {engine_id: a, side_channel: "p:2", `+
				`tp_size: 1}}, `+decode, "disaggregation: {transfer: nixl-push}"),
			`engine id "a" is taken by`,
		},
		{attach(prefill + `, {url: "http://p:1", role: decode}`), `engine "http://p:1" is taken by`},
		{
			attach(prefill + `, {url: "http://d:1", group: 1}, {url: "http://d:2"}, {url: "http://d:3"}`),
			"applications[0].engine.ranks: all groups have the same number of ranks: found group 1 with 1",
		},
		{
			attach(prefill + `, {url: "http://d:1", group: 3}`),
			"applications[0].engine.ranks[1].group: found 3, wanted group numbers from 0 without gaps",
		},
	} {
		lines := faultsOf(t, c[0])
		require.Len(t, lines, 1, "%s\n%s", c[0], strings.Join(lines, "\n"))
		assert.Contains(t, lines[0], c[1], c[0])
	}
	assert.Empty(t, faultsOf(t, pd("kind: sim, args: {kv_transfer_config: {kv_load_failure_policy: fail}}",
		twoPrefill, fourDecode)))
}

func TestClaimsOfPools(t *testing.T) {
	t.Parallel()
	both := pd("kind: sim", "route_prefix: /pd", twoPrefill, fourDecode)
	_, _, err := Parse(Default(), "app.yaml", []byte(both+
		"  - {name: pd, model: {id: m}, route_prefix: /pd, engine: {kind: sim}}\n"))
	var faults Faults
	require.ErrorAs(t, err, &faults)
	lines := strings.Join(faults.lines(), "\n")
	for _, what := range []string{`application name "pd"`, `model name "m"`} {
		assert.Contains(t, lines, what+" is taken by applications[0].")
	}
	assert.Len(t, faults, 2, lines)
}

func TestAdviceAboutAlways(t *testing.T) {
	t.Parallel()
	_, warnings, err := Parse(Default(), "app.yaml", []byte(pd("kind: sim", twoPrefill, fourDecode,
		"disaggregation: {decide: always}")))
	require.NoError(t, err)
	require.Len(t, warnings, 1)
	assert.Contains(t, warnings[0].String(), "7:30: applications[0].disaggregation.decide: every prompt")
}

// drawPools draws the two pools of an application.
func drawPools(t *rapid.T, name string, names map[string]bool) []*Application {
	decode := drawApplication(t, name, names)
	prefill := *decode
	if rapid.Bool().Draw(t, "own values") {
		other := drawApplication(t, name, map[string]bool{})
		other.Engine.Kind = decode.Engine.Kind
		side := sideOf(other)
		if decode.Engine.Kind == KindAttach {
			side.Engine.Command, side.Engine.Args, side.Engine.Env = nil, nil, nil
		}
		side.Engine.Family, side.Engine.Ranks = decode.Engine.Family, nil
		side.Resources = decode.Resources
		if decode.Resources.Share() > 0 { // lockstep ranks of real engines have no share
			side.DataParallel.Coupling, side.Routing = decode.DataParallel.Coupling, decode.Routing
		}
		side.applyTo(&prefill)
	}
	together := &Disaggregation{
		Transfer: transfersOf(decode)[0], Decide: rapid.SampledFrom([]string{"isl", "mex"}).Draw(t, "decide"),
		Fallback: rapid.SampledFrom([]string{FallbackLocal, FallbackFail}).Draw(t, "fallback"),
		Colocate: rapid.SampledFrom([]string{"", ColocateNo, ColocatePrefer}).Draw(t, "colocate"),
	}
	if decode.Engine.Kind == KindAttach {
		together.Colocate = ""
		drawPrefillRanks(t, &prefill)
	}
	for _, a := range []*Application{&prefill, decode} {
		own := *together
		a.Disaggregation = &own
	}
	prefill.Name, prefill.Pool = name, PoolPrefill
	decode.Name, decode.Pool = name, PoolDecode
	return []*Application{&prefill, decode}
}

// drawPrefillRanks gives an attached prefill pool ranks of its own, or none.
func drawPrefillRanks(t *rapid.T, a *Application) {
	a.Engine.Ranks = nil
	for i := range rapid.IntRange(0, 3).Draw(t, "prefill ranks") {
		r := AttachRank{
			URL: "http://10.0.1.1:" + valueText(int64(8000+i)), Addressing: AddressURL, Role: RolePrefill,
		}
		if transfersOf(a)[0] == TransferSGLang {
			r.PD = &AttachPD{Bootstrap: "http://10.0.1.1:" + valueText(int64(9000+i))}
		}
		a.Engine.Ranks = append(a.Engine.Ranks, r)
	}
	n := len(a.Engine.Ranks)
	a.DataParallel.DPSize, a.NumReplicas, a.NumGroups = n, n, min(n, 1)
}

// TestPrintedPoolsParse: the two pools of an application print as one, and its text gives them again.
func TestPrintedPoolsParse(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		names := map[string]bool{}
		want := &File{Applications: drawPools(t, "pd", names)}
		want.Applications = append(want.Applications, drawApplication(t, "other", names))
		text := want.Print()
		got, _, err := Parse(Default(), "print", text)
		require.NoError(t, err, string(text))
		require.Equal(t, want, got, string(text))
		require.Equal(t, string(text), string(got.Print()))
		stored, err := json.Marshal(want)
		require.NoError(t, err)
		var read File
		require.NoError(t, json.Unmarshal(stored, &read))
		require.Equal(t, want, &read, string(stored))
	})
}

func TestPrintSharesWhatBothPoolsHave(t *testing.T) {
	t.Parallel()
	f := parsed(t, pd("kind: sim, args: {max_num_seqs: 64}, env: {A: x}", "resources: {gpus: 0}", twoPrefill,
		"decode: {data_parallel: {dp_size: 4}, routing: {policy: random}}"))
	assert.Equal(t, `applications:
  - name: pd
    model:
      id: m
    engine:
      kind: sim
      args:
        max_num_seqs: 64
      env:
        A: x
    resources:
      gpus: 0
    disaggregation:
      transfer: sim
    prefill:
      data_parallel:
        dp_size: 2
        coupling: independent
      num_replicas: 2
    decode:
      data_parallel:
        dp_size: 4
        coupling: independent
      num_replicas: 4
      routing:
        policy: random
`, string(f.Print()))
}

// What both pools have is the application's, the rest names its pool.
func TestComparePools(t *testing.T) {
	t.Parallel()
	of := func(seed int64, ranks ...int) (pools []*Application) {
		for i, pool := range []string{PoolPrefill, PoolDecode} {
			pools = append(pools, &Application{
				Name: "pd", Pool: pool, NumReplicas: ranks[i],
				Engine: Engine{Args: Args{{"seed", seed}}},
			})
		}
		return pools
	}
	assert.Empty(t, ComparePools(of(1, 2, 4), of(1, 2, 4)))
	assert.Equal(t, []Diff{
		{"decode.num_replicas", "4", "5"},
		{"engine.args.seed", "1", "2"},
		{"prefill.num_replicas", "2", "3"},
	}, ComparePools(of(1, 2, 4), of(2, 3, 5)))
	assert.Equal(t, []Diff{{"num_replicas", "2", "3"}}, ComparePools(of(1, 2, 2), of(1, 3, 3)))
	one := []*Application{{Name: "one"}}
	assert.Equal(t, []string{"x"}, Join(one, [][]string{{"x", "x"}}, nil))
}
