package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// defaultTail is the default number of lines per rank.
const defaultTail = 200

func newLogs(e *env) *cobra.Command {
	var follow bool
	var since time.Duration
	var tail int
	cmd := &cobra.Command{
		Use:   "logs APP[/GROUP[/RANK]] [flags]",
		Short: "what the engines write",
		Long: "logs shows the last lines of the engines of an application, a group or one rank. -f goes on " +
			"until Ctrl-C.",
		Example: `  dpserve logs demo/0/3 --tail 20
  dpserve logs demo -f --since 5m`,
		Args: requireArgs(1, "APP[/GROUP[/RANK]]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := logTarget(args[0])
			if err != nil {
				return err
			}
			if tail < 0 || since < 0 {
				return usageError("logs", "--tail and --since must not be negative")
			}
			q.Follow, q.Tail = follow, tail
			if tail == 0 {
				q.Tail = client.AllLines
			}
			if since > 0 {
				q.Since = e.now().Add(-since)
			}
			return e.withAdmin(func(cluster admin) error { return runLogs(cmd.Context(), e, cluster, q) })
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with new lines")
	cmd.Flags().DurationVar(&since, "since", 0, "only lines younger than this, for example 5m")
	cmd.Flags().IntVar(&tail, "tail", defaultTail, "last `lines` of each rank; 0 = all that is kept")
	return cmd
}

// logTarget reads APP, APP/GROUP or APP/GROUP/RANK.
func logTarget(s string) (client.LogQuery, error) {
	q := client.LogQuery{Group: client.AllRanks, Rank: client.AllRanks}
	parts := strings.Split(s, "/")
	bad := problem.New(problem.InvalidArgument, "%q: wanted APP, APP/GROUP or APP/GROUP/RANK", s).
		WithHint("for example demo/0/3")
	if len(parts) > 3 || parts[0] == "" {
		return q, bad
	}
	q.App = parts[0]
	for i, p := range parts[1:] {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return q, bad
		}
		if i == 0 {
			q.Group = int(n)
		} else {
			q.Rank = int(n)
		}
	}
	return q, nil
}

func runLogs(ctx context.Context, e *env, cluster admin, q client.LogQuery) error {
	stream, err := cluster.Logs(ctx, q)
	if err != nil {
		return err
	}
	defer func() { _ = stream.Close() }() // only read
	err = copyLogs(e, stream)
	if ctx.Err() != nil && q.Follow {
		return nil // Ctrl-C ends following
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return problem.New(problem.Unavailable, "the log stream was cut").
			WithHint("dpserve has stopped there, or is being restarted")
	}
	return err
}

// copyLogs copies lines unchanged; on a terminal it paints the head of each line.
func copyLogs(e *env, r io.Reader) error {
	if !e.io.OutTTY || !e.io.Color {
		_, err := io.Copy(e.io.Out, r)
		return err
	}
	lines := bufio.NewReader(r)
	for {
		text, err := lines.ReadString('\n')
		if l, perr := client.ParseLogLine(strings.TrimSuffix(text, "\n")); perr == nil {
			head := fmt.Sprintf("%s %s/%d/%d", l.Time.Local().Format(time.TimeOnly), l.App, l.Group, l.Rank)
			text = e.io.paint(faint, head) + " " + l.Text + "\n"
		}
		if _, werr := io.WriteString(e.io.Out, text); werr != nil {
			return werr
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
