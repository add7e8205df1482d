package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/pause"
)

type statusFlags struct {
	watch, exitCode, unhealthy bool

	output *format
}

// statusDocument is the JSON of status.
type statusDocument struct {
	Apps []client.AppStatus `json:"apps"`
	Next string             `json:"next,omitempty"` // what a person should do; "" = nothing
}

func newStatus(e *env) *cobra.Command {
	f := &statusFlags{}
	cmd := &cobra.Command{
		Use:   "status [APP] [flags]",
		Short: "applications, groups and ranks",
		Long: `status shows every application, or one, with its ranks; those that are not ready come first.
States of an application: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING. A rank is pending,
starting, ready, fenced, killing, backoff, draining or failed; it is unreachable while its node does not
answer. -w goes on until Ctrl-C, also when the cluster gets another leader: redrawn on a terminal, one line
per change elsewhere. A narrow terminal shows fewer columns.

Columns: EPOCH counts the starts of a rank's unit, AGE is the time in its present state, IN-FLIGHT the
requests it works on, TOK/S the tokens it generated per second over the last 10 s, TTFT-P50 and -P95 the time
to the first token over the last 512 requests, RESTARTS the starts after the first one, HIT% how much of the
prompts was in its cache. With -o wide, LAST-END is when and why a unit ended last without an order, and the
last line of its engine. All columns: docs/glossary.md#tables-of-the-command-line.

The last line, "next: ...", says what to do if something needs a person; without it nothing does.

Of an application with prefill and decode ranks, a line under the tables has the requests whose prompt a
prefill rank computed (remote), the decode rank (local), or the decode rank because no prefill rank could
(fall-back), the pairs of ranks that are connected, and the transfers of KV blocks that the engines have
counted: the mean time of one, and the bytes of all.`,
		Example: `  dpserve status demo -w
  dpserve status --unhealthy                   # only what does not run
  dpserve status --exit-code && echo "everything runs"`,
		Args: requireArgs(0, "APP"),
	}
	cmd.Flags().BoolVarP(&f.watch, "watch", "w", false, "go on watching")
	cmd.Flags().BoolVar(&f.unhealthy, "unhealthy", false,
		"only ranks that are not ready, and applications that are not RUNNING")
	cmd.Flags().BoolVar(&f.exitCode, "exit-code", false, "exit code 3 when something is not RUNNING")
	f.output = addOutput(cmd)
	cmd.RunE = e.asking(func(ctx context.Context, cluster admin, args []string) error {
		return runStatus(ctx, e, f, cluster, args)
	})
	return cmd
}

func runStatus(ctx context.Context, e *env, f *statusFlags, cluster admin, args []string) error {
	if f.watch {
		return watchStatus(ctx, e, f, cluster, args)
	}
	var apps []client.AppStatus
	var next string
	err := newPatience(e, maxLeaderWait).askUntilAnswered(ctx, func(ctx context.Context) (err error) {
		apps, next, err = fetchStatus(ctx, cluster, args)
		return err
	})
	if err != nil {
		return err
	}
	shown := f.choose(apps)
	if f.unhealthy && f.output.isTable() && len(apps) > 0 && len(shown) == 0 {
		printMessage(e.io.Err, "%s", allRun(apps))
	} else if err := newStatusListing(e, shown, next).write(e.io, *f.output); err != nil {
		return err
	}
	if len(apps) == 0 && *f.output == formatTable {
		printMessage(e.io.Err, "nothing is deployed; `dpserve deploy FILE` does it")
	}
	if f.exitCode && slices.ContainsFunc(apps,
		func(a client.AppStatus) bool { return a.Status != client.StatusRunning }) {
		return &silentError{code: exitDiffers}
	}
	return nil
}

// choose returns the applications and ranks that the flags ask for.
func (f *statusFlags) choose(apps []client.AppStatus) []client.AppStatus {
	if f.unhealthy {
		return onlyUnhealthy(apps)
	}
	return apps
}

// countReady returns how many ranks are ready and how many are wanted.
func countReady(apps []client.AppStatus) (ready, desired int) {
	for i := range apps {
		ready, desired = ready+apps[i].Ready, desired+apps[i].Desired
	}
	return ready, desired
}

// allRun is what --unhealthy says if it has nothing to show.
func allRun(apps []client.AppStatus) string {
	ready, desired := countReady(apps)
	return fmt.Sprintf("everything runs: %d of %s ready", ready, formatCount(desired, "rank"))
}

// fetchApps fetches the status of all applications, or of the one that args names.
func fetchApps(ctx context.Context, cluster admin, args []string) ([]client.AppStatus, error) {
	if len(args) == 0 {
		return cluster.Apps(ctx)
	}
	a, err := fetchApp(ctx, cluster, args[0])
	if err != nil {
		return nil, err
	}
	return []client.AppStatus{a}, nil
}

// fetchApp fetches the status of an application, or of one pool of one.
func fetchApp(ctx context.Context, cluster admin, name string) (client.AppStatus, error) {
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return client.AppStatus{}, err
	}
	return api.FindApp(apps, name)
}

// fetchStatus is fetchApps with what to do next about the applications and the nodes.
func fetchStatus(ctx context.Context, cluster admin, args []string) (apps []client.AppStatus, next string,
	err error,
) {
	if apps, err = fetchApps(ctx, cluster, args); err != nil {
		return nil, "", err
	}
	nodes, _ := cluster.Nodes(ctx) // the applications count; without the nodes there is less advice
	return apps, nextStep(apps, nodes), nil
}

func newStatusListing(e *env, apps []client.AppStatus, next string) *listing {
	if apps == nil {
		apps = []client.AppStatus{}
	}
	notes := statusNotes(apps)
	if next != "" {
		notes = append(notes, "next: "+next)
	}
	return &listing{
		document: statusDocument{Apps: apps, Next: next}, names: namesOf(apps),
		table: func(wide bool) []*table { return newStatusView(e, wide).tables(apps) },
		notes: notes, more: slices.Concat(indexNotes(apps), haltNotes(apps)),
	}
}

func namesOf(apps []client.AppStatus) []string {
	names := make([]string, len(apps))
	for i := range apps {
		names[i] = apps[i].Name
	}
	return names
}

// watchStatus shows the status until Ctrl-C, which is no failure. It redraws a terminal; elsewhere it prints
// a line per change, or with -o json a document per line. The last status stays on the terminal.
func watchStatus(ctx context.Context, e *env, f *statusFlags, cluster admin, args []string) error {
	w := &watcher{e: e, f: f, scr: e.screen(), printed: printedLines{}}
	patience := newPatience(e, maxAPISilence)
	for ctx.Err() == nil {
		var apps []client.AppStatus
		var next string
		ok, err := patience.watchOnce(ctx, func(ctx context.Context) (err error) {
			apps, next, err = fetchStatus(ctx, cluster, args)
			return err
		})
		if ok {
			err = w.show(apps, next)
		}
		if err != nil && ctx.Err() == nil {
			return err
		}
		_ = pause.For(ctx, watchRefresh)
	}
	return nil
}

// watcher holds the state that was printed last, by name.
type watcher struct {
	e   *env
	f   *statusFlags
	scr *screen

	printed   printedLines
	summaries string // the states of the document that was printed last
}

func (w *watcher) show(apps []client.AppStatus, next string) error {
	format := *w.f.output
	if format.isTable() {
		if w.e.io.OutTTY && w.scr.tty {
			w.scr.show(w.lines(apps, next, format == formatWide))
			return nil
		}
		return w.printLines(apps, next)
	}
	key := summarizeStates(apps)
	if w.summaries == key {
		return nil
	}
	w.summaries = key
	l := newStatusListing(w.e, w.f.choose(apps), next)
	if format == formatJSON {
		return writeJSONLine(w.e.io.Out, versioned{l.document})
	}
	return l.write(w.e.io, format)
}

// lines returns the live lines of a watch: the applications, then as many ranks as the terminal has rows for.
func (w *watcher) lines(apps []client.AppStatus, next string, wide bool) renderer {
	shown := w.f.choose(apps)
	return func(width, height int) []string {
		view := statusView{now: w.e.now(), relative: true, wide: wide, width: width}
		top := view.apps(shown)
		top.fit(width-1, 0)
		lines := append(top.renderLines(w.e.io.paintLive), "")
		if w.f.unhealthy && len(shown) == 0 {
			return []string{allRun(apps)}
		}
		notes := statusNotes(shown)
		if next != "" {
			notes = append(notes, wrap("next: "+next, width-1)...)
		}
		if wide {
			notes = slices.Concat(indexNotes(shown), notes)
		}
		if len(notes) > 0 {
			notes = append([]string{""}, notes...)
		}
		room := max(liveRows(height)-len(lines)-len(notes), minRankLines)
		rows := unhealthyFirst(rankRows(shown))
		return slices.Concat(lines, view.liveRanks(rows, room, w.e.io.paintLive), notes)
	}
}

// minRankLines is how many lines a table of ranks has at least, however many lines others take.
const minRankLines = 4

// printLines prints the applications and ranks whose state changed.
func (w *watcher) printLines(apps []client.AppStatus, next string) error {
	for i := range apps {
		if err := w.printLine(apps[i].Name,
			fmt.Sprintf("%s %d/%d", apps[i].Status, apps[i].Ready, apps[i].Desired), ""); err != nil {
			return err
		}
	}
	for _, r := range rankRows(apps) {
		if _, wasPrinted := w.printed[r.name()]; w.f.unhealthy && r.isReady() && !wasPrinted {
			continue // it is printed when it is back
		}
		phase := fmt.Sprintf("%s epoch %d", r.rank.Phase, r.rank.Epoch)
		if err := w.printLine(r.name(), phase, reasonOf(r)); err != nil {
			return err
		}
	}
	if next == "" {
		delete(w.printed, "next:") // the same advice is printed again if it is needed again
		return nil
	}
	return w.printLine("next:", "", next)
}

func (w *watcher) printLine(name, state, text string) error {
	now := w.e.now()
	if !w.printed.isNew(now, name, state, text) {
		return nil
	}
	_, err := fmt.Fprintln(w.e.io.Out, now.UTC().Format(time.RFC3339), name,
		strings.TrimSpace(state+" "+text))
	return err
}

// summarizeStates returns the states that a watch compares: counters do not count as a change.
func summarizeStates(apps []client.AppStatus) string {
	var b strings.Builder
	for i := range apps {
		fmt.Fprintf(&b, "%s %s %d %d\n", apps[i].Name, apps[i].Status, apps[i].Ready, apps[i].Revision)
	}
	for r := range allRanks(apps) {
		fmt.Fprintf(&b, "%s %s %d\n", r.name(), r.rank.Phase, r.rank.Epoch)
	}
	return b.String()
}
