package engine_test

import (
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

func cached(coupling app.Coupling) *app.Application {
	a := demo(coupling)
	a.Engine.Args = nil
	a.Routing.Policy = "scoring"
	return a
}

func TestWhoWantsEvents(t *testing.T) {
	for name, c := range map[string]struct {
		change func(a *app.Application)
		want   bool
	}{
		"a policy that reads the index": {func(*app.Application) {}, true},
		"the default": {
			func(a *app.Application) { a.Routing.Policy = app.DefaultPolicy(app.Independent) },
			true,
		},
		"the default in lockstep": {func(a *app.Application) {
			a.Routing.Policy = app.DefaultPolicy(app.Lockstep)
		}, true},
		"another one":   {func(a *app.Application) { a.Routing.Policy = "kv" }, true},
		"auto, written": {func(a *app.Application) { a.Engine.KVEvents = app.KVEventsAuto }, true},
		"attached": {func(a *app.Application) {
			a.Engine.Kind, a.Engine.Family = app.KindAttach,
				app.FamilyVLLM
		}, true},
		"caching on, written": {func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "enable_prefix_caching", Value: true}}
		}, true},
		"the last flag counts": {func(a *app.Application) {
			a.Engine.Args = app.Args{
				{Name: "no-enable-prefix-caching", Value: true},
				{Name: "enable-prefix-caching", Value: true},
			}
		}, true},
		"KV16 forbidden": {func(a *app.Application) {
			a.Engine.KVEvents = app.KVEventsOff
		}, false},
		"KV16 caching off": {func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "enable_prefix_caching", Value: false}}
		}, false},
		"KV16 caching off, other words": {func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "no-enable-prefix-caching", Value: true}}
		}, false},
		"KV16 caching off, sglang": {func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "disable_radix_cache", Value: true}}
		}, false},
		"KV16 no weight on overlap": {kvWith("overlap_score_weight", 0), false},
		"approximate":               {kvWith("no_kv_events", true), false},
		"a policy of load": {func(a *app.Application) {
			a.Routing.Policy = "power-of-two"
		}, false},
		"a policy of texts": {func(a *app.Application) {
			a.Routing.Policy = "prefix-aware"
		}, false},
		"nothing but the API is assumed": {func(a *app.Application) {
			a.Engine.Kind,
				a.Engine.Family = app.KindAttach, app.FamilyOpenAI
		}, false},
		"no such policy": {func(a *app.Application) { a.Routing.Policy = "best" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			a := cached(app.Independent)
			c.change(a)
			assert.Equal(t, c.want, engine.WantsEvents(a))
		})
	}
}

func kvWith(param string, value any) func(a *app.Application) {
	return func(a *app.Application) {
		a.Routing.Policy, a.Routing.Params = "kv", map[string]any{param: value}
	}
}

// eventsFlag is the value of the flag in argv, "" without.
func eventsFlag(argv []string) string {
	if i := slices.Index(argv, "--kv-events-config"); i >= 0 {
		return argv[i+1]
	}
	return ""
}

func tcp(port int) string { return "tcp://127.0.0.1:" + strconv.Itoa(port) }

func TestLaunchedEnginesDialTheirOwnDPServer(t *testing.T) {
	l, err := engine.Render(&engine.Spec{
		App: cached(app.Independent), Rank: 3, Base: 20016,
		Executable: "dpserve",
	}, nil)
	require.NoError(t, err)
	const want = `{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://127.0.0.1:20017",` +
		`"replay_endpoint":"tcp://127.0.0.1:20018","topic":""}`
	assert.Equal(t, want, eventsFlag(l.Argv)) //nolint:testifylint // the very bytes, which all ranks share
	assert.Equal(t, &engine.EventSource{
		Bind: "tcp://127.0.0.1:20017", Replay: "tcp://127.0.0.1:20018",
		Host: "127.0.0.1",
	}, l.Events)

	// Ranks of a lockstep group get one and the same flag, and add their number: all argv but rank and port
	// are equal.
	var first []string
	for rank := range 4 {
		l, err := engine.Render(&engine.Spec{
			App: cached(app.Lockstep), Rank: rank, Base: 20016,
			Rank0Addr: "127.0.0.1", Rank0Port: 20036,
		}, nil)
		require.NoError(t, err)
		if rank == 0 {
			first = l.Argv
		}
		assert.Equal(t, eventsFlag(first), eventsFlag(l.Argv))
		assert.Contains(t, eventsFlag(l.Argv),
			`"endpoint":"tcp://127.0.0.1:20020","replay_endpoint":"tcp://127.0.0.1:20024"`)
		p := engine.PortsOf(20016, 4)
		assert.Equal(t, [...]int{20020 + rank, 20024 + rank}, [...]int{p.KV(rank), p.Replay(rank)})
		assert.Equal(t, tcp(p.KV(rank)), l.Events.Bind)
		assert.Equal(t, tcp(p.Replay(rank)), l.Events.Replay)
	}
}

// KV16: engines publish no KV events where nothing would use them.
func TestKV16NoFlagWhereNobodyReads(t *testing.T) {
	for name, change := range map[string]func(a *app.Application){
		"off": func(a *app.Application) { a.Engine.KVEvents = app.KVEventsOff },
		"caching off": func(a *app.Application) {
			a.Engine.Args = app.Args{{Name: "enable_prefix_caching", Value: false}}
		},
		"weight 0": kvWith("overlap_score_weight", 0),
	} {
		a := cached(app.Independent)
		change(a)
		l, err := engine.Render(&engine.Spec{App: a, Base: 20016, Executable: "dpserve"}, nil)
		require.NoError(t, err)
		assert.NotContains(t, l.Argv, "--kv-events-config", name)
		assert.Nil(t, l.Events, name)
	}
}

func TestAttachedRanksPublishWhereTheFileSays(t *testing.T) {
	a := cached(app.Independent)
	a.Engine.Kind = app.KindAttach
	a.Engine.Ranks = []app.AttachRank{
		{URL: "http://h:1", KVEvents: &app.KVSocket{Connect: "tcp://h:2", Replay: "tcp://h:3"}},
		{URL: "http://[::1]:1", KVEvents: &app.KVSocket{Bind: "tcp://127.0.0.1:4"}},
		{URL: "http://h:5"},
	}
	want := []*engine.EventSource{
		{Connect: "tcp://h:2", Replay: "tcp://h:3", Host: "h"},
		{Bind: "tcp://127.0.0.1:4", Host: "::1"},
		nil,
	}
	for rank := range want {
		l, err := engine.Render(&engine.Spec{App: a, Rank: rank}, nil)
		require.NoError(t, err)
		assert.Equal(t, want[rank], l.Events)
	}
	a.Routing.Policy = "round-robin"
	l, err := engine.Render(&engine.Spec{App: a}, nil)
	require.NoError(t, err)
	assert.Nil(t, l.Events, "nobody reads them")
	assert.Empty(t, engine.HostOf("::"))
}
