package simulate_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/routing"
)

func run(t *testing.T, cfg simulate.Config, work []simulate.Request, name string) *simulate.Result {
	t.Helper()
	return setting{name: name}.run(t, cfg, work)
}

// setting is a policy with its parameters.
type setting struct {
	name, preset string
	params       map[string]any
}

func (s setting) run(t *testing.T, cfg simulate.Config, work []simulate.Request) *simulate.Result {
	t.Helper()
	r, err := simulate.Run(cfg, work, func() (routing.Policy, error) {
		return routing.New(s.name, s.preset, s.params)
	})
	require.NoError(t, err)
	assert.Len(t, r.TTFT, r.Offered, "every request is served")
	return r
}

// skipShort leaves a test out under -short, which the race detector runs with: a run has one goroutine, and
// the detector makes it slow.
func skipShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("many runs")
	}
}

// RA2: The Router's account of prefill work is good enough for the policies that go by it. With an account
// that keeps a prompt whole until its first token lmetric-1 loses six points here.
func TestReckonedWorkKeepsGoodput(t *testing.T) {
	const seeds = 3
	good := 0.0
	for seed := range uint64(seeds) {
		good += run(t, simulate.Default(), simulate.Chats(3000, 7, seed), "lmetric-1").Goodput / seeds
	}
	assert.GreaterOrEqual(t, good, .62)
	t.Logf("goodput %.1f %%", 100*good)
}

// RA5: Homes of sessions and of texts are kept behind four ingresses as behind one.
func TestHomesAreKeptBehindSeveralIngresses(t *testing.T) {
	work := simulate.Agents(200, 1, 11)
	for _, name := range []string{"session-affinity", "prefix-aware"} {
		good := map[int]float64{}
		for _, ingresses := range []int{1, 4} {
			cfg := simulate.Default()
			cfg.Ingresses, cfg.Lag = ingresses, 100*time.Millisecond
			r, err := simulate.Run(cfg, work, func() (routing.Policy, error) {
				return routing.New(name, routing.PresetTuned, nil)
			})
			require.NoError(t, err)
			good[ingresses] = r.Goodput
		}
		assert.InDelta(t, good[1], good[4], .03, name)
		t.Logf("%s: goodput %.1f %% behind one ingress, %.1f %% behind four", name, 100*good[1], 100*good[4])
	}
}

func TestRunsRepeat(t *testing.T) {
	cfg := simulate.Default()
	cfg.Ingresses, cfg.Lag = 2, 20*time.Millisecond
	work := simulate.Agents(20, 1, 5)
	first := run(t, cfg, work, "lmetric-1")
	again := run(t, cfg, work, "lmetric-1")
	assert.Equal(t, first, again)
}

// Engines refuse a request that is longer than a rank holds. It counts as offered, and the others are served.
func TestTooLongRequestsAreRefused(t *testing.T) {
	cfg := simulate.Default()
	work := simulate.Uniform(40, 2048, 10, 10, 1)
	for _, i := range []int{0, 7, 39} {
		work[i].Prompt = cfg.Engine.Blocks*simulate.BlockSize - work[i].Output + 1
	}
	r, err := simulate.Run(cfg, work, func() (routing.Policy, error) {
		return routing.New("lmetric-1", "", nil)
	})
	require.NoError(t, err)
	assert.Equal(t, 3, r.Refused)
	assert.Len(t, r.TTFT, 37)
	assert.InDelta(t, 37.0/40, r.Goodput, 1e-9)
	assert.InDelta(t, 37.0/40, cfg.Bound(work).Goodput, 1e-9)
	assert.Equal(t, -1, r.Chosen[7].Rank)
}

// A run can be watched and ended.
func TestRunsEndWhereTheyAreTold(t *testing.T) {
	cfg, seen, enough := simulate.Default(), 0, errors.New("enough")
	cfg.Each = func(sent int) error {
		if seen = sent; sent == 25 {
			return enough
		}
		return nil
	}
	_, err := simulate.Run(cfg, simulate.Uniform(40, 2048, 10, 10, 1),
		func() (routing.Policy, error) { return routing.New("random", "", nil) })
	require.ErrorIs(t, err, enough)
	assert.Equal(t, 25, seen)
}

// Years without a request take no longer than an hour, and a run can be ended while no request comes.
func TestYearsWithoutRequestsAreSkipped(t *testing.T) {
	work := []simulate.Request{
		{Prompt: 2048, Output: 100}, {At: 50 * 365 * 24 * time.Hour, Prompt: 2048, Output: 100},
	}
	newPolicy := func() (routing.Policy, error) { return routing.New("lmetric-1", "", nil) }
	alone, group := simulate.Default(), simulate.LockstepGroup(4, 0)
	for name, play := range map[string]func(each func(int) error) (*simulate.Result, error){
		"independent": func(each func(int) error) (*simulate.Result, error) {
			alone.Each = each
			return simulate.Run(alone, work, newPolicy)
		},
		"lockstep": func(each func(int) error) (*simulate.Result, error) {
			group.Each, group.Until = each, work[1].At+1
			r, err := simulate.RunGroup(group, work, newPolicy)
			if err != nil {
				return nil, err
			}
			return r.Whole, nil
		},
	} {
		calls, enough := 0, errors.New("enough")
		r, err := play(func(int) error { calls++; return nil })
		require.NoError(t, err, name)
		assert.Len(t, r.TTFT, 2, name)
		assert.Less(t, calls, 10_000, "%s: twice a second for an hour", name)
		_, err = play(func(sent int) error {
			if calls--; sent == 1 && calls < 1000 {
				return enough
			}
			return nil
		})
		require.ErrorIs(t, err, enough, name)
	}
}

// What a cache without limit would hold is the most that the ranks' caches can.
func TestBound(t *testing.T) {
	cfg := simulate.Default()
	work := []simulate.Request{
		{Prompt: 1024, Output: 9, Blocks: []uint64{1, 2}},
		// the last block has the token that is always computed
		{Prompt: 1024, Output: 9, Blocks: []uint64{1, 2}},
		{Prompt: 2048, Output: 9, Blocks: []uint64{1, 2, 3, 4}},
		{Prompt: 60_000, Output: 9}, // more than 2 s
		{Prompt: 60_000, Output: 1},
	}
	b := cfg.Bound(work)
	assert.InDelta(t, (512.0+1024)/(1024+1024+2048+120_000), b.Hit, 1e-9)
	assert.InDelta(t, 3.0/5, b.Goodput, 1e-9)
	cfg.Goals = routing.Goals{TTFT: time.Minute, TPOT: time.Millisecond}
	assert.InDelta(t, 1.0/5, cfg.Bound(work).Goodput, 1e-9,
		"an answer of one token has no time between tokens")
	cfg = simulate.Default()
	chats := simulate.Chats(500, 5, 3)
	b = cfg.Bound(chats)
	r := run(t, cfg, chats, "lmetric-1")
	assert.LessOrEqual(t, r.Hit, b.Hit)
	assert.LessOrEqual(t, r.Goodput, b.Goodput)
	assert.Positive(t, r.Hit)
	assert.Less(t, b.Goodput, 1.0)
}

func TestBurstMaxMean(t *testing.T) {
	r := &simulate.Result{Counts: simulate.Counts{Requests: make([]int, 2)}}
	for i, rank := range []int{0, 0, 1, 1, 0, 0, 0, 1} { // two bursts of four
		r.Chosen = append(r.Chosen, simulate.Choice{At: time.Duration(i / 4), Rank: rank})
	}
	r.Chosen = append(r.Chosen, simulate.Choice{At: 9, Rank: 1}) // no burst
	mean, worst := r.BurstMaxMean()
	assert.InDelta(t, 1.25, mean, 1e-9)
	assert.InDelta(t, 1.5, worst, 1e-9)
	work := simulate.Bursts(2, 512, 4, 1)
	assert.Len(t, work, 1024)
	assert.Equal(t, work[0].Blocks[:4], work[1023].Blocks[:4])
	assert.NotEqual(t, work[0].Blocks[4], work[1023].Blocks[4])
	assert.Equal(t, work[511].At, work[0].At)
	assert.Greater(t, work[512].At, work[0].At)
}

// The records of a rank carry the instants at which they happened, on the rank's own clock.
func TestRecordsCarryTheRanksTime(t *testing.T) {
	cfg := simulate.Default()
	cfg.Ranks, cfg.Lag = 2, 300*time.Millisecond
	cfg.ClockSkew, cfg.ClockJump, cfg.ClockJumpAt = []time.Duration{0, 5 * time.Minute},
		[]time.Duration{-time.Second}, 10*time.Second
	work := simulate.Uniform(200, 2048, 50, 10, 1)
	kinds := map[routing.EventKind]int{}
	var admitted []time.Duration // off the first rank's clock
	cfg.Report = func(e *routing.Event) {
		switch e.Kind {
		case routing.EvAdmitted, routing.EvFirstToken, routing.EvProgress, routing.EvFinished:
			assert.Positive(t, e.At)
			kinds[e.Kind]++
		default:
			assert.Zero(t, e.At)
		}
		if e.Kind == routing.EvAdmitted {
			offset := e.At - time.Hour - work[len(admitted)].At
			if e.Rank.Rank() == 1 {
				offset -= 5 * time.Minute
			} else if work[len(admitted)].At >= cfg.ClockJumpAt {
				offset += time.Second
			}
			admitted = append(admitted, offset)
		}
	}
	run(t, cfg, work, "round-robin")
	assert.Len(t, kinds, 4)
	for i, offset := range admitted {
		assert.Zero(t, offset, i)
	}
}
