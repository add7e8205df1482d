package engine_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func demo(coupling app.Coupling) *app.Application {
	return &app.Application{
		Name:  "demo",
		Model: app.Model{ID: "demo", Aliases: []string{"d"}},
		Engine: app.Engine{
			Kind: app.KindSim,
			Args: app.Args{
				{Name: "max_num_seqs", Value: int64(8)},
				{Name: "enable-scale-out", Value: true},
				{Name: "prefix_caching", Value: false},
				{Name: "sim_fail", Value: []any{"crash@1", "hang@2.5"}},
			},
			Env: map[string]string{"A": "1", "VLLM_DP_RANK": "3", "GOGC": "50"},
		},
		DataParallel:            app.DataParallel{DPSize: 4, Coupling: coupling},
		GracefulShutdownTimeout: 9.5,
	}
}

// RG11: the command line and the environment of an independent rank.
func TestRG11AnIndependentRankGetsNoDataParallelFlags(t *testing.T) {
	s := &engine.Spec{App: demo(app.Independent), Rank: 3, Base: 20016, Executable: "dpserve"}
	environ := []string{"PATH=/bin", "HTTP_PROXY=http://p", "DPSERVE_TOKEN=secret", "VLLM_DP_SIZE=9", "A=0"}
	l, err := engine.Render(s, environ)
	require.NoError(t, err)
	assert.Equal(t, []string{
		"dpserve", "engine", "sim", "--host", "127.0.0.1", "--port", "20016", "--served-model-name", "demo",
		"d",
		"--shutdown-timeout", "10", "--enable-prompt-tokens-details", "--sim-watch-stdin",
		"--max-num-seqs", "8", "--enable-scale-out", "--no-prefix-caching", "--sim-fail", "crash@1",
		"--sim-fail", "hang@2.5",
	}, l.Argv)
	assert.Equal(t, []string{
		"A=1", "GOGC=50", "GOMAXPROCS=1", "PATH=/bin",
		"VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120",
	}, l.Env)
	assert.Equal(t, "http://127.0.0.1:20016", l.URL)
}

func TestALockstepRankNamesItsPlaceAndRankZero(t *testing.T) {
	a := demo(app.Lockstep)
	a.Engine.Args, a.Engine.Command = nil, []string{"other", "engine"}
	l, err := engine.Render(&engine.Spec{
		App: a, Rank: 2, Base: 20016, Rank0Addr: "127.0.0.1",
		Rank0Port: 20036,
	}, nil)
	require.NoError(t, err)
	assert.Equal(t, []string{
		"other", "engine", "--host", "127.0.0.1", "--port", "20018", "--served-model-name", "demo", "d",
		"--shutdown-timeout", "10", "--enable-prompt-tokens-details", "--sim-watch-stdin",
		"--data-parallel-size", "4", "--data-parallel-rank", "2", "--data-parallel-size-local", "1",
		"--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", "20036",
	}, l.Argv)
	assert.Equal(t, []string{"other", "engine"}, a.Engine.Command, "the app's own slice is left alone")
}

// Nodes that share a machine have their engines on addresses of their own, event sockets too; ranks of one
// start share a secret.
func TestALaunchOnAnotherAddress(t *testing.T) {
	a := demo(app.Lockstep)
	a.Engine.Args, a.Routing.Policy = nil, "kv"
	s := &engine.Spec{
		App: a, Rank: 2, Base: 20016, Host: "127.0.0.2", Rank0Addr: "127.0.0.1",
		Rank0Port: 20036, GroupKey: "k",
	}
	l, err := engine.Render(s, nil)
	require.NoError(t, err)
	assert.Equal(t, "http://127.0.0.2:20018", l.URL)
	assert.Equal(t, []string{"--host", "127.0.0.2", "--port", "20018"}, l.Argv[3:7])
	assert.Contains(t, l.Argv, `{"enable_kv_cache_events":true,"publisher":"zmq",`+
		`"endpoint":"tcp://127.0.0.2:20020","replay_endpoint":"tcp://127.0.0.2:20024","topic":""}`)
	assert.Equal(t, &engine.EventSource{
		Bind: "tcp://127.0.0.2:20022", Replay: "tcp://127.0.0.2:20026",
		Host: "127.0.0.2",
	}, l.Events)
	assert.Contains(t, l.Env, "DPSERVE_GROUP_KEY=k")
	assert.NotContains(t, l.Argv, "k", "every user of the machine sees a command line")
	a.DataParallel.Coupling = app.Independent
	l, err = engine.Render(s, nil)
	require.NoError(t, err)
	assert.NotContains(t, l.Env, "DPSERVE_GROUP_KEY=k")
}

func TestAttachedRanksAreCountedInsideTheirGroup(t *testing.T) {
	a := demo(app.Independent)
	a.Engine.Kind = app.KindAttach
	a.Engine.Ranks = []app.AttachRank{{URL: "http://a:1"}, {URL: "http://b:1", Group: 1}, {URL: "http://c:1"}}
	l, err := engine.Render(&engine.Spec{App: a, Group: 0, Rank: 1}, nil)
	require.NoError(t, err)
	assert.Equal(t, engine.Launch{URL: "http://c:1"}, l)
	seven := 7
	a.Engine.Ranks[2].Number = &seven // ranks that were removed left a hole
	l, err = engine.Render(&engine.Spec{App: a, Group: 0, Rank: 7}, nil)
	require.NoError(t, err)
	assert.Equal(t, "http://c:1", l.URL)
	_, err = engine.Render(&engine.Spec{App: a, Group: 1, Rank: 1}, nil)
	require.EqualError(t, err, "app demo declares no engine for rank 1 of group 1")
}

func TestPortLayout(t *testing.T) {
	p := engine.PortsOf(20000, 8)
	assert.Equal(t, [...]int{20003, 20011, 20019, 20040}, [...]int{p.HTTP(3), p.KV(3), p.Replay(3), p.RPC()})
	for _, size := range []int{1, 2, 64} { // no two ranks share a port, and all are in the block
		p, seen := engine.PortsOf(20000, size), map[int]bool{}
		for rank := range size {
			for _, port := range []int{p.HTTP(rank), p.KV(rank), p.Replay(rank), p.SideChannel(rank)} {
				assert.False(t, seen[port], port)
				assert.Less(t, port-20000, 5*size+8)
				seen[port] = true
			}
		}
	}
}

func TestFlagValues(t *testing.T) {
	flags, err := engine.Flags(app.Args{
		{Name: "a_b", Value: "x y"},
		{Name: "c", Value: 1.5},
		{Name: "d", Value: float64(1e6)},
		{Name: "e", Value: []any{"x", int64(2)}},
		{Name: "f", Value: map[string]any{"k": true}},
		{Name: "g", Value: nil},
		{Name: "--h", Value: int64(-1)},
	})
	require.NoError(t, err)
	assert.Equal(t, []string{
		"--a-b", "x y", "--c", "1.5", "--d", "1000000", "--e", `["x",2]`, "--f",
		`{"k":true}`, "--h", "-1",
	}, flags)
	_, err = engine.Flags(app.Args{{Name: "x", Value: []any{func() {}}}})
	require.Error(t, err)
}

func TestMaxOngoingAndKey(t *testing.T) {
	a := demo(app.Independent)
	assert.Equal(t, 8, engine.MaxOngoing(a))
	a.MaxOngoingRequests = 3
	assert.Equal(t, 3, engine.MaxOngoing(a))
	a.MaxOngoingRequests, a.Engine.Args = 0,
		app.Args{{Name: "max-num-seqs", Value: float64(64)}, {Name: "api_key", Value: "k"}}
	assert.Equal(t, 64, engine.MaxOngoing(a))
	assert.Equal(t, "k", engine.APIKey(a))
	sglang := launched(app.KindSGLang, app.Lockstep, 4, arg("max_running_requests", int64(128)))
	assert.Equal(t, 32, engine.MaxOngoing(sglang))
	sglang.DataParallel.Coupling = app.Independent
	assert.Equal(t, 128, engine.MaxOngoing(sglang))
	a.Engine.Args = app.Args{{Name: "max-num-seqs", Value: "many"}}
	assert.Equal(t, 256, engine.MaxOngoing(a))
	assert.Empty(t, engine.APIKey(a))
	assert.Equal(t, 256, engine.DefaultMaxOngoing)
}
