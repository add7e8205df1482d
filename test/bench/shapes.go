package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
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
}

// closed runs n connections back to back for d.
func closed(ctx context.Context, t target, req []byte, n int, d time.Duration) sample {
	var mu sync.Mutex
	var s sample
	var wg sync.WaitGroup
	cpu0, start := cpu(t.pids), time.Now()
	for i := range n {
		wg.Go(func() {
			c, err := dial(ctx, t.addrs[i%len(t.addrs)], req)
			if err != nil {
				mu.Lock()
				s.errs++
				mu.Unlock()
				return
			}
			defer c.c.Close()
			var one sample
			for time.Since(start) < d && ctx.Err() == nil {
				f, ch, err := c.do()
				if err != nil {
					one.errs++
					break
				}
				one.first = append(one.first, f)
				one.requests++
				one.chunks += ch
			}
			mu.Lock()
			defer mu.Unlock()
			s.first = append(s.first, one.first...)
			s.requests += one.requests
			s.chunks += one.chunks
			s.errs += one.errs
		})
	}
	wg.Wait()
	s.wall, s.cpu = time.Since(start), cpu(t.pids)-cpu0
	return s
}

// open sends rate requests per second with jittered arrivals over idle connections, for d.
func open(ctx context.Context, t target, req []byte, rate float64, conns int, d time.Duration, rnd *rand.Rand) sample {
	pool := make(chan *client, conns)
	for i := range conns {
		if c, err := dial(ctx, t.addrs[i%len(t.addrs)], req); err == nil {
			pool <- c
		}
	}
	var mu sync.Mutex
	var s sample
	var errs atomic.Int64
	var wg sync.WaitGroup
	cpu0, start := cpu(t.pids), time.Now()
	for at := start; at.Sub(start) < d && ctx.Err() == nil; at = at.Add(time.Duration(rnd.Float64() * 2 / rate * float64(time.Second))) {
		time.Sleep(time.Until(at))
		c := <-pool
		wg.Go(func() {
			defer func() { pool <- c }()
			f, ch, err := c.do()
			if err != nil {
				errs.Add(1)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			s.first = append(s.first, f)
			s.requests++
			s.chunks += ch
		})
	}
	wg.Wait()
	s.wall, s.cpu, s.errs = time.Since(start), cpu(t.pids)-cpu0, int(errs.Load())
	close(pool)
	for c := range pool {
		_ = c.c.Close()
	}
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
	run  func(ctx context.Context, t target, rnd *rand.Rand) sample
	cols []column
}

type column struct {
	head string
	of   func(s, direct sample) float64
}

func (sh shape) measure(ctx context.Context, ts []target, rounds int, rnd *rand.Rand) {
	got := make([][]sample, len(ts))
	for range rounds {
		for _, i := range rnd.Perm(len(ts)) {
			got[i] = append(got[i], sh.run(ctx, ts[i], rnd))
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
		errs := 0
		for _, s := range got[i] {
			errs += s.errs
		}
		if errs > 0 {
			fmt.Printf("  (%d errors)", errs)
		}
		fmt.Println()
	}
}
