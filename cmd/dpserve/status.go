package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

type statusFlags struct {
	watch, exitCode bool
	output          *format
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
		Long: `status shows every application, or one, with its ranks. States of an application: DEPLOYING,
RUNNING, UNHEALTHY, DEPLOY_FAILED, DELETING. A rank is pending, starting, ready, fenced, killing, backoff,
draining or failed; it is unreachable while its node does not answer. -w goes on until Ctrl-C: redrawn on a
terminal, one line per change elsewhere.`,
		Example: `  dpserve status demo -w
  dpserve status --exit-code && echo "everything runs"`,
		Args: requireArgs(0, "APP"),
	}
	cmd.Flags().BoolVarP(&f.watch, "watch", "w", false, "go on watching")
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
	if err := newStatusListing(e, apps).write(e.io, *f.output); err != nil {
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
	view := statusView{now: e.now(), relative: e.io.OutTTY}
	return &listing{
		document: statusDocument{APIVersion: apiVersion, Apps: apps}, names: names,
		table: func(wide bool) []*table { return view.tables(apps, wide) }, notes: statusNotes(apps),
	}
}

// watchStatus shows the status until Ctrl-C, which is no failure. It redraws a terminal; elsewhere it prints
// a line per change, or with -o json a document per line.
func watchStatus(ctx context.Context, e *env, f *statusFlags, cluster admin, args []string) error {
	w := &watcher{e: e, f: f, scr: newScreen(e.io), seen: map[string]string{}}
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
			return w.redraw(apps, format == formatWide)
		}
		return w.printLines(apps)
	}
	key := summarizeStates(apps)
	if w.seen[""] == key {
		return nil
	}
	w.seen[""] = key
	if format == formatJSON {
		return writeJSONLine(w.e.io.Out, newStatusListing(w.e, apps).document)
	}
	return newStatusListing(w.e, apps).write(w.e.io, format)
}

func (w *watcher) redraw(apps []client.AppStatus, wide bool) error {
	view := statusView{now: w.e.now(), relative: true}
	var lines []string
	for i, t := range view.tables(apps, wide) {
		if i > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, t.renderLines(nil)...)
	}
	if more := statusNotes(apps); len(more) > 0 {
		lines = append(append(lines, ""), more...)
	}
	w.scr.show(lines...)
	return nil
}

// printLines prints the applications and ranks whose state changed.
func (w *watcher) printLines(apps []client.AppStatus) error {
	now := w.e.now().UTC().Format(time.RFC3339)
	for i := range apps {
		if err := w.printLine(now, apps[i].Name,
			fmt.Sprintf("%s %d/%d", apps[i].Status, apps[i].Ready, apps[i].Desired)); err != nil {
			return err
		}
	}
	for r := range allRanks(apps) {
		if err := w.printLine(now, r.name(),
			strings.TrimSpace(
				fmt.Sprintf("%s epoch %d %s", r.rank.Phase, r.rank.Epoch, r.reason()))); err != nil {
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

// statusView renders applications. With relative, times are ages for a person; without, they are time stamps
// for a program.
type statusView struct {
	now      time.Time
	relative bool
}

func (v statusView) tables(apps []client.AppStatus, wide bool) []*table {
	return []*table{v.apps(apps, wide), v.ranks(apps, wide)}
}

func (v statusView) apps(apps []client.AppStatus, wide bool) *table {
	t := &table{head: []string{"APP", "STATUS", "RANKS", "GROUPS", "MODEL", "KIND", "POLICY", "QUEUED"}}
	if wide {
		t.head = append(t.head, "REVISION", "COUPLING")
	}
	t.head = append(t.head, "MESSAGE")
	for i := range apps {
		a := &apps[i]
		row := cells(a.Name, a.Status, fmt.Sprintf("%d/%d", a.Ready, a.Desired), strconv.Itoa(a.Groups),
			a.Model, a.Kind, a.Policy, strconv.Itoa(a.Queued))
		row[1].color = statusColor(a.Status)
		if wide {
			row = append(row, cells(strconv.FormatUint(a.Revision, 10), a.Coupling)...)
		}
		t.add(append(row, cell{text: joinLines(a.Message)})...)
	}
	return t
}

func (v statusView) ranks(apps []client.AppStatus, wide bool) *table {
	t := &table{
		head: []string{
			"RANK", "STATE", "EPOCH", "AGE", "NODE", "IN-FLIGHT", "TOK/S", "TTFT-P50", "TTFT-P95",
			"RESTARTS", "HIT%",
		},
	}
	if !v.relative {
		t.head[3] = "SINCE"
	}
	if wide {
		t.head = append(t.head, "REQUESTS", "PID", "INCARNATION", "URL")
	}
	t.head = append(t.head, "REASON")
	for r := range allRanks(apps) {
		row := cells(r.name(), r.rank.Phase, strconv.FormatUint(r.rank.Epoch, 10), v.since(r.unit.Since),
			r.rank.Node, strconv.Itoa(r.rank.InFlight), fmt.Sprintf("%.0f", r.rank.TokensPerS),
			formatMillis(r.rank.TTFTp50Ms), formatMillis(r.rank.TTFTp95Ms), strconv.Itoa(r.unit.Restarts),
			formatHitRate(r.rank))
		row[1].color = phaseColor(r.rank.Phase)
		if wide {
			row = append(row,
				cells(strconv.FormatUint(r.rank.Requests, 10), formatNumber(r.rank.PID), r.rank.Incarnation,
					r.rank.URL)...)
		}
		t.add(append(row, cell{text: r.reason()})...)
	}
	return t
}

func (v statusView) since(t time.Time) string {
	switch {
	case t.IsZero():
		return "-"
	case v.relative:
		return formatAge(v.now.Sub(t))
	}
	return t.UTC().Format(time.RFC3339)
}

// formatAge returns a duration in its largest unit.
func formatAge(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(int(d.Seconds()), 0))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// formatMillis returns a latency; 0 means that nothing was measured.
func formatMillis(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fms", ms)
}

func formatNumber(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// joinLines joins the lines of a message, so that it fits one cell of a table.
func joinLines(s string) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; ")), " ")
}

func statusColor(status string) color {
	switch status {
	case client.StatusRunning:
		return good
	case client.StatusDeploying, client.StatusDeleting:
		return busy
	case client.StatusUnhealthy, client.StatusDeployFailed:
		return bad
	}
	return plain
}

func phaseColor(phase string) color {
	if phase == client.Unreachable {
		return bad
	}
	switch state.Phase(phase) {
	case state.Ready:
		return good
	case state.Pending, state.Starting, state.Draining, state.Backoff:
		return busy
	case state.Fenced, state.Killing, state.Failed:
		return bad
	case state.Gone:
		return faint
	}
	return plain
}

// rankRow is one rank with its unit and its application.
type rankRow struct {
	app  *client.AppStatus
	unit *client.UnitStatus
	rank *client.RankStatus
}

// allRanks yields all ranks in the order of the listing.
func allRanks(apps []client.AppStatus) func(func(rankRow) bool) {
	return func(yield func(rankRow) bool) {
		for a := range apps {
			for u := range apps[a].Units {
				unit := &apps[a].Units[u]
				for r := range unit.Ranks {
					if !yield(rankRow{&apps[a], unit, &unit.Ranks[r]}) {
						return
					}
				}
			}
		}
	}
}

// name returns APP/GROUP/RANK, the form that logs takes.
func (r rankRow) name() string {
	return fmt.Sprintf("%s/%d/%d", r.app.Name, r.rank.Group, r.rank.Rank)
}

// reason says why a rank is not ready, or what it waits for.
func (r rankRow) reason() string {
	switch {
	case r.rank.Phase == string(state.Ready) && r.rank.Tripped:
		return "tripped: its answers failed in a row"
	case r.rank.Phase == string(state.Ready):
		return ""
	}
	return joinLines(cmp.Or(r.rank.Progress, r.unit.Reason))
}

// statusNotes returns the lines under the tables of status: the index of each application that has one, and
// the problems of each rank's KV cache and KV events.
func statusNotes(apps []client.AppStatus) []string {
	var out []string
	for i := range apps {
		if a := &apps[i]; a.Index != nil {
			out = append(out,
				fmt.Sprintf("%s: index %s; identity %s", a.Name, describeIndex(a.Index), a.Identity))
		}
	}
	for r := range allRanks(apps) {
		if kv := r.rank.KV; kv != nil {
			if text := describeKVProblems(kv); text != "" {
				out = append(out, r.name()+": "+text)
			}
		}
	}
	return out
}

// describeIndex returns the size of an index and its error counts.
func describeIndex(ix *client.Index) string {
	s := fmt.Sprintf("%d blocks, %s of %s", ix.Blocks, formatMebibytes(ix.Bytes), formatMebibytes(ix.Cap))
	for _, part := range []struct {
		n    uint64
		what string
	}{{uint64(max(ix.Orphans, 0)), "orphans"}, {ix.Evicted, "evicted"}, {ix.Resyncs, "resyncs"}} {
		if part.n > 0 {
			s += fmt.Sprintf(", %d %s", part.n, part.what)
		}
	}
	return s
}

func formatMebibytes(n int) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// describeKVProblems returns the problems of a rank's KV cache and KV events, "" if there are none.
func describeKVProblems(kv *client.KVStatus) string {
	s := kv.Note
	e := kv.Events
	if e == nil || s != "" && e.State == client.EventsLive && e.Gaps+e.Dropped == 0 {
		return s
	}
	add := func(text string) {
		if s != "" {
			s += "; "
		}
		s += text
	}
	switch {
	case e.State == client.EventsSilent && kv.Note == "":
		add(fmt.Sprintf("KV events silent for %.0f s under traffic", e.SilentFor))
	case e.State == client.EventsPartial:
		add("KV events partial: what it held before is not known")
	case e.State == client.EventsConnecting:
		add("its KV events are not connected")
	}
	if e.Gaps > 0 {
		add(fmt.Sprintf("%d gaps in its KV events", e.Gaps))
	}
	if e.Dropped > 0 {
		add(fmt.Sprintf("%d KV events dropped", e.Dropped))
	}
	return s
}

// formatHitRate returns a rank's share of cached prompt tokens; "-" while its engine has reported none.
func formatHitRate(r *client.RankStatus) string {
	if r.PromptTokens == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", 100*r.HitRate)
}
