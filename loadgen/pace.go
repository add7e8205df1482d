package loadgen

import (
	"context"
	"math/rand/v2"
	"time"
)

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
