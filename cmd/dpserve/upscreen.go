package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// watchEvery is the interval at which `up` reads the status of its ranks. After settledAfter rounds without a
// request, a death or a rank that is not ready, it reads the status in every calmRounds-th round alone.
const (
	watchEvery   = 250 * time.Millisecond
	settledAfter = rateWindowSamples
	calmRounds   = 4
)

// watchRanks shows the ranks until a signal comes or the node ends: as a live table on a terminal, and
// everywhere one line for each rank that dies, and one when it is ready again. died says that one did.
func watchRanks(ctx context.Context, e *env, s *serving, cluster admin, scr *screen, died *atomic.Bool,
	wide bool,
) {
	defer scr.clear()
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	history, speed := &unitHistory{}, &rate{}
	load, calm := upLoad{}, 0 // calm counts rounds in a row in which nothing happened
	for {
		calm++
		requests, tokens, inFlight := s.Totals()
		if died.Swap(false) || inFlight > 0 || requests != load.requests {
			calm = 0
		}
		load = upLoad{requests: requests, inFlight: inFlight, tokensPerS: speed.add(e.now(), tokens)}
		if calm < settledAfter || calm%calmRounds == 0 {
			apps, isSteady := history.print(ctx, e, cluster, scr)
			if !isSteady {
				calm = 0
			}
			showRanks(e, scr, apps, load, wide)
		}
		select {
		case <-s.done:
			return
		case <-e.sig.first:
			return
		case <-tick.C:
		}
	}
}

// print reads the status and prints what is new in it. isSteady: nothing is, and all ranks are ready. Without
// a status, in an election or at the node's end, it returns none.
func (h *unitHistory) print(ctx context.Context, e *env, cluster admin, scr *screen) (
	apps []client.AppStatus, isSteady bool,
) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	apps, err := cluster.Apps(ctx)
	if err != nil {
		return nil, false
	}
	news := h.news(e.now(), apps)
	for _, line := range news {
		scr.printMessage("%s", line)
	}
	ready, desired := countReady(apps)
	return apps, len(news) == 0 && ready == desired
}

// showRanks shows the live table of a status, and leaves the last one without any.
func showRanks(e *env, scr *screen, apps []client.AppStatus, load upLoad, wide bool) {
	if apps == nil {
		return
	}
	scr.show(func(width, height int) []string {
		view := statusView{now: e.now(), relative: true, wide: wide, width: width}
		summary := load.summary(apps, width-1)
		rows := rankRows(apps)
		return append(view.liveRanks(rows, liveRows(height)-1, e.io.paintLive), summary)
	})
}

// upLoad is what the node of `up` has served.
type upLoad struct {
	requests   uint64
	inFlight   int
	tokensPerS float64
}

// summary is the last live line of `up`. Parts that do not fit are left out, the last ones first.
func (l upLoad) summary(apps []client.AppStatus, width int) string {
	ready, desired := countReady(apps)
	parts := []string{
		strings.Join(namesOf(apps), ", "), fmt.Sprintf("%d/%d ready", ready, desired),
		formatCount(int(l.requests), "request"),
		fmt.Sprintf("%d in flight", l.inFlight), fmt.Sprintf("%.0f tokens/s", l.tokensPerS), "(Ctrl-C stops)",
	}
	if len(apps) > maxNamedApps {
		parts[0] = fmt.Sprintf("%d applications", len(apps))
	}
	line := strings.Join(parts, "  ")
	for len(parts) > 2 && textWidth(line) > width {
		parts = parts[:len(parts)-1]
		line = strings.Join(parts, "  ")
	}
	return line
}

// maxNamedApps is how many applications the summary names.
const maxNamedApps = 3

// unitHistory knows what `up` has printed about each unit. It turns statuses into sentences, each fact once.
type unitHistory struct {
	units map[string]*unitPast // nil before the first status
}

// unitPast is what was seen last of a unit.
type unitPast struct {
	phase     string
	epoch     uint64
	attempt   int
	wasReady  bool      // the unit has served
	downSince time.Time // when it was seen to be not ready
}

// news returns one sentence for each unit that died, came back, or changed in another way that users notice.
// `up` waited until every unit was ready: one that is not ready in the first status was lost since.
func (h *unitHistory) news(now time.Time, apps []client.AppStatus) []string {
	first := h.units == nil
	if first {
		h.units = map[string]*unitPast{}
	}
	var out []string
	seen := map[string]bool{}
	for _, a := range apps {
		for j := range a.Units {
			u := &a.Units[j]
			seen[u.Unit] = true
			past := h.units[u.Unit]
			if past == nil {
				past = &unitPast{downSince: now}
				if first {
					past.phase, past.epoch, past.wasReady = string(state.Ready), u.Epoch, true
				}
				h.units[u.Unit] = past
			}
			line := past.describe(now, a.Kind, u)
			past.record(now, u)
			if line != "" {
				out = append(out, u.Unit+" "+line)
			}
		}
	}
	for name := range h.units {
		if !seen[name] {
			delete(h.units, name)
			out = append(out, name+" is gone")
		}
	}
	slices.Sort(out)
	return out
}

func (p *unitPast) record(now time.Time, u *client.UnitStatus) {
	isReady := u.Phase == string(state.Ready)
	if p.phase == string(state.Ready) && !isReady {
		p.downSince = now
	}
	p.phase, p.epoch, p.attempt, p.wasReady = u.Phase, u.Epoch, u.Attempt, p.wasReady || isReady
}

// describe says what has happened to the unit since the last status; "" if nothing that matters.
func (p *unitPast) describe(now time.Time, kind string, u *client.UnitStatus) string {
	isReady, wasReady := u.Phase == string(state.Ready), p.phase == string(state.Ready)
	switch {
	case isReady && wasReady && u.Epoch > p.epoch:
		return fmt.Sprintf("died and is ready again, epoch %d", u.Epoch)
	case isReady && wasReady:
		return ""
	case isReady && p.wasReady:
		return fmt.Sprintf("is ready again, epoch %d, after %.1f s", u.Epoch, now.Sub(p.downSince).Seconds())
	case isReady:
		return fmt.Sprintf("is ready, epoch %d", u.Epoch)
	case wasReady:
		return describeLoss(kind, u)
	case u.Phase == string(state.Failed) && p.phase != u.Phase:
		return fmt.Sprintf("failed after %s%s; `dpserve logs %s` shows why",
			formatCount(u.Attempt, "attempt"), inParentheses(u.Reason), u.Unit)
	case u.Attempt > p.attempt && p.phase != "" && u.Attempt > 1:
		return "did not start" + inParentheses(u.Reason) + ", is tried again"
	}
	return ""
}

// describeLoss says why a unit that was ready is not any more.
func describeLoss(kind string, u *client.UnitStatus) string {
	why := inParentheses(u.Reason)
	switch state.Phase(u.Phase) {
	case state.Draining:
		return "drains" + why
	case state.Pending:
		return "waits for room" + why
	case state.Failed:
		return fmt.Sprintf("failed%s; `dpserve logs %s` shows why", why, u.Unit)
	case client.Unreachable:
		return "is unreachable" + why
	case state.Starting, state.Ready, state.Fenced, state.Killing, state.Backoff, state.Gone:
	}
	switch {
	case kind == "attach":
		return "does not answer" + why + ", is asked again"
	case len(u.Ranks) > 1:
		return fmt.Sprintf("died%s, its %d ranks start again", why, len(u.Ranks))
	}
	return "died" + why + ", starts again"
}

// inParentheses returns the first clause of a reason in parentheses, after a space; "" for no reason.
func inParentheses(reason string) string {
	reason, _, _ = strings.Cut(joinLines(reason), "; ")
	return inBrackets(strings.Replace(reason, "engine was ended by ", "", 1))
}

// deathRecord is the log record of a rank's death. `up` says the same in a sentence.
const deathRecord = "unit is fenced"

// upLog is the log of the node of `up`: it leaves out the records that `up` prints as sentences, and notes
// that there was one.
type upLog struct {
	scr  *screen
	died *atomic.Bool
}

// Write prints a record. The logger writes one record per call.
func (l upLog) Write(p []byte) (int, error) {
	if strings.Contains(string(p), deathRecord) {
		l.died.Store(true)
		return len(p), nil
	}
	return l.scr.Write(p)
}
