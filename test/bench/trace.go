//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/tracesim"
)

// traceFlags are the flags of the role trace.
type traceFlags struct {
	trace     string
	ingresses int
	lag       time.Duration
	slow      float64
}

// The workloads that need no file.
const (
	traceAgents  = "agents"
	traceUniform = "uniform"
)

// The generated workloads, and the rank that becomes slow.
const (
	agentSessions                 = 1500
	uniformPrompt, uniformOutput  = 2048, 150
	uniformSpan                   = 5 * time.Minute
	firstSeed                     = 11
	slowRank                      = 3
	slowFrom                      = time.Minute
	justSlow, soonSlow, afterSlow = 10 * time.Second, 20 * time.Second, time.Hour
)

var errNoTrace = errors.New("role trace needs -trace FILE, a trace of Mooncake's format, or -trace agents, or -trace uniform")

// workload gives the requests of one round.
func (t *traceFlags) workload(load float64) (func(seed uint64) []tracesim.Request, error) {
	switch t.trace {
	case "":
		return nil, errNoTrace
	case traceAgents:
		return func(seed uint64) []tracesim.Request { return tracesim.Agents(agentSessions, load, seed) }, nil
	case traceUniform:
		return func(seed uint64) []tracesim.Request {
			return tracesim.Uniform(int(load*uniformSpan.Seconds()), uniformPrompt, uniformOutput, load, seed)
		}, nil
	}
	f, err := os.Open(t.trace)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	trace, err := tracesim.ReadTrace(f)
	if err != nil {
		return nil, err
	}
	return func(seed uint64) []tracesim.Request { return tracesim.Play(trace, load, seed) }, nil
}

// newPolicy makes the policy of a row.
func (r routed) newPolicy() (routing.Policy, error) {
	params := map[string]any{}
	if err := yaml.Unmarshal([]byte("{"+r.params+"}"), &params); err != nil {
		return nil, fmt.Errorf("params of %s: %w", r.name, err)
	}
	return routing.New(r.policy, r.preset, params)
}

// run plays the trace under every policy, and prints a row for each: means over the rounds, which differ in their seed.
func (t *traceFlags) run(ctx context.Context, p *policyFlags, rounds int) error {
	rows, err := chosen(settings(), p.policies, func(r routed) string { return r.name })
	if err != nil {
		return err
	}
	work, err := t.workload(p.load)
	if err != nil {
		return err
	}
	cfg := tracesim.Default()
	cfg.Ingresses, cfg.Lag = max(t.ingresses, 1), t.lag
	cfg.SlowRank, cfg.SlowFactor, cfg.SlowFrom = slowRank, t.slow, slowFrom
	fmt.Printf("%s at %g, %d ranks of %d tokens, %d ingresses, records %s old, means of %d rounds\n",
		t.trace, p.load, cfg.Ranks, cfg.Blocks*tracesim.BlockSize, cfg.Ingresses, cfg.Lag, rounds)
	fmt.Printf("%-24s%10s%8s%8s%12s%8s%8s%12s%8s%8s%10s%10s", "", "goodput %", "sd", "worst", "TTFT mean s", "p50", "p99", "TPOT p50 ms", "p99", "hit %", "tokens/s", "max/mean")
	if t.slow > 0 {
		fmt.Printf("  share of the slow rank: 0-10 s, 10-20 s, later")
	}
	fmt.Println()
	for _, r := range rows {
		var got []*tracesim.Result
		for round := range max(rounds, 1) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			cfg.Seed = firstSeed + uint64(round)
			one, err := tracesim.Run(cfg, work(cfg.Seed), r.newPolicy)
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			got = append(got, one)
		}
		t.write(r.name, got)
	}
	return nil
}

// write prints a row.
func (t *traceFlags) write(name string, got []*tracesim.Result) {
	mean := func(of func(r *tracesim.Result) float64) float64 {
		sum := 0.0
		for _, r := range got {
			sum += of(r)
		}
		return sum / float64(max(len(got), 1))
	}
	goodput := func(r *tracesim.Result) float64 { return 100 * r.Goodput }
	at := func(of func(r *tracesim.Result) []time.Duration, p float64, unit time.Duration) float64 {
		return mean(func(r *tracesim.Result) float64 { return float64(tracesim.Percentile(of(r), p)) / float64(unit) })
	}
	ttft := func(r *tracesim.Result) []time.Duration { return r.TTFT }
	tpot := func(r *tracesim.Result) []time.Duration { return r.TPOT }
	average := mean(goodput)
	spread := math.Sqrt(mean(func(r *tracesim.Result) float64 { return (goodput(r) - average) * (goodput(r) - average) }))
	worst := slices.MinFunc(got, func(a, b *tracesim.Result) int { return int(1e6 * (a.Goodput - b.Goodput)) })
	fmt.Printf("%-24s%10.1f%8.1f%8.1f%12.2f%8.2f%8.2f%12.1f%8.0f%8.1f%10.0f%10.2f", name, average, spread, goodput(worst),
		mean(func(r *tracesim.Result) float64 { return tracesim.Mean(r.TTFT).Seconds() }), at(ttft, .5, time.Second), at(ttft, .99, time.Second),
		at(tpot, .5, time.Millisecond), at(tpot, .99, time.Millisecond),
		mean(func(r *tracesim.Result) float64 { return 100 * r.Hit }), mean((*tracesim.Result).TokensPerSecond), mean((*tracesim.Result).MaxMean))
	if t.slow > 0 {
		for _, span := range [][2]time.Duration{{0, justSlow}, {justSlow, soonSlow}, {soonSlow, afterSlow}} {
			fmt.Printf("  %.3f", mean(func(r *tracesim.Result) float64 { return r.Share(slowRank, slowFrom+span[0], slowFrom+span[1]) }))
		}
	}
	fmt.Println()
}
