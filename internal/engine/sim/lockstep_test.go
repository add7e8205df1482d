package sim

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/test/ports"
)

func group(t *testing.T, n int, mutate func(*Config)) []*Server {
	t.Helper()
	c := fast() // a step takes the floor of a group step
	c.RPCAddr = ports.TakeAddr(t)
	if mutate != nil {
		mutate(&c)
	}
	servers, err := startGroup(t.Context(), c, n)
	require.NoError(t, err)
	for _, s := range servers {
		t.Cleanup(func() { assert.NoError(t, s.Close()) })
	}
	return servers
}

func TestGroupStepsTogetherInWaves(t *testing.T) {
	g := group(t, 3, nil)
	status, _ := ask(t, g[2], "/v1/completions", `{"prompt":"x","max_tokens":20,"ignore_eos":true}`)
	assert.Equal(t, 200, status)
	for _, s := range g {
		// two times the sync interval, idle ranks too
		eventually(t, func() bool { return s.Stats().Steps == 32 })
	}
	assert.Contains(t, get(t, g[2], "/metrics"),
		`vllm:generation_tokens_total{engine="2",model_name="sim"} 20.0`)
}

func TestHungRankStallsItsPeers(t *testing.T) {
	g := group(t, 2, nil)
	require.NoError(t, g[1].Fail(Fault{Mode: ModeHang}))
	got := make(chan string, 1)
	go func() {
		got <- tryAsk(g[0].URL()+"/v1/completions", wholeBody)
	}()
	eventually(t, func() bool { return g[0].Stats().Running == 1 })
	assert.Empty(t, get(t, g[0], "/health"))
	require.NoError(t, g[1].Recover())
	assert.Contains(t, <-got, `"length"`)
}

// quickDeath makes the notice of a lost peer short.
func quickDeath(c *Config) { c.Model.Speed = 50 }

func TestDeadRankOverGloo(t *testing.T) {
	for _, victim := range []int{0, 1} {
		g := group(t, 2, quickDeath)
		busy := g[1-victim]
		got := make(chan string, 1)
		go func() {
			got <- tryAsk(busy.URL()+"/v1/completions", strings.Replace(streamBody, "40", "20000", 1))
		}()
		eventually(t, func() bool { return busy.Stats().Tokens > 3 })
		require.NoError(t, g[victim].Fail(Fault{Mode: ModeKill}))
		events := pieces(<-got)
		assert.Contains(t, events[len(events)-2], msgEngineDead)
		eventually(t, func() bool {
			busy.end.mu.Lock()
			defer busy.end.mu.Unlock()
			return busy.end.exit != nil && busy.end.exit.Code == 0
		})
	}
}

func TestIdlePeerDiesOfItsNextRequest(t *testing.T) {
	g := group(t, 2, quickDeath)
	require.NoError(t, g[1].Fail(Fault{Mode: ModeKill}))
	assert.Empty(t, get(t, g[0], "/health"))
	status, body := ask(t, g[0], "/v1/completions", wholeBody)
	assert.Equal(t, 500, status)
	assert.Contains(t, body, msgEngineDead)
}

func TestPeersFreezeOverNCCL(t *testing.T) {
	g := group(t, 2, func(c *Config) { c.Model.NCCL = true })
	require.NoError(t, g[1].Fail(Fault{Mode: ModeKill}))
	resp := post(t, g[0], "/v1/completions", streamBody)
	eventually(t, func() bool { return g[0].Stats().Waiting+g[0].Stats().Running == 1 })
	assert.Empty(t, get(t, g[0], "/health"))
	assert.Zero(t, g[0].Stats().Tokens)
	_ = resp.Body.Close()
	eventually(t, func() bool { return g[0].Stats().InFlight == 0 })
}

func TestStoppedRankEndsItsStreamsWithTheErrorEvent(t *testing.T) {
	g := group(t, 2, quickDeath)
	got := make(chan string, 1)
	go func() {
		got <- tryAsk(g[1].URL()+"/v1/completions", strings.Replace(streamBody, "40", "20000", 1))
	}()
	eventually(t, func() bool { return g[1].Stats().Tokens > 3 })
	g[1].Shutdown(context.Background(), 0)
	events := pieces(<-got)
	assert.Contains(t, events[len(events)-2], msgEngineDead)
}

func TestMismatchStopsRankZeroAlone(t *testing.T) {
	c := fast()
	c.RPCAddr, c.DPSize, c.HandshakeTimeout = ports.TakeAddr(t), 2, 2*time.Second
	other := c
	other.DPRank, other.ExpertParallel = 1, true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	late := make(chan error, 1)
	go func() {
		_, err := startServer(ctx, other)
		late <- err
	}()
	_, err := startServer(t.Context(), c)
	require.ErrorIs(t, err, errMismatch)
	require.ErrorContains(t, err, "for engine 1")
	cancel()
	require.Error(t, <-late, "rank 1 was still waiting")
}

func TestLoneRankNeverGetsIn(t *testing.T) {
	c := fast()
	c.RPCAddr, c.DPSize, c.DPRank, c.HandshakeTimeout = ports.TakeAddr(t), 2, 1, 50*time.Millisecond
	_, err := startServer(t.Context(), c)
	require.ErrorContains(t, err, "waited for its group in vain")
	c.DPRank = 0
	_, err = startServer(t.Context(), c)
	require.ErrorContains(t, err, "1 of 2 ranks came")
}

// LG40: what a rank says of its step comes as it was said, because rank 0 computes from all tokens what the
// ranks do together.
func TestReportsOfRanks(t *testing.T) {
	member, rank0 := net.Pipe()
	l := &link{conns: []net.Conn{member}}
	for _, in := range []em.GroupInput{
		{Kind: em.GroupWave, Rank: 3},
		{Kind: em.GroupReport, Rank: 3, Took: 85 * time.Millisecond, Tokens: 8192, Unfinished: true},
		{Kind: em.GroupReport, Rank: 3, Took: time.Millisecond},
	} {
		go l.report(3, in)
		f, err := readFrame(rank0)
		require.NoError(t, err)
		assert.Equal(t, in, asReport(3, f))
	}
}

// LG40: `--sim-law` and `--sim-prompt-steps` set the step times of a lockstep group.
func TestLawOfAGroup(t *testing.T) {
	of := func(args ...string) Config {
		c, ignored, err := ParseFlags(append(args, "--data-parallel-size", "8", "--data-parallel-rank", "0",
			"--sim-speed", "2"))
		require.NoError(t, err)
		assert.Empty(t, ignored)
		return c
	}
	law, shared := steptime.DeepSeek(8)
	c := of("--sim-law", "deepseek-v3", "--sim-prompt-steps")
	assert.Equal(t, law, c.Model.Law)
	assert.True(t, c.Model.PromptSteps)
	assert.Equal(t, em.GroupConfig{
		Ranks: 8, SyncInterval: 16, MinStep: em.MinWallStep, Shared: shared, Speed: 2,
	}, c.groupConfig())
	for _, c := range []Config{
		of(), of("--sim-law", "qwen3-32b"), of("--sim-law", "deepseek-v3", "--sim-step-ms", "5"),
	} {
		assert.Equal(t, steptime.Reference(), c.Model.Law)
		assert.Zero(t, c.groupConfig().Shared)
		assert.False(t, c.Model.PromptSteps)
	}
	_, _, err := ParseFlags([]string{"--sim-law", "deepseek-v3"})
	require.ErrorContains(t, err, "set coupling: lockstep")
}
