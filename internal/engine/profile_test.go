package engine_test

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/state"
)

// after is the word that follows a flag, "" if the flag is missing.
func after(argv []string, flag string) string {
	if i := slices.Index(argv, flag); i >= 0 && i+1 < len(argv) {
		return argv[i+1]
	}
	return ""
}

// group renders all ranks of a group whose ranks are on one node.
func group(t *testing.T, a *app.Application, base int) []engine.Launch {
	t.Helper()
	s := engine.Spec{App: a, Base: base, GroupKey: "k"}
	for r := range a.DataParallel.DPSize {
		s.Local = append(s.Local, engine.Seat{Rank: r, Devices: []int{r}})
	}
	meeting := s.Meeting()
	s.Rank0Addr, s.Rank0Port = meeting.Host, meeting.Port
	out := make([]engine.Launch, len(s.Local))
	for i, seat := range s.Local {
		s.Rank, s.Devices = seat.Rank, seat.Devices
		l, err := engine.Render(&s, nodeEnvironment())
		require.NoError(t, err)
		out[i] = l
	}
	return out
}

// The ranks of a lockstep group differ in rank, port and devices only, in argv and in environment.
func TestRanksOfALockstepGroupHaveTheSameFlags(t *testing.T) {
	launches := group(t, launched(app.KindVLLM, app.Lockstep, 8, arg("enable_expert_parallel", true)), 20016)
	own := []string{"--port", "--data-parallel-rank"}
	common := func(l *engine.Launch) []string {
		words := slices.Clone(l.Argv)
		for _, flag := range own {
			words[slices.Index(words, flag)+1] = ""
		}
		return append(words, slices.DeleteFunc(slices.Clone(l.Env), func(kv string) bool {
			return strings.HasPrefix(kv, "CUDA_VISIBLE_DEVICES=")
		})...)
	}
	for i := range launches {
		assert.Equal(t, common(&launches[0]), common(&launches[i]))
		assert.Equal(t, strconv.Itoa(i), after(launches[i].Argv, "--data-parallel-rank"))
		assert.Contains(t, launches[i].Env, "CUDA_VISIBLE_DEVICES="+strconv.Itoa(i))
		assert.Nil(t, launches[i].Ranks)
	}
}

// One SGLang process hosts all ranks of its node: the launch is the same, and the rank stands in a header.
func TestRanksOfAnSGLangProcessShareItsLaunch(t *testing.T) {
	a := launched(app.KindSGLang, app.Lockstep, 4, arg("tp_size", int64(4)), arg("enable_dp_attention", true))
	launches := group(t, a, 20016)
	for i, l := range launches {
		assert.Equal(t, launches[0].Argv, l.Argv)
		assert.Equal(t, launches[0].Env, l.Env)
		assert.Equal(t, launches[0].URL, l.URL)
		assert.Equal(t, []int{0, 1, 2, 3}, l.Ranks)
		assert.Equal(t, [...]any{app.AddressHeader, i}, [...]any{l.Addressing, l.Selector})
	}
	assert.Contains(t, launches[0].Env, "CUDA_VISIBLE_DEVICES=0,1,2,3")
}

// CC11: what the file says reaches the engine as it is written, and dpserve adds no setting of its own.
func TestCC11FlagsOfTheFileAreVerbatim(t *testing.T) {
	args := []app.Arg{
		arg("max_num_seqs", int64(1024)), arg("gpu-memory-utilization", 0.85), arg("dtype", "bfloat16"),
		arg("trust_remote_code", true), arg("compilation_config", map[string]any{"level": int64(3)}),
	}
	want := []string{
		"--max-num-seqs", "1024", "--gpu-memory-utilization", "0.85", "--dtype", "bfloat16",
		"--trust-remote-code", "--compilation-config", `{"level":3}`,
	}
	for _, kind := range []app.Kind{app.KindVLLM, app.KindSGLang} {
		a := launched(kind, app.Independent, 2, args...)
		l, err := engine.Render(&engine.Spec{App: a, Base: 20016}, nil)
		require.NoError(t, err)
		at := len(l.Argv) - len(want)
		assert.Equal(t, want, l.Argv[at:], kind)
		for _, word := range l.Argv[:at] {
			if name, isFlag := strings.CutPrefix(word, "--"); isFlag {
				_, isOwned := engineflags.FindOwned(name)
				assert.True(t, isOwned, "%s: %s is not in the file", kind, word)
			}
		}
	}
}

func TestCommandsOfVLLM(t *testing.T) {
	a := launched(app.KindVLLM, app.Independent, 1)
	for want, command := range map[string][]string{
		"vllm serve org/model --served-model-name": nil,
		"/venv/bin/vllm serve org/model --served":  {"/venv/bin/vllm", "serve"},
		"python -m vllm.entrypoints.openai.api_server --model org/model --served": {
			"python", "-m", "vllm.entrypoints.openai.api_server",
		},
	} {
		a.Engine.Command = command
		l, err := engine.Render(&engine.Spec{App: a, Base: 20016}, nil)
		require.NoError(t, err)
		assert.True(t, strings.HasPrefix(strings.Join(l.Argv, " "), want), "%q", l.Argv)
	}
}

// PL5: two groups of 16 ranks on one host share no port over HTTP, events, replay and side channel. Each port
// is one that the engine gets on its command line or in its environment, with its rank added where the engine
// adds it.
func TestPL5PortsOfTwoGroupsOnOneHost(t *testing.T) {
	const ranks, block, ephemeral = 16, 96, 32768
	seen := map[int]string{}
	claim := func(port int, what string) {
		t.Helper()
		assert.Empty(t, seen[port], "%s takes port %d", what, port)
		assert.NotContains(t, []int{8000, 8265, 7946, 7947}, port, what)
		assert.Less(t, port, ephemeral, what)
		seen[port] = what
	}
	number := func(text string) int {
		t.Helper()
		n, err := strconv.Atoi(text[strings.LastIndexByte(text, ':')+1:])
		require.NoError(t, err, text)
		return n
	}
	for g := range 2 {
		base := 20000 + g*block
		a := inPool(launched(app.KindVLLM, app.Lockstep, ranks), app.PoolDecode, app.TransferNIXL)
		s := engine.Spec{App: a, Base: base}
		for r := range ranks {
			s.Local = append(s.Local, engine.Seat{Rank: r})
		}
		bound := map[int]bool{}
		for _, b := range s.Binds() {
			bound[b.Port] = true
			claim(b.Port, "group "+strconv.Itoa(g))
		}
		for r, l := range group(t, a, base) {
			http := number(after(l.Argv, "--port"))
			assert.Equal(t, http, number(l.URL))
			events := after(l.Argv, "--kv-events-config")
			dialled := number(cutBetween(t, events, `"endpoint":"`, `"`)) + r
			replay := number(cutBetween(t, events, `"replay_endpoint":"`, `"`)) + r
			side := r
			for _, kv := range l.Env {
				if port, ok := strings.CutPrefix(kv, "VLLM_NIXL_SIDE_CHANNEL_PORT="); ok {
					side += number(port)
				}
			}
			assert.Equal(t, number(l.Events.Bind), dialled)
			assert.Equal(t, number(l.Events.Replay), replay)
			claim(dialled, "events")
			rpc := number(after(l.Argv, "--data-parallel-rpc-port"))
			for _, port := range []int{http, replay, side, rpc} {
				assert.True(t, bound[port], "rank %d binds %d", r, port)
			}
		}
		for port := range seen {
			assert.Less(t, port, base+block)
		}
	}
	assert.Len(t, seen, 2*(4*ranks+1))
}

// The ports of an SGLang group of any size are in its block, and no two are the same.
func TestPortsOfSGLang(t *testing.T) {
	for dp := 1; dp <= 64; dp++ {
		a := inPool(launched(app.KindSGLang, app.Lockstep, dp), app.PoolPrefill, app.TransferSGLang)
		s := engine.Spec{App: a, Base: 20000}
		for r := range dp {
			s.Local = append(s.Local, engine.Seat{Rank: r})
		}
		seen := map[int]bool{}
		for _, b := range s.Binds() {
			assert.False(t, seen[b.Port], "dp %d: %d", dp, b.Port)
			seen[b.Port] = true
			assert.Less(t, b.Port-20000, (5*dp+8+15)/16*16, "dp %d", dp)
		}
		for r := range dp {
			assert.False(t, seen[s.Ports().KV(r)], "dp %d", dp)
		}
	}
}

func cutBetween(t *testing.T, s, head, tail string) string {
	t.Helper()
	_, s, ok := strings.Cut(s, head)
	require.True(t, ok, head)
	s, _, _ = strings.Cut(s, tail)
	return s
}

// Ingresses find the bootstrap server of a launched prefill rank by its port block.
func TestBootstrapPortOfALaunchedRank(t *testing.T) {
	for _, c := range []struct {
		a    *app.Application
		rank int
	}{
		{inPool(launched(app.KindSGLang, app.Lockstep, 4), app.PoolPrefill, app.TransferSGLang), 0},
		{inPool(launched(app.KindSGLang, app.Independent, 4), app.PoolPrefill, app.TransferSGLang), 3},
		{inPool(launched(app.KindVLLM, app.Lockstep, 4), app.PoolPrefill, app.TransferMooncake), 3},
		{inPool(launched(app.KindVLLM, app.Independent, 4), app.PoolPrefill, app.TransferMooncake), 2},
	} {
		l, err := engine.Render(&engine.Spec{App: c.a, Rank: c.rank, Base: 20000, Advertise: "10.0.0.1"}, nil)
		require.NoError(t, err)
		want := after(l.Argv, "--disaggregation-bootstrap-port")
		for _, kv := range l.Env {
			if port, ok := strings.CutPrefix(kv, "VLLM_MOONCAKE_BOOTSTRAP_PORT="); ok {
				want = port
			}
		}
		st := &state.State{Units: map[string]*state.Unit{"u": {
			App: c.a.Name, Pool: c.a.Pool, Ranks: []state.RankGrant{{Rank: c.rank, Node: "n"}},
			Blocks: []state.Block{{Node: "n", Base: 20000}},
		}}}
		address, _, err := engine.BootstrapServer(st, c.a, 0, c.rank)
		require.NoError(t, err)
		assert.Equal(t, "http://127.0.0.1:"+want, address)
	}
}

// Only a process on another node than rank 0 must know rank 0's address before its ranks have one.
func TestMeetsFirst(t *testing.T) {
	s := engine.Spec{App: launched(app.KindSGLang, app.Lockstep, 4), Nodes: 2, NodeRank: 1}
	assert.True(t, s.MeetsFirst())
	s.NodeRank = 0
	assert.False(t, s.MeetsFirst())
	s.App, s.NodeRank = launched(app.KindVLLM, app.Lockstep, 4), 1
	assert.False(t, s.MeetsFirst())
}
