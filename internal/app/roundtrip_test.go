package app

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/routing"
)

// A generator of files that Parse could have made. It draws only what a user may write, and derives the rest
// with the
// simplest code.

func anyText() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringMatching(`[a-zA-Z0-9_./:@ -]{0,12}`),
		rapid.SampledFrom([]string{
			"", "on", "off", "yes", "true", "null", "~", "1", "0x1", "1e3", "01", "<<",
			"*a", "&a", "- a", "a: b", "# c", "!t", "%", "\n", " x ", "\t", "é😀", "\u2028", "'", `"`, `\`,
			".5", "-", "{}", "[", "a\nb\n", "\u0085", "\ufeff", "<&>",
		}),
		rapid.String().Filter(func(s string) bool { return !slices.Contains([]byte(s), 0) }),
	)
}

func anyValue(depth int) *rapid.Generator[any] {
	scalars := []*rapid.Generator[any]{
		rapid.Map(anyText(), func(s string) any { return s }),
		rapid.Map(rapid.Int64(), func(v int64) any { return v }),
		rapid.Map(rapid.Bool(), func(v bool) any { return v }),
		rapid.Map(rapid.Float64().Filter(func(v float64) bool { return !math.IsInf(v, 0) && !math.IsNaN(v) }),
			func(v float64) any { return v }),
		rapid.Map(rapid.IntRange(-5, 5), func(v int) any { return float64(v) }),
	}
	if depth == 0 {
		return rapid.OneOf(scalars...)
	}
	inner := rapid.OneOf(anyValue(depth-1), rapid.Just[any](nil))
	return rapid.OneOf(append(scalars,
		rapid.Map(rapid.SliceOfN(inner, 0, 3), func(v []any) any { return append([]any{}, v...) }),
		rapid.Map(rapid.MapOfN(anyText(), inner, 0, 3), func(v map[string]any) any { return v }),
	)...)
}

func modelName(t *rapid.T, taken map[string]bool) string {
	return rapid.StringMatching(`[A-Za-z0-9é][A-Za-z0-9._/:#@!&*?,{}-]{0,10}`).
		Filter(func(s string) bool {
			ok := !taken[s]
			taken[s] = true
			return ok
		}).Draw(t, "model name")
}

func amount(t *rapid.T, label string, low float64) float64 {
	return rapid.OneOf(rapid.Float64Range(low, 1e6),
		rapid.Map(rapid.IntRange(1, 5000), func(v int) float64 { return float64(v) })).Draw(t, label)
}

func drawArgs(t *rapid.T) Args {
	var out Args
	names := rapid.SliceOfNDistinct(rapid.StringMatching(`x[a-z0-9]{0,6}(_[a-z]{1,3})?(\.[a-z]{1,3})?`), 0, 4,
		rapid.ID[string]).Draw(t, "flags")
	for _, name := range names {
		out = append(out, Arg{Name: name, Value: anyValue(2).Draw(t, "value")})
	}
	return out
}

func drawRanks(t *rapid.T, n, groups int) []AttachRank {
	var out []AttachRank
	for i := range n {
		r := AttachRank{
			URL: "http://10.0.0.1:" + strconv.Itoa(8000+i), Addressing: AddressURL,
			Role: RoleBoth, Group: i % groups,
		}
		if rapid.Bool().Draw(t, "by header") {
			r.Addressing, r.Selector = AddressHeader, rapid.IntRange(0, 9).Draw(t, "selector")
		}
		if rapid.Bool().Draw(t, "events") {
			r.KVEvents = &KVSocket{Bind: "tcp://*:" + strconv.Itoa(5557+i)}
			r.Node = "node-1"
		}
		out = append(out, r)
	}
	return out
}

// drawNumbers gives independent ranks numbers with holes, in any order.
func drawNumbers(t *rapid.T, a *Application) {
	if a.DataParallel.Coupling == Lockstep || !rapid.Bool().Draw(t, "holes") {
		return
	}
	numbers := make([]int, len(a.Engine.Ranks))
	for g := range a.NumGroups {
		free := rapid.SliceOfNDistinct(rapid.IntRange(0, 40), a.DataParallel.DPSize, a.DataParallel.DPSize,
			rapid.ID[int]).Draw(t, "numbers")
		for i := range a.Engine.Ranks {
			if a.Engine.Ranks[i].Group == g {
				numbers[i], free = free[0], free[1:]
			}
		}
	}
	a.Engine.setNumbers(numbers)
}

func drawApplication(t *rapid.T, name string, names map[string]bool) *Application {
	a := Default()
	a.Name = name
	a.RoutePrefix = rapid.SampledFrom([]string{"/", "/" + name, "/" + name + "/x"}).Draw(t, "prefix")
	a.Model = Model{ID: modelName(t, names)}
	a.Model.Source = rapid.SampledFrom([]string{a.Model.ID, "/models/x y", "1.50"}).Draw(t, "source")
	for range rapid.IntRange(0, 2).Draw(t, "aliases") {
		a.Model.Aliases = append(a.Model.Aliases, modelName(t, names))
	}
	if rapid.Bool().Draw(t, "adapter") {
		id := modelName(t, names)
		names[a.Model.ID+":"+id] = true
		a.Model.Adapters = []Adapter{{ID: id, Source: "s3://x"}}
	}
	a.DataParallel = DataParallel{
		DPSize:   rapid.IntRange(1, 8).Draw(t, "dp"),
		Coupling: rapid.SampledFrom([]Coupling{Independent, Lockstep}).Draw(t, "coupling"),
	}
	a.NumGroups = rapid.IntRange(1, 3).Draw(t, "groups")
	a.NumReplicas = a.NumGroups * a.DataParallel.DPSize
	drawEngine(t, &a)
	drawTuning(t, &a)
	return &a
}

func drawEngine(t *rapid.T, a *Application) {
	e := &a.Engine
	e.Kind = rapid.SampledFrom([]Kind{KindSim, KindVLLM, KindAttach}).Draw(t, "kind")
	e.KVEvents = rapid.SampledFrom([]string{KVEventsAuto, KVEventsOff}).Draw(t, "kv_events")
	e.StartupTimeoutS = amount(t, "startup", 1e-3)
	if e.Kind == KindAttach {
		e.Family = rapid.SampledFrom([]string{"", FamilyVLLM, FamilySGLang}).Draw(t, "family")
		e.Ranks = drawRanks(t, a.NumReplicas, a.NumGroups)
		drawNumbers(t, a)
		return
	}
	if rapid.Bool().Draw(t, "command") {
		e.Command = rapid.SliceOfN(anyText().Filter(func(s string) bool { return s != "" }), 1, 3).Draw(t,
			"words")
	}
	e.Args = drawArgs(t)
	e.Env = rapid.MapOfN(rapid.StringMatching(`X[A-Z_0-9]{0,5}`), anyText(), 1, 3).Draw(t, "env")
	if e.Kind == KindVLLM {
		a.Resources.GPUs = 1
	}
	if rapid.Bool().Draw(t, "gpus") {
		a.Resources.GPUs, a.Resources.GPUsSet = drawGPUs(t, a), true
	}
	a.Resources.CPUs = amount(t, "cpus", 0) / 1e3
}

// drawGPUs draws a whole number of devices, or a share of one. Lockstep ranks of real engines have no share.
func drawGPUs(t *rapid.T, a *Application) float64 {
	mayShare := a.Engine.Kind == KindSim || a.DataParallel.Coupling != Lockstep
	if mayShare && rapid.Bool().Draw(t, "share") {
		return float64(rapid.IntRange(1, share.Whole-1).Draw(t, "parts")) / share.Whole
	}
	return float64(rapid.IntRange(0, 4).Draw(t, "gpu count"))
}

func drawTuning(t *rapid.T, a *Application) {
	a.Resources.Labels = rapid.MapOfN(rapid.StringMatching(`[a-z0-9]{1,4}`), anyText(), 1, 2).Draw(t,
		"labels")
	a.PlacementGroupStrategy = rapid.SampledFrom(strategies()).Draw(t, "strategy")
	a.MaxRanksPerNode = rapid.IntRange(0, 4).Draw(t, "per node")
	a.Routing.Policy = rapid.SampledFrom(policies()).Draw(t, "policy")
	if a.Routing.Policy == "mex" && a.DataParallel.Coupling == Lockstep { // it is refused
		a.Routing.Policy = DefaultPolicy(Lockstep)
	}
	presets := []string{routing.PresetDocumented, routing.PresetTuned}
	a.Routing.Preset = rapid.SampledFrom(presets).Draw(t, "preset")
	if rapid.Bool().Draw(t, "params") {
		a.Routing.Params = map[string]map[string]any{
			"scoring": {"profile": "locality"}, "power-of-two": {"prefer_local": false},
			"mex": {"goal": "latency", "ttft_s": 0.25, "cost_model": "moe"},
		}[a.Routing.Policy]
	}
	a.Routing.Identity = rapid.SampledFrom([]string{IdentityText, IdentityTokens}).Draw(t, "identity")
	if rapid.Bool().Draw(t, "busy") {
		share := rapid.OneOf(rapid.SampledFrom([]float64{0, 1, 0.95}), rapid.Float64Range(0, 1)).Draw(t,
			"busy threshold")
		a.Routing.BusyThreshold = &share
	}
	a.MaxOngoingRequests = rapid.IntRange(0, 300).Draw(t, "ongoing")
	a.MaxQueuedRequests = rapid.IntRange(0, 2000).Draw(t, "queued")
	a.MaxQueuedTokens = rapid.IntRange(0, 2000).Draw(t, "queued tokens")
	a.Timeouts = Timeouts{
		QueueS: amount(t, "queue", 1e-3), FirstTokenS: amount(t, "first", 1e-3),
		BetweenTokensS: 30,
	}
	a.Retries.Attempts = rapid.IntRange(1, 9).Draw(t, "attempts")
	a.HealthCheckPeriodS = amount(t, "period", 1e-3)
	a.GracefulShutdownTimeout = rapid.SampledFrom([]float64{0, 0.5, 1800, 10}).Draw(t, "grace")
}

func drawFile(t *rapid.T) *File {
	names := map[string]bool{}
	f := &File{}
	for i := range rapid.IntRange(1, 3).Draw(t, "applications") {
		f.Applications = append(f.Applications, drawApplication(t, "app-"+strconv.Itoa(i), names))
	}
	return f
}

// CC8: parse(print(x)) = x for drawn files.
func TestPrintParses(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawFile(t)
		text := want.Print()
		got, _, err := Parse(Default(), "print", text)
		require.NoError(t, err, string(text))
		require.Equal(t, want, got, string(text))
		require.Equal(t, string(text), string(got.Print()))
	})
}

// TestJSONIsExact: stored values come back with their types.
func TestJSONIsExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		want := drawFile(t)
		text, err := json.Marshal(want)
		require.NoError(t, err)
		var got File
		require.NoError(t, json.Unmarshal(text, &got))
		require.Equal(t, want, &got, string(text))
		again, err := json.Marshal(&got)
		require.NoError(t, err)
		require.Equal(t, string(text), string(again))
	})
}

// TestCompareSeesEveryDifference: equal applications are no change, and unequal ones always are.
func TestCompareSeesEveryDifference(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := drawApplication(t, "a", map[string]bool{})
		b := drawApplication(t, "a", map[string]bool{})
		require.Empty(t, Compare(a, a))
		left, err := json.Marshal(a)
		require.NoError(t, err)
		right, err := json.Marshal(b)
		require.NoError(t, err)
		require.Equal(t, string(left) != string(right), len(Compare(a, b)) > 0, "%s\n%s", left, right)
	})
}

func TestCompare(t *testing.T) {
	t.Parallel()
	before := parsed(t, `
applications:
  - {name: a, model: {id: a}, engine: {kind: sim, args: {x: 1, y: 2}, env: {TOKEN: secret}}}
  - {name: c, model: {id: c}, engine: {kind: sim, args: {x: 1, y: 2}}}
  - {name: d, model: {id: d}, engine: {kind: sim}}
`).Applications
	after := parsed(t, `
applications:
  - {name: a, model: {id: a}, engine: {kind: sim, args: {x: 1.0, z: [1]}, env: {TOKEN: other}},
    routing: {policy: random}}
  - {name: c, model: {id: c}, engine: {kind: sim, args: {y: 2, x: 1}}}
  - {name: d, model: {id: d}, engine: {kind: sim}}
`).Applications
	diffs := Compare(before[0], after[0])
	assert.Equal(t, "engine.args.x, engine.args.y, engine.args.z, engine.env.TOKEN, routing.policy",
		diffPaths(diffs))
	assert.Equal(t, `engine.args.x: 1 → 1.0`, describeDiff(diffs[0]))
	assert.Equal(t, `engine.args.y: 2 → (unset)`, describeDiff(diffs[1]))
	assert.Equal(t, `engine.env.TOKEN: (hidden) → (hidden)`, describeDiff(diffs[3]))
	assert.Equal(t, `routing.policy: "mex" → "random"`, describeDiff(diffs[4]))
	assert.Equal(t, "engine.args", diffPaths(Compare(before[1], after[1])))
	assert.Empty(t, Compare(before[2], after[2]))
}

func FuzzParse(f *testing.F) {
	f.Add(Sample())
	f.Add([]byte(one("num_replicas: 6", "data_parallel: {dp_size: 4}")))
	f.Add([]byte(`{"applications":[{"name":"a","model":{"id":"a"},"engine":{"kind":"sim"}}]}`))
	f.Add([]byte(pd("kind: sim, args: {a: 1}, env: {A: b}", twoPrefill,
		"decode: {engine: {args: {A: 2}}, routing: {policy: random}, resources: {gpus: 0}}")))
	f.Add([]byte(pd(`kind: attach, ranks: [{url: "http://p:1", role: prefill}, {url: "http://d:1"}]`)))
	f.Add([]byte("a: &a {<<: *a}\n? x\n: !!str 1\n---\n"))
	f.Add([]byte("applications: &x [{name: a, <<: {model: {id: 1}}, engine: {kind: sim}}]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		file, _, err := Parse(Default(), "fuzz", text)
		if err != nil {
			var faults Faults
			require.ErrorAs(t, err, &faults)
			require.NotEmpty(t, faults)
			for _, fault := range faults {
				require.Positive(t, fault.Line)
				require.Positive(t, fault.Col)
			}
			return
		}
		again, _, err := Parse(Default(), "print", file.Print())
		require.NoError(t, err, string(file.Print()))
		require.Equal(t, file, again)
	})
}

// describeDiff returns `path: old → new`.
func describeDiff(d Diff) string {
	show := func(s string) string {
		if s == "" {
			return "(unset)"
		}
		return s
	}
	return fmt.Sprintf("%s: %s → %s", d.Path, show(d.Old), show(d.New))
}

// diffPaths lists the changed paths.
func diffPaths(diffs []Diff) string {
	paths := make([]string, len(diffs))
	for i, d := range diffs {
		paths[i] = d.Path
	}
	return strings.Join(paths, ", ")
}
