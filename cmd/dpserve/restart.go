package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/process"
)

const (
	restartTimeout = 2 * time.Minute
	restartPoll    = 100 * time.Millisecond
	restartAsk     = 5 * time.Second // one question to a process that may be ending
)

func newRestart(e *env) *cobra.Command {
	timeout, force := restartTimeout, false
	cmd := &cobra.Command{
		Use:   "restart [flags]",
		Short: "replace a node's process, without its engines",
		Long: `restart replaces the dpserve process of the node at --addr by the file that is now at the path
by which it was started: the same command line, the same process id. Engines that dpserve started go on, and
the next process adopts them: no model is loaded again. The node tells the cluster first; its ranks leave
routing, and their open requests get some seconds. Those that last longer are cut. SIGUSR2, and "systemctl
reload dpserve" with the unit file of examples/cluster, do the same. While no leader answers it is refused:
the next process could not start an engine.

Before it lets go of anything the node runs the file ("dpserve version --check"), for at most 5 s. It refuses
one that does not answer, is for another machine, or does not read its data folder or understand its shims,
and goes on as it is. Afterwards restart says which version answers; exit code 1: not that of the file.`,
		Example: `  dpserve restart
  dpserve restart --addr 10.0.0.2:8265`,
		Args: requireArgs(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return usageError("restart", "--timeout must be positive")
			}
			return e.withAdmin(func(cluster admin) error {
				return runRestart(cmd.Context(), e, cluster, timeout, force)
			})
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", timeout,
		"how long to wait for the next process; then exit code 8")
	cmd.Flags().BoolVar(&force, "force", false, "restart also while no leader of the cluster answers")
	return cmd
}

// runRestart asks for a restart, waits for the next process and says which version it is.
func runRestart(ctx context.Context, e *env, cluster admin, timeout time.Duration, force bool) error {
	began := e.now()
	old, err := cluster.Restart(ctx, force)
	if err != nil {
		return err
	}
	printMessage(e.io.Err, "%s is restarting", old.Node)
	next, err := awaitProcess(ctx, cluster, old, timeout)
	if err != nil {
		return err
	}
	took := e.now().Sub(began).Round(restartPoll)
	switch {
	case old.Next != "" && next.Version != old.Next:
		return problem.New(problem.Conflict, "%s runs dpserve %s, and the file was %s when it was checked",
			old.Node, next.Version, old.Next).WithHint("its log says why")
	case next.Version == old.Version:
		printMessage(e.io.Err, "warning: %s runs dpserve %s, the same version as before, after %s", old.Node,
			next.Version, took)
	default:
		printMessage(e.io.Err, "%s: %s -> %s, after %s", old.Node, old.Version, next.Version,
			took)
	}
	return nil
}

// awaitProcess waits until another process of the node answers.
func awaitProcess(ctx context.Context, cluster admin, old client.Process, timeout time.Duration) (
	client.Process, error,
) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, errStillRestarting)
	defer cancel()
	for {
		next, err := askProcess(ctx, cluster)
		if err == nil && next.Process != old.Process {
			return next, nil
		}
		if err := pause.For(ctx, restartPoll); errors.Is(err, errStillRestarting) {
			return next, problem.New(problem.Timeout, "%s has no new process after %s", old.Node, timeout).
				WithHint("look at its log; its engines wait for it, as long as its --orphan-timeout says")
		} else if err != nil {
			return next, err
		}
	}
}

func askProcess(ctx context.Context, cluster admin) (client.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, restartAsk)
	defer cancel()
	return cluster.Process(ctx)
}

// errStillRestarting ends the wait for the next process.
var errStillRestarting = errors.New("the node is still restarting")

// findProgram returns the path by which this process was started, from its first argument. The path stays the
// same when the file is renamed or replaced; that of os.Executable follows a file that is renamed. A process
// that a restart has executed has the path as its first argument.
func findProgram(arg string) string {
	running, err := os.Executable()
	if err != nil {
		running = arg
	}
	path, err := exec.LookPath(arg)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil || !isSameFile(path, process.Self()) {
		return running // the first argument is free text
	}
	return path
}

func isSameFile(a, b string) bool {
	first, err := os.Stat(a)
	if err != nil {
		return false
	}
	second, err := os.Stat(b)
	return err == nil && os.SameFile(first, second)
}

// executeAgain replaces this process by the file at the path of its program, or by itself if that file has
// gone since it was checked. It returns only with an error. Until the next process listens for SIGUSR2, the
// signal is ignored; otherwise it would end the process.
func executeAgain(program string) error {
	signal.Ignore(syscall.SIGUSR2)
	args := append([]string{program}, os.Args[1:]...)
	err := syscall.Exec(program, args, os.Environ())
	err = errors.Join(err, syscall.Exec(process.Self(), args, os.Environ()))
	return problem.New(problem.Internal, "cannot execute %s: %w", program, err).
		WithHint("start dpserve again; its engines wait for it, as long as --orphan-timeout says")
}
