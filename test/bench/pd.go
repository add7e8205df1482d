//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/internal/loadgen"
)

// pools is a way to use the six ranks of the comparison.
type pools struct {
	name   string
	keys   string // of the application
	args   string // further arguments of the engines
	isPair bool
}

const (
	pdPrefills = 2
	pdDecodes  = 4
)

// poolings are the rows of the comparison. The first is what the others are compared with.
func poolings() []pools {
	together := fmt.Sprintf("    data_parallel: {dp_size: %d, coupling: independent}\n", pdPrefills+pdDecodes)
	apart := fmt.Sprintf(`    prefill: {data_parallel: {dp_size: %d, coupling: independent}}
    decode: {data_parallel: {dp_size: %d, coupling: independent}}
`, pdPrefills, pdDecodes)
	return []pools{
		{name: "together", keys: together},
		{name: "together-2048", keys: together, args: ", max_num_batched_tokens: 2048"},
		{name: "apart", keys: apart, isPair: true},
		{name: "apart-always", keys: apart + "    disaggregation: {decide: always}\n", isPair: true},
	}
}

// yaml is the file of an application with these ranks.
func (p pools) yaml() string {
	return fmt.Sprintf(`applications:
  - name: bench
    model: {id: bench}
    engine: {kind: sim, args: {max_model_len: 65536, num_gpu_blocks_override: %d, block_size: %d%s}}
%s    graceful_shutdown_timeout_s: 1
`, simBlocks, simBlockSize, p.args, p.keys)
}

// stream is one part of a mixed load: an open loop of prompts that share nothing, or of conversations.
type stream struct {
	name   string
	rate   float64 // requests per second, of a conversation sessions
	prompt int     // tokens; 0 = talk has them
	tokens int     // of an answer
	talk   loadgen.Conversation
}

// mixture is a traffic: streams that run at the same time.
type mixture struct {
	name    string
	what    string
	warmup  time.Duration
	streams []stream
}

func mixtures() []mixture {
	const many = 1 << 20 // sessions: the measurement ends before
	return []mixture{
		{
			name:   "documents",
			what:   "long prompts beside steady decodes: what splitting is for",
			warmup: 8 * time.Second,
			streams: []stream{
				{name: "long prompts", rate: 1.1, prompt: 16000, tokens: 128},
				{name: "steady decodes", rate: 12, prompt: 200, tokens: 128},
			},
		},
		{
			name:    "short",
			what:    "short prompts: a second leg and the queue of two ranks cost more than they save",
			warmup:  5 * time.Second,
			streams: []stream{{name: "short prompts", rate: 40, prompt: 1500, tokens: 64}},
		},
		{
			name:   "agents",
			what:   "long shared prefixes, which the decode ranks hold: prefill ranks have little to do",
			warmup: 20 * time.Second,
			streams: []stream{{
				name: "agents", rate: 4, tokens: 32,
				talk: loadgen.Conversation{
					Sessions: many, Turns: 6, SystemPrompts: 8, SystemTokens: 4000,
					TurnTokens: 1500, Think: time.Second,
				},
			}},
		},
	}
}

// run sends the stream's load.
func (s *stream) run(ctx context.Context, url string, warmup, duration time.Duration, load float64,
	seed uint64,
) (*loadgen.Report, error) {
	cfg := loadgen.Config{
		URL: url, Model: "bench", Stream: true, IgnoreEOS: true, MaxTokens: s.tokens, Rate: s.rate * load,
		Warmup: warmup, Duration: duration, Seed: seed,
	}
	if s.prompt == 0 {
		return loadgen.RunSessions(ctx, cfg, s.talk)
	}
	cfg.PromptTokens = s.prompt
	return loadgen.Run(ctx, cfg)
}

// pdRun is what one run of a mixture came to.
type pdRun struct {
	reports []*loadgen.Report // by stream
	ways    ways
}

// comparePools runs every traffic on the same six ranks, apart and together, each on fresh processes; the
// rounds differ in their seed.
func (p *policyFlags) comparePools(ctx context.Context, bin string, rounds int) error {
	all := poolings()
	rows, err := chosen(all, p.policies, func(r pools) string { return r.name })
	if err != nil {
		return err
	}
	if rows[0].name != all[0].name {
		rows = append([]pools{all[0]}, rows...)
	}
	kinds, err := chosen(mixtures(), p.traffic, func(m mixture) string { return m.name })
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "dpserve-pd-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fmt.Printf("%d CPUs, %s, %d simulated ranks with %d tokens each: together, or %d for prefill and %d for "+
		"decode; %s measured per run, median of %d rounds\n", runtime.NumCPU(), runtime.Version(),
		pdPrefills+pdDecodes, simBlocks*simBlockSize, pdPrefills, pdDecodes, p.duration, rounds)
	for _, m := range kinds {
		got := make([][]pdRun, len(rows))
		for round := range rounds {
			for i, r := range rows {
				own := filepath.Join(dir, m.name+"-"+r.name+"-"+strconv.Itoa(round))
				one, err := p.mix(ctx, bin, own, m, r, round)
				if err != nil {
					return fmt.Errorf("%s, %s: %w", m.name, r.name, err)
				}
				got[i] = append(got[i], one)
				fmt.Fprintf(os.Stderr, "%s, %s, round %d: %s\n", m.name, r.name, round+1, one.ways)
			}
		}
		m.write(p.load, rows, got)
	}
	return nil
}

// mix measures one traffic on ranks that are used in one way.
func (p *policyFlags) mix(ctx context.Context, bin, dir string, m mixture, r pools,
	round int,
) (out pdRun, err error) {
	ctx, cancel := context.WithCancel(ctx)
	n, err := startNode(ctx, bin, dir)
	if n != nil && n.cmd != nil {
		defer func() { cancel(); _ = n.cmd.Wait() }() // its engines end with it
	}
	defer cancel()
	if err != nil {
		return out, err
	}
	if err := n.deploy(ctx, r.yaml()); err != nil {
		return out, err
	}
	if r.isPair {
		if err := waitForPairs(ctx, n.admin, pdPrefills*pdDecodes); err != nil {
			return out, err
		}
	}
	before, err := waysOf(ctx, n.admin)
	if err != nil {
		return out, err
	}
	out.reports = make([]*loadgen.Report, len(m.streams))
	errs := make(chan error, len(m.streams))
	for i := range m.streams {
		go func() {
			seed := uint64(round*len(m.streams)+i) + 1
			report, err := m.streams[i].run(ctx, "http://"+n.http, m.warmup, p.duration, p.load, seed)
			out.reports[i] = report
			errs <- err
		}()
	}
	for range m.streams {
		if one := <-errs; one != nil && err == nil {
			err = one
			cancel()
		}
	}
	if err != nil {
		return out, err
	}
	after, err := waysOf(ctx, n.admin)
	out.ways = after.minus(before)
	return out, err
}

// write prints a table per stream: a row per use of the ranks, a column per figure, medians over the rounds.
func (m mixture) write(load float64, rows []pools, got [][]pdRun) {
	fmt.Printf("\n%s: %s\n", m.name, m.what)
	for i, s := range m.streams {
		size := fmt.Sprintf("prompts of %d tokens", s.prompt)
		if s.prompt == 0 {
			size = fmt.Sprintf("sessions of %d turns, %d system prompts of %d tokens, %d tokens a message",
				s.talk.Turns, s.talk.SystemPrompts, s.talk.SystemTokens, s.talk.TurnTokens)
		}
		fmt.Printf("%s: %.3g per second, %s, %d tokens an answer\n%-18s", s.name, s.rate*load, size,
			s.tokens, "")
		for _, f := range poolFigures() {
			fmt.Printf("%14s", f.head)
		}
		fmt.Println()
		for k, r := range rows {
			fmt.Printf("%-18s", r.name)
			for _, f := range poolFigures() {
				var values []float64
				for round := range got[k] {
					values = append(values, f.of(&got[k][round], &got[0][round], i))
				}
				fmt.Printf("%14.*f", f.digits, median(values))
			}
			failed, errs := 0, map[string]int(nil)
			for _, run := range got[k] {
				if n := run.reports[i].Failed; n > 0 {
					failed, errs = failed+n, run.reports[i].Errors
				}
			}
			if failed > 0 {
				fmt.Printf("  (%d failed: %v)", failed, errs)
			}
			fmt.Println()
		}
	}
}

// poolFigure is a column: of a run's stream, beside the first row's run of the same round.
type poolFigure struct {
	head   string
	digits int
	of     func(r, base *pdRun, stream int) float64
}

func poolFigures() []poolFigure {
	ttft := func(r *pdRun, i int) loadgen.Percentiles { return percentilesOf(r.reports[i].TTFT) }
	tpot := func(r *pdRun, i int) loadgen.Percentiles { return percentilesOf(r.reports[i].TPOT) }
	return []poolFigure{
		{"requests", 0, func(r, _ *pdRun, i int) float64 { return float64(r.reports[i].Offered) }},
		{"goodput %", 1, func(r, _ *pdRun, i int) float64 { return 100 * r.reports[i].Goodput.Share }},
		{"TTFT p50 ms", 0, func(r, _ *pdRun, i int) float64 { return ttft(r, i).P50 }},
		{"p99 ms", 0, func(r, _ *pdRun, i int) float64 { return ttft(r, i).P99 }},
		{"p99 times", 2, func(r, base *pdRun, i int) float64 {
			return ttft(base, i).P99 / max(ttft(r, i).P99, 1e-3)
		}},
		{"TPOT p50 ms", 1, func(r, _ *pdRun, i int) float64 { return tpot(r, i).P50 }},
		{"p99 ms", 1, func(r, _ *pdRun, i int) float64 { return tpot(r, i).P99 }},
		{"p99 times", 2, func(r, base *pdRun, i int) float64 {
			return tpot(base, i).P99 / max(tpot(r, i).P99, 1e-3)
		}},
		{"remote %", 1, func(r, _ *pdRun, _ int) float64 { return 100 * r.ways.share() }},
	}
}

// percentilesOf is zero where nothing was measured.
func percentilesOf(p *loadgen.Percentiles) loadgen.Percentiles {
	if p == nil {
		return loadgen.Percentiles{}
	}
	return *p
}
