package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// deployTimeout is the default of --timeout: how long deploy waits for RUNNING.
const deployTimeout = 10 * time.Minute

type deployFlags struct {
	detach, dryRun, prune, yes, partial bool

	revision uint64
	pinned   *uint64 // revision, or nil if the flag is not given
	timeout  time.Duration
	engine   string
	output   *format
}

func newDeploy(e *env) *cobra.Command {
	f := &deployFlags{}
	cmd := &cobra.Command{
		Use:   "deploy FILE [flags]",
		Short: "bring the applications of a file to RUNNING",
		Long: `deploy checks FILE, shows what changes, applies it and waits until every rank serves.
Applications that FILE does not list stay as they are, unless --prune is given. When FILE changes ranks that
run, they are replaced one unit at a time, and each must be ready for rollout.min_ready_s before the next one
goes. A rank that ends before that, or does not start, halts the rollout: the cluster goes back to the last
good revision (rollout.on_failure), and deploy ends with log lines of that rank and exit code 1, or 5 if the
rank was never ready. A rollout that another deploy replaces, or whose application is deleted, ends it with
exit code 1. Ctrl-C leaves the monitor (exit code 130) and the rollout goes on.

It says what it does in the words of plan. -o json prints the status in the end, or with --detach what was
applied.`,
		Example: `  dpserve deploy examples/quickstart/app.yaml
  dpserve deploy app.yaml --dry-run            # as dpserve plan`,
		Args: requireArgs(1, "FILE"),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.dryRun, "dry-run", false, "show what would change, and change nothing")
	flags.BoolVar(&f.prune, "prune", false, "delete applications that FILE does not list")
	flags.BoolVar(&f.partial, "partial", false,
		"start the groups that find a place, and the others when there is one")
	flags.Uint64Var(&f.revision, "revision", 0,
		"`REVISION` of the cluster that plan showed; refused if an application of FILE has changed since")
	flags.BoolVar(&f.yes, "yes", false, "do not ask before --prune deletes something")
	flags.StringVar(&f.engine, "engine", "", "sim: run the file on the simulated engine")
	f.addWaitFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("revision") {
			f.pinned = &f.revision
		}
		return runDeploy(cmd.Context(), e, f, args[0])
	}
	return cmd
}

// addWaitFlags adds the flags of a command that waits for a roll-out.
func (f *deployFlags) addWaitFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.detach, "detach", false, "do not wait for RUNNING")
	cmd.Flags().DurationVar(&f.timeout, "timeout", deployTimeout,
		"how long to wait for RUNNING; then exit code 8")
	f.output = addOutput(cmd)
}

func (f *deployFlags) check(cmd string) error {
	if f.timeout <= 0 {
		return usageError(cmd, "--timeout %s: must be positive", f.timeout)
	}
	return nil
}

func runDeploy(ctx context.Context, e *env, f *deployFlags, path string) error {
	if err := f.check("deploy"); err != nil {
		return err
	}
	file, err := readFor(e, f.engine, func() (*appFile, error) { return readApps(e, path) })
	if err != nil {
		return err
	}
	req := file.request()
	req.Prune, req.Partial, req.Revision = f.prune, f.partial, f.pinned
	return e.withAdmin(func(cluster admin) error { return f.deploy(ctx, e, cluster, file, req) })
}

func (f *deployFlags) deploy(ctx context.Context, e *env, cluster admin, file *appFile,
	req client.DeployRequest,
) error {
	if f.dryRun {
		p, err := cluster.Plan(ctx, req)
		if err != nil {
			return err
		}
		return planListing(&p, file).write(e.io, *f.output)
	}
	if err := confirmPrune(ctx, e, f, cluster, file); err != nil {
		return err
	}
	result, err := cluster.Deploy(ctx, req)
	if err != nil {
		return err
	}
	return f.finish(ctx, e, cluster, result)
}

// finish shows what a deploy has changed and waits until it is rolled out.
func (f *deployFlags) finish(ctx context.Context, e *env, cluster admin, result client.DeployResult) error {
	printChanges(e, result)
	if !f.detach {
		return awaitRunning(ctx, e, f, cluster, result)
	}
	printMessage(e.io.Err, "applied; watch it with `dpserve status -w`")
	if f.output.isTable() {
		return nil // people have read on stderr what was applied
	}
	return writeDocument(e.io.Out, *f.output, versioned{result}, slices.Sorted(maps.Keys(result.Apps)))
}

// awaitRunning waits until the applications run and prints their status.
func awaitRunning(ctx context.Context, e *env, f *deployFlags, cluster admin,
	result client.DeployResult,
) error {
	waiting, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	m := newMonitor(e, cluster, e.screen())
	m.pinned = true
	err := m.awaitRunning(waiting, result.Apps)
	if errors.Is(err, errInterrupted) {
		return interrupted(e, "the rollout goes on, watch it with `dpserve status -w`")
	}
	if err != nil {
		return err
	}
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return err
	}
	apps = slices.DeleteFunc(apps,
		func(a client.AppStatus) bool { _, mine := result.Apps[a.Name]; return !mine })
	return newStatusListing(e, apps, "").write(e.io, *f.output)
}

// confirmPrune asks before --prune deletes applications that the file does not list.
func confirmPrune(ctx context.Context, e *env, f *deployFlags, cluster admin, file *appFile) error {
	if !f.prune {
		return nil
	}
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return err
	}
	var gone []string
	for i := range apps {
		if !slices.Contains(file.names(), apps[i].Name) {
			gone = append(gone, apps[i].Name)
		}
	}
	name := "prune"
	switch len(gone) {
	case 0:
		return nil
	case 1:
		name = gone[0]
	}
	return e.confirm("--prune deletes "+strings.Join(gone, ", "), name, f.yes)
}

// printChanges prints one line per application of the deploy, in the words of plan.
func printChanges(e *env, result client.DeployResult) {
	for i := range result.Changes {
		c := &result.Changes[i]
		line := c.App + ": " + describeImpact(&c.Impact)
		var fields []string
		for _, d := range c.Diffs {
			fields = append(fields, d.Path)
		}
		if why := cmp.Or(joinSome(c.Reasons), joinSome(fields)); why != "" {
			line += " (" + why + ")"
		}
		printMessage(e.io.Err, "%s", line)
		for _, r := range c.Gone {
			printMessage(e.io.Err, "%s: the file does not list rank %s, which goes", c.App, r)
		}
	}
}

// replacedError ends the wait for a revision that another deploy has replaced. Changes of attached ranks are
// revisions too, and keep what was deployed, so the wait goes on.
func replacedError(a *client.AppStatus, want uint64) error {
	if a.Revision <= want || a.Kind == string(app.KindAttach) {
		return nil
	}
	return problem.New(problem.Conflict,
		"%s: revision %d was replaced by revision %d while it was rolled out", a.Name, want, a.Revision).
		WithHint("it was deployed again meanwhile; `dpserve status %s` shows what runs now", a.Name)
}

// deleteTimeout covers the longest default drain and the time in which the engines stop.
const deleteTimeout = 35 * time.Minute

func newDelete(e *env) *cobra.Command {
	var yes, detach bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "delete APP [flags]",
		Short: "drain and remove an application",
		Long: `delete shows what goes away, asks for the application's name, drains its requests
(graceful_shutdown_timeout_s) and waits until every engine process is gone.`,
		Example: "  dpserve delete demo --yes",
		Args:    requireArgs(1, "APP"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			if timeout <= 0 {
				return usageError("delete", "--timeout %s: must be positive", timeout)
			}
			a, err := fetchApp(ctx, cluster, args[0])
			if err != nil {
				return err
			}
			what := fmt.Sprintf("delete ends %s of %s", formatCount(a.Desired, "rank"), args[0])
			if err := e.confirm(what, args[0], yes); err != nil {
				return err
			}
			if err := cluster.Delete(ctx, args[0]); err != nil || detach {
				return err
			}
			return awaitDeleted(ctx, e, cluster, args[0], timeout)
		}),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&detach, "detach", false, "do not wait until it is gone")
	cmd.Flags().DurationVar(&timeout, "timeout", deleteTimeout, "how long to wait; then exit code 8")
	return cmd
}

func awaitDeleted(ctx context.Context, e *env, cluster admin, name string, timeout time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := newMonitor(e, cluster, e.screen()).awaitGone(waiting, name)
	if errors.Is(err, errInterrupted) {
		return interrupted(e, "the deletion goes on")
	}
	if err == nil {
		printMessage(e.io.Err, "%s is gone", name)
	}
	return err
}
