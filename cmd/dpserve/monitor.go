package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Pace of a monitor.
const (
	pollEvery    = 50 * time.Millisecond // status of a loopback API costs well under a millisecond
	redrawEvery  = 100 * time.Millisecond
	patience     = 5 * time.Second // how long the API may be silent before the monitor gives up
	askEachTime  = 5 * time.Second // deadline of one call
	maxLogTail   = 20              // lines of a failed rank that are shown
	watchRefresh = time.Second     // status -w on a terminal
)

// monitor follows applications and shows what changes: in place on a terminal, one line per change elsewhere.
type monitor struct {
	admin admin
	scr   *screen
	now   func() time.Time

	began  time.Time
	seen   map[string]string // rank → what was last said of it
	drawn  time.Time
	silent time.Time // since when the API does not answer; zero = it does
}

func newMonitor(e *env, client admin, scr *screen) *monitor {
	return &monitor{admin: client, scr: scr, now: e.now, began: e.now(), seen: map[string]string{}}
}

// until polls the apps and calls done with them until it says so, or ctx ends. A short silence of the API is forgiven.
func (m *monitor) until(ctx context.Context, names []string, done func([]msg.AppStatus) (bool, error)) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		apps, ok, err := m.ask(ctx, names)
		if err != nil {
			m.scr.show()
			return err
		}
		if ok {
			m.draw(apps)
			if over, err := done(apps); over || err != nil {
				m.scr.show()
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			m.scr.show()
			return context.Cause(ctx)
		}
	}
}

// ask gives the apps among names that exist; not ok without an error means: try again.
func (m *monitor) ask(ctx context.Context, names []string) (apps []msg.AppStatus, ok bool, err error) {
	call, cancel := context.WithTimeout(ctx, askEachTime)
	defer cancel()
	all, err := m.admin.Apps(call)
	if err == nil {
		m.silent = time.Time{}
		return slices.DeleteFunc(all, func(a msg.AppStatus) bool { return !slices.Contains(names, a.Name) }), true, nil
	}
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	if m.silent.IsZero() {
		m.silent = m.now()
	}
	if m.now().Sub(m.silent) > patience {
		return nil, false, err
	}
	return nil, false, nil
}

// draw shows the apps as they are now.
func (m *monitor) draw(apps []msg.AppStatus) {
	for r := range eachRank(apps) {
		m.change(r)
	}
	if now := m.now(); now.Sub(m.drawn) >= redrawEvery {
		m.drawn = now
		m.scr.show(m.live(apps)...)
	}
}

// change says one line when a rank's story goes on; on a terminal the live lines show it.
func (m *monitor) change(r rankRow) {
	story := r.rank.Phase
	if r.unit.Attempt > 1 && r.rank.Phase == string(state.Starting) {
		story += fmt.Sprintf(" (attempt %d)", r.unit.Attempt)
	}
	if r.rank.Phase != string(state.Starting) { // what a start waits for changes too often for lines
		if why := r.reason(); why != "" {
			story += ": " + why
		}
	}
	if m.seen[r.name()] == story {
		return
	}
	m.seen[r.name()] = story
	if !m.scr.tty {
		m.scr.say("%s %s", r.name(), story)
	}
}

func (m *monitor) live(apps []msg.AppStatus) []string {
	t := &table{head: []string{"RANK", "STATE", "EPOCH", "ATTEMPT", ""}}
	var heads []string
	for i := range apps {
		a := &apps[i]
		heads = append(heads, fmt.Sprintf("%s %s, %d of %d ranks ready", a.Name, a.Status, a.Ready, a.Desired))
	}
	for r := range eachRank(apps) {
		t.add(cells(r.name(), r.rank.Phase, fmt.Sprint(r.rank.Epoch), fmt.Sprint(r.unit.Attempt), r.reason())...)
	}
	head := fmt.Sprintf("%s  %.1fs", strings.Join(heads, "; "), m.now().Sub(m.began).Seconds())
	return append([]string{head}, t.lines(nil)...)
}

// running waits until every app runs at the given revision or later. Errors: problem.Unplaceable with the failing rank's last
// log lines, problem.Timeout, errInterrupted.
func (m *monitor) running(ctx context.Context, want map[string]uint64) error {
	names := slices.Sorted(maps.Keys(want))
	begun := map[string]bool{}
	err := m.until(ctx, names, func(apps []msg.AppStatus) (bool, error) {
		up := 0
		if name := deletedOf(apps, begun); name != "" {
			return true, problem.New(problem.Conflict, "%s was deleted while it was rolled out", name).WithHint("deploy it again if that was not meant")
		}
		for i := range apps {
			a := &apps[i]
			if a.Revision < want[a.Name] {
				continue
			}
			if a.Status == statusDeployFailed {
				return true, deployFailed(a)
			}
			if a.Status == statusRunning {
				up++
			}
		}
		return up == len(want), nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return problem.New(problem.Timeout, "not RUNNING in time: %s; the rollout goes on", strings.Join(names, ", ")).
			WithHint("watch it with `dpserve status -w`")
	}
	return err
}

// deletedOf names an application that was there and is not, or is on its way out. begun remembers which ones were.
func deletedOf(apps []msg.AppStatus, begun map[string]bool) string {
	there := map[string]bool{}
	for i := range apps {
		if apps[i].Status == statusDeleting {
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

// gone waits until none of the apps exists any more.
func (m *monitor) gone(ctx context.Context, names ...string) error {
	err := m.until(ctx, names, func(apps []msg.AppStatus) (bool, error) { return len(apps) == 0, nil })
	if errors.Is(err, context.DeadlineExceeded) {
		return problem.New(problem.Timeout, "not gone in time: %s; the deletion goes on", strings.Join(names, ", ")).
			WithHint("watch it with `dpserve status -w`")
	}
	return err
}

// deployFailed names the first failed unit and shows the last lines of its log.
func deployFailed(a *msg.AppStatus) error {
	for i := range a.Units {
		if a.Units[i].Phase == string(state.Failed) {
			return unitFailed(a.Name, &a.Units[i])
		}
	}
	return problem.New(problem.Unplaceable, "%s cannot be rolled out: %s", a.Name, oneLine(a.Message)).WithHint("correct the file and deploy it again")
}

func unitFailed(app string, u *msg.UnitStatus) error {
	err := problem.New(problem.Unplaceable, "%s cannot be rolled out: %s failed after %s: %s", app, u.Unit, count(u.Attempt, "attempt"), oneLine(u.Reason))
	tail := u.LogTail[max(0, len(u.LogTail)-maxLogTail):]
	if len(tail) == 0 { // the engine did not come so far as to write anything
		return err.WithHint("correct what the reason names and deploy again; taken ports: give this node a --port-range of its own")
	}
	return err.WithDetails(tail...).WithHint("these are the last log lines of %s; `dpserve logs %s` shows more", u.Unit, app)
}

// linger shows what is left, in a line, of what goes on by itself until nothing is. After timeout it gives pending of the last line, and
// after Ctrl-C it says what goesOn.
func (e *env) linger(ctx context.Context, timeout time.Duration, look func(ctx context.Context) (left string, over bool, err error),
	goesOn string, pending func(left string) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	scr, said := newScreen(e.io), ""
	tick := time.NewTicker(redrawEvery)
	defer tick.Stop()
	for {
		left, over, err := look(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if over {
			scr.show()
			return nil
		}
		switch {
		case left == "":
		case scr.tty:
			scr.show(left)
		case left != said:
			scr.say("%s", left)
		}
		if left != "" {
			said = left
		}
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
		}
		scr.show()
		if errors.Is(context.Cause(ctx), errInterrupted) {
			talk(e.io.Err, "interrupted; %s", goesOn)
			return &silentError{code: exitInterrupted}
		}
		return pending(said)
	}
}
