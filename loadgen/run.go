package loadgen

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Run sends the load of cfg and reports what its clients saw. It returns when all requests have ended; each is bounded by
// cfg.Timeout. If ctx ends first, running requests are cut, the report covers what ended before, and the error is the cause.
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
	r := &run{cfg: cfg, do: c.do, keep: out.add, nap: exactSleep, started: time.Now()}
	before := cpuTime(cfg.PIDs)
	r.drive(ctx)
	report := out.report(cfg, r.measured())
	report.CPU = charge(before, cpuTime(cfg.PIDs), time.Since(r.started), out.all())
	return report, context.Cause(ctx)
}

// sender sends request number n and waits for its end; intended is zero for "now".
type sender func(ctx context.Context, n uint64, intended time.Time) *sample

// run is one load in progress.
type run struct {
	cfg     Config
	do      sender
	keep    func(s *sample, counts bool) // safe for concurrent use
	nap     func(time.Duration)          // sleeps at most that long
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

// measured is when the measurement began.
func (r *run) measured() time.Time { return r.started.Add(r.cfg.Warmup) }

// claim decides about a request that is to be sent at t: whether it still belongs to the run, and whether it counts.
func (r *run) claim(t time.Time) (counts, ok bool) {
	if t.Before(r.measured()) {
		return false, true
	}
	if r.cfg.Duration > 0 && t.Sub(r.measured()) >= r.cfg.Duration {
		return false, false
	}
	return true, r.cfg.Requests == 0 || r.counted.Add(1) <= int64(r.cfg.Requests)
}

// one sends a request and keeps its sample.
func (r *run) one(ctx context.Context, intended time.Time, counts bool) {
	r.keep(r.do(ctx, r.number.Add(1), intended), counts)
}

// closed keeps cfg.Concurrency clients busy.
func (r *run) closed(ctx context.Context) {
	var wg sync.WaitGroup
	for range r.cfg.Concurrency {
		wg.Go(func() {
			for ctx.Err() == nil {
				counts, ok := r.claim(time.Now())
				if !ok {
					return
				}
				r.one(ctx, time.Time{}, counts)
			}
		})
	}
	wg.Wait()
}

// open sends at the times of the schedule. Over the bound of requests in flight it falls behind, and the wait counts as
// latency, because times are taken from the intended send.
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
			r.one(ctx, at, counts)
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

// schedule gives the intended send times of an open loop as offsets from its start. It does not know what the server
// does, which is what makes the loop open.
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

// next is the offset of the next request.
func (s *schedule) next() time.Duration {
	if s.arrivals == Uniform {
		s.at = (float64(s.n) + s.r.Float64()) * s.gap
	} else {
		s.at += s.r.ExpFloat64() * s.gap
	}
	s.n++
	return time.Duration(s.at * float64(time.Second))
}

// coarse is how long before the time the runtime's timer hands over to the exact sleep. The runtime rounds timers of an
// idle process up to whole milliseconds, which would be measured as latency of the server.
const coarse = 2 * time.Millisecond

// waitUntil blocks until t or the end of ctx.
func (r *run) waitUntil(ctx context.Context, t time.Time) error {
	if d := time.Until(t) - coarse; d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		d := time.Until(t)
		if d <= 0 {
			return nil
		}
		r.nap(min(d, coarse))
	}
	return context.Cause(ctx)
}
