package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dpserve/dpserve/actors/msg"
)

type statusFlags struct {
	watch, exitCode bool
	output          *format
}

// statusDocument is the JSON of status.
type statusDocument struct {
	APIVersion string          `json:"apiVersion"`
	Apps       []msg.AppStatus `json:"apps"`
}

func newStatus(e *env) *cobra.Command {
	f := &statusFlags{}
	cmd := &cobra.Command{
		Use:   "status [APP] [flags]",
		Short: "applications, groups and ranks",
		Long: `status shows every application, or one, with its ranks. States of an application: DEPLOYING, RUNNING, UNHEALTHY,
DEPLOY_FAILED, DELETING. A rank is pending, starting, ready, fenced, killing, backoff, draining or failed; it is unreachable while
its node does not answer. -w goes on until Ctrl-C: redrawn on a terminal, one line per change elsewhere.`,
		Example: `  dpserve status demo -w
  dpserve status --exit-code && echo "everything runs"`,
		Args: takes(0, "APP"),
	}
	cmd.Flags().BoolVarP(&f.watch, "watch", "w", false, "go on watching")
	cmd.Flags().BoolVar(&f.exitCode, "exit-code", false, "exit code 3 when something is not RUNNING")
	f.output = addOutput(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error { return e.status(cmd.Context(), f, args) }
	return cmd
}

func (e *env) status(ctx context.Context, f *statusFlags, args []string) error {
	client, err := e.admin()
	if err != nil {
		return err
	}
	defer client.Close()
	if f.watch {
		return e.watch(ctx, f, client, args)
	}
	apps, err := pick(ctx, client, args)
	if err != nil {
		return err
	}
	if err := e.statusListing(apps).write(e.io, *f.output); err != nil {
		return err
	}
	if len(apps) == 0 && *f.output == formatTable {
		talk(e.io.Err, "nothing is deployed; `dpserve deploy FILE` does it")
	}
	if f.exitCode && !allRunning(apps) {
		return &silentError{code: exitDiffers}
	}
	return nil
}

// pick asks for all applications, or the one that was named.
func pick(ctx context.Context, client admin, args []string) ([]msg.AppStatus, error) {
	apps, err := client.Apps(ctx)
	if err != nil || len(args) == 0 {
		return apps, err
	}
	a, err := appNamed(apps, args[0])
	if err != nil {
		return nil, err
	}
	return []msg.AppStatus{a}, nil
}

func allRunning(apps []msg.AppStatus) bool {
	for i := range apps {
		if apps[i].Status != statusRunning {
			return false
		}
	}
	return true
}

func (e *env) statusListing(apps []msg.AppStatus) *listing {
	names := make([]string, len(apps))
	for i := range apps {
		names[i] = apps[i].Name
	}
	if apps == nil {
		apps = []msg.AppStatus{}
	}
	view := statusView{now: e.now(), relative: e.io.OutTTY}
	return &listing{
		document: statusDocument{APIVersion: apiVersion, Apps: apps}, names: names,
		table: func(wide bool) []*table { return view.tables(apps, wide) }, notes: notes(apps),
	}
}

// watch shows the status until the user has seen enough, which is no failure. A terminal is redrawn; elsewhere each change is
// a line, or with -o json a document on a line.
func (e *env) watch(ctx context.Context, f *statusFlags, client admin, args []string) error {
	w := &watcher{e: e, f: f, scr: newScreen(e.io), seen: map[string]string{}}
	tick := time.NewTicker(watchRefresh)
	defer tick.Stop()
	for {
		apps, err := pick(ctx, client, args)
		if ctx.Err() != nil {
			return nil // Ctrl-C is how a watch ends
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

// watcher remembers what was shown.
type watcher struct {
	e    *env
	f    *statusFlags
	scr  *screen
	seen map[string]string
}

func (w *watcher) show(apps []msg.AppStatus) error {
	format := *w.f.output
	if format == formatTable || format == formatWide {
		if w.e.io.OutTTY && w.scr.tty {
			return w.redraw(apps, format == formatWide)
		}
		return w.lines(apps)
	}
	key := summaryOf(apps)
	if w.seen[""] == key {
		return nil
	}
	w.seen[""] = key
	if format == formatJSON {
		return writeJSONLine(w.e.io.Out, w.e.statusListing(apps).document)
	}
	return w.e.statusListing(apps).write(w.e.io, format)
}

func (w *watcher) redraw(apps []msg.AppStatus, wide bool) error {
	view := statusView{now: w.e.now(), relative: true}
	var lines []string
	for i, t := range view.tables(apps, wide) {
		if i > 0 {
			lines = append(lines, "")
		}
		lines = append(lines, t.lines(nil)...)
	}
	if more := notes(apps); len(more) > 0 {
		lines = append(append(lines, ""), more...)
	}
	w.scr.show(lines...)
	return nil
}

// lines prints the applications and ranks whose state changed.
func (w *watcher) lines(apps []msg.AppStatus) error {
	now := w.e.now().UTC().Format(time.RFC3339)
	for i := range apps {
		if err := w.line(now, apps[i].Name, fmt.Sprintf("%s %d/%d", apps[i].Status, apps[i].Ready, apps[i].Desired)); err != nil {
			return err
		}
	}
	for r := range eachRank(apps) {
		if err := w.line(now, r.name(), strings.TrimSpace(fmt.Sprintf("%s epoch %d %s", r.rank.Phase, r.rank.Epoch, r.reason()))); err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) line(now, name, text string) error {
	if w.seen[name] == text {
		return nil
	}
	w.seen[name] = text
	_, err := fmt.Fprintln(w.e.io.Out, now, name, text)
	return err
}

// summaryOf is what counts as a change of a document: states, not counters.
func summaryOf(apps []msg.AppStatus) string {
	var b strings.Builder
	for i := range apps {
		fmt.Fprintf(&b, "%s %s %d %d\n", apps[i].Name, apps[i].Status, apps[i].Ready, apps[i].Revision)
	}
	for r := range eachRank(apps) {
		fmt.Fprintf(&b, "%s %s %d\n", r.name(), r.rank.Phase, r.rank.Epoch)
	}
	return b.String()
}
