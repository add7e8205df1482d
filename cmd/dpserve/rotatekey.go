package main

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
)

const (
	rotateTimeout = 2 * time.Minute
	rotateLook    = 250 * time.Millisecond
)

func newRotateKey(e *env) *cobra.Command {
	timeout := rotateTimeout
	cmd := &cobra.Command{
		Use:   "rotate-key [flags]",
		Short: "give the gossip of the cluster a new key",
		Long: `rotate-key replaces the key that the nodes' gossip is encrypted with, as after a machine was removed whose disk somebody else may
read. Every node lets the new key in, then sends with it, then lets the old one out: no member is lost on the way, no request notices.
A node that is lost gets the key when it is back. Ctrl-C leaves the monitor (exit code 130) and the change goes on.`,
		Example: "  dpserve nodes rotate-key",
		Args:    takes(0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return e.withAdmin(func(client admin) error { return e.rotateKey(cmd.Context(), client, timeout) })
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", rotateTimeout, "how long to watch; then exit code 8")
	return cmd
}

func (e *env) rotateKey(ctx context.Context, client admin, timeout time.Duration) error {
	if timeout <= 0 {
		return usageError("nodes rotate-key", "--timeout must be positive")
	}
	if err := client.RotateKey(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	tick := time.NewTicker(rotateLook)
	defer tick.Stop()
	waiting := ""
	for {
		r, err := client.KeyRotation(ctx)
		switch {
		case err != nil && ctx.Err() == nil && problem.CodeOf(err) != problem.Unavailable: // while another node begins to lead
			return err
		case err == nil && r.Done:
			talk(e.io.Err, "the gossip has a new key")
			return nil
		case err == nil:
			waiting = strings.Join(r.Waiting, ", ")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return e.leftRotation(ctx, waiting)
		}
	}
}

func (e *env) leftRotation(ctx context.Context, waiting string) error {
	if errors.Is(context.Cause(ctx), errInterrupted) {
		talk(e.io.Err, "interrupted; the change of the key goes on")
		return &silentError{code: exitInterrupted}
	}
	return problem.New(problem.Timeout, "the gossip has no new key yet, it waits for %s; the change goes on", cmp.Or(waiting, "the leader")).
		WithHint("`dpserve nodes` shows what is wrong with them")
}
