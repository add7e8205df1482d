package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
)

// drainTimeout is how long drain watches unless --timeout says otherwise.
const drainTimeout = 35 * time.Minute

type drainFlags struct {
	deadline time.Duration
	timeout  time.Duration
	detach   bool
}

func newDrain(e *env) *cobra.Command {
	f := &drainFlags{}
	cmd := &cobra.Command{
		Use:   "drain NODE [flags]",
		Short: "move a node's ranks elsewhere",
		Long: `drain gives a node no new ranks and moves those it has, whole groups or one independent rank at a time, as soon as another node
has room. Running streams end by themselves, or at --deadline. It shows what is left until the node is empty; Ctrl-C leaves the
monitor (exit code 130) and the drain goes on. "dpserve undrain NODE" ends it.`,
		Example: `  dpserve drain gpu-3
  dpserve drain gpu-3 --deadline 30m`,
		Args: takes(1, "NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.withAdmin(func(client admin) error {
				return e.drain(cmd.Context(), client, f, args[0], cmd.Flags().Changed("deadline"))
			})
		},
	}
	cmd.Flags().DurationVar(&f.deadline, "deadline", 0, "when running streams are cut; default: each application's graceful_shutdown_timeout_s")
	cmd.Flags().DurationVar(&f.timeout, "timeout", drainTimeout, "how long to watch; then exit code 8")
	cmd.Flags().BoolVar(&f.detach, "detach", false, "do not watch")
	return cmd
}

func (e *env) drain(ctx context.Context, client admin, f *drainFlags, node string, bounded bool) error {
	if f.deadline < 0 || f.timeout <= 0 {
		return usageError("drain", "--deadline and --timeout must be positive")
	}
	var deadline *time.Duration
	if bounded {
		deadline = &f.deadline
	}
	if err := client.Drain(ctx, node, deadline); err != nil {
		return err
	}
	if f.detach {
		talk(e.io.Err, "%s is draining; watch it with `dpserve nodes`", node)
		return nil
	}
	return e.awaitDrained(ctx, client, node, f.timeout)
}

// awaitDrained shows what a node still has until it has nothing.
func (e *env) awaitDrained(ctx context.Context, client admin, node string, timeout time.Duration) error {
	err := e.linger(ctx, timeout, func(ctx context.Context) (string, bool, error) { return e.drained(ctx, client, node) },
		"the drain goes on, `dpserve undrain "+node+"` ends it",
		func(string) error {
			return problem.New(problem.Timeout, "%s is not drained in time; the drain goes on", node).WithHint("watch it with `dpserve nodes`")
		})
	if err == nil {
		talk(e.io.Err, "%s is drained", node)
	}
	return err
}

// drained says what a node still has in a line, and whether that is nothing.
func (e *env) drained(ctx context.Context, client admin, node string) (left string, over bool, err error) {
	list, err := client.Nodes(ctx)
	if err != nil {
		return "", false, err
	}
	n, err := nodeNamed(list, node)
	if err != nil {
		return "", false, err
	}
	switch n.State {
	case "drained", "lost":
		return "", true, nil
	case "draining":
	default:
		return "", false, problem.New(problem.Conflict, "%s is %s: somebody has ended the drain", node, n.State)
	}
	left = fmt.Sprintf("%s: %s, %s in flight", node, count(n.Ranks, "rank"), count(n.InFlight, "request"))
	if n.Reason != "" {
		left += "; " + oneLine(n.Reason)
	}
	return left, false, nil
}

func newUndrain(e *env) *cobra.Command {
	return &cobra.Command{
		Use:     "undrain NODE",
		Short:   "give a node ranks again",
		Long:    "undrain ends a drain. Ranks that have moved stay where they are.",
		Example: "  dpserve undrain gpu-3",
		Args:    takes(1, "NODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.withAdmin(func(client admin) error {
				if err := client.Undrain(cmd.Context(), args[0]); err != nil {
					return err
				}
				talk(e.io.Err, "%s takes ranks again", args[0])
				return nil
			})
		},
	}
}
