package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

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
		RunE: func(cmd *cobra.Command, args []string) error {
			return runDelete(cmd.Context(), e, args[0], yes, detach, timeout)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&detach, "detach", false, "do not wait until it is gone")
	cmd.Flags().DurationVar(&timeout, "timeout", deleteTimeout, "how long to wait; then exit code 8")
	return cmd
}

func runDelete(ctx context.Context, e *env, name string, yes, detach bool, timeout time.Duration) error {
	cluster, err := e.admin()
	if err != nil {
		return err
	}
	defer cluster.Close()
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return err
	}
	a, err := findApp(apps, name)
	if err != nil {
		return err
	}
	if err := e.confirm(fmt.Sprintf("delete ends %s of %s", formatCount(a.Desired, "rank"), name), name,
		yes); err != nil {
		return err
	}
	if err := cluster.Delete(ctx, name); err != nil {
		return err
	}
	if detach {
		return nil
	}
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err = newMonitor(e, cluster, e.screen()).awaitGone(waiting, name)
	if errors.Is(err, errInterrupted) {
		printMessage(e.io.Err, "interrupted; the deletion goes on")
		return &silentError{code: exitInterrupted}
	}
	if err == nil {
		printMessage(e.io.Err, "%s is gone", name)
	}
	return err
}
