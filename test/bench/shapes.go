//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// sample is what one slice on one target gave.
type sample struct {
	first    []time.Duration
	requests int
	chunks   int
	cpu      time.Duration
	wall     time.Duration
	errs     int
	err      error // the first
}

// load is what a slice does: requests over connections. rate 0 is a closed loop: every connection sends its
// next request when the last answer is whole. stagger spreads the first requests over that time, so that
// paced streams do not beat in step.
type load struct {
	req     []byte
	conns   int
	rate    float64 // requests per second in all, at jittered times
	stagger time.Duration
	fresh   bool // no prompt is sent twice
	// a connection serves one request: all are opened at once and closed, again and again
	burst   bool
	silence time.Duration // before each burst
}

// add joins what one connection or request gave.
func (s *sample) add(o sample) {
	s.first = append(s.first, o.first...)
	s.requests += o.requests
	s.chunks += o.chunks
	s.errs += o.errs
	if s.err == nil {
		s.err = o.err
	}
}

// one does a request.
func (s *sample) one(c *client) bool {
	f, n, err := c.do()
	if err != nil {
		s.add(sample{errs: 1, err: err})
		return false
	}
	s.first = append(s.first, f)
	s.requests++
	s.chunks += n
	return true
}

// slice dials, warms every connection up with one small request, and measures for d, to the end of what was
// begun by then. In bursts nothing is dialled before.
func (l load) slice(ctx context.Context, t target, d time.Duration, rnd *rand.Rand) sample {
	var clients []*client
	var s sample
	if !l.burst {
		clients, s = l.dial(ctx, t)
	}
	defer func() {
		for _, c := range clients {
			c.close()
		}
	}()
	cpu0, start := cpu(t.pids), time.Now()
	switch {
	case l.burst:
		s.add(l.bursts(ctx, t, start, d))
	case l.rate > 0:
		s.add(l.open(ctx, clients, start, d, rnd))
	default:
		s.add(l.closed(ctx, clients, start, d))
	}
	s.wall, s.cpu = time.Since(start), cpu(t.pids)-cpu0
	return s
}

// dial opens the connections. The warm-up runs on all of them at once, so that a gateway has its connections
// to the engines too.
func (l load) dial(ctx context.Context, t target) ([]*client, sample) {
	var s sample
	var out []*client
	for i := range l.conns {
		c, err := t.dial(ctx, i, l.req)
		if err != nil {
			s.add(sample{errs: 1, err: err})
			continue
		}
		if l.fresh {
			c.req = bytes.Clone(c.req)
		}
		out = append(out, c)
	}
	warm := payload(64, 2, 5*time.Millisecond, true, false)
	each(out, func(_ int, c *client) sample {
		var one sample
		own := c.req
		c.req = warm
		one.one(c)
		if c.req = own; l.fresh {
			c.tag = tagged(own)
		}
		return sample{errs: one.errs, err: one.err}
	}, &s)
	return out, s
}

// each runs work on all clients at once.
func each(clients []*client, work func(i int, c *client) sample, into *sample) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() {
			one := work(i, c)
			mu.Lock()
			defer mu.Unlock()
			into.add(one)
		})
	}
	wg.Wait()
}

func (l load) closed(ctx context.Context, clients []*client, start time.Time, d time.Duration) (s sample) {
	each(clients, func(i int, c *client) (one sample) {
		time.Sleep(l.stagger * time.Duration(i) / time.Duration(len(clients)))
		for time.Since(start) < d && ctx.Err() == nil && one.one(c) {
		}
		return one
	}, &s)
	return s
}

// bursts opens all connections at once and sends one request over each. A first token counts from the dial.
func (l load) bursts(ctx context.Context, t target, start time.Time, d time.Duration) (s sample) {
	for time.Since(start) < d && ctx.Err() == nil && s.errs == 0 {
		time.Sleep(l.silence)
		each(make([]*client, l.conns), func(i int, _ *client) (one sample) {
			begun := time.Now()
			c, err := t.dial(ctx, i, l.req)
			if err != nil {
				return sample{errs: 1, err: err}
			}
			defer c.close()
			dialled := time.Since(begun)
			if one.one(c) {
				one.first[0] += dialled
			}
			return one
		}, &s)
	}
	return s
}

// open sends at jittered times, whether or not earlier answers have come.
func (l load) open(ctx context.Context, clients []*client, start time.Time, d time.Duration,
	rnd *rand.Rand,
) (s sample) {
	pool := make(chan *client, len(clients))
	for _, c := range clients {
		pool <- c
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	gap := func() time.Duration { return time.Duration(rnd.Float64() * 2 / l.rate * float64(time.Second)) }
	for at := start; at.Sub(start) < d && ctx.Err() == nil; at = at.Add(gap()) {
		time.Sleep(time.Until(at))
		c := <-pool
		wg.Go(func() {
			var one sample
			if one.one(c) {
				pool <- c
			}
			mu.Lock()
			defer mu.Unlock()
			s.add(one)
		})
	}
	wg.Wait()
	return s
}

func percentile(d []time.Duration, p float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	d = slices.Clone(d)
	slices.Sort(d)
	return d[int(p*float64(len(d)-1))]
}

func median[T cmp.Ordered](v []T) T {
	v = slices.Clone(v)
	slices.Sort(v)
	return v[len(v)/2]
}

// shape is one row block of the report: each round runs every target once, in shuffled order.
type shape struct {
	name string
	load load
	cols []column
}

type column struct {
	head string
	of   func(s, direct sample) float64
}

func (sh shape) measure(ctx context.Context, ts []target, rounds int, d time.Duration, rnd *rand.Rand) {
	got := make([][]sample, len(ts))
	for range rounds {
		for _, i := range rnd.Perm(len(ts)) {
			got[i] = append(got[i], sh.load.slice(ctx, ts[i], d, rnd))
		}
	}
	fmt.Printf("\n%s (median of %d interleaved rounds)\n%-18s", sh.name, rounds, "")
	for _, c := range sh.cols {
		fmt.Printf("%22s", c.head)
	}
	fmt.Println()
	for i, t := range ts {
		fmt.Printf("%-18s", t.name)
		for _, c := range sh.cols {
			var v []float64
			for r := range rounds {
				v = append(v, c.of(got[i][r], got[0][r]))
			}
			fmt.Printf("%22.3f", median(v))
		}
		var all sample
		for _, s := range got[i] {
			all.add(sample{errs: s.errs, err: s.err})
		}
		if all.errs > 0 {
			fmt.Printf("  (%d errors, the first: %v)", all.errs, all.err)
		}
		fmt.Println()
	}
}
