package tracesim_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/tracesim"
)

func policy(name string) func() (routing.Policy, error) {
	return func() (routing.Policy, error) { return routing.New(name, "", nil) }
}

func run(t *testing.T, cfg tracesim.Config, work []tracesim.Request, name string) *tracesim.Result {
	t.Helper()
	r, err := tracesim.Run(cfg, work, policy(name))
	require.NoError(t, err)
	assert.Len(t, r.TTFT, r.Offered, "every request is served")
	return r
}

// chats is a generated workload with the prompt lengths of conversations: half below 7,000 tokens, some above 60,000; every
// fourth continues one of the last prompts.
func chats(n int, rate float64, seed uint64) []tracesim.Request {
	rnd := rand.New(rand.NewPCG(seed, 9))
	work := tracesim.Uniform(n, tracesim.BlockSize, 1, rate, seed)
	for i := range work {
		r := &work[i]
		r.Prompt = int(min(7000*math.Exp(rnd.NormFloat64()), 126_000)) + tracesim.BlockSize
		r.Output = 20 + int(320*rnd.ExpFloat64())
		var shared []uint64
		if before := i - 1 - rnd.IntN(200); rnd.IntN(4) == 0 && before >= 0 {
			shared = work[before].Blocks[:min(len(work[before].Blocks), r.Prompt/tracesim.BlockSize)]
		}
		r.Blocks = append([]uint64(nil), shared...)
		for len(r.Blocks) < r.Prompt/tracesim.BlockSize {
			r.Blocks = append(r.Blocks, rnd.Uint64())
		}
	}
	return work
}

// The Router's account of prefill work is good enough for the policies that go by it. With an account that keeps a prompt whole
// until its first token lmetric-1 loses six points here.
func TestReckonedWorkKeepsGoodput(t *testing.T) {
	const seeds = 3
	good := 0.0
	for seed := range uint64(seeds) {
		good += run(t, tracesim.Default(), chats(3000, 7, seed), "lmetric-1").Goodput / seeds
	}
	assert.GreaterOrEqual(t, good, .62)
	t.Logf("goodput %.1f %%", 100*good)
}

// A rank that becomes five times slower gets at most half of its share, and what it gets does not spoil the first tokens.
func TestASlowRankIsNotTrustedTooMuch(t *testing.T) {
	for _, rate := range []float64{30, 42} {
		cfg := tracesim.Default()
		cfg.Lag, cfg.SlowRank, cfg.SlowFactor, cfg.SlowFrom = 100*time.Millisecond, 3, 5, time.Minute
		work := tracesim.Uniform(int(rate*180), 2048, 150, rate, 11)
		base, r := run(t, cfg, work, "least-loaded"), run(t, cfg, work, "lmetric-1")
		from := cfg.SlowFrom
		for _, share := range []float64{r.Share(3, from, from+10*time.Second), r.Share(3, from+10*time.Second, from+20*time.Second), r.Share(3, from+20*time.Second, time.Hour)} {
			assert.LessOrEqual(t, share, .0625, "at %v/s", rate)
		}
		assert.LessOrEqual(t, tracesim.Percentile(r.TTFT, .99).Seconds(), 1.1*tracesim.Percentile(base.TTFT, .99).Seconds(), "at %v/s", rate)
		assert.GreaterOrEqual(t, r.TokensPerSecond(), .98*base.TokensPerSecond(), "at %v/s", rate)
		t.Logf("%v/s: TTFT p99 %s, least-loaded %s", rate, tracesim.Percentile(r.TTFT, .99), tracesim.Percentile(base.TTFT, .99))
	}
}

// Homes of sessions and of texts are kept behind four ingresses as behind one.
func TestHomesAreKeptBehindSeveralIngresses(t *testing.T) {
	work := tracesim.Agents(200, 1, 11)
	for _, name := range []string{"session-affinity", "prefix-aware"} {
		good := map[int]float64{}
		for _, ingresses := range []int{1, 4} {
			cfg := tracesim.Default()
			cfg.Ingresses, cfg.Lag = ingresses, 100*time.Millisecond
			r, err := tracesim.Run(cfg, work, func() (routing.Policy, error) { return routing.New(name, routing.PresetTuned, nil) })
			require.NoError(t, err)
			good[ingresses] = r.Goodput
		}
		assert.InDelta(t, good[1], good[4], .03, name)
		t.Logf("%s: goodput %.1f %% behind one ingress, %.1f %% behind four", name, 100*good[1], 100*good[4])
	}
}

func TestRunsRepeat(t *testing.T) {
	cfg := tracesim.Default()
	cfg.Ingresses, cfg.Lag = 2, 20*time.Millisecond
	work := tracesim.Agents(20, 1, 5)
	first := run(t, cfg, work, "lmetric-1")
	again := run(t, cfg, work, "lmetric-1")
	assert.Equal(t, first, again)
}

func TestTraceFormat(t *testing.T) {
	trace, err := tracesim.ReadTrace(strings.NewReader(`{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 0, "input_length": 512, "output_length": 0, "hash_ids": []}
`))
	require.NoError(t, err)
	assert.Equal(t, []tracesim.Request{
		{Prompt: 512, Output: 1, Blocks: []uint64{}},
		{At: 3 * time.Second, Prompt: 1100, Output: 5, Blocks: []uint64{7, 8}},
	}, trace)
	for _, bad := range []string{"x", `{"timestamp": 1, "input_length": 0}`, `{"timestamp": -1, "input_length": 9}`} {
		_, err := tracesim.ReadTrace(strings.NewReader(bad))
		require.ErrorIs(t, err, tracesim.ErrTrace)
	}
}

// Rounded timestamps are spread over what they were rounded by; exact ones stay.
func TestRoundedTimesAreSpread(t *testing.T) {
	var rounded, exact []tracesim.Request
	for i := range 100 {
		rounded = append(rounded, tracesim.Request{At: time.Duration(i/10) * 3 * time.Second})
		exact = append(exact, tracesim.Request{At: time.Duration(i) * time.Second})
	}
	distinct := map[time.Duration]bool{}
	for _, r := range tracesim.Play(rounded, 2, 1) {
		distinct[r.At] = true
		assert.Less(t, r.At, 15*time.Second)
	}
	assert.Len(t, distinct, 100)
	for i, r := range tracesim.Play(exact, 2, 1) {
		assert.Equal(t, time.Duration(i)*time.Second/2, r.At)
	}
}
