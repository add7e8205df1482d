package main

import (
	"cmp"
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
)

// rotateTimeout is how long rotate-key watches unless --timeout says otherwise.
const rotateTimeout = 2 * time.Minute

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
	err := e.linger(ctx, timeout, func(ctx context.Context) (string, bool, error) { return rotated(ctx, client) },
		"the change of the key goes on",
		func(left string) error {
			return problem.New(problem.Timeout, "the gossip has no new key yet, %s; the change goes on", cmp.Or(left, "nobody leads")).
				WithHint("`dpserve nodes` shows what is wrong with them")
		})
	if err == nil {
		talk(e.io.Err, "the gossip has a new key")
	}
	return err
}

// rotated says for whom a change of the key waits, "" while another node begins to lead, and whether it is complete.
func rotated(ctx context.Context, client admin) (left string, over bool, err error) {
	r, err := client.KeyRotation(ctx)
	switch {
	case problem.CodeOf(err) == problem.Unavailable:
		return "", false, nil
	case err != nil || r.Done || len(r.Waiting) == 0: // nobody: the leader takes the next step
		return "", r.Done, err
	}
	return "waiting for " + strings.Join(r.Waiting, ", "), false, nil
}
