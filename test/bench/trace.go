//go:build linux

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/goccy/go-yaml"
	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/tracesim"
)

var errUsage = errors.New("usage")

// traceFlags are the flags of the role trace.
type traceFlags struct {
	trace     string
	loads     list[float64]
	ingresses list[int]
	lags      list[time.Duration]
	goals     list[time.Duration]
	paired    string
	requests  int
	slow      float64
}

func (t *traceFlags) register(flags *flag.FlagSet) {
	usual := tracesim.Default()
	flags.StringVar(&t.trace, "trace", "",
		"trace: a file, or the name of a generated workload; none = list them")
	t.loads = list[float64]{[]float64{1}, parseFactor}
	flags.Var(&t.loads, "load",
		"factor on every rate; generated workloads: sessions or requests per second. "+
			"trace: several with commas between, as -ingresses and -lag; each combination has a table")
	t.ingresses = list[int]{[]int{usual.Ingresses}, parseIngresses}
	flags.Var(&t.ingresses, "ingresses", "trace: number of ingresses that route")
	t.lags = list[time.Duration]{[]time.Duration{usual.Lag}, parseLag}
	flags.Var(&t.lags, "lag", "trace: how old the ranks' records are when an ingress hears of them")
	t.goals = list[time.Duration]{[]time.Duration{usual.Goals.TTFT, usual.Goals.TPOT}, parseLag}
	flags.Var(&t.goals, "goals", "trace: TTFT,TPOT: what a request must meet to count in goodput. "+
		"A policy's own goals are its parameters")
	flags.StringVar(&t.paired, "paired", "",
		"trace: name of a row; the others show their difference to it in goodput, seed by seed")
	flags.IntVar(&t.requests, "requests", 0, "trace: play this many requests, the first ones; 0 = all")
	flags.Float64Var(&t.slow, "slow", 0,
		"trace: rank 3 takes this many times as long from the first minute on; 0 = never")
}

// takeFile reads what is behind the flags: a file, if -trace is not given.
func (t *traceFlags) takeFile(args []string) error {
	if t.trace == "" && len(args) > 0 {
		t.trace, args = args[0], args[1:]
	}
	if len(args) > 0 {
		return fmt.Errorf("%w: %q is too much: there is one trace, and flags come in front of it", errUsage,
			args)
	}
	return nil
}

// What seeds the first round, and the rank that becomes slow.
const (
	firstSeed                     = 11
	slowRank                      = 3
	slowFrom                      = time.Minute
	justSlow, soonSlow, afterSlow = 10 * time.Second, 20 * time.Second, time.Hour
)

// newPolicy makes the policy of a row.
func (r routed) newPolicy() (routing.Policy, error) {
	params := map[string]any{}
	if err := yaml.Unmarshal([]byte("{"+r.params+"}"), &params); err != nil {
		return nil, fmt.Errorf("params of %s: %w", r.name, err)
	}
	return routing.New(r.policy, r.preset, params)
}

// cell is one table: all rows and seeds at one load, one number of ingresses and one lag.
type cell struct {
	load   float64
	config tracesim.Config
	got    [][]outcome // by row, then by round
	left   atomic.Int64
	done   chan struct{}
}

// outcome is what is kept of a run.
type outcome struct {
	bound                tracesim.Bound
	offered, refused     int
	goodput, hit         float64 // %
	ttft, ttft50, ttft99 float64 // s
	tpot50, tpot99       float64 // ms
	requests, work       float64 // of the busiest rank over the mean
	burst, worstBurst    float64 // likewise, of the requests of a burst
	tokens               float64 // per second
	shares               [3]float64
}

// run plays the workload under every policy, in every combination of load, ingresses and lag. The rounds
// differ in their seed.
func (t *traceFlags) run(ctx context.Context, out io.Writer, notes *os.File, policies string,
	rounds int,
) error {
	if t.trace == "" {
		listWorkloads(out)
		return nil
	}
	rows, err := t.rows(policies)
	if err != nil {
		return err
	}
	cells, err := t.cells(len(rows), max(rounds, 1))
	if err != nil {
		return err
	}
	work, err := openWorkload(t.trace, t.requests)
	if err != nil {
		return err
	}
	show := startProgress(notes, len(cells)*len(rows)*max(rounds, 1))
	defer show.stop()
	return playAll(ctx, cells, rows, work, runtime.GOMAXPROCS(0), show, func(c *cell) {
		show.wipe()
		t.write(out, c, rows)
	})
}

// rows are the settings asked for, and the one that they are paired with.
func (t *traceFlags) rows(policies string) ([]routed, error) {
	if policies != "" && t.paired != "" {
		policies += "," + t.paired
	}
	rows, err := chosen(settings(), policies, func(r routed) string { return r.name })
	if err == nil && t.paired != "" && !slices.ContainsFunc(rows,
		func(r routed) bool { return r.name == t.paired }) {
		err = fmt.Errorf("%w: -paired takes the name of one row, not %q", errUsage, t.paired)
	}
	return rows, err
}

// cells are the combinations of load, ingresses and lag.
func (t *traceFlags) cells(rows, rounds int) ([]*cell, error) {
	if len(t.goals.values) != 2 || slices.Min(t.goals.values) <= 0 {
		return nil, fmt.Errorf("%w: -goals takes two durations above 0: TTFT,TPOT", errUsage)
	}
	var cells []*cell
	for _, load := range t.loads.values {
		for _, ingresses := range t.ingresses.values {
			for _, lag := range t.lags.values {
				c := &cell{load: load, config: tracesim.Default(), done: make(chan struct{})}
				c.config.Ingresses, c.config.Lag = ingresses, lag
				c.config.Goals = tracesim.Goals{TTFT: t.goals.values[0], TPOT: t.goals.values[1]}
				c.config.SlowRank, c.config.SlowFactor, c.config.SlowFrom = slowRank, t.slow, slowFrom
				for range rows {
					c.got = append(c.got, make([]outcome, rounds))
				}
				c.left.Store(int64(rows * rounds))
				cells = append(cells, c)
			}
		}
	}
	return cells, nil
}

// playAll runs what the cells consist of, several runs at a time, and hands over each cell when it is whole,
// in order. Every run is alone with its engines and Routers, so the results are those of one run after the
// other.
func playAll(
	ctx context.Context, cells []*cell, rows []routed, work workload, workers int, show *progress,
	whole func(c *cell),
) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	ended := make(chan error, 1)
	go func() {
		for _, c := range cells {
			for i := range rows {
				for round := range c.got[i] {
					group.Go(func() error {
						var err error
						c.got[i][round], err = c.play(ctx, rows[i], round, work, show)
						if err == nil && c.left.Add(-1) == 0 {
							close(c.done)
						}
						return err
					})
				}
			}
		}
		ended <- group.Wait()
	}()
	for _, c := range cells {
		select {
		case <-c.done:
		case err := <-ended:
			if err != nil {
				return err
			}
			ended <- nil // all cells are whole
		}
		whole(c)
	}
	return <-ended
}

// play is one run.
func (c *cell) play(ctx context.Context, row routed, round int, work workload, show *progress) (outcome,
	error,
) {
	if err := ctx.Err(); err != nil {
		return outcome{}, err
	}
	cfg := c.config
	cfg.Seed = firstSeed + uint64(round)
	requests := work(c.load, cfg.Seed)
	r := show.begin(fmt.Sprintf("%s seed %d", row.name, cfg.Seed))
	defer show.end(r)
	cfg.Each = func(sent int) error {
		show.advance(r, float64(sent)/float64(len(requests)))
		return ctx.Err()
	}
	got, err := tracesim.Run(cfg, requests, row.newPolicy)
	if err != nil {
		return outcome{}, fmt.Errorf("%s: %w", row.name, err)
	}
	p := outcome{bound: cfg.Bound(requests), offered: got.Offered, refused: got.Refused}
	p.goodput, p.hit = 100*got.Goodput, 100*got.Hit
	p.ttft = tracesim.Mean(got.TTFT).Seconds()
	p.ttft50, p.ttft99 = tracesim.Percentile(got.TTFT, .5).Seconds(), tracesim.Percentile(got.TTFT,
		.99).Seconds()
	p.tpot50 = 1000 * tracesim.Percentile(got.TPOT, .5).Seconds()
	p.tpot99 = 1000 * tracesim.Percentile(got.TPOT, .99).Seconds()
	p.requests, p.work, p.tokens = tracesim.MaxMean(got.Requests), tracesim.MaxMean(got.Work),
		got.TokensPerSecond()
	p.burst, p.worstBurst = got.BurstMaxMean()
	for i, span := range [][2]time.Duration{{0, justSlow}, {justSlow, soonSlow}, {soonSlow, afterSlow}} {
		p.shares[i] = got.Share(slowRank, slowFrom+span[0], slowFrom+span[1])
	}
	return p, nil
}

// write prints the table of a cell: a row per policy, means over the seeds.
func (t *traceFlags) write(out io.Writer, c *cell, rows []routed) {
	base := slices.IndexFunc(rows, func(r routed) bool { return r.name == t.paired })
	bursts := slices.ContainsFunc(c.got, func(runs []outcome) bool { return runs[0].worstBurst > 0 })
	first := c.got[0]
	over := func(runs []outcome, of func(p *outcome) float64) []float64 {
		values := make([]float64, len(runs))
		for i := range runs {
			values[i] = of(&runs[i])
		}
		return values
	}
	goodput := func(p *outcome) float64 { return p.goodput }
	bound := mean(over(first, func(p *outcome) float64 { return 100 * p.bound.Hit }))
	cfg, reachable := c.config, mean(over(first, func(p *outcome) float64 { return 100 * p.bound.Goodput }))
	fmt.Fprintf(out, "\n%s, load %g: %d requests on %d ranks of %d tokens; "+
		"ingresses %d, records %s old, seeds %d\n",
		filepath.Base(t.trace), c.load, first[0].offered, cfg.Ranks, cfg.Blocks*tracesim.BlockSize,
		cfg.Ingresses, cfg.Lag, len(first))
	fmt.Fprintf(out, "goals: first token within %s, %s per token after it; "+
		"%.1f %% of the requests meet them alone on a rank that has seen all prompts before\n",
		cfg.Goals.TTFT, cfg.Goals.TPOT, reachable)
	if n := first[0].refused; n > 0 {
		fmt.Fprintf(out, "%d requests are longer than a rank holds: refused, and not in goodput\n", n)
	}

	head := []string{"", "goodput %", "worst seed"}
	if base >= 0 {
		head = append(head, "over "+t.paired)
	}
	head = append(head, "TTFT s mean", "p50", "p99", "TPOT ms p50", "p99", "hit %", "bound %",
		"max/mean requests", "work")
	if bursts {
		head = append(head, "of a burst", "worst")
	}
	if t.slow > 0 {
		head = append(head, "tokens/s", "slow rank's share 0-10 s", "10-20 s", "later")
	}
	table := [][]string{head}
	for i, r := range rows {
		runs := c.got[i]
		good := over(runs, goodput)
		cells := []string{r.name, formatInterval("%.1f", good), fmt.Sprintf("%.1f", slices.Min(good))}
		if base >= 0 {
			difference := ""
			if i != base {
				var pairs []float64
				for round := range runs {
					pairs = append(pairs, runs[round].goodput-c.got[base][round].goodput)
				}
				difference = formatInterval("%+.1f", pairs)
			}
			cells = append(cells, difference)
		}
		number := func(format string, of func(p *outcome) float64) {
			cells = append(cells, fmt.Sprintf(format, mean(over(runs, of))))
		}
		number("%.2f", func(p *outcome) float64 { return p.ttft })
		number("%.2f", func(p *outcome) float64 { return p.ttft50 })
		number("%.2f", func(p *outcome) float64 { return p.ttft99 })
		number("%.1f", func(p *outcome) float64 { return p.tpot50 })
		number("%.0f", func(p *outcome) float64 { return p.tpot99 })
		number("%.1f", func(p *outcome) float64 { return p.hit })
		cells = append(cells, fmt.Sprintf("%.1f", bound))
		number("%.2f", func(p *outcome) float64 { return p.requests })
		number("%.2f", func(p *outcome) float64 { return p.work })
		if bursts {
			number("%.2f", func(p *outcome) float64 { return p.burst })
			worst := slices.Max(over(runs, func(p *outcome) float64 { return p.worstBurst }))
			cells = append(cells, fmt.Sprintf("%.2f", worst))
		}
		if t.slow > 0 {
			number("%.0f", func(p *outcome) float64 { return p.tokens })
			for k := range len(runs[0].shares) {
				number("%.3f", func(p *outcome) float64 { return p.shares[k] })
			}
		}
		table = append(table, cells)
	}
	writeTable(out, table)
}

// formatInterval writes the mean of values and half of its 95 % confidence interval, if there are several.
func formatInterval(format string, values []float64) string {
	text := fmt.Sprintf(format, mean(values))
	if half, ok := halfWidth(values); ok {
		text += fmt.Sprintf(" ± %.1f", half)
	}
	return text
}

// writeTable prints rows of equally many cells in columns: the first to the left, the others to the right.
func writeTable(out io.Writer, rows [][]string) {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, text := range row {
			width[i] = max(width[i], len([]rune(text)))
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, text := range row {
			pad := strings.Repeat(" ", width[i]-len([]rune(text)))
			if i == 0 {
				line.WriteString(text + pad)
			} else {
				line.WriteString("  " + pad + text)
			}
		}
		fmt.Fprintln(out, strings.TrimRight(line.String(), " "))
	}
}
