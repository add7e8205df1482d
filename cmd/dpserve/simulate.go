package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/simulate"
)

type simulateFlags struct {
	trace, app string
	policies   []string
	decide     []string
	loads      []string
	fail, slow []string
	seeds      int
	requests   int
	ingresses  int
	lag        time.Duration
	ttft, tpot time.Duration
	page, plot string
	output     *format
}

// Bounds of what the flags may say.
const (
	mostSeeds     = 1000
	mostIngresses = 1024
	mostLag       = time.Hour
	mostRuns      = 10_000
	maxTrace      = 1024 // MiB
)

func newSimulate(e *env) *cobra.Command {
	f := &simulateFlags{}
	cmd := &cobra.Command{
		Use:   "simulate FILE --trace TRACE [flags]",
		Short: "play a trace against an application's ranks on virtual time, and compare policies",
		Long: `simulate plays the requests of a trace through the Router of live ingresses, before simulated
engines in the shape of FILE: its ranks or pools, coupling, limits, policy and parameters. An hour of traffic
takes seconds. It prints goodput, times, cache hits and balance, each as the mean over the seeds and half of
its 95 % confidence interval. Below them are two bounds: each request alone on an idle rank whose cache holds
all prompts before it, and one rank as fast as all, first come first served. Where load is above capacity a
policy may be above the second, because it lets some requests wait for the others.

TRACE has the format of Mooncake's traces, one JSON object per line with timestamp (ms), input_length,
output_length and hash_ids (of blocks of 512 tokens), or of the Azure LLM inference traces; its lines may be
in any order. Other values generate requests: ` + strings.Join(workloadNames(), ", ") + `.

The engine is that of kind sim with FILE's arguments. Other kinds get the cost model that the policy
expects, the arguments that the simulated engine knows, and room for 699,392 tokens. Seeds differ in
the instants within what timestamps are rounded by, in generated requests, and in what a policy draws.`,
		Example: `  dpserve simulate app.yaml --trace trace.jsonl --policy mex,lmetric-1 --rate x1.5,x2
  dpserve simulate app.yaml --trace agents --rate 1.1 --ingresses 4 --lag 100ms
  dpserve simulate app.yaml --trace trace.jsonl --fail rank=3@60s+120s --slow rank=2:x5@30s`,
		Args: requireArgs(1, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd.Context(), e, args[0]) },
	}
	flags := cmd.Flags()
	flags.StringVar(&f.trace, "trace", "", "`FILE` of requests, or the name of generated ones")
	flags.StringVar(&f.app, "app", "", "`NAME` of the application, where FILE has several")
	flags.StringSliceVar(&f.policies, "policy", nil, "policies to compare, as `NAME`, NAME:tuned or "+
		"NAME:PARAMETER=VALUE:…, with commas between (default that of FILE)")
	flags.StringSliceVar(&f.decide, "decide", nil, "of prefill and decode ranks: `DECIDERS` to compare; "+
		"together = every rank does both (default that of FILE)")
	flags.StringSliceVar(&f.loads, "rate", []string{"x1"}, "`FACTORS` on the rate of TRACE, each has a "+
		"table; generated: sessions or requests per second")
	flags.IntVar(&f.seeds, "seeds", 5, "runs of each policy at each rate")
	flags.IntVar(&f.requests, "requests", 0, "play so many requests, the first ones; 0 = all")
	flags.IntVar(&f.ingresses, "ingresses", 1, "nodes that route")
	flags.DurationVar(&f.lag, "lag", 0, "age of the ranks' records when an ingress hears of them")
	flags.StringArrayVar(&f.fail, "fail", nil, "a rank that dies, as `rank=3@60s`, or "+
		"rank=3@60s+30s if it is back 30 s later; prefill=N for a prefill rank")
	flags.StringArrayVar(&f.slow, "slow", nil, "a rank that takes longer for every step, as `rank=2:x5`, "+
		"rank=2:x5@60s or rank=2:x5@60s+30s")
	flags.DurationVar(&f.ttft, "slo-ttft", 0,
		"limit of the first token for goodput (default ttft_s of FILE's policy, else 2s)")
	flags.DurationVar(&f.tpot, "slo-tpot", 0,
		"limit of the mean gap between tokens for goodput (default tpot_s, else 50ms)")
	flags.StringVar(&f.page, "html", "", "`FILE` for a report with plots, which needs nothing else")
	flags.StringVar(&f.plot, "svg", "", "`FILE` for the plot of goodput by rate")
	f.output = addOutput(cmd)
	return cmd
}

// check reports flags that make no sense.
func (f *simulateFlags) check() error {
	for _, bound := range []struct {
		name               string
		value, least, most int
	}{
		{"seeds", f.seeds, 1, mostSeeds},
		{"ingresses", f.ingresses, 1, mostIngresses},
		{"requests", f.requests, 0, simulate.MaxRequests},
	} {
		if bound.value < bound.least || bound.value > bound.most {
			return usageError("simulate", "--%s %d: wanted %d to %d", bound.name, bound.value, bound.least,
				bound.most)
		}
	}
	switch {
	case f.trace == "":
		return problem.New(problem.InvalidArgument, "simulate wants --trace").WithHint(
			"--trace FILE plays a trace, and --trace NAME generates one: %s",
			strings.Join(workloadNames(), ", "))
	case f.lag < 0 || f.lag > mostLag:
		return usageError("simulate", "--lag %s: wanted 0s to %s", f.lag, mostLag)
	case f.ttft < 0 || f.tpot < 0:
		return usageError("simulate", "--slo-ttft and --slo-tpot are above 0")
	}
	return nil
}

func (f *simulateFlags) run(ctx context.Context, e *env, path string) error {
	if err := f.check(); err != nil {
		return err
	}
	loads, err := parseLoads(f.loads)
	if err != nil {
		return err
	}
	file, err := readApps(e, path)
	if err != nil {
		return err
	}
	pools, err := chooseApp(file, f.app)
	if err != nil {
		return err
	}
	settings, err := f.settings(pools)
	if err != nil {
		return err
	}
	work, err := f.open(e)
	if err != nil {
		return err
	}
	study := simulate.NewStudy(settings, loads, f.seeds, work)
	if n := study.Runs(); n > mostRuns {
		return usageError("simulate", "these are %d runs: wanted at most %d", n, mostRuns)
	}
	if err := playAll(ctx, e, study); err != nil {
		return err
	}
	report := study.Report()
	report.App, report.Trace = pools[0].Name, filepath.Base(f.trace)
	if err := simulationListing(report).write(e.io, *f.output); err != nil {
		return err
	}
	return errors.Join(writeTo(f.page, report.WritePage), writeTo(f.plot, report.WritePlot))
}

// writeTo writes a file; without a name nothing.
func writeTo(path string, write func(w io.Writer) error) error {
	if path == "" {
		return nil
	}
	var text bytes.Buffer
	err := write(&text)
	if err == nil {
		err = os.WriteFile(path, text.Bytes(), 0o644) //nolint:gosec // a report is no secret
	}
	if err != nil {
		return problem.New(problem.InvalidArgument, "cannot write %s: %w", path, err).
			WithHint("name a file in a folder that you may write to")
	}
	return nil
}

// open reads the trace, or finds the generator.
func (f *simulateFlags) open(e *env) (work func(load float64, seed uint64) []simulate.Request, err error) {
	for _, g := range simulate.Workloads() {
		if g.Name == f.trace {
			return func(load float64, seed uint64) []simulate.Request {
				work := g.Make(load, seed)
				if f.requests > 0 {
					work = work[:min(f.requests, len(work))]
				}
				return work
			}, nil
		}
	}
	const format = "one JSON object per line with timestamp, input_length, output_length and hash_ids, " +
		"or an Azure LLM inference trace"
	text, err := readInput(e, f.trace, maxTrace, "play a part of it",
		"--trace is a file, or one of "+strings.Join(workloadNames(), ", "))
	if err != nil {
		return nil, err
	}
	trace, cut, err := simulate.ReadTrace(bytes.NewReader(text), f.requests)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "%s: %w", f.trace, err).WithHint("%s", format)
	}
	if cut > 0 {
		printMessage(e.io.Err, "warning: %s: the file ends within line %d, which is left out", f.trace, cut)
	}
	return func(load float64, seed uint64) []simulate.Request {
		return simulate.Play(trace, load, seed)
	}, nil
}

// playAll plays the runs of a study, as many at a time as there are processors.
func playAll(ctx context.Context, e *env, study *simulate.Study) error {
	p := simulationProgress{total: study.Runs(), began: e.now(), now: e.now, shares: map[int]float64{}}
	screen := e.screen()
	defer screen.clear()
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(runtime.GOMAXPROCS(0))
	for run := range study.Runs() {
		group.Go(func() error {
			err := study.Play(run, func(share float64) error {
				if p.advance(run, share) {
					screen.showLine(p.line(study))
				}
				return ctx.Err()
			})
			p.end(run)
			return err
		})
	}
	err := group.Wait()
	if errors.Is(err, context.Canceled) {
		return context.Cause(ctx)
	}
	return err
}

// simulationProgress is how far the runs are.
type simulationProgress struct {
	total int
	began time.Time
	now   func() time.Time

	mu     sync.Mutex
	ended  int
	shares map[int]float64 // of runs under way
	shown  time.Time
}

// advance reports whether it is time to show the line again.
func (p *simulationProgress) advance(run int, share float64) bool {
	const every = 200 * time.Millisecond
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shares[run] = share
	now := p.now()
	if now.Sub(p.shown) < every {
		return false
	}
	p.shown = now
	return true
}

func (p *simulationProgress) end(run int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended++
	delete(p.shares, run)
}

// line says how many runs have ended, which one is under way, and how long the others will take.
func (p *simulationProgress) line(study *simulate.Study) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	const width, leastDone = 20, .1
	done, name := float64(p.ended), ""
	for run, share := range p.shares {
		done += share
		if one := study.Name(run); name == "" || one < name {
			name = one
		}
	}
	full := int(width * done / float64(p.total))
	left := ""
	if done > leastDone {
		more := float64(p.now().Sub(p.began)) * (float64(p.total) - done) / done
		left = fmt.Sprintf(", %s left", time.Duration(more).Round(time.Second))
	}
	return fmt.Sprintf("%s%s %d of %d runs%s: %s", strings.Repeat("█", full), strings.Repeat("░", width-full),
		p.ended, p.total, left, name)
}

// simulationListing is a table per load: a row per policy, then the bounds.
func simulationListing(r *simulate.Report) *listing {
	return &listing{document: r, table: func(bool) (out []*table) {
		for i := range r.Loads {
			out = append(out, simulationTable(r, &r.Loads[i]))
		}
		return out
	}}
}

func simulationTable(r *simulate.Report, load *simulate.Load) *table {
	head, rows := load.Table()
	t := &table{head: head}
	for _, row := range rows {
		t.add(cells(row...)...)
	}
	duration := func(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }
	t.notes = []string{fmt.Sprintf("%s at rate %g: %s, %d of them longer than a rank holds; "+
		"goals %s and %s; ingresses %d, records %s old; %s", r.Trace, load.Load,
		formatCount(load.Requests, "request"), load.Refused, duration(r.TTFTMs), duration(r.TPOTMs),
		r.Ingresses, duration(r.LagMs), formatCount(r.Seeds, "seed"))}
	return t
}
