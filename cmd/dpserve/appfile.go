package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/server"
)

// maxFile is the largest app.yaml in bytes; the admin API has the same limit.
const maxFile = 1 << 20

// appFile is an app.yaml without faults.
type appFile struct {
	name    string // for messages
	text    []byte
	apps    []*app.Application
	changed bool // apps differ from text
}

// readApps reads and checks a file ("-" is stdin). It prints warnings to stderr and returns faults as
// app.Faults.
func readApps(e *env, path string) (*appFile, error) {
	text, err := readFile(e, path)
	if err != nil {
		return nil, err
	}
	return parseApps(e, app.Default(), path, text)
}

// parseApps reads a file with the defaults of base.
func parseApps(e *env, base app.Application, name string, text []byte) (*appFile, error) {
	file, warnings, err := server.ParseAppsOver(base, name, text)
	for _, w := range warnings {
		printMessage(e.io.Err, "warning: %s", w.String())
	}
	if err != nil {
		return nil, err
	}
	return &appFile{name: name, text: text, apps: file.Applications}, nil
}

func readFile(e *env, path string) ([]byte, error) {
	if path == "-" {
		return readBounded("stdin", e.io.In)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fileError(path, err)
	}
	defer func() { _ = f.Close() }() // only read
	return readBounded(path, f)
}

func readBounded(name string, r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return nil, fileError(name, err)
	}
	if len(text) > maxFile {
		return nil, problem.New(problem.TooLarge, "%s is larger than 1 MiB", name).
			WithHint("is it an app.yaml?")
	}
	return text, nil
}

func fileError(path string, err error) error {
	cause := err
	var perr *fs.PathError
	if errors.As(err, &perr) {
		cause = perr.Err
	}
	return problem.New(problem.InvalidArgument, "cannot read %s: %w", path, cause).
		WithHint("`dpserve up` without a file runs a ready-made example")
}

// names lists the file's applications in order.
func (f *appFile) names() []string {
	var out []string
	for _, a := range eachOnce(f.apps) {
		out = append(out, a.AppName())
	}
	return out
}

// eachOnce lists each application once: of two pools, the decode pool.
func eachOnce(apps []*app.Application) []*app.Application {
	return slices.DeleteFunc(slices.Clone(apps),
		func(a *app.Application) bool { return a.Pool == app.PoolPrefill })
}

// print returns the canonical text of the applications.
func (f *appFile) print() []byte { return (&app.File{Applications: f.apps}).Print() }

// request returns what a deploy sends: the text of the file as it is, unless the applications were changed.
func (f *appFile) request() client.DeployRequest {
	if f.changed {
		return client.DeployRequest{File: f.name, Text: f.print()}
	}
	return client.DeployRequest{File: f.name, Text: f.text}
}

// engineSim is the only value of --engine.
const engineSim = "sim"

// simulatedFlags are the engine arguments that the simulated engine understands and that shape its load.
func simulatedFlags() []string {
	return []string{
		"max_num_seqs", "max_model_len", "block_size", "num_gpu_blocks_override", "max_num_batched_tokens",
		"max_num_queued_reqs",
		"max_num_queued_tokens", "enable_expert_parallel", "tensor_parallel_size", "seed",
		"enable_prefix_caching",
	}
}

// checkEngine refuses unknown values of --engine.
func checkEngine(engine string) error {
	if engine == "" || engine == engineSim {
		return nil
	}
	return problem.New(problem.InvalidArgument, "--engine %q: wanted sim", engine).
		WithHint("leave --engine out to run the file as written")
}

// simulate converts applications to the simulated engine and returns one line per change. It drops settings
// that only devices or the real program need, and keeps sizes, coupling, routing and limits.
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
	s.add(len(a.Engine.Ranks) > 0, "engine.ranks dropped: %s are started instead",
		formatCount(len(a.Engine.Ranks), "simulated rank"))
	s.add(a.Resources.GPUs > 0, "resources.gpus: %d → 0", a.Resources.GPUs)
	s.add(len(a.Resources.Labels) > 0, "resources.labels dropped")
	args, dropped := simulatedArgs(a)
	s.add(len(dropped) > 0, "engine.args dropped: %s", strings.Join(dropped, ", "))
	if d := a.Disaggregation; d != nil {
		s.add(d.Transfer != app.TransferSim, "disaggregation.transfer: %s → sim", d.Transfer)
		d.Transfer = app.TransferSim
	}
	a.Engine = app.Engine{
		Kind: app.KindSim, Args: args, KVEvents: a.Engine.KVEvents,
		StartupTimeoutS: a.Engine.StartupTimeoutS, StallTimeoutS: a.Engine.StallTimeoutS,
	}
	a.Resources.GPUs, a.Resources.GPUsSet, a.Resources.Labels = 0, false, nil
	return s.lines
}

// simulatedArgs keeps the arguments that have the same meaning for the simulated engine; only vllm's do.
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

// checkKinds refuses engine kinds that this version cannot start, before any engine starts.
func checkKinds(apps []*app.Application) error { return controller.CheckRunnable(apps) }

// simulateFile converts a file to the simulated engine and prints the changes.
func simulateFile(e *env, file *appFile) {
	for _, line := range simulate(file.apps) {
		printMessage(e.io.Err, "--engine sim: %s", line)
	}
	file.changed = true
}
