package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/sim"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/simulate"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/routing"
)

// chooseApp returns the pools of the application that is simulated.
func chooseApp(file *appFile, name string) ([]*app.Application, error) {
	all := app.ByName(file.apps)
	for _, pools := range all {
		if pools[0].Name == name || name == "" && len(all) == 1 {
			return pools, nil
		}
	}
	hint := "--app is one of: " + strings.Join(file.names(), ", ")
	if name == "" {
		return nil, problem.New(problem.InvalidArgument, "%s has several applications", file.name).
			WithHint("%s", hint)
	}
	return nil, problem.New(problem.InvalidArgument, "%s has no application %q", file.name, name).
		WithHint("%s", hint)
}

// settings are the rows: each policy, and with prefill ranks under each decider.
func (f *simulateFlags) settings(pools []*app.Application) ([]simulate.Setting, error) {
	base, err := f.config(pools)
	if err != nil {
		return nil, err
	}
	if len(f.decide) > 0 && base.Prefill.Ranks == 0 {
		return nil, usageError("simulate", "--decide is for an application with prefill and decode ranks")
	}
	own := pools[len(pools)-1] // the decode pool is the last
	var out []simulate.Setting
	policies := f.policies
	if len(policies) == 0 {
		policies = []string{own.Routing.Policy}
	}
	for _, text := range policies {
		setting := simulate.Setting{Name: text, Config: *base}
		if setting.NewPolicy, err = parsePolicy(text, &own.Routing); err != nil {
			return nil, err
		}
		if len(f.policies) == 0 {
			setting.Config.PrefillPolicy = pools[0].Routing.NewPolicy
		}
		if own.DataParallel.Coupling == app.Lockstep {
			setting.IsGroup = true
			if err := checkGroup(&setting, own); err != nil {
				return nil, err
			}
		}
		if base.Prefill.Ranks == 0 {
			out = append(out, setting)
			continue
		}
		decides := f.decide
		if len(decides) == 0 {
			decides = []string{own.Disaggregation.Decide}
		}
		for _, decide := range decides {
			one := setting
			one.Name = setting.Name + " " + decide
			if decide == "together" {
				one.Config.Ranks += one.Config.Prefill.Ranks
				one.Config.Prefill = simulate.Pool{}
			} else if one.Config.Pair, err = routing.ParsePairRule(decide); err != nil {
				return nil, err
			}
			out = append(out, one)
		}
	}
	return out, nil
}

// checkGroup gives a setting the queue of its lockstep group, if its policy has one.
func checkGroup(s *simulate.Setting, a *app.Application) error {
	policy, err := s.NewPolicy()
	if err != nil {
		return err
	}
	switch {
	case a.NumGroups > 1:
		return problem.New(problem.InvalidArgument, "simulate plays one lockstep group, %s has %d", a.Name,
			a.NumGroups).WithHint("write num_groups: 1, and --rate x%.2g", 1/float64(a.NumGroups))
	case routing.GroupFitOf(policy.Name()) == routing.WrongForGroups:
		return problem.New(problem.InvalidArgument, "policy %s is not for lockstep groups", policy.Name()).
			WithHint("cohorts is their default")
	}
	if cohorts, ok := policy.(routing.Cohorts); ok {
		rule := cohorts.GroupRule()
		s.Config.Rule = &rule
	}
	return nil
}

// parsePolicy reads NAME, NAME:PRESET and NAME:PARAMETER=VALUE. The policy of the file has the file's
// parameters.
func parsePolicy(text string, own *app.Routing) (func() (routing.Policy, error), error) {
	name, rest, hasMore := strings.Cut(text, ":")
	r := app.Routing{Policy: name, Params: map[string]any{}}
	if name == own.Policy && !hasMore {
		r = *own
	}
	for part := range strings.SplitSeq(rest, ":") {
		parameter, value, isParameter := strings.Cut(part, "=")
		switch {
		case part == "":
		case !isParameter:
			r.Preset = part
		default:
			var v any
			if err := yaml.Unmarshal([]byte(value), &v); err != nil {
				return nil, problem.New(problem.InvalidArgument, "--policy %s: cannot read %q", text, value).
					WithHint("NAME, NAME:tuned or NAME:PARAMETER=VALUE:…")
			}
			r.Params[parameter] = v
		}
	}
	_, err := r.NewPolicy()
	return r.NewPolicy, err
}

// config is the shape of the application.
func (f *simulateFlags) config(pools []*app.Application) (*simulate.GroupConfig, error) {
	own := pools[len(pools)-1]
	c := simulate.LockstepGroup(own.DataParallel.DPSize, 0)
	c.Config = simulate.Default()
	c.Ingresses, c.Lag = f.ingresses, f.lag
	var err error
	if c.Pool, err = poolOf(own, &c.Transfer); err != nil {
		return nil, err
	}
	if len(pools) > 1 {
		if slices.ContainsFunc(pools, func(a *app.Application) bool {
			return a.DataParallel.Coupling == app.Lockstep
		}) {
			return nil, problem.New(problem.InvalidArgument, "simulate plays no pools of lockstep groups").
				WithHint("write coupling: independent for both pools, or simulate one group without pools")
		}
		if c.Prefill, err = poolOf(pools[0], &c.Transfer); err != nil {
			return nil, err
		}
		c.Pair.NeedsMet = own.Disaggregation.Fallback == app.FallbackFail
	}
	c.Most, c.Wait = own.MaxQueuedRequests, app.Seconds(own.Timeouts.QueueS)
	c.Attempts, c.Cut = own.Retries.Attempts, !own.Retries.ContinueStreams
	policy, err := own.Routing.NewPolicy()
	if err != nil {
		return nil, err
	}
	goals := routing.GoalsOf(policy)
	c.Goals = routing.Goals{TTFT: cmp.Or(f.ttft, goals.TTFT), TPOT: cmp.Or(f.tpot, goals.TPOT)}
	if c.Faults, err = f.faults(&c.Config); err != nil {
		return nil, err
	}
	if len(c.Faults) > 0 && own.DataParallel.Coupling == app.Lockstep {
		return nil, usageError("simulate", "--fail and --slow are for independent ranks")
	}
	return &c, nil
}

// poolOf is a pool of the application with the engine that its arguments ask for.
func poolOf(a *app.Application, transfer *simulate.Transfer) (simulate.Pool, error) {
	isSim, moe := a.Engine.Kind == app.KindSim, false
	if policy, err := a.Routing.NewPolicy(); err == nil {
		mex, isMex := policy.(routing.Mex)
		moe = isMex && mex.MoE
	}
	args := a.Engine.Args
	if !isSim {
		args, _ = simulatedArgs(a)
	}
	argv, err := engine.Flags(args)
	if err != nil {
		return simulate.Pool{}, err
	}
	if a.DataParallel.Coupling == app.Lockstep {
		argv = append(argv, "--data-parallel-size", strconv.Itoa(a.DataParallel.DPSize),
			"--data-parallel-rank", "0")
	}
	cfg, _, err := sim.ParseFlags(argv)
	if err != nil {
		return simulate.Pool{}, problem.New(problem.InvalidArgument, "%s: %w", a.PoolName(), err).
			WithHint("`dpserve validate` names the line")
	}
	p := simulate.Pool{
		Ranks: a.NumReplicas, Engine: cfg.Model, Shared: cfg.Shared, Slots: engine.MaxOngoing(a),
		BusyThreshold: a.Routing.BusyThreshold,
	}
	e := &p.Engine
	room := e.Blocks * e.BlockSize
	e.Blocks, e.BlockSize = room/simulate.BlockSize, simulate.BlockSize
	if _, isSet := args.Get("max-model-len"); !isSet {
		e.MaxModelLen = room
	}
	e.MaxModelLen = min(e.MaxModelLen, e.Blocks*e.BlockSize)
	if !isSim && moe {
		e.Law = steptime.MoE()
	}
	if !isSim && a.DataParallel.Coupling == app.Lockstep {
		e.Law, p.Shared = steptime.DeepSeek(a.DataParallel.DPSize)
	}
	perToken := float64(cfg.Transfer.TokenBytes) / cfg.Transfer.GBps // ns
	transfer.PerToken = time.Duration(perToken)
	return p, nil
}

// faults reads --fail and --slow.
func (f *simulateFlags) faults(c *simulate.Config) ([]simulate.Fault, error) {
	var out []simulate.Fault
	for i, text := range slices.Concat(f.fail, f.slow) {
		name := "fail"
		if i >= len(f.fail) {
			name = "slow"
		}
		fault, err := parseFault(text, name == "slow", c)
		if err != nil {
			return nil, usageError("simulate", "--%s %s: %v", name, text, err)
		}
		out = append(out, fault)
	}
	slices.SortStableFunc(out, func(a, b simulate.Fault) int { return cmp.Compare(a.At, b.At) })
	return out, nil
}

// parseFault reads rank=N[:xF][@AT[+FOR]].
func parseFault(text string, isSlow bool, c *simulate.Config) (f simulate.Fault, err error) {
	what, when, hasTime := strings.Cut(text, "@")
	what, factor, hasFactor := strings.Cut(what, ":x")
	pool, number, _ := strings.Cut(what, "=")
	ranks := c.Ranks
	if f.Prefill = pool == "prefill"; f.Prefill {
		ranks = c.Prefill.Ranks
	}
	if pool != "rank" && !f.Prefill || hasFactor != isSlow || !isSlow && !hasTime {
		if isSlow {
			return f, fmt.Errorf("wanted rank=N:xFACTOR, and @TIME or @TIME+FOR behind it")
		}
		return f, fmt.Errorf("wanted rank=N@TIME or rank=N@TIME+FOR")
	}
	if f.Rank, err = strconv.Atoi(number); err != nil || f.Rank < 0 || f.Rank >= ranks {
		return f, fmt.Errorf("%q is no rank from 0 to %d", number, ranks-1)
	}
	if isSlow {
		f.Factor, err = strconv.ParseFloat(factor, 64)
		if err != nil || !(f.Factor > 0 && f.Factor <= 1e6) {
			return f, fmt.Errorf("%q is no factor above 0", factor)
		}
	}
	if !hasTime {
		return f, nil
	}
	at, span, hasSpan := strings.Cut(when, "+")
	if f.At, err = parseSpan(at); err == nil && hasSpan {
		f.For, err = parseSpan(span)
	}
	return f, err
}

func parseSpan(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if most := 365 * 24 * time.Hour; err != nil || d < 0 || d > most {
		return 0, fmt.Errorf("%q is no time such as 90s", text)
	}
	return d, nil
}

// parseLoads reads factors such as x2.
func parseLoads(texts []string) ([]float64, error) {
	const least, most = 1e-3, 1e6
	var out []float64
	for _, text := range texts {
		v, err := strconv.ParseFloat(strings.TrimPrefix(text, "x"), 64)
		if err != nil || !(v >= least && v <= most) {
			return nil, usageError("simulate", "--rate %s: wanted factors such as x2, from %g to %g", text,
				least, most)
		}
		out = append(out, v)
	}
	return out, nil
}

func workloadNames() []string {
	var names []string
	for _, g := range simulate.Workloads() {
		names = append(names, g.Name)
	}
	return names
}
