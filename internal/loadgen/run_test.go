package loadgen

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

// fake is a sender whose answers take a fixed time of the fake clock.
type fake struct {
	takes   time.Duration
	busy    atomic.Int64
	busiest atomic.Int64
	mu      sync.Mutex
	numbers []uint64
	times   []time.Time // intended
}

func (f *fake) send(ctx context.Context, n uint64, intended time.Time) *sample {
	f.busiest.Store(max(f.busiest.Load(), f.busy.Add(1)))
	defer f.busy.Add(-1)
	f.mu.Lock()
	f.numbers = append(f.numbers, n)
	f.times = append(f.times, intended)
	f.mu.Unlock()
	s := &sample{intended: intended, sent: time.Now()}
	if intended.IsZero() {
		s.intended = s.sent
	}
	select {
	case <-time.After(f.takes):
	case <-ctx.Done():
		s.fail(failureStopped)
		return s
	}
	s.first, s.last, s.end, s.chunks = time.Now(), time.Now(), time.Now(), 1
	return s
}

func fakeRun(cfg Config, f *fake) (*run, *collector) {
	cfg = cfg.withDefaults()
	out := newCollector(cfg)
	return &run{cfg: cfg, do: f.send, record: out.add, sleep: time.Sleep, started: time.Now()}, out
}

func TestClosedLoop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{takes: 100 * time.Millisecond}
		r, out := fakeRun(Config{Concurrency: 4, Duration: time.Second, Warmup: 500 * time.Millisecond}, f)
		r.drive(t.Context())
		report := out.report(r.cfg, r.measureStart())
		assert.Equal(t, 40, report.Offered) // 4 clients × 10 answers a second
		assert.Equal(t, counts{60, 60}, out.all())
		assert.EqualValues(t, 4, f.busiest.Load())
		assert.InDelta(t, 1, report.DurationS, 1e-9)
		assert.InDelta(t, 40, report.RequestsPerS, 1e-9)
		assert.Equal(t, &Percentiles{Count: 40, Mean: 100, P50: 100, P90: 100, P95: 100, P99: 100, Max: 100},
			report.TTFT)
		assert.Nil(t, report.Lag)
		assert.Nil(t, report.TPOT)
	})
}

func TestClosedLoopByNumber(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{takes: time.Second}
		r, out := fakeRun(Config{Concurrency: 4, Requests: 10}, f)
		r.drive(t.Context())
		assert.Equal(t, counts{10, 10}, out.all())
		slices.Sort(f.numbers)
		assert.Equal(t, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, f.numbers)
	})
}

// A server with one slot that needs 1 s per answer is asked twice a second: latency grows by half a second
// per request, although each answer takes one second.
func TestOpenLoopCountsTheWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{takes: time.Second}
		r, out := fakeRun(Config{Rate: 2, Arrivals: Uniform, Requests: 20, Concurrency: 1}, f)
		r.drive(t.Context())
		report := out.report(r.cfg, r.measureStart())
		assert.Equal(t, 20, report.Offered)
		assert.EqualValues(t, 1, f.busiest.Load())
		assert.Greater(t, report.TTFT.Max, 9_000.0)
		assert.Greater(t, report.Lag.Max, 8_000.0)
		assert.Less(t, report.Goodput.Share, 0.3)
	})
}

func TestOpenLoopIsOnTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fake{takes: 10 * time.Second}
		r, out := fakeRun(Config{Rate: 100, Duration: 2 * time.Second}, f)
		r.drive(t.Context())
		report := out.report(r.cfg, r.measureStart())
		assert.Greater(t, report.Offered, 100)
		assert.EqualValues(t, report.Offered, f.busiest.Load())
		assert.LessOrEqual(t, report.Lag.Max, 0.001)
		assert.True(t, slices.IsSortedFunc(f.times, time.Time.Compare))
	})
}

func TestStoppedRunReportsWhatEnded(t *testing.T) {
	t.Parallel()
	for _, cfg := range []Config{{Concurrency: 2}, {Rate: 2}} {
		synctest.Test(t, func(t *testing.T) {
			stop := errors.New("enough")
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(3500*time.Millisecond, func() { cancel(stop) })
			f := &fake{takes: time.Second}
			r, out := fakeRun(cfg, f)
			r.drive(ctx)
			report := out.report(r.cfg, r.measureStart())
			assert.Positive(t, report.OK)
			assert.Zero(t, report.Failed)
			assert.Less(t, time.Since(r.started), 4*time.Second)
		})
	}
}

func TestScheduleKeepsItsRate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(0.1, 10_000).Draw(t, "rate")
		arrivals := rapid.SampledFrom([]Arrivals{Poisson, Uniform}).Draw(t, "arrivals")
		cfg := Config{Rate: rate, Arrivals: arrivals, Seed: rapid.Uint64().Draw(t, "seed")}
		a, b := newSchedule(cfg), newSchedule(cfg)
		const n = 2000
		var last time.Duration
		for range n {
			at := a.next()
			require.GreaterOrEqual(t, at, last)
			require.Equal(t, at, b.next(), "equal seeds, equal times")
			last = at
		}
		// The mean of 2,000 exponential gaps is within 20 % in all but one of 10^18 cases.
		require.InEpsilon(t, n/rate, last.Seconds(), 0.2)
	})
}

func TestPairsAlternate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		direct, proxied := &fake{takes: time.Millisecond}, &fake{takes: 3 * time.Millisecond}
		cfg := Config{URL: "http://proxied", Concurrency: 1, Requests: 100}.withDefaults()
		p := &pair{
			direct: direct.send, proxied: proxied.send, directCfg: Config{URL: "http://direct"},
			cfg: cfg, sleep: time.Sleep,
		}
		o, err := p.compare(t.Context())
		require.NoError(t, err)
		assert.InDelta(t, 2, o.AddedP50, 1e-9)
		assert.InDelta(t, 2, o.AddedP99, 1e-9)
		require.Len(t, o.Runs, overheadRuns)
		for _, r := range o.Runs {
			assert.InDelta(t, 50, r.Direct.Count, 1)
			assert.InDelta(t, 50, r.Proxied.Count, 1)
		}
		assert.InDelta(t, len(direct.numbers), len(proxied.numbers), 1)
		odd := 0
		for _, n := range proxied.numbers {
			odd += int(n % 2)
		}
		assert.InDelta(t, len(proxied.numbers)/2, odd, 2, "neither side is always first")
	})
}

func TestPercentilesAgainstTheDefinition(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.IntRange(0, 1e6), 1, 200).Draw(t, "µs")
		c := newCollector(Config{})
		for _, v := range values {
			c.ttft.add(time.Duration(v) * time.Microsecond)
		}
		got := c.ttft.percentiles()
		slices.Sort(values)
		n := len(values)
		at := func(percent int) float64 { return float64(values[percent*(n-1)/100]) / 1000 }
		require.Equal(t, []float64{at(50), at(90), at(95), at(99), at(100)},
			[]float64{got.P50, got.P90, got.P95, got.P99, got.Max})
		require.Equal(t, n, got.Count)
	})
}

func TestTimesAreBounded(t *testing.T) {
	t.Parallel()
	c := newCollector(Config{})
	c.itl.limit = 100
	for i := range 10_000 {
		c.itl.add(time.Duration(i) * time.Millisecond)
	}
	p := c.itl.percentiles()
	assert.Len(t, c.itl.kept, 100)
	assert.Equal(t, 10_000, p.Count)
	assert.InDelta(t, 9999, p.Max, 0)
	assert.InDelta(t, 4999.5, p.Mean, 1e-6)
	assert.InDelta(t, 5000, p.P50, 2500) // seeded
}

func TestValidateNamesEverything(t *testing.T) {
	t.Parallel()
	good := Config{URL: "http://127.0.0.1:8000", Model: "demo"}
	require.NoError(t, good.Validate())
	err := Config{URL: "http://a/v1", Mode: Open, Concurrency: -1, MaxTokens: -1, Route: "x"}.Validate()
	var p *problem.Error
	require.ErrorAs(t, err, &p)
	assert.Equal(t, problem.InvalidArgument, p.Code)
	assert.Len(t, p.Details, 6)
	_, err = Run(t.Context(), Config{})
	require.Error(t, err)
	_, err = RunOverhead(t.Context(), good, Config{})
	require.Error(t, err)
}

func TestDefaultsAreComplete(t *testing.T) {
	t.Parallel()
	assert.Equal(t, Config{
		Mode: Closed, Arrivals: Poisson, Concurrency: 16, Duration: 10 * time.Second, PromptBytes: 256,
		MaxTokens: 64, Route: Chat,
		Timeout: 2 * time.Minute, SLO: SLO{2 * time.Second, 50 * time.Millisecond},
	}, Config{}.withDefaults())
	assert.Equal(t, 4096, Config{Rate: 1}.withDefaults().Concurrency)
	assert.Equal(t, 400, Config{PromptTokens: 100}.withDefaults().PromptBytes)
}
