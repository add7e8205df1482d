package app

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// faultsOf returns Parse's error, one line per fault.
func faultsOf(t *testing.T, text string) []string {
	t.Helper()
	_, _, err := Parse(Default(), "app.yaml", []byte(text))
	if err == nil {
		return nil
	}
	var faults Faults
	require.ErrorAs(t, err, &faults)
	for _, f := range faults {
		assert.Positive(t, f.Line, f.String())
		assert.Positive(t, f.Col, f.String())
		assert.NotEmpty(t, f.Describe(), f.String())
	}
	return faults.lines()
}

func parsed(t *testing.T, text string) *File {
	t.Helper()
	f, _, err := Parse(Default(), "app.yaml", []byte(text))
	require.NoError(t, err)
	return f
}

// one returns the smallest file, with more keys of its one application.
func one(more ...string) string {
	return "applications:\n  - name: demo\n    model: {id: demo}\n    engine: {kind: sim}\n    " +
		"" + strings.Join(more, "\n    ") + "\n"
}

func TestEveryBlockOfTheSchemaPaper(t *testing.T) {
	t.Parallel()
	unsupported := map[string][]string{
		"01_smallest.yaml":               nil,
		"02_full.yaml":                   {"routing.slo"},
		"03_sglang.yaml":                 {"routing.policy"},
		"04_prefill_decode.yaml":         nil,
		"05_attach.yaml":                 nil,
		"06_attach_lockstep_and_pd.yaml": nil,
	}
	files, err := filepath.Glob("testdata/schema/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, len(unsupported))
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		lines := faultsOf(t, string(text))
		want := unsupported[filepath.Base(name)]
		require.Len(t, lines, len(want), "%s\n%s", name, strings.Join(lines, "\n"))
		for i, line := range lines {
			assert.Contains(t, line, "]."+want[i]+": ", name)
			assert.Contains(t, line, "not supported in this version", name)
		}
	}
}

func TestFullExampleWithoutLaterKeys(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/schema/02_full.yaml")
	require.NoError(t, err)
	var kept []string
	for _, line := range strings.Split(string(text), "\n") {
		if !strings.Contains(line, "slo:") {
			kept = append(kept, line)
		}
	}
	a := parsed(t, strings.Join(kept, "\n")).Applications[0]
	assert.Equal(t, KindVLLM, a.Engine.Kind)
	assert.Equal(t, Lockstep, a.DataParallel.Coupling)
	assert.Equal(t, 16, a.NumReplicas)
	assert.Equal(t, 1, a.NumGroups)
	assert.Equal(t, []string{"deepseek-r1", "deepseek", "deepseek-r1:my-lora", "my-lora"},
		a.Model.ServedNames())
	assert.Equal(t, Args{
		{"tensor_parallel_size", int64(1)}, {"max_num_seqs", int64(256)}, {"enable_expert_parallel", true},
	}, a.Engine.Args)
	assert.Len(t, a.Units(), 1)
}

func TestAllFaultsAtOnceInOrder(t *testing.T) {
	t.Parallel()
	lines := faultsOf(t, `
applications:
  - name: Demo_1
    modle: {id: x}
    model: {id: demo}
    engine:
      kind: vlm
      stall_timeout_s: 0
    num_replicas: "4"
    routing: {policy: power_of_two, policy: kv}
  - name: two
    model: {id: demo}
    engine: {kind: sim}
`)
	assert.Equal(t, []string{
		`app.yaml:3:11: applications[0].name: found "Demo_1", ` +
			`wanted a DNS label: 1 to 63 of a-z, 0-9 and -, not at the ends`,
		`app.yaml:4:5: applications[0].modle: unknown key "modle"; hint: did you mean "model"?`,
		`app.yaml:7:13: applications[0].engine.kind: found "vlm", wanted sim | vllm | sglang | attach; ` +
			`hint: did you mean "vllm"?`,
		`app.yaml:8:24: applications[0].engine.stall_timeout_s: found 0, wanted seconds above 0 to 2592000`,
		`app.yaml:9:19: applications[0].num_replicas: found "4", wanted an integer from 1 to 65536; ` +
			`hint: write it without quotes`,
		`app.yaml:10:23: applications[0].routing.policy: found "power_of_two", wanted ` +
			strings.Join(policies(), " | ") + `; hint: did you mean "power-of-two"?`,
		`app.yaml:10:37: duplicate key "policy"; hint: it is also on line 10; keep one`,
		`app.yaml:12:17: applications[1].model.id: model name "demo" is taken by ` +
			`applications[0].model.id; hint: choose another one`,
	}, lines)
}

func TestFaultTexts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, want string }{
		"nothing":      {"", "the file holds nothing: wanted applications: [...]"},
		"comment only": {"# x\n", "the file holds nothing"},
		"a list":       {"- a\n", "app.yaml:1:1: found a list, wanted a map"},
		"no applications": {
			"application: []\n",
			`unknown key "application"; hint: did you mean "applications"?`,
		},
		"empty list":    {"applications: []\n", "found an empty list, wanted at least one application"},
		"null list":     {"applications:\n", "the key applications is missing or empty"},
		"not YAML":      {"applications: [1,", "not YAML: "},
		"two documents": {one() + "---\na: 1\n", "a second document"},
		"tab":           {"\tapplications: []", "app.yaml:1:1: YAML takes no tabs; hint: indent with spaces"},
		"not UTF-8":     {"applications: \xff", "the file is not UTF-8 text"},
		"NUL":           {"a: \x00", "control character U+0000"},
		"no name": {
			"applications: [{model: {id: a}, engine: {kind: sim}}]",
			"the key name is missing or empty",
		},
		"no kind": {
			"applications: [{name: a, model: {id: a}, engine: {}}]",
			"the key kind is missing or empty",
		},
		"no engine": {
			"applications: [{name: a, model: {id: a}}]",
			"the key engine is missing or empty",
		},
		"no id": {
			"applications: [{name: a, model: {}, engine: {kind: sim}}]",
			"the key id is missing or empty",
		},
		"blank in id": {
			"applications: [{name: a, model: {id: 'a b'}, engine: {kind: sim}}]",
			"visible characters without blanks",
		},
		"name twice": {"applications: [{name: a, model: {id: a}, engine: {kind: sim}}, {name: a, " +
			"model: {id: b}, engine: {kind: sim}}]", `application name "a" is taken by applications[0].name`},
		"alias is id": {
			"applications: [{name: a, model: {id: a, aliases: [a]}, engine: {kind: sim}}]",
			`model.aliases[0]: model name "a" is taken`,
		},
		"adapter twice": {"applications: [{name: a, model: {id: a, adapters: [{id: l, source: s}, {id: " +
			"l, source: s}]}, engine: {kind: sim}}]", `adapters[1].id: model name "l" is taken`},
		"adapter source": {"applications: [{name: a, model: {id: a, adapters: [{id: l}]}, engine: {kind: " +
			"sim}}]", "the key source is missing"},
		"prefix":      {one("route_prefix: a/"), `found "a/", wanted / or a path`},
		"prefix dots": {one("route_prefix: /a/../b"), "wanted / or a path"},
		"max queued":  {one("max_queued_requests: -1"), "a queue without a bound is refused"},
		"negative": {
			one("max_ongoing_requests: -4"),
			"found -4, wanted an integer from 1 to 1000000",
		},
		"huge integer": {
			one("num_groups: 99999999999999999999"),
			"found 99999999999999999999, wanted an integer",
		},
		"float":         {one("num_groups: 1.5"), "found 1.5, wanted an integer"},
		"octal-looking": {one("num_groups: 1_000"), `found "1_000", wanted an integer`},
		"infinite":      {one("health_check_period_s: .inf"), "wanted seconds above 0"},
		"too often":     {one("timeouts: {keepalive_s: 0.5}"), "found 0.5, wanted 0, or seconds from 1 to"},
		"negative time": {one("graceful_shutdown_timeout_s: -1"), "wanted seconds from 0 to"},
		"attempts":      {one("retries: {attempts: 0}"), "wanted an integer from 1 to 16"},
		"strategy":      {one("placement_group_strategy: pack"), `did you mean "PACK"?`},
		"identity": {
			one("routing: {identity: learned}"),
			`identity "learned" is not supported in this version`,
		},
		"policy word": {
			one("routing: {policy: group-balance}"),
			`policy "group-balance" is not supported in this version`,
		},
		"policy map": {one("routing: {policy: {a: 1}}"), "found a map, wanted power-of-two"},
		"label":      {one("resources: {labels: {'a b': c}}"), "wanted a label"},
		"gpus":       {one("resources: {gpus: 1.5}"), "found 1.5, wanted a whole number, or a"},
		"cpus":       {one("resources: {cpus: -1}"), "wanted cpus from 0"},
		"ranks of sim": {
			"applications: [{name: a, model: {id: a}, engine: {kind: sim, ranks: []}}]",
			"ranks belongs to kind attach",
		},
		"unknown alias":   {"applications: *a", `unknown alias "*a"`},
		"alias in itself": {"applications: &a [*a]", `unknown alias "*a"`},
		"custom tag":      {"applications: !python x", "unknown tag"},
		"key of no text":  {"applications: []\n? {a: 1}\n: 2\n", "not YAML"},
		"merge of a list": {one("timeouts: {<<: [1]}"), "a merge key (<<) takes a map"},
		"dp 0":            {one("data_parallel: {dp_size: 0}"), "found 0, wanted an integer from 1 to 4096"},
		"dp too big": {
			one("data_parallel: {dp_size: 4097}"),
			"found 4097, wanted an integer from 1 to 4096",
		},
		"too many ranks": {
			one("data_parallel: {dp_size: 4096}", "num_groups: 17"),
			"found 69632 ranks, wanted at most 65536",
		},
		"autoscaling": {
			one("autoscaling_config: {min_replicas: 1, max_replicas: 2}"),
			"the number of ranks is fixed: found min_replicas 1, max_replicas 2",
		},
		"autoscaling half": {one("autoscaling_config: {min_replicas: 1}"), "the number of ranks is fixed"},
		"two sizes": {
			one("autoscaling_config: {min_replicas: 2, max_replicas: 2}", "num_replicas: 4"),
			"two sizes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lines := faultsOf(t, c.text)
			require.NotEmpty(t, lines)
			assert.Contains(t, strings.Join(lines, "\n"), c.want)
			assert.Len(t, lines, 1+boolToInt(name == "no applications"), strings.Join(lines, "\n"))
		})
	}
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// RG2: the table of dp_size, num_replicas and num_groups.
func TestNumReplicas(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		keys       []string
		dp, groups int
		fault      string
		hint       string
	}{
		{keys: nil, dp: 1, groups: 1},
		{keys: []string{"num_replicas: 3"}, dp: 1, groups: 3},
		{keys: []string{"data_parallel: {dp_size: 1}"}, dp: 1, groups: 1},
		{keys: []string{"data_parallel: {dp_size: 1}", "num_replicas: 1"}, dp: 1, groups: 1},
		{keys: []string{"data_parallel: {dp_size: 4}", "num_replicas: 4"}, dp: 4, groups: 1},
		{keys: []string{"data_parallel: {dp_size: 4}", "num_replicas: 8"}, dp: 4, groups: 2},
		{keys: []string{"data_parallel: {dp_size: 4}", "num_groups: 3"}, dp: 4, groups: 3},
		{keys: []string{"data_parallel: {dp_size: 4}", "num_groups: 2", "num_replicas: 8"}, dp: 4, groups: 2},
		{keys: []string{
			"data_parallel: {dp_size: 4}",
			"autoscaling_config: {min_replicas: 8, max_replicas: 8}",
		}, dp: 4, groups: 2},
		{
			keys:  []string{"data_parallel: {dp_size: 4}", "num_replicas: 6"},
			fault: ruleSize + ": found 6, wanted a multiple of dp_size 4", hint: "write 4 or 8",
		},
		{
			keys:  []string{"data_parallel: {dp_size: 4}", "num_replicas: 3"},
			fault: ruleSize + ": found 3, wanted a multiple of dp_size 4", hint: "write 4",
		},
		{
			keys:  []string{"data_parallel: {dp_size: 4}", "num_groups: 3", "num_replicas: 8"},
			fault: ruleSize + ": found 8, wanted 4 × 3 = 12", hint: "leave num_replicas or num_groups out",
		},
		{
			keys:  []string{"data_parallel: {dp_size: 4}", "num_replicas: 0"},
			fault: "found 0, wanted an integer from 1 to 65536",
		},
		{
			keys:  []string{"data_parallel: {dp_size: 0}", "num_replicas: 4"},
			fault: "found 0, wanted an integer from 1 to 4096",
		},
		{keys: []string{"num_groups: 0"}, fault: "found 0, wanted an integer from 1 to 65536"},
	} {
		text := one(c.keys...)
		if c.fault != "" {
			lines := faultsOf(t, text)
			require.Len(t, lines, 1, text)
			assert.Contains(t, lines[0], c.fault)
			assert.True(t, strings.HasSuffix(lines[0], c.hint), lines[0])
			continue
		}
		a := parsed(t, text).Applications[0]
		assert.Equal(t, c.dp, a.DataParallel.DPSize, text)
		assert.Equal(t, c.groups, a.NumGroups, text)
		assert.Equal(t, c.dp*c.groups, a.NumReplicas, text)
		assert.Len(t, a.Units(), c.dp*c.groups, text)
	}
}

func TestScalarsThatLookLikeOthers(t *testing.T) {
	t.Parallel()
	f := parsed(t, `
applications:
  - name: 123
    model: {id: 7_000, source: 1.50, aliases: [true, 0x10, on, 1e3]}
    engine: {kind: sim, kv_events: off, env: {A: 1, B: yes, C: 010, D: ""}}
`)
	a := f.Applications[0]
	assert.Equal(t, "123", a.Name)
	assert.Equal(t, Model{ID: "7_000", Source: "1.50", Aliases: []string{"true", "0x10", "on", "1e3"}},
		a.Model)
	assert.Equal(t, KVEventsOff, a.Engine.KVEvents)
	assert.Equal(t, map[string]string{"A": "1", "B": "yes", "C": "010", "D": ""}, a.Engine.Env)
}

func TestArgumentTypes(t *testing.T) {
	t.Parallel()
	f, warnings, err := Parse(Default(), "app.yaml", []byte(`
applications:
  - name: a
    model: {id: a}
    engine:
      kind: sim
      args:
        a: 1
        b: 1.0
        c: 1e3
        d: "1"
        e: true
        f: [1, 2.0, x, null, {k: [true]}]
        g: 010
        h: -0.5
        i: !!str 5
        j: |
          two
          lines
        k: on
        l: 0xff
`))
	require.NoError(t, err)
	assert.Equal(t, Args{
		{"a", int64(1)},
		{"b", 1.0},
		{"c", 1000.0},
		{"d", "1"},
		{"e", true},
		{"f", []any{int64(1), 2.0, "x", nil, map[string]any{"k": []any{true}}}},
		{"g", int64(10)},
		{"h", -0.5},
		{"i", "5"},
		{"j", "two\nlines\n"},
		{"k", "on"},
		{"l", int64(255)},
	}, f.Applications[0].Engine.Args)
	require.Len(t, warnings, 1)
	assert.Equal(t,
		`app.yaml:20:12: applications[0].engine.args.k: read as the text "on"; `+
			`hint: write true or false for a flag, or put the text in quotes`,
		warnings[0].String())
}

// LG35: a policy that takes the ranks of a lockstep group one by one is a warning with the reason, and mex a
// fault. cohorts where there is no group is a warning, too.
func TestPoliciesOfLockstepGroups(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ coupling, policy, warning, fault string }{
		{"lockstep", "cohorts", "", ""},
		{"lockstep", "direct", "", ""},
		{"lockstep", "kv", "kv sends each prompt by itself", ""},
		{"lockstep", "lmetric-1", "lmetric-1 sends each prompt by itself", ""},
		{"lockstep", "mex", "", "mex costs such a group a quarter of its tokens"},
		{"independent", "cohorts", "independent ranks get lmetric-1", ""},
		{"independent", "mex", "", ""},
	} {
		_, warnings, err := Parse(Default(), "a", fmt.Appendf(nil, "applications: [{name: a, "+
			"model: {id: a}, engine: {kind: sim}, data_parallel: {dp_size: 2, coupling: %s}, "+
			"routing: {policy: %s}}]", c.coupling, c.policy))
		if c.fault != "" {
			require.ErrorContains(t, err, c.fault)
			continue
		}
		require.NoError(t, err)
		if c.warning == "" {
			assert.Empty(t, warnings)
			continue
		}
		require.Len(t, warnings, 1)
		assert.Contains(t, warnings[0].String(), c.warning)
	}
}

func TestJSONIsYAML(t *testing.T) {
	t.Parallel()
	f := parsed(t, "{\n\t"+`"applications":[{"name":"a","model":{"id":"a\u002fb\ud83d\ude00\/c"},`+"\n\t\t"+
		`"engine":{"kind":"sim","args":{"x":1.5e3}},"num_replicas":2}]}`)
	assert.Equal(t, "a/b😀/c", f.Applications[0].Model.ID)
	assert.Equal(t, Args{{"x", 1500.0}}, f.Applications[0].Engine.Args)
}

func TestAliasesAndMergeKeys(t *testing.T) {
	t.Parallel()
	f := parsed(t, `
applications:
  - &base
    name: one
    model: {id: one}
    engine: &engine {kind: sim, args: &args {a: 1, b: 2}}
    timeouts: &slow {queue_s: 5, first_token_s: 6}
  - <<: *base
    name: two
    model: {id: two}
    engine:
      <<: [{stall_timeout_s: 7}, *engine]
      args: {<<: *args, b: 3}
    timeouts: *slow
`)
	two := f.Applications[1]
	assert.Equal(t, "two", two.Name)
	assert.InDelta(t, 7, two.Engine.StallTimeoutS, 0)
	assert.Equal(t, Args{{"b", int64(3)}, {"a", int64(1)}}, two.Engine.Args)
	assert.Equal(t, f.Applications[0].Timeouts, two.Timeouts)
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	a := parsed(t,
		"applications: [{name: demo, model: {id: m}, engine: {kind: sim}, data_parallel: {dp_size: "+
			"4}}]").Applications[0]
	assert.Equal(t, &Application{
		Name: "demo", RoutePrefix: "/", Model: Model{ID: "m", Source: "m"},
		Engine:       Engine{Kind: KindSim, KVEvents: "auto", StartupTimeoutS: 600, StallTimeoutS: 20},
		DataParallel: DataParallel{DPSize: 4, Coupling: Independent}, NumReplicas: 4, NumGroups: 1,
		PlacementGroupStrategy: "SPREAD",
		Routing:                Routing{Policy: "mex", Preset: "documented", Identity: "text"},
		QueueBounds:            QueueBounds{MaxQueuedRequests: 10_000},
		Rollout:                Rollout{MinReadyS: 10, OnFailure: OnFailureRollback},
		Timeouts:               Timeouts{QueueS: 60, FirstTokenS: 300, BetweenTokensS: 30, KeepaliveS: 15},
		Retries:                Retries{Attempts: 3, ContinueStreams: true},
		HealthCheckPeriodS:     1, HealthCheckTimeoutS: 5, GracefulShutdownTimeout: 1800,
	}, a)
}

// TestThePolicyFollowsTheCoupling, unless the file names one. What is printed reads the same.
func TestThePolicyFollowsTheCoupling(t *testing.T) {
	t.Parallel()
	const vllm, sglang = "engine: {kind: vllm}, data_parallel: {dp_size: 2, coupling: %s}",
		"engine: {kind: sglang, args: {tp_size: 2, enable_dp_attention: %s}}, data_parallel: {dp_size: 2}"
	for _, c := range []struct{ rest, want string }{
		{"engine: {kind: sim}", "mex"},
		{"engine: {kind: sim}, routing: {}", "mex"},
		{"engine: {kind: sim}, routing: null", "mex"},
		{"engine: {kind: sim}, routing: {policy: null}", "mex"},
		{"engine: {kind: sim}, routing: {preset: tuned, params: {ttft_s: 1}}", "mex"},
		{"engine: {kind: sim}, data_parallel: {dp_size: 4, coupling: lockstep}", "cohorts"},
		{
			"engine: {kind: sim}, data_parallel: {dp_size: 4, coupling: lockstep}, routing: {policy: kv}",
			"kv",
		},
		{"engine: {kind: sim}, routing: {policy: lmetric-1}", "lmetric-1"},
		{"engine: {kind: attach, ranks: [{url: \"http://h:1\"}]}", "mex"},
		{fmt.Sprintf(vllm, Independent), "mex"},
		{fmt.Sprintf(vllm, Lockstep), "cohorts"},
		{fmt.Sprintf(sglang, "true"), "cohorts"},
	} {
		f := parsed(t, "applications: [{name: demo, model: {id: m}, "+c.rest+"}]")
		assert.Equal(t, c.want, f.Applications[0].Routing.Policy, c.rest)
		assert.Equal(t, f.Applications[0].Routing, parsed(t, string(f.Print())).Applications[0].Routing,
			c.rest)
	}
}

// CC8: the sample is sound and has every key.
func TestSampleShowsEveryKey(t *testing.T) {
	t.Parallel()
	_, warnings, err := Parse(Default(), "sample", Sample())
	require.NoError(t, err)
	assert.Empty(t, warnings)
	text := string(Sample())
	for _, name := range keyNames(reflect.TypeFor[draft]()) {
		assert.Contains(t, text, name+":")
	}
}

// keyNames lists the supported keys of a struct and of the structs in it.
func keyNames(of reflect.Type) []string {
	var out []string
	for _, k := range keysOf(of) {
		if k.isLater {
			continue
		}
		out = append(out, k.name)
		f := of.FieldByIndex(k.field).Type
		for f.Kind() == reflect.Pointer || f.Kind() == reflect.Slice {
			f = f.Elem()
		}
		if f.Kind() == reflect.Struct && f != reflect.TypeFor[scaling]() && f != reflect.TypeFor[Arg]() {
			out = append(out, keyNames(f)...)
		}
	}
	return out
}

// Sample returns a documented file that has every key of this version.
func Sample() []byte {
	text, err := os.ReadFile("testdata/sample.yaml")
	if err != nil { // the tests that read it fail
		return nil
	}
	return text
}

func policies() []string { return wordLists["policy"] }

func strategies() []string { return wordLists["strategy"] }

func TestFaultsAreAProblem(t *testing.T) {
	t.Parallel()
	_, _, err := Parse(Default(), "app.yaml", []byte("x: 1\n"))
	assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
	var faults Faults
	require.ErrorAs(t, err, &faults)
	p := faults.Problem()
	assert.Equal(t, "the application file has 2 faults", p.Message)
	assert.Len(t, p.Details, 2)
}

func TestFaultsAreBounded(t *testing.T) {
	t.Parallel()
	lines := faultsOf(t, "applications:\n"+strings.Repeat("  - {nme: 1}\n", 200))
	require.Len(t, lines, maxFaults+1)
	assert.Contains(t, lines[maxFaults], "more faults from here on are not shown")
}

func TestExamplesParse(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../examples/*/app.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		_, warnings, err := Parse(Default(), name, text)
		require.NoError(t, err)
		assert.Empty(t, warnings)
	}
}
