package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
)

type statusFlags struct {
	watch, exitCode, unhealthy bool

	output *format
}

// statusDocument is the JSON of status.
type statusDocument struct {
	APIVersion string             `json:"apiVersion"`
	Apps       []client.AppStatus `json:"apps"`
}

func newStatus(e *env) *cobra.Command {
	f := &statusFlags{}
	cmd := &cobra.Command{
		Use:   "status [APP] [flags]",
		Short: "applications, groups and ranks",
		Long: `status shows every application, or one, with its ranks; those that are not ready come first.
States of an application: DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING. A rank is pending,
starting, ready, fenced, killing, backoff, draining or failed; it is unreachable while its node does not
answer. -w goes on until Ctrl-C: redrawn on a terminal, one line per change elsewhere. A narrow terminal
shows fewer columns.

Columns: EPOCH counts the starts of a rank's unit, AGE is the time in its present state, IN-FLIGHT the
requests it works on, TOK/S the tokens it generated per second over the last 10 s, TTFT-P50 and -P95 the time
to the first token over the last 512 requests, RESTARTS the starts after the first one, HIT% how much of the
prompts was in its cache. All columns: docs/glossary.md#tables-of-the-command-line.

Of an application with prefill and decode ranks, a line under the tables has the requests whose prompt a
prefill rank computed (remote), the decode rank (local), or the decode rank because no prefill rank could
(fall-back), the pairs of ranks that have met, and the transfers of KV blocks that the engines have
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
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return runStatus(cmd.Context(), e, f, args) }
	return cmd
}

func runStatus(ctx context.Context, e *env, f *statusFlags, args []string) error {
	cluster, err := e.admin()
	if err != nil {
		return err
	}
	defer cluster.Close()
	if f.watch {
		return watchStatus(ctx, e, f, cluster, args)
	}
	apps, err := fetchStatus(ctx, cluster, args)
	if err != nil {
		return err
	}
	shown := f.choose(apps)
	isListing := *f.output == formatTable || *f.output == formatWide
	if f.unhealthy && isListing && len(apps) > 0 && len(shown) == 0 {
		printMessage(e.io.Err, "everything runs: %s", countReady(apps))
	} else if err := newStatusListing(e, shown).write(e.io, *f.output); err != nil {
		return err
	}
	if len(apps) == 0 && *f.output == formatTable {
		printMessage(e.io.Err, "nothing is deployed; `dpserve deploy FILE` does it")
	}
	if f.exitCode && !areAllRunning(apps) {
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

// countReady returns how many ranks are ready.
func countReady(apps []client.AppStatus) string {
	ready, desired := 0, 0
	for i := range apps {
		ready, desired = ready+apps[i].Ready, desired+apps[i].Desired
	}
	return fmt.Sprintf("%d of %s ready", ready, formatCount(desired, "rank"))
}

// fetchStatus fetches the status of all applications, or of the one that args names.
func fetchStatus(ctx context.Context, cluster admin, args []string) ([]client.AppStatus, error) {
	apps, err := cluster.Apps(ctx)
	if err != nil || len(args) == 0 {
		return apps, err
	}
	a, err := findApp(apps, args[0])
	if err != nil {
		return nil, err
	}
	return []client.AppStatus{a}, nil
}

func areAllRunning(apps []client.AppStatus) bool {
	for i := range apps {
		if apps[i].Status != client.StatusRunning {
			return false
		}
	}
	return true
}

func newStatusListing(e *env, apps []client.AppStatus) *listing {
	names := make([]string, len(apps))
	for i := range apps {
		names[i] = apps[i].Name
	}
	if apps == nil {
		apps = []client.AppStatus{}
	}
	return &listing{
		document: statusDocument{APIVersion: apiVersion, Apps: apps}, names: names,
		table: func(wide bool) []*table { return newStatusView(e, wide).tables(apps) },
		notes: statusNotes(apps), more: indexNotes(apps),
	}
}

// watchStatus shows the status until Ctrl-C, which is no failure. It redraws a terminal; elsewhere it prints
// a line per change, or with -o json a document per line. The last status stays on the terminal.
func watchStatus(ctx context.Context, e *env, f *statusFlags, cluster admin, args []string) error {
	w := &watcher{e: e, f: f, scr: e.screen(), seen: map[string]string{}}
	tick := time.NewTicker(watchRefresh)
	defer tick.Stop()
	for {
		apps, err := fetchStatus(ctx, cluster, args)
		if ctx.Err() != nil {
			return nil // Ctrl-C ends a watch
		}
		if err != nil {
			return err
		}
		if err := w.show(apps); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// watcher holds the state that was printed last, by name.
type watcher struct {
	e    *env
	f    *statusFlags
	scr  *screen
	seen map[string]string
}

func (w *watcher) show(apps []client.AppStatus) error {
	format := *w.f.output
	if format == formatTable || format == formatWide {
		if w.e.io.OutTTY && w.scr.tty {
			w.scr.show(w.lines(apps, format == formatWide))
			return nil
		}
		return w.printLines(apps)
	}
	key := summarizeStates(apps)
	if w.seen[""] == key {
		return nil
	}
	w.seen[""] = key
	if format == formatJSON {
		return writeJSONLine(w.e.io.Out, newStatusListing(w.e, w.f.choose(apps)).document)
	}
	return newStatusListing(w.e, w.f.choose(apps)).write(w.e.io, format)
}

// lines returns the live lines of a watch: the applications, then as many ranks as the terminal has rows for.
func (w *watcher) lines(apps []client.AppStatus, wide bool) renderer {
	shown := w.f.choose(apps)
	return func(width, height int) []string {
		view := statusView{now: w.e.now(), relative: true, wide: wide, width: width}
		top := view.apps(shown)
		top.fit(width-1, 0)
		lines := append(top.renderLines(w.e.io.paintLive), "")
		if w.f.unhealthy && len(shown) == 0 {
			return []string{"everything runs: " + countReady(apps)}
		}
		notes := statusNotes(shown)
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
func (w *watcher) printLines(apps []client.AppStatus) error {
	now := w.e.now().UTC().Format(time.RFC3339)
	for i := range apps {
		if err := w.printLine(now, apps[i].Name,
			fmt.Sprintf("%s %d/%d", apps[i].Status, apps[i].Ready, apps[i].Desired)); err != nil {
			return err
		}
	}
	rows := rankRows(apps)
	reasons := reasonsOf(rows)
	for i, r := range rows {
		if w.f.unhealthy && r.isReady() && w.seen[r.name()] == "" {
			continue // it is printed when it is back
		}
		text := strings.TrimSpace(fmt.Sprintf("%s epoch %d %s", r.rank.Phase, r.rank.Epoch, reasons[i]))
		if err := w.printLine(now, r.name(), text); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) printLine(now, name, text string) error {
	if w.seen[name] == text {
		return nil
	}
	w.seen[name] = text
	_, err := fmt.Fprintln(w.e.io.Out, now, name, text)
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
