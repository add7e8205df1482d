package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Pace of a monitor.
const (
	pollEvery    = 50 * time.Millisecond // a status request to a loopback API takes well under a millisecond
	redrawEvery  = 100 * time.Millisecond
	callTimeout  = 5 * time.Second  // deadline of one call
	maxLogTail   = 20               // log lines of a failed rank that are printed
	watchRefresh = time.Second      // status -w on a terminal
	stillEvery   = 30 * time.Second // off a terminal: between two lines about ranks that still start
)

// monitor polls the status of applications and shows changes: in place on a terminal, one line per change
// elsewhere.
type monitor struct {
	admin admin
	scr   *screen
	now   func() time.Time
	paint func(color, string) string

	pinned    bool // a later revision than the wanted one ends the wait
	patience  *patience
	started   time.Time
	seen      map[string]string // rank → the last text printed about it
	lastDrawn time.Time
	lastStill time.Time // when a line about ranks that still start was printed
}

func newMonitor(e *env, cluster admin, scr *screen) *monitor {
	p := newPatience(e, maxAPISilence)
	p.answered = true // to the command that is monitored
	return &monitor{
		admin: cluster, scr: scr, now: e.now, paint: e.io.paintLive, started: e.now(), lastStill: e.now(),
		seen: map[string]string{}, patience: p,
	}
}

// pollUntil polls the apps and calls done with them until done returns true or an error, or until ctx ends.
// It asks again for maxAPISilence if the API does not answer.
func (m *monitor) pollUntil(ctx context.Context, names []string,
	done func([]client.AppStatus) (bool, error),
) error {
	defer m.scr.clear()
	for {
		var apps []client.AppStatus
		ok, err := m.patience.watchOnce(ctx, func(ctx context.Context) (err error) {
			apps, err = m.admin.Apps(ctx)
			return err
		})
		if err != nil {
			return err
		}
		if ok {
			apps = slices.DeleteFunc(apps,
				func(a client.AppStatus) bool { return !slices.Contains(names, a.Name) })
			m.draw(apps)
			if over, err := done(apps); over || err != nil {
				return err
			}
		}
		if err := pause.For(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// draw shows the present state of the apps.
func (m *monitor) draw(apps []client.AppStatus) {
	rows := rankRows(apps)
	for _, r := range rows {
		m.printChange(r, reasonOf(r))
	}
	now := m.now()
	if now.Sub(m.lastDrawn) >= redrawEvery {
		m.lastDrawn = now
		m.scr.show(m.liveLines(apps))
	}
	if !m.scr.tty && now.Sub(m.lastStill) >= stillEvery {
		m.lastStill = now
		m.printStill(rows)
	}
}

// printStill prints how many ranks still start, and what the first of them does. Models take minutes to load,
// in which nothing else is printed off a terminal.
func (m *monitor) printStill(rows []rankRow) {
	var starting []int
	for i, r := range rows {
		if r.rank.Phase == string(state.Starting) {
			starting = append(starting, i)
		}
	}
	if len(starting) > 0 {
		first := starting[0]
		m.scr.printMessage("%d of %d ranks still start after %.0fs; %s %s", len(starting), len(rows),
			m.now().Sub(m.started).Seconds(), rows[first].name(), reasonOf(rows[first]))
	}
}

// printChange prints one line when a rank's state or reason changes. On a terminal the live lines show it.
func (m *monitor) printChange(r rankRow, why string) {
	story := r.rank.Phase
	if r.unit.Attempt > 1 && r.rank.Phase == string(state.Starting) {
		story += fmt.Sprintf(" (attempt %d)", r.unit.Attempt)
	}
	if r.rank.Phase != string(state.Starting) && why != "" { // that of a start changes too often for lines
		story += ": " + why
	}
	if m.seen[r.name()] == story {
		return
	}
	m.seen[r.name()] = story
	if !m.scr.tty {
		m.scr.printMessage("%s %s", r.name(), story)
	}
}

func (m *monitor) liveLines(apps []client.AppStatus) renderer {
	heads := make([]string, len(apps))
	for i := range apps {
		a := &apps[i]
		heads[i] = fmt.Sprintf("%s %s, %d of %d ranks ready", a.Name, a.Status, a.Ready, a.Desired)
		if a.RollingOut {
			heads[i] += ", rolling out"
		}
	}
	return func(width, height int) []string {
		elapsed := m.now().Sub(m.started).Seconds()
		head := fmt.Sprintf("%s  %.1fs", strings.Join(heads, "; "), elapsed)
		rows := rankRows(apps)
		if len(rows)+2 > liveRows(height) {
			rows = unhealthyFirst(rows)
		}
		t := &table{
			head: []string{"RANK", "STATE", "EPOCH", "ATTEMPT", ""}, optional: []string{"ATTEMPT", "EPOCH"},
		}
		reasons := reasonsOf(rows)
		for i, r := range rows {
			row := cells(r.name(), r.rank.Phase, fmt.Sprint(r.rank.Epoch), fmt.Sprint(r.unit.Attempt),
				reasons[i])
			row[1].color = phaseColor(r.rank.Phase)
			t.add(row...)
		}
		t.fit(width-1, reasonWidth)
		return append([]string{head}, t.renderLines(m.paint)...)
	}
}

// awaitRunning waits until every app runs at the given revision or later and is rolled out. Errors:
// problem.Unplaceable when a unit does not start and problem.Upstream when one ends that was ready, both with
// log lines of it; problem.Timeout, errInterrupted.
func (m *monitor) awaitRunning(ctx context.Context, want map[string]uint64) error {
	names := slices.Sorted(maps.Keys(want))
	begun := map[string]bool{}
	err := m.pollUntil(ctx, names, func(apps []client.AppStatus) (bool, error) {
		up := 0
		if name := findDeleted(apps, begun); name != "" {
			return true, problem.New(problem.Conflict, "%s was deleted while it was rolled out", name).
				WithHint("deploy it again if that was not meant")
		}
		for i := range apps {
			a := &apps[i]
			if a.Revision < want[a.Name] {
				continue
			}
			if a.Halt != nil && a.Halt.Revision == want[a.Name] {
				if a.Halt.BackTo == 0 || isSettled(a) {
					return true, haltError(a)
				}
				continue // it goes back
			}
			if err := replacedError(a, want[a.Name]); err != nil && m.pinned {
				return true, err
			}
			if !isSettled(a) {
				continue
			}
			if a.Status == client.StatusDeployFailed {
				return true, deployFailure(a)
			}
			up++
		}
		return up == len(want), nil
	})
	return lateError(err, "not RUNNING in time: %s; the rollout goes on", strings.Join(names, ", "))
}

// isSettled reports whether a deploy of an application has ended, well or not. A roll-out that has failed is
// halted at once.
func isSettled(a *client.AppStatus) bool {
	return (a.Status == client.StatusRunning || a.Status == client.StatusDeployFailed) && !a.RollingOut
}

// haltError is the error of a roll-out that was halted.
func haltError(a *client.AppStatus) error {
	h, then, code, what := a.Halt, "the units that were not replaced go on", problem.Upstream, "ended"
	if h.Unready {
		code, what = problem.Unplaceable, "did not start"
	}
	if h.BackTo != 0 {
		then = fmt.Sprintf("revision %d is back, %d of %d ranks are ready", h.BackTo, a.Ready, a.Desired)
	}
	err := problem.New(code, "%s: the rollout of revision %d was halted, because %s %s: %s; %s", a.Name,
		h.Revision, h.Unit, what, joinLines(h.Cause), then)
	return err.WithDetails(cutTail(h.LogTail)...).WithHint(
		"correct the file and deploy it again; `dpserve get %s --revision %d` prints what was halted", a.Name,
		h.Revision)
}

// lateError returns err, unless it is the deadline: then it says what is not there yet.
func lateError(err error, format string, args ...any) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return problem.New(problem.Timeout, format, args...).WithHint("watch it with `dpserve status -w`")
}

// findDeleted returns the name of an application that existed and is gone, or that is being deleted. begun
// records the applications that existed.
func findDeleted(apps []client.AppStatus, begun map[string]bool) string {
	there := map[string]bool{}
	for i := range apps {
		if apps[i].Status == client.StatusDeleting {
			return apps[i].Name
		}
		there[apps[i].Name], begun[apps[i].Name] = true, true
	}
	for _, name := range slices.Sorted(maps.Keys(begun)) {
		if !there[name] {
			return name
		}
	}
	return ""
}

// awaitGone waits until the app does not exist.
func (m *monitor) awaitGone(ctx context.Context, name string) error {
	err := m.pollUntil(ctx, []string{name},
		func(apps []client.AppStatus) (bool, error) { return len(apps) == 0, nil })
	return lateError(err, "not gone in time: %s; the deletion goes on", name)
}

// deployFailure is the error of a failed rollout: it names the first failed unit and holds lines of its
// log.
func deployFailure(a *client.AppStatus) error {
	for i := range a.Units {
		if a.Units[i].Phase == string(state.Failed) {
			return unitFailure(a.Name, &a.Units[i])
		}
	}
	return problem.New(problem.Unplaceable, "%s cannot be rolled out: %s", a.Name, joinLines(a.Message)).
		WithHint("correct the file and deploy it again")
}

// cutTail returns the log lines of a failed rank that are printed.
func cutTail(tail []string) []string { return tail[max(0, len(tail)-maxLogTail):] }

func unitFailure(app string, u *client.UnitStatus) error {
	err := problem.New(problem.Unplaceable, "%s cannot be rolled out: %s failed after %s: %s", app, u.Unit,
		formatCount(u.Attempt, "attempt"), joinLines(u.Reason))
	tail := cutTail(u.LogTail)
	if len(tail) == 0 { // the engine ended before it wrote a line
		return err.WithHint(
			"correct what the reason names and deploy again; taken ports: give this node a --port-range " +
				"of its own")
	}
	return err.WithDetails(tail...).WithHint(
		"these log lines of %s are about its failure; `dpserve logs %s` shows more", u.Unit, app)
}

// followUntilDone polls an operation that the cluster runs by itself and shows one line about what is left,
// until look reports that it is over. After timeout it returns timeoutError of the last line. After Ctrl-C it
// prints goesOn, because the operation continues without the command.
func followUntilDone(ctx context.Context, e *env, timeout time.Duration,
	look func(ctx context.Context) (left string, over bool, err error),
	goesOn string, timeoutError func(left string) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	scr, said, printed, patience := e.screen(), "", printedLines{}, newPatience(e, maxAPISilence)
	patience.answered = true // to the command that began the operation
	for {
		var left string
		var over bool
		_, err := patience.watchOnce(ctx, func(ctx context.Context) (err error) {
			left, over, err = look(ctx)
			return err
		})
		if err != nil && ctx.Err() == nil {
			return err
		}
		if over {
			scr.clear()
			return nil
		}
		switch {
		case left == "":
		case scr.tty:
			scr.showLine(left)
		case printed.isNew(e.now(), "", "", left):
			scr.printMessage("%s", left)
		}
		said = cmp.Or(left, said)
		if pause.For(ctx, redrawEvery) == nil {
			continue
		}
		scr.clear()
		if errors.Is(context.Cause(ctx), errInterrupted) {
			return interrupted(e, goesOn)
		}
		return timeoutError(said)
	}
}

// interrupted ends a command after Ctrl-C, and says what goes on without it.
func interrupted(e *env, goesOn string) error {
	printMessage(e.io.Err, "interrupted; %s", goesOn)
	return &silentError{code: exitInterrupted}
}
