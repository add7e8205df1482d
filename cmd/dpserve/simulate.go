package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// engineSim is the one value of --engine.
const engineSim = "sim"

// simulatedFlags are the engine arguments that the simulated engine understands as well; they keep the shape of the load.
func simulatedFlags() []string {
	return []string{
		"max_num_seqs", "max_model_len", "block_size", "num_gpu_blocks_override", "max_num_batched_tokens", "max_num_queued_reqs",
		"max_num_queued_tokens", "enable_expert_parallel", "tensor_parallel_size", "seed", "enable_prefix_caching",
	}
}

// checkEngine refuses values of --engine that do not exist.
func checkEngine(engine string) error {
	if engine == "" || engine == engineSim {
		return nil
	}
	return problem.New(problem.InvalidArgument, "--engine %q: wanted sim", engine).WithHint("leave --engine out to run the file as written")
}

// simulate turns applications into ones of the simulated engine and says what it changed, one line each. What only devices
// or the real program need goes; sizes, coupling, routing and limits stay.
func simulate(apps []*app.Application) []string {
	var said []string
	for _, a := range apps {
		if a.Engine.Kind == app.KindSim {
			continue
		}
		said = append(said, simulateOne(a)...)
	}
	return said
}

func simulateOne(a *app.Application) []string {
	s := &changes{app: a.Name}
	s.add(true, "engine.kind: %s → sim", a.Engine.Kind)
	s.add(len(a.Engine.Command) > 0, "engine.command dropped")
	s.add(len(a.Engine.Env) > 0, "engine.env dropped")
	s.add(len(a.Engine.Ranks) > 0, "engine.ranks dropped: %s are started instead", count(len(a.Engine.Ranks), "simulated rank"))
	s.add(a.Resources.GPUs > 0, "resources.gpus: %d → 0", a.Resources.GPUs)
	s.add(len(a.Resources.Labels) > 0, "resources.labels dropped")
	args, dropped := simulatedArgs(a)
	s.add(len(dropped) > 0, "engine.args dropped: %s", strings.Join(dropped, ", "))
	a.Engine = app.Engine{
		Kind: app.KindSim, Args: args, KVEvents: a.Engine.KVEvents,
		StartupTimeoutS: a.Engine.StartupTimeoutS, StallTimeoutS: a.Engine.StallTimeoutS,
	}
	a.Resources.GPUs, a.Resources.GPUsSet, a.Resources.Labels = 0, false, nil
	return s.lines
}

// simulatedArgs keeps the arguments that mean the same to the simulated engine; only vllm's do.
func simulatedArgs(a *app.Application) (kept app.Args, dropped []string) {
	for _, arg := range a.Engine.Args {
		name := strings.ReplaceAll(arg.Name, "-", "_")
		if a.Engine.Kind == app.KindVLLM && slices.Contains(simulatedFlags(), name) {
			kept = append(kept, arg)
			continue
		}
		dropped = append(dropped, arg.Name)
	}
	return kept, dropped
}

type changes struct {
	app   string
	lines []string
}

func (c *changes) add(when bool, format string, args ...any) {
	if when {
		c.lines = append(c.lines, c.app+": "+fmt.Sprintf(format, args...))
	}
}

// checkKinds refuses what this version cannot start, before anything is started.
func checkKinds(apps []*app.Application) error {
	for _, a := range apps {
		switch a.Engine.Kind {
		case app.KindVLLM, app.KindSGLang:
			return problem.New(problem.Unplaceable, "%s: engines of kind %s come with the next version", a.Name, a.Engine.Kind).
				WithHint("--engine sim runs the file on the simulated engine")
		case app.KindSim, app.KindAttach:
		}
	}
	return nil
}
