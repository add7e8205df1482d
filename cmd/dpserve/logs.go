package main

import (
	"context"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/internal/problem"
)

// defaultTail is how many lines of each rank logs shows.
const defaultTail = 200

func newLogs(e *env) *cobra.Command {
	var follow bool
	var since time.Duration
	var tail int
	cmd := &cobra.Command{
		Use:   "logs APP[/GROUP[/RANK]] [flags]",
		Short: "what the engines write",
		Long:  "logs shows the last lines of the engines of an application, a group or one rank. -f goes on until Ctrl-C.",
		Example: `  dpserve logs demo/0/3 --tail 20
  dpserve logs demo -f --since 5m`,
		Args: takes(1, "APP[/GROUP[/RANK]]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := logTarget(args[0])
			if err != nil {
				return err
			}
			if tail < 0 || since < 0 {
				return usageError("logs", "--tail and --since must not be negative")
			}
			q.follow, q.since, q.tail = follow, since, tail
			return e.logs(cmd.Context(), q)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with new lines")
	cmd.Flags().DurationVar(&since, "since", 0, "only lines younger than this, for example 5m")
	cmd.Flags().IntVar(&tail, "tail", defaultTail, "last `lines` of each rank; 0 = all that is kept")
	return cmd
}

// logTarget reads APP, APP/GROUP or APP/GROUP/RANK.
func logTarget(s string) (logQuery, error) {
	q := logQuery{group: -1, rank: -1}
	parts := strings.Split(s, "/")
	bad := problem.New(problem.InvalidArgument, "%q: wanted APP, APP/GROUP or APP/GROUP/RANK", s).WithHint("for example demo/0/3")
	if len(parts) > 3 || parts[0] == "" {
		return q, bad
	}
	q.app = parts[0]
	for i, p := range parts[1:] {
		n, err := strconv.Atoi(p)
		if err != nil || n < 0 {
			return q, bad
		}
		if i == 0 {
			q.group = n
		} else {
			q.rank = n
		}
	}
	return q, nil
}

func (e *env) logs(ctx context.Context, q logQuery) error {
	client, err := e.admin()
	if err != nil {
		return err
	}
	stream, err := client.Logs(ctx, q)
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }() // only read
	_, err = io.Copy(e.io.Out, stream)
	if ctx.Err() != nil && q.follow {
		return nil // Ctrl-C is how following ends
	}
	return err
}
