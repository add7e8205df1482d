package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
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
		Long: `logs shows the last lines of the engines of an application, a group or one rank. -f goes on
until Ctrl-C, also when the cluster gets another leader.`,
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

// runLogs copies log lines. When a stream that follows is cut, it opens another one.
func runLogs(ctx context.Context, e *env, cluster admin, q client.LogQuery) error {
	lines := logCopier{e: e, newest: map[string]time.Time{}}
	patience := newPatience(e, maxAPISilence)
	for ctx.Err() == nil {
		var stream io.ReadCloser
		ok, err := patience.ask(ctx, func(ctx context.Context) (err error) {
			stream, err = cluster.Logs(ctx, q)
			return err
		})
		if ok {
			err = lines.copy(stream)
			_ = stream.Close() // only read
		}
		isCut := errors.Is(err, io.ErrUnexpectedEOF)
		switch {
		case ctx.Err() != nil && q.Follow: // Ctrl-C ends following
		case isCut && q.Follow:
			patience.say("the log stream was cut: the leader has changed, or dpserve is being restarted")
			q.Since, q.Tail = lines.resume(q.Since), client.AllLines
		case isCut:
			return problem.New(problem.Unavailable, "the log stream was cut").
				WithHint("dpserve has stopped there, or is being restarted")
		case ok || err != nil:
			return err
		}
		_ = pause.For(ctx, watchRefresh)
	}
	return nil
}

// logCopier copies lines unchanged; on a terminal it paints the head of each line. It leaves out the lines
// that the stream before a cut has had.
type logCopier struct {
	e      *env
	newest map[string]time.Time // by rank: the newest line
	known  map[string]time.Time // newest, when the stream before was cut
}

// resumeOverlap is how far the stream after a cut goes back: the clocks of the nodes differ.
const resumeOverlap = 10 * time.Second

// resume returns where the next stream begins.
func (c *logCopier) resume(since time.Time) time.Time {
	c.known = maps.Clone(c.newest)
	for _, at := range c.newest {
		if at = at.Add(-resumeOverlap); at.After(since) {
			since = at
		}
	}
	return since
}

func (c *logCopier) copy(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		text, err := lines.ReadString('\n')
		if err == nil || errors.Is(err, io.EOF) { // a line that was cut comes again
			if werr := c.write(text); werr != nil {
				return werr
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (c *logCopier) write(text string) error {
	l, err := client.ParseLogLine(strings.TrimSuffix(text, "\n"))
	if err == nil {
		rank := fmt.Sprintf("%s/%d/%d", l.App, l.Group, l.Rank)
		if !l.Time.After(c.known[rank]) {
			return nil
		}
		c.newest[rank] = l.Time
		if c.e.io.OutTTY && c.e.io.Color {
			text = c.e.io.paint(faint, l.Time.Local().Format(time.TimeOnly)+" "+rank) + " " + l.Text + "\n"
		}
	}
	_, err = io.WriteString(c.e.io.Out, text)
	return err
}
