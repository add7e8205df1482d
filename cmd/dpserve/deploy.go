package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/internal/problem"
)

// deployTimeout is how long deploy waits for RUNNING unless --timeout says otherwise.
const deployTimeout = 10 * time.Minute

type deployFlags struct {
	detach, dryRun, prune, yes bool
	timeout                    time.Duration
	engine                     string
	output                     *format
}

func newDeploy(e *env) *cobra.Command {
	f := &deployFlags{}
	cmd := &cobra.Command{
		Use:   "deploy FILE [flags]",
		Short: "bring the applications of a file to RUNNING",
		Long: `deploy checks FILE, shows what changes, applies it and waits until every rank serves. Applications that FILE does not list
stay as they are, unless --prune is given. A rollout that fails ends it with exit code 5 and the last log lines of the rank that
failed; Ctrl-C leaves the monitor (exit code 130) and the rollout goes on.`,
		Example: `  dpserve deploy examples/quickstart/app.yaml
  dpserve deploy app.yaml --dry-run            # what would change`,
		Args: takes(1, "FILE"),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.detach, "detach", false, "do not wait for RUNNING")
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVar(&f.prune, "prune", false, "delete applications that FILE does not list")
	flags.BoolVar(&f.yes, "yes", false, "do not ask before --prune deletes something")
	flags.DurationVar(&f.timeout, "timeout", deployTimeout, "how long to wait for RUNNING; then exit code 8")
	flags.StringVar(&f.engine, "engine", "", "sim: run the file on the simulated engine")
	f.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return e.deploy(cmd.Context(), f, args[0]) }
	return cmd
}

func (e *env) deploy(ctx context.Context, f *deployFlags, path string) error {
	if f.timeout <= 0 {
		return usageError("deploy", "--timeout %s: must be positive", f.timeout)
	}
	file, err := e.deployFile(f, path)
	if err != nil {
		return err
	}
	client, err := e.admin()
	if err != nil {
		return err
	}
	defer client.Close()
	before, err := client.Apps(ctx)
	if err != nil {
		return err
	}
	plan := planOf(file, before, f.prune)
	if f.dryRun {
		return plan.listing().write(e.io, *f.output)
	}
	if err := e.confirmPrune(f, plan); err != nil {
		return err
	}
	result, err := client.Deploy(ctx, api.DeployRequest{File: file.name, Text: file.text, Prune: f.prune})
	if err != nil {
		return err
	}
	e.tellChanges(result)
	if f.detach {
		talk(e.io.Err, "applied; watch it with `dpserve status -w`")
		return nil
	}
	return e.awaitRunning(ctx, f, client, result)
}

func (e *env) deployFile(f *deployFlags, path string) (*appFile, error) {
	if err := checkEngine(f.engine); err != nil {
		return nil, err
	}
	file, err := e.readApps(path)
	if err != nil {
		return nil, err
	}
	if f.engine == engineSim {
		if err := e.simulate(file); err != nil {
			return nil, err
		}
	}
	return file, checkKinds(file.apps)
}

// awaitRunning follows the rollout to its end and prints the applications as they are then.
func (e *env) awaitRunning(ctx context.Context, f *deployFlags, client admin, result api.DeployResult) error {
	waiting, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	err := newMonitor(e, client, newScreen(e.io)).running(waiting, result.Apps)
	if errors.Is(err, errInterrupted) {
		talk(e.io.Err, "interrupted; the rollout goes on, watch it with `dpserve status -w`")
		return &silentError{code: exitInterrupted}
	}
	if err != nil {
		return err
	}
	apps, err := client.Apps(ctx)
	if err != nil {
		return err
	}
	apps = slices.DeleteFunc(apps, func(a msg.AppStatus) bool { _, mine := result.Apps[a.Name]; return !mine })
	return e.statusListing(apps).write(e.io, *f.output)
}

func (e *env) confirmPrune(f *deployFlags, p *plan) error {
	if len(p.Delete) == 0 {
		return nil
	}
	name := p.Delete[0]
	if len(p.Delete) > 1 {
		name = "prune"
	}
	return e.confirm(fmt.Sprintf("--prune deletes %s", strings.Join(p.Delete, ", ")), name, f.yes)
}

// plan is what a deploy does to the applications there are.
type plan struct {
	APIVersion string   `json:"apiVersion"`
	Create     []string `json:"create"`
	Replace    []string `json:"replace"` // if anything in them differs; else they stay as they are
	Delete     []string `json:"delete"`
}

func planOf(file *appFile, before []msg.AppStatus, prune bool) *plan {
	p := &plan{APIVersion: apiVersion, Create: []string{}, Replace: []string{}, Delete: []string{}}
	for _, name := range file.names() {
		if slices.ContainsFunc(before, func(a msg.AppStatus) bool { return a.Name == name }) {
			p.Replace = append(p.Replace, name)
		} else {
			p.Create = append(p.Create, name)
		}
	}
	for _, a := range before {
		if prune && !slices.Contains(file.names(), a.Name) {
			p.Delete = append(p.Delete, a.Name)
		}
	}
	return p
}

func (p *plan) rows() [][]cell {
	var rows [][]cell
	for _, group := range []struct {
		what  string
		names []string
	}{{"create", p.Create}, {"replace, if it differs", p.Replace}, {"delete", p.Delete}} {
		for _, n := range group.names {
			rows = append(rows, cells(n, group.what))
		}
	}
	return rows
}

// tellChanges says what the cluster did, one line per application.
func (e *env) tellChanges(result api.DeployResult) {
	for _, c := range result.Changes {
		fields := ""
		if len(c.Fields) > 0 {
			fields = ": " + strings.Join(c.Fields, ", ")
		}
		talk(e.io.Err, "%s %s%s", c.Action, c.App, fields)
		for _, r := range c.Gone {
			talk(e.io.Err, "%s: the file does not list rank %s, which goes", c.App, r)
		}
	}
}

func (p *plan) listing() *listing {
	return &listing{document: p, names: slices.Concat(p.Create, p.Replace, p.Delete), table: func(bool) []*table {
		return []*table{{head: []string{"APP", "CHANGE"}, rows: p.rows()}}
	}}
}

// appNamed finds an application, or says which ones there are.
func appNamed(apps []msg.AppStatus, name string) (msg.AppStatus, error) {
	var names []string
	for _, a := range apps {
		if a.Name == name {
			return a, nil
		}
		names = append(names, a.Name)
	}
	err := problem.New(problem.NotFound, "no application %q", name)
	if len(names) == 0 {
		return msg.AppStatus{}, err.WithHint("nothing is deployed; `dpserve deploy FILE` does it")
	}
	return msg.AppStatus{}, err.WithHint("applications are %s", strings.Join(names, ", "))
}
