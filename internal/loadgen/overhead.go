package loadgen

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"text/tabwriter"
	"time"
)

// overheadRuns is the number of repetitions: a median of five tolerates two disturbed runs.
const overheadRuns = 5

// Overhead is the latency that a proxy adds, as clients see it. Each run measures both ways in turns, so that
// noise of the machine affects both. Times are milliseconds from the send to the first token (streams) or to
// the end (whole answers).
type Overhead struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"` // BenchOverhead

	Direct  string `json:"direct"`  // URL
	Proxied string `json:"proxied"` // URL

	AddedP50 float64 `json:"added_p50_ms"` // median over the runs of p50 proxied − p50 direct
	AddedP99 float64 `json:"added_p99_ms"` // the same of p99

	Runs []OverheadRun `json:"runs"`
	// CPU is the time of proxied.PIDs over the proxied requests, DirectCPU that of direct.PIDs over all
	// requests.
	CPU       *CPU `json:"cpu,omitempty"`
	DirectCPU *CPU `json:"direct_cpu,omitempty"`
}

// OverheadRun is one of the runs.
type OverheadRun struct {
	Direct   *Percentiles   `json:"direct"`
	Proxied  *Percentiles   `json:"proxied"`
	AddedP50 float64        `json:"added_p50_ms"`
	AddedP99 float64        `json:"added_p99_ms"`
	Errors   map[string]int `json:"errors,omitempty"` // "direct KIND" and "proxied KIND"
}

// complete reports whether the run measured both sides.
func (r OverheadRun) complete() bool { return r.Direct != nil && r.Proxied != nil }

// RunOverhead sends the load of proxied in turns to direct and to proxied, overheadRuns times. Of direct it
// uses only URL, Model, APIKey and PIDs. Rate, concurrency, Requests and Duration apply per run to both sides
// together, Warmup to the first run. If ctx ends, the error is its cause and the result covers the complete
// runs (nil if there is none).
func RunOverhead(ctx context.Context, direct, proxied Config) (*Overhead, error) {
	shape := proxied
	shape.URL, shape.Model, shape.APIKey, shape.PIDs = direct.URL, direct.Model, direct.APIKey, direct.PIDs
	for _, cfg := range []Config{proxied, shape} {
		if err := cfg.Validate(); err != nil {
			return nil, err
		}
	}
	d, err := newClient(ctx, shape.withDefaults())
	if err != nil {
		return nil, err
	}
	defer d.close()
	x, err := newClient(ctx, proxied.withDefaults())
	if err != nil {
		return nil, err
	}
	defer x.close()
	p := &pair{direct: d.do, proxied: x.do, directCfg: d.cfg, cfg: x.cfg, sleep: exactSleep}
	return p.compare(ctx)
}

// pair sends to two servers in turns.
type pair struct {
	direct, proxied sender
	directCfg, cfg  Config
	sleep           func(time.Duration)
}

// do sends one of two consecutive numbers to each side. The side that goes first alternates in a pattern
// without a short period (the parity of the bits of the pair's number), so that no periodic load of the
// machine affects one side only.
func (p *pair) do(ctx context.Context, n uint64, intended time.Time) *sample {
	proxied := (n+parity(n/2))%2 == 0
	send := p.direct
	if proxied {
		send = p.proxied
	}
	s := send(ctx, n, intended)
	s.proxied = proxied
	return s
}

func parity(n uint64) uint64 {
	var odd uint64
	for ; n > 0; n &= n - 1 {
		odd ^= 1
	}
	return odd
}

func (p *pair) compare(ctx context.Context) (*Overhead, error) {
	out := &Overhead{
		APIVersion: APIVersion, Kind: "BenchOverhead", Direct: p.directCfg.URL, Proxied: p.cfg.URL,
	}
	before, directBefore, began := cpuTime(p.cfg.PIDs), cpuTime(p.directCfg.PIDs), time.Now()
	var proxied, all counts
	var first uint64
	cfg := p.cfg
	for range overheadRuns {
		done := newSides()
		r := &run{cfg: cfg, do: p.do, record: done.add, sleep: p.sleep, started: time.Now()}
		r.number.Store(first)
		r.drive(ctx)
		if err := context.Cause(ctx); err != nil {
			break
		}
		first, cfg.Warmup = r.number.Load(), 0
		proxied, all = proxied.plus(done.proxied), all.plus(done.proxied).plus(done.direct)
		out.Runs = append(out.Runs, done.result())
	}
	if len(out.Runs) == 0 {
		return nil, context.Cause(ctx)
	}
	wall := time.Since(began)
	out.CPU = chargeCPU(before, cpuTime(p.cfg.PIDs), wall, proxied)
	out.DirectCPU = chargeCPU(directBefore, cpuTime(p.directCfg.PIDs), wall, all)
	out.AddedP50 = medianOf(out.Runs, func(r OverheadRun) float64 { return r.AddedP50 })
	out.AddedP99 = medianOf(out.Runs, func(r OverheadRun) float64 { return r.AddedP99 })
	return out, context.Cause(ctx)
}

func (c counts) plus(o counts) counts { return counts{c.requests + o.requests, c.chunks + o.chunks} }

// sides collects the samples of one run for each side.
type sides struct {
	mu              sync.Mutex
	direct, proxied counts // warm-up included
	times           map[bool]*collector
}

func newSides() *sides {
	return &sides{
		times: map[bool]*collector{false: newCollector(Config{}), true: newCollector(Config{Seed: 1})},
	}
}

func (s *sides) add(x *sample, measured bool) {
	s.mu.Lock()
	side := &s.direct
	if x.proxied {
		side = &s.proxied
	}
	*side = side.plus(counts{1, x.chunks})
	s.mu.Unlock()
	x.intended = x.sent // the client's own delay is not part of the comparison
	s.times[x.proxied].add(x, measured)
}

func (s *sides) result() OverheadRun {
	r := OverheadRun{
		Direct: s.times[false].answered(), Proxied: s.times[true].answered(), Errors: map[string]int{},
	}
	if r.complete() {
		r.AddedP50, r.AddedP99 = r.Proxied.P50-r.Direct.P50, r.Proxied.P99-r.Direct.P99
	}
	for name, side := range map[string]*collector{"direct": s.times[false], "proxied": s.times[true]} {
		for kind, n := range side.errors {
			r.Errors[name+" "+kind] = n
		}
	}
	return r
}

// medianOf returns the median over the runs that measured both sides.
func medianOf(runs []OverheadRun, of func(OverheadRun) float64) float64 {
	var values []float64
	for _, r := range runs {
		if r.complete() {
			values = append(values, of(r))
		}
	}
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return values[(len(values)-1)/2]
}

// WriteTable writes o as a table.
func (o *Overhead) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	// tabwriter returns errors at Flush
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(t, format, args...) }
	p("%s against %s, in turns, %d runs\n", o.Proxied, o.Direct, len(o.Runs))
	if slices.ContainsFunc(o.Runs, OverheadRun.complete) {
		p("added latency: p50 %+.3f ms, p99 %+.3f ms (medians of the runs)\n\n", o.AddedP50, o.AddedP99)
	} else {
		p("added latency: not measured\n\n")
	}
	p("run\tdirect p50\tproxied p50\tadded\tdirect p99\tproxied p99\tadded\trequests\t\n")
	for i, r := range o.Runs {
		if !r.complete() {
			p("%d\tno good answers%s\t\n", i+1, formatErrorKinds(r.Errors))
			continue
		}
		p("%d\t%.3f\t%.3f\t%+.3f\t%.3f\t%.3f\t%+.3f\t%d%s\t\n", i+1, r.Direct.P50, r.Proxied.P50, r.AddedP50,
			r.Direct.P99, r.Proxied.P99, r.AddedP99, r.Direct.Count+r.Proxied.Count,
			formatErrorKinds(r.Errors))
	}
	if o.CPU != nil {
		p("\nproxy: %s\n", o.CPU)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write the table: %w", err)
	}
	return nil
}
