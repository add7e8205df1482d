package loadgen

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
)

// Run sends the load of cfg and reports what its clients measured. It returns when all requests have ended;
// cfg.Timeout bounds each. If ctx ends first, Run cuts running requests, the report covers the requests that
// ended before, and the error is the cause.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	c, err := newClient(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer c.close()
	out := newCollector(cfg)
	r := &run{cfg: cfg, do: c.do, record: out.add, sleep: exactSleep, started: time.Now()}
	before := cpuTime(cfg.PIDs)
	r.drive(ctx)
	report := out.report(cfg, r.measureStart())
	report.CPU = chargeCPU(before, cpuTime(cfg.PIDs), time.Since(r.started), out.all())
	return report, context.Cause(ctx)
}

// sender sends request number n and waits for its end. A zero intended means now.
type sender func(ctx context.Context, n uint64, intended time.Time) *sample

// run is one load in progress.
type run struct {
	cfg     Config
	do      sender
	record  func(s *sample, counts bool) // safe for concurrent use
	sleep   func(time.Duration)          // sleeps at most the given time
	started time.Time
	number  atomic.Uint64 // of the next request, warm-up included
	counted atomic.Int64  // measured requests so far
}

func (r *run) drive(ctx context.Context) {
	if r.cfg.Mode == Open {
		r.open(ctx)
		return
	}
	r.closed(ctx)
}

// measureStart returns the start of the measurement.
func (r *run) measureStart() time.Time { return r.started.Add(r.cfg.Warmup) }

// claim decides whether a request to be sent at t belongs to the run (ok), and whether it is measured
// (counts).
func (r *run) claim(t time.Time) (counts, ok bool) {
	if t.Before(r.measureStart()) {
		return false, true
	}
	if r.cfg.Duration > 0 && t.Sub(r.measureStart()) >= r.cfg.Duration {
		return false, false
	}
	return true, r.cfg.Requests == 0 || r.counted.Add(1) <= int64(r.cfg.Requests)
}

// sendOne sends a request and records its sample.
func (r *run) sendOne(ctx context.Context, intended time.Time, counts bool) {
	r.record(r.do(ctx, r.number.Add(1), intended), counts)
}

// closed runs a closed loop of cfg.Concurrency clients.
func (r *run) closed(ctx context.Context) {
	var wg sync.WaitGroup
	for range r.cfg.Concurrency {
		wg.Go(func() {
			for ctx.Err() == nil {
				counts, ok := r.claim(time.Now())
				if !ok {
					return
				}
				r.sendOne(ctx, time.Time{}, counts)
			}
		})
	}
	wg.Wait()
}

// open sends at the times of the schedule. At the limit of requests in flight it falls behind. The wait
// counts as latency, because times are taken from the intended send.
func (r *run) open(ctx context.Context) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, r.cfg.Concurrency)
	plan := newSchedule(r.cfg)
	for {
		at := r.started.Add(plan.next())
		counts, ok := r.claim(at)
		if !ok || r.waitUntil(ctx, at) != nil || !acquire(ctx, slots) {
			break
		}
		wg.Go(func() {
			r.sendOne(ctx, at, counts)
			<-slots
		})
	}
	wg.Wait()
}

func acquire(ctx context.Context, slots chan<- struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// schedule returns the intended send times of an open loop as offsets from its start. It is independent of
// the server, which makes the loop open.
type schedule struct {
	arrivals Arrivals
	gap      float64 // mean gap in seconds
	r        *rand.Rand
	n        int
	at       float64 // of the last Poisson arrival, seconds
}

func newSchedule(cfg Config) *schedule {
	return &schedule{
		arrivals: cfg.Arrivals, gap: 1 / cfg.Rate,
		r: rand.New(rand.NewPCG(cfg.Seed, 0x10ad)),
	}
}

// next returns the offset of the next request.
func (s *schedule) next() time.Duration {
	if s.arrivals == Uniform {
		s.at = (float64(s.n) + s.r.Float64()) * s.gap
	} else {
		s.at += s.r.ExpFloat64() * s.gap
	}
	s.n++
	return time.Duration(s.at * float64(time.Second))
}

// timerMargin is the time before the target at which the runtime's timer hands over to the exact sleep. The
// runtime rounds timers of an idle process up to whole milliseconds, which would count as latency of the
// server.
const timerMargin = 2 * time.Millisecond

// waitUntil blocks until t or the end of ctx.
func (r *run) waitUntil(ctx context.Context, t time.Time) error {
	if d := time.Until(t) - timerMargin; d > 0 {
		if err := pause.For(ctx, d); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		d := time.Until(t)
		if d <= 0 {
			return nil
		}
		r.sleep(min(d, timerMargin))
	}
	return context.Cause(ctx)
}
