package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
)

type eventsFlags struct {
	follow bool
	since  time.Duration

	output *format
}

func newEvents(e *env) *cobra.Command {
	f := &eventsFlags{}
	cmd := &cobra.Command{
		Use:   "events [APP] [flags]",
		Short: "what happened, why, and what dpserve did",
		Long: `events shows the last changes of applications, units and nodes: when, of what, what caused
them, and what dpserve did. -f goes on until Ctrl-C, one line per change, also when the cluster gets another
leader. The leader keeps 1,000 changes. A new leader begins with the last change of each unit; those before it
are gone with the leader that had them.`,
		Example: `  dpserve events demo --since 1h
  dpserve events -f -o json`,
		Args: requireArgs(0, "APP"),
	}
	cmd.Flags().BoolVarP(&f.follow, "follow", "f", false, "go on with new changes")
	cmd.Flags().DurationVar(&f.since, "since", 0, "only changes younger than this, for example 1h")
	f.output = addOutput(cmd)
	cmd.RunE = e.asking(func(ctx context.Context, cluster admin, args []string) error {
		if f.since < 0 {
			return usageError("events", "--since must not be negative")
		}
		app := strings.Join(args, "")
		if f.follow {
			return followEvents(ctx, e, f, cluster, app)
		}
		return listEvents(ctx, e, f, cluster, app)
	})
	return cmd
}

func listEvents(ctx context.Context, e *env, f *eventsFlags, cluster admin, app string) error {
	var list []client.Event
	err := newPatience(e, maxLeaderWait).askUntilAnswered(ctx, func(ctx context.Context) (err error) {
		list, err = cluster.PastEvents(ctx, app)
		return err
	})
	if err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(ev client.Event) bool { return f.isTooOld(e, &ev) })
	slices.SortStableFunc(list, func(a, b client.Event) int { return a.Time.Compare(b.Time) })
	t := &table{head: []string{"TIME", "SUBJECT", "EPOCH", "CHANGE", "ACTION", "CAUSE"}}
	names := make([]string, len(list))
	for i := range list {
		ev := &list[i]
		names[i] = ev.Subject()
		t.add(cells(formatEventTime(ev), ev.Subject(), formatEpoch(ev), formatEventChange(ev), ev.Action,
			joinLines(ev.Reason))...)
	}
	if len(list) == 0 && f.output.isTable() {
		printMessage(e.io.Err, "no change is kept")
		return nil
	}
	l := listing{
		document: map[string]any{"events": list}, names: names,
		table: func(bool) []*table { return []*table{t} },
	}
	return l.write(e.io, *f.output)
}

func (f *eventsFlags) isTooOld(e *env, ev *client.Event) bool {
	return f.since > 0 && ev.Time.Before(e.now().Add(-f.since))
}

// followEvents prints changes until Ctrl-C. When the stream ends, because another node leads or dpserve is
// being restarted, it begins another one and leaves out what it has printed.
func followEvents(ctx context.Context, e *env, f *eventsFlags, cluster admin, app string) error {
	patience := newPatience(e, maxAPISilence)
	var printed []client.Event
	for ctx.Err() == nil {
		before := printed
		_, err := patience.ask(ctx, func(ctx context.Context) error {
			for ev, err := range cluster.Events(ctx, app, 0) {
				if err != nil {
					return err
				}
				patience.hear()
				if f.isTooOld(e, &ev) || slices.ContainsFunc(before, func(was client.Event) bool {
					return isSameEvent(&was, &ev)
				}) {
					continue
				}
				if err := f.printEvent(e, &ev); err != nil {
					return err
				}
				printed = append(printed, ev)
				printed = printed[max(0, len(printed)-maxRemembered):]
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			return err
		}
		_ = pause.For(ctx, watchRefresh)
	}
	return nil
}

// maxRemembered is how many changes `events -f` remembers: as many as a leader keeps.
const maxRemembered = 1000

// isSameEvent reports whether a change that a stream begins with was the change that another one had. A new
// leader knows of a unit's last change what the state says.
func isSameEvent(was, now *client.Event) bool {
	if was.Subject() != now.Subject() || was.Epoch != now.Epoch || was.Phase != now.Phase {
		return false
	}
	return now.Former || was.Time.Equal(now.Time)
}

func (f *eventsFlags) printEvent(e *env, ev *client.Event) error {
	switch {
	case *f.output == formatName:
		_, err := fmt.Fprintln(e.io.Out, ev.Subject())
		return err
	case !f.output.isTable():
		return writeJSONLine(e.io.Out, versioned{ev})
	}
	text := fmt.Sprintf("%s %s %s", formatEventTime(ev), ev.Subject(), formatEventChange(ev))
	if ev.Epoch > 0 {
		text += " epoch " + formatEpoch(ev)
	}
	if ev.Reason != "" {
		text += ": " + joinLines(ev.Reason)
	}
	if ev.Action != "" {
		text += "; dpserve " + ev.Action
	}
	_, err := fmt.Fprintln(e.io.Out, text)
	return err
}

func formatEventTime(ev *client.Event) string { return ev.Time.UTC().Format(time.RFC3339) }

func formatEpoch(ev *client.Event) string {
	if ev.Epoch == 0 {
		return ""
	}
	return fmt.Sprint(ev.Epoch)
}

func formatEventChange(ev *client.Event) string {
	if ev.From == "" {
		return ev.Phase
	}
	return ev.From + " -> " + ev.Phase
}
