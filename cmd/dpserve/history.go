package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

func newHistory(e *env) *cobra.Command {
	var output *format
	cmd := &cobra.Command{
		Use:   "history APP [flags]",
		Short: "the revisions of an application that the cluster keeps",
		Long: `history lists the last 10 revisions of an application, the newest first, and the last good
one if it is older. A revision is good once all of its units have been ready for rollout.min_ready_s. FROM is
the revision that a rollback repeated. "dpserve get APP --revision N" prints one, "dpserve plan APP --revision
N" shows what a rollback to it would change.`,
		Example: "  dpserve history demo",
		Args:    requireArgs(1, "APP"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			list, err := cluster.History(ctx, args[0])
			if err != nil {
				return err
			}
			return newHistoryListing(e, list).write(e.io, *output)
		}),
	}
	output = addOutput(cmd)
	return cmd
}

func newHistoryListing(e *env, list []client.Revision) *listing {
	names := make([]string, len(list))
	for i := range list {
		names[i] = strconv.FormatUint(list[i].Revision, 10)
	}
	return &listing{
		document: map[string]any{"revisions": list}, names: names,
		table: func(wide bool) []*table {
			v := newStatusView(e, wide)
			t := &table{head: []string{"REVISION", "DEPLOYED", "FROM", "STATE"}}
			for i := range list {
				r := &list[i]
				from := "-"
				if r.From != 0 {
					from = strconv.FormatUint(r.From, 10)
				}
				t.add(cells(names[i], v.since(r.At), from, describeRevision(r))...)
			}
			return []*table{t}
		},
	}
}

func describeRevision(r *client.Revision) string {
	var words []string
	if r.IsCurrent {
		words = append(words, "current")
	}
	if r.IsGood {
		words = append(words, "good")
	}
	if r.Halted != "" {
		words = append(words, "halted: "+joinLines(r.Halted))
	}
	return cmp.Or(strings.Join(words, ", "), "-")
}

func newGet(e *env) *cobra.Command {
	var revision uint64
	cmd := &cobra.Command{
		Use:   "get APP [flags]",
		Short: "print an application as it is deployed, as a file",
		Long: `get prints the app.yaml of an application, without what is at its default. "dpserve deploy" of
it changes nothing. It has the values of engine.env.`,
		Example: `  dpserve get demo
  dpserve get demo --revision 3`,
		Args: requireArgs(1, "APP"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			file, err := cluster.AppFile(ctx, args[0], revision)
			if err != nil {
				return hintResource(args[0], err)
			}
			_, err = fmt.Fprint(e.io.Out, file.Text)
			return err
		}),
	}
	cmd.Flags().Uint64Var(&revision, "revision", 0, "`REVISION` of the application; default: the current one")
	addRevisionCompletion(e, cmd, "revision")
	return cmd
}

func newRollback(e *env) *cobra.Command {
	f := &deployFlags{}
	var to uint64
	cmd := &cobra.Command{
		Use:   "rollback APP [flags]",
		Short: "deploy a former revision of an application again",
		Long: `rollback deploys what an application had at a former revision, and waits as deploy does. It
makes a new revision, so it can be rolled back too. Without --to it goes to the last good revision before the
current one that differs from it. It takes over from a roll-out that is under way. What does not fit on the
nodes any more is refused (exit code 5). An application of kind attach is refused (exit code 1), because its
former engines may be gone.`,
		Example: `  dpserve rollback demo
  dpserve plan demo --revision 3 && dpserve rollback demo --to 3`,
		Args: requireArgs(1, "APP"),
		RunE: e.asking(func(ctx context.Context, cluster admin, args []string) error {
			if err := f.check("rollback"); err != nil {
				return err
			}
			result, err := cluster.Rollback(ctx, args[0], to)
			if err != nil {
				return err
			}
			return f.finish(ctx, e, cluster, result)
		}),
	}
	cmd.Flags().Uint64Var(&to, "to", 0, "`REVISION` of the application, one of history")
	f.addWaitFlags(cmd)
	addRevisionCompletion(e, cmd, "to")
	return cmd
}

// addRevisionCompletion has a flag offer the revisions of the application that the command names.
func addRevisionCompletion(e *env, cmd *cobra.Command, flag string) {
	offer := func(cmd *cobra.Command, args []string, prefix string,
	) ([]cobra.Completion, cobra.ShellCompDirective) {
		list := func(ctx context.Context, cluster admin, _ []string) (out []cobra.Completion, err error) {
			revisions, err := cluster.History(ctx, args[0])
			for i := range revisions {
				out = append(out, cobra.CompletionWithDesc(strconv.FormatUint(revisions[i].Revision, 10),
					describeRevision(&revisions[i])))
			}
			return out, err
		}
		if len(args) == 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(e, list)(cmd, nil, prefix)
	}
	_ = cmd.RegisterFlagCompletionFunc(flag, offer) // only an unknown flag is an error
}

// haltNotes are the last lines of the engines whose ends halted roll-outs.
func haltNotes(apps []client.AppStatus) []string {
	var out []string
	for i := range apps {
		if h := apps[i].Halt; h != nil && len(h.LogTail) > 0 {
			out = append(out, fmt.Sprintf("the last lines of %s of revision %d:", h.Unit, h.Revision))
			for _, line := range cutTail(h.LogTail) {
				out = append(out, "  "+line)
			}
		}
	}
	return out
}
