package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/nearest"
	"github.com/dpserve/dpserve/internal/problem"
)

// maxFile is the largest app.yaml in MiB; the admin API has the same limit.
const maxFile = 1

// appFile is an app.yaml without faults.
type appFile struct {
	name    string // for messages
	text    []byte
	apps    []*app.Application
	changed bool   // apps differ from text
	again   string // the command that deploys it; "" = deploy of the file
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
	file, warnings, err := parseFile(e, base, name, text)
	for _, w := range warnings {
		printMessage(e.io.Err, "warning: %s", w.String())
	}
	if err != nil {
		return nil, err
	}
	return &appFile{name: name, text: text, apps: file.Applications, changed: file.Foreign != ""}, nil
}

// addReading adds the flags of commands that read a file.
func addReading(e *env, root *cobra.Command) {
	for cmd := range allCommands(root) {
		if !slices.Contains([]string{"up", "validate", "convert", "plan", "deploy", "simulate"}, cmd.Name()) {
			continue
		}
		cmd.Flags().StringVar(&e.rayReplicas, "ray-num-replicas", "",
			"what num_replicas of a Ray Serve file with data_parallel_size counts: groups|ranks "+
				"(default groups, and one group where both are equal)")
	}
}

// parseFile reads a file in any form. Paths of model files that it names begin at its folder.
func parseFile(e *env, base app.Application, name string, text []byte) (*app.File, []app.Warning, error) {
	if err := nearest.CheckFlag("--ray-num-replicas", cmp.Or(e.rayReplicas, app.RayGroups), app.RayGroups,
		app.RayRanks); err != nil {
		return nil, nil, err
	}
	return app.ParseWith(base, name, text, app.Foreign{RayReplicas: e.rayReplicas, Beside: besideOf(name)})
}

func besideOf(file string) func(path string) ([]byte, error) {
	return func(path string) ([]byte, error) {
		if !filepath.IsAbs(path) {
			path = filepath.Join(filepath.Dir(file), path)
		}
		f, err := os.Open(path)
		if perr, ok := errors.AsType[*fs.PathError](err); ok {
			err = perr.Err
		}
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }() // only read
		return io.ReadAll(io.LimitReader(f, maxFile<<20+1))
	}
}

func readFile(e *env, path string) ([]byte, error) {
	return readInput(e, path, maxFile, "is it an app.yaml?",
		"`dpserve up` without a file runs a ready-made example")
}

// readInput reads a file ("-" is stdin) of at most so many MiB. The hints are for files that are larger, and
// for those that cannot be read.
func readInput(e *env, path string, mebibytes int, largeHint, errorHint string) ([]byte, error) {
	name, in := "stdin", e.io.In
	var text []byte
	var err error
	if path != "-" {
		var f *os.File
		f, err = os.Open(path)
		name, in = path, f
		defer func() { _ = f.Close() }() // only read
	}
	if err == nil {
		text, err = io.ReadAll(io.LimitReader(in, int64(mebibytes)<<20+1))
	}
	if perr, ok := errors.AsType[*fs.PathError](err); ok {
		err = perr.Err
	}
	switch {
	case err != nil:
		return nil, problem.New(problem.InvalidArgument, "cannot read %s: %w", name, err).
			WithHint("%s", errorHint)
	case len(text) > mebibytes<<20:
		return nil, problem.New(problem.TooLarge, "%s is larger than %d MiB", name, mebibytes).
			WithHint("%s", largeHint)
	}
	return text, nil
}

// names lists the file's applications in order.
func (f *appFile) names() []string {
	var out []string
	for _, pools := range app.ByName(f.apps) {
		out = append(out, pools[0].Name)
	}
	return out
}

// print returns the canonical text of the applications.
func (f *appFile) print() []byte { return (&app.File{Applications: f.apps}).Print() }

// request returns what a deploy sends: the text of the file as it is, unless the applications were changed.
func (f *appFile) request() client.DeployRequest {
	text := f.text
	if f.changed {
		text = f.print()
	}
	return client.DeployRequest{File: f.name, Text: text}
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

// readFor reads an application file for a value of --engine. It refuses unknown values, and converts the file
// to the simulated engine if that is asked for, which it says.
func readFor(e *env, engine string, read func() (*appFile, error)) (*appFile, error) {
	if engine != "" && engine != engineSim {
		return nil, problem.New(problem.InvalidArgument, "--engine %q: wanted sim", engine).
			WithHint("leave --engine out to run the file as written")
	}
	file, err := read()
	if err == nil && engine == engineSim {
		for _, line := range useSimulatedEngine(file.apps) {
			printMessage(e.io.Err, "--engine sim: %s", line)
		}
		file.changed = true
	}
	return file, err
}

// useSimulatedEngine converts applications to the simulated engine and returns one line per change. It drops
// settings that only devices or the real program need, and keeps sizes, coupling, routing and limits.
func useSimulatedEngine(apps []*app.Application) []string {
	var said []string
	for _, a := range apps {
		if a.Engine.Kind != app.KindSim {
			said = append(said, useSimulatedEngineIn(a)...)
		}
	}
	return said
}

func useSimulatedEngineIn(a *app.Application) []string {
	s := &changes{app: a.PoolName()}
	s.add(true, "engine.kind: %s → sim", a.Engine.Kind)
	s.add(len(a.Engine.Command) > 0, "engine.command dropped")
	s.add(len(a.Engine.Env) > 0, "engine.env dropped")
	s.add(len(a.Engine.Ranks) > 0, "engine.ranks dropped: %s are started instead",
		formatCount(len(a.Engine.Ranks), "simulated rank"))
	if n := len(a.Engine.Services); n > 0 {
		s.add(true, "engine.services dropped: %s are started instead", formatCount(n, "simulated rank"))
		a.DataParallel.DPSize, a.NumReplicas, a.NumGroups = a.DataParallel.DPSize+n, a.NumReplicas+n, 1
	}
	s.add(a.Resources.GPUs > 0, "resources.gpus: %g → 0", a.Resources.GPUs)
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

// validateDocument is the JSON of validate. Messages of faults say all of a fault: rule, found and wanted.
type validateDocument struct {
	File         string         `json:"file"`
	Valid        bool           `json:"valid"` // there are no faults
	Applications []validatedApp `json:"applications"`
	Faults       []client.Fault `json:"faults"`
	Warnings     []client.Fault `json:"warnings"`
}

type validatedApp struct {
	Name string `json:"name"`
	Kind string `json:"kind"`
}

func newValidate(e *env) *cobra.Command {
	var show bool
	var output *format
	cmd := &cobra.Command{
		Use:   "validate FILE [flags]",
		Short: "check an app.yaml, offline",
		Long: `validate reads a file as deploy does and names every fault with line, column, what was found
and what was wanted. It needs no running dpserve. FILE may be - for stdin. Faults end it with exit code 2.

-o json prints one document, with faults or without: file, valid, applications (name, kind), faults and
warnings (file, line, col, path, message, found, wanted, hint).`,
		Example: `  dpserve validate examples/quickstart/app.yaml --print
  dpserve validate app.yaml -o json            # for editors and CI`,
		Args: requireArgs(1, "FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if show && cmd.Flags().Changed("output") {
				return usageError("validate", "--print and --output exclude each other")
			}
			return runValidate(e, args[0], show, *output)
		},
	}
	cmd.Flags().BoolVar(&show, "print", false,
		"print the file as dpserve reads it, sizes worked out, without what is at its default")
	output = addOutput(cmd)
	return cmd
}

func runValidate(e *env, path string, show bool, output format) error {
	if output == formatJSON || output == formatYAML {
		return writeValidation(e, path, output)
	}
	file, err := readApps(e, path)
	if err != nil {
		return err
	}
	switch {
	case show:
		_, err = e.io.Out.Write(file.print())
		return err
	case output == formatName:
		return writeNames(e.io.Out, file.names())
	}
	printMessage(e.io.Err, "%s is sound: %s", file.name, formatCount(len(file.names()), "application"))
	return nil
}

// writeValidation prints the document. Faults are part of it, so only the exit code tells of them again.
func writeValidation(e *env, path string, output format) error {
	text, err := readFile(e, path)
	if err != nil {
		return err
	}
	file, warnings, err := parseFile(e, app.Default(), path, text)
	var faults app.Faults
	if err != nil && !errors.As(err, &faults) {
		return err
	}
	doc := validateDocument{
		File: path, Valid: err == nil, Applications: []validatedApp{},
		Faults:   completeFaults(api.ConvertFaults(faults)),
		Warnings: completeFaults(api.ConvertFaults(warnings)),
	}
	if file != nil && doc.Valid {
		for _, pools := range app.ByName(file.Applications) {
			doc.Applications = append(doc.Applications,
				validatedApp{pools[0].Name, string(pools[0].Engine.Kind)})
		}
	}
	if err := writeDocument(e.io.Out, output, versioned{doc}, nil); err != nil || doc.Valid {
		return err
	}
	return &silentError{code: problem.ExitCode(problem.InvalidArgument)}
}
