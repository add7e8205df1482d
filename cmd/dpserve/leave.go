package main

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
)

func newLeave(e *env) *cobra.Command {
	f := &drainFlags{}
	var yes bool
	cmd := &cobra.Command{
		Use:   "leave [flags]",
		Short: "take the node at DPSERVE_ADDR out of its cluster",
		Long: `leave drains the node that DPSERVE_ADDR names, waits until it is empty and removes it from the cluster. Its process then ends
with exit code 0, and its data folder is of no more use: to come back, join with an empty one. A node without which the voters
that remain would have no living majority is refused before anything changes: remove or bring back the lost ones first.`,
		Example: `  DPSERVE_ADDR=127.0.0.3:8265 dpserve leave`,
		Args:    takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return e.withAdmin(func(client admin) error {
				return e.leave(cmd.Context(), client, f, yes, cmd.Flags().Changed("deadline"))
			})
		},
	}
	cmd.Flags().DurationVar(&f.deadline, "deadline", 0, "when running streams are cut; default: each application's graceful_shutdown_timeout_s")
	cmd.Flags().DurationVar(&f.timeout, "timeout", drainTimeout, "how long to wait for the drain; then exit code 8")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

func (e *env) leave(ctx context.Context, client admin, f *drainFlags, yes, bounded bool) error {
	v, err := client.Version(ctx)
	if err != nil {
		return err
	}
	if v.Node == "" {
		return problem.New(problem.Upstream, "the node at DPSERVE_ADDR does not tell its name").WithHint("it runs another version: use its own dpserve command")
	}
	list, err := client.Nodes(ctx)
	if err != nil {
		return err
	}
	if _, err := nodeNamed(list, v.Node); err != nil {
		return err
	}
	if len(list) == 1 {
		return problem.New(problem.Conflict, "%s is the only node of its cluster", v.Node).WithHint("stop it with Ctrl-C or SIGTERM")
	}
	if err := e.confirm(v.Node+" leaves its cluster", v.Node, yes); err != nil {
		return err
	}
	check := func(ctx context.Context) error { return client.CheckLeave(ctx, v.Node) }
	if err := askForRemoval(ctx, check); err != nil {
		return err
	}
	if err := e.drain(ctx, client, f, v.Node, bounded); err != nil {
		return err
	}
	if err := removeNode(ctx, client, v.Node); err != nil {
		return err
	}
	talk(e.io.Err, "%s has left", v.Node)
	return nil
}

// removeNode removes a node.
func removeNode(ctx context.Context, client admin, node string) error {
	return askForRemoval(ctx, func(ctx context.Context) error { return client.RemoveNode(ctx, node) })
}

// askForRemoval asks again while the node's vote or its leadership goes to another one, or while it is not known whether the voters
// that remain are alive.
func askForRemoval(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		err := ask(ctx)
		if problem.CodeOf(err) != problem.Unavailable || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(removeRetry):
		case <-ctx.Done():
			return err
		}
	}
}

// How long askForRemoval asks, and the pause in between.
const (
	removeTimeout = 30 * time.Second
	removeRetry   = 500 * time.Millisecond
)
