//go:build linux

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/loadgen"
	"github.com/dpserve/dpserve/internal/steptime"
)

// policyFlags are the flags of the roles policies and policy-cpu.
type policyFlags struct {
	policies, traffic string
	duration          time.Duration
	load              float64
}

// rows are the settings asked for, the first of all in front: ratios need it.
func (p *policyFlags) rows() ([]routed, error) {
	all := settings()
	rows, err := chosen(all, p.policies, func(r routed) string { return r.name })
	if err == nil && rows[0].name != all[0].name {
		rows = append([]routed{all[0]}, rows...)
	}
	return rows, err
}

// compare runs every policy under every traffic. Each run has a fresh dpserve with fresh engines; the rounds
// differ in their seed.
func (p *policyFlags) compare(ctx context.Context, bin string, rounds int) error {
	rows, err := p.rows()
	if err != nil {
		return err
	}
	kinds, err := chosen(traffics(), p.traffic, func(t traffic) string { return t.name })
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "dpserve-policies-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("%d CPUs, %s, %d simulated ranks with %d tokens each, %s measured per run, "+
		"median of %d rounds\n",
		runtime.NumCPU(), runtime.Version(), simRanks, simBlocks*simBlockSize, p.duration, rounds)
	for _, t := range kinds {
		if err := p.under(ctx, bin, dir, t, rows, rounds); err != nil {
			return err
		}
	}
	return nil
}

// under prints the table of one traffic.
func (p *policyFlags) under(ctx context.Context, bin, dir string, t traffic, rows []routed,
	rounds int,
) error {
	got := make([][]*loadgen.Report, len(rows))
	for round := range rounds {
		for i, r := range rows {
			report, err := p.run(ctx, bin, filepath.Join(dir, t.name+"-"+r.name+"-"+strconv.Itoa(round)), t,
				r, round)
			if err != nil {
				return fmt.Errorf("%s under %s: %w", t.name, r.name, err)
			}
			got[i] = append(got[i], report)
			fmt.Fprintf(os.Stderr, "%s %s, round %d: %d requests, %d failed, hit %.1f %%\n", t.name, r.name,
				round+1, report.Offered, report.Failed, 100*report.HitShare)
		}
	}
	t.write(p.load, rows, got)
	return nil
}

// write prints the table: a row per policy, a column per figure, medians over the rounds.
func (t traffic) write(load float64, rows []routed, got [][]*loadgen.Report) {
	fmt.Printf("\n%s: %s\n", t.name, t.what)
	fmt.Printf("%g sessions/s of %d turns, %d system prompts of %d tokens, %d tokens a message, "+
		"%d tokens an answer\n%-24s", t.rate*load, t.talk.Turns, t.talk.SystemPrompts,
		t.talk.SystemTokens, t.talk.TurnTokens, t.tokens, "")
	for _, c := range figures() {
		fmt.Printf("%12s", c.head)
	}
	fmt.Println()
	for i, r := range rows {
		fmt.Printf("%-24s", r.name)
		failed := 0
		for _, c := range figures() {
			var values []float64
			for round, report := range got[i] {
				values = append(values, c.of(report, got[0][round]))
			}
			fmt.Printf("%12.*f", c.digits, median(values))
		}
		for _, report := range got[i] {
			failed += report.Failed
		}
		if failed > 0 {
			fmt.Printf("  (%d failed, in round 1: %v)", failed, got[i][0].Errors)
		}
		fmt.Println()
	}
}

// run measures one policy under one traffic.
func (p *policyFlags) run(ctx context.Context, bin, dir string, t traffic, r routed,
	round int,
) (*loadgen.Report, error) {
	ctx, cancel := context.WithCancel(ctx)
	n, err := startNode(ctx, bin, dir)
	if n != nil && n.cmd != nil {
		defer func() { cancel(); _ = n.cmd.Wait() }() // its engines end with it
	}
	defer cancel()
	if err != nil {
		return nil, err
	}
	if err := n.deploy(ctx, simApp(r)); err != nil {
		return nil, err
	}
	return loadgen.RunSessions(ctx, loadgen.Config{
		URL: "http://" + n.http, Model: "bench", Stream: true, IgnoreEOS: true, MaxTokens: t.tokens,
		Rate:   t.rate * p.load,
		Warmup: t.warmup, Duration: p.duration, Seed: uint64(round) + 1,
	}, t.talk)
}

// simApp is the file of the application that is compared.
func simApp(r routed) string {
	return fmt.Sprintf(`applications:
  - name: bench
    model: {id: bench}
%s    engine: {kind: sim, args: {max_model_len: 65536, num_gpu_blocks_override: %d, block_size: %d}}
    data_parallel: {dp_size: %d, coupling: independent}
    graceful_shutdown_timeout_s: 1
`, r.yaml(), simBlocks, simBlockSize, simRanks)
}

// figure is a column of the comparison; base is the first row of the same round.
type figure struct {
	head   string
	digits int
	of     func(r, base *loadgen.Report) float64
}

func figures() []figure {
	p50 := func(p *loadgen.Percentiles) float64 {
		if p == nil {
			return 0
		}
		return p.P50
	}
	return []figure{
		{"requests", 0, func(r, _ *loadgen.Report) float64 { return float64(r.Offered) }},
		{"goodput %", 1, func(r, _ *loadgen.Report) float64 { return 100 * r.Goodput.Share }},
		{"hit %", 1, func(r, _ *loadgen.Report) float64 { return 100 * r.HitShare }},
		{"of oracle %", 1, func(r, _ *loadgen.Report) float64 { return 100 * r.Sessions.OfOracle }},
		{"load %", 0, func(r, _ *loadgen.Report) float64 { return 100 * prefillLoad(r) }},
		{"TTFT p50 ms", 0, func(r, _ *loadgen.Report) float64 { return p50(r.TTFT) }},
		{"p99 ms", 0, func(r, _ *loadgen.Report) float64 {
			if r.TTFT == nil {
				return 0
			}
			return r.TTFT.P99
		}},
		{"TPOT p50 ms", 1, func(r, _ *loadgen.Report) float64 { return p50(r.TPOT) }},
		{"max/mean", 2, func(r, _ *loadgen.Report) float64 { return busiest(r.Ranks) }},
		{"p50 of rr %", 0, func(r, base *loadgen.Report) float64 {
			return 100 * p50(r.TTFT) / max(p50(base.TTFT), 1e-3)
		}},
	}
}

// busiest is the largest number of answers over the mean of all ranks, of which some may have given none.
func busiest(ranks map[string]int) float64 {
	most, sum := 0, 0
	for _, n := range ranks {
		most, sum = max(most, n), sum+n
	}
	return simRanks * float64(most) / float64(max(sum, 1))
}

// prefillLoad is the share of the ranks' time that the prompt tokens took which were not cached, by the step
// law without its attention pairs.
func prefillLoad(r *loadgen.Report) float64 {
	return float64(r.PromptTokens-r.CachedTokens) * steptime.Reference().TokenMS / 1000 / max(r.DurationS,
		1e-3) / simRanks
}

// cpu measures the gateway's CPU time per request under each policy, over the mocks, interleaved.
func (p *policyFlags) cpu(ctx context.Context, bin string, rounds int, slice time.Duration,
	only string,
) error {
	rows, err := p.rows()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "dpserve-policies-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	engines, err := startEngines(ctx, self, simRanks)
	if err != nil {
		return err
	}
	var ts []target
	for i, r := range rows {
		t, err := startDpserve(ctx, bin, filepath.Join(dir, strconv.Itoa(i)), engines, r)
		if err != nil {
			return err
		}
		ts = append(ts, t)
	}
	fmt.Printf("%d CPUs, %s, engines: %d mocks, each slice %s\n", runtime.NumCPU(), runtime.Version(),
		simRanks, slice)
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, sh := range cpuShapes() {
		if strings.Contains(sh.name, only) && ctx.Err() == nil {
			sh.measure(ctx, ts, rounds, slice, rnd)
		}
	}
	return nil
}

// cpuShapes are the bodies whose routing costs are compared: as the first role sends them, and such that no
// prompt comes twice, which fills every index.
func cpuShapes() []shape {
	perRequest := func(s sample) float64 {
		return float64(s.cpu.Microseconds()) / float64(max(s.requests, 1))
	}
	cols := []column{
		{"CPU us/request", func(s, _ sample) float64 { return perRequest(s) }},
		{"over round-robin", func(s, base sample) float64 {
			return perRequest(s) / max(perRequest(base), 1e-3)
		}},
		{"requests/s", func(s, _ sample) float64 { return float64(s.requests) / s.wall.Seconds() }},
	}
	body := func(bytes int) []byte { return payload(bytes, 1, 0, bytes > 100<<10, false) }
	return []shape{
		{"small body, 16 clients, closed loop", load{req: body(64), conns: 16}, cols},
		{"4 KB, a new prompt each time, 16 clients", load{req: body(4 << 10), conns: 16, fresh: true}, cols},
		{"400 KB body, 1 client", load{req: body(400 << 10), conns: 1}, cols},
		{"400 KB, a new prompt each time, 1 client", load{req: body(400 << 10), conns: 1, fresh: true}, cols},
	}
}
