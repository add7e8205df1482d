package main

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Words of an application's status. They are the admin API's and Ray's.
const (
	statusRunning      = "RUNNING"
	statusDeploying    = "DEPLOYING"
	statusUnhealthy    = "UNHEALTHY"
	statusDeployFailed = "DEPLOY_FAILED"
	statusDeleting     = "DELETING"
)

// statusView renders applications; relative says that times are ages (a person reads) and not stamps (a program does).
type statusView struct {
	now      time.Time
	relative bool
}

func (v statusView) tables(apps []msg.AppStatus, wide bool) []*table {
	return []*table{v.apps(apps, wide), v.ranks(apps, wide)}
}

func (v statusView) apps(apps []msg.AppStatus, wide bool) *table {
	t := &table{head: []string{"APP", "STATUS", "RANKS", "GROUPS", "MODEL", "KIND", "POLICY", "QUEUED"}}
	if wide {
		t.head = append(t.head, "REVISION", "COUPLING")
	}
	t.head = append(t.head, "MESSAGE")
	for i := range apps {
		a := &apps[i]
		row := cells(a.Name, a.Status, fmt.Sprintf("%d/%d", a.Ready, a.Desired), strconv.Itoa(a.Groups), a.Model, a.Kind, a.Policy, strconv.Itoa(a.Queued))
		row[1].color = statusColor(a.Status)
		if wide {
			row = append(row, cells(strconv.FormatUint(a.Revision, 10), a.Coupling)...)
		}
		t.add(append(row, cell{text: oneLine(a.Message)})...)
	}
	return t
}

func (v statusView) ranks(apps []msg.AppStatus, wide bool) *table {
	t := &table{head: []string{"RANK", "STATE", "EPOCH", "AGE", "NODE", "IN-FLIGHT", "TOK/S", "TTFT-P50", "TTFT-P95", "RESTARTS", "HIT%"}}
	if !v.relative {
		t.head[3] = "SINCE"
	}
	if wide {
		t.head = append(t.head, "REQUESTS", "PID", "INCARNATION", "URL")
	}
	t.head = append(t.head, "REASON")
	for r := range eachRank(apps) {
		row := cells(r.name(), r.rank.Phase, strconv.FormatUint(r.rank.Epoch, 10), v.since(r.unit.Since), r.rank.Node, strconv.Itoa(r.rank.InFlight),
			fmt.Sprintf("%.0f", r.rank.TokensPerS), millis(r.rank.TTFTp50Ms), millis(r.rank.TTFTp95Ms), strconv.Itoa(r.unit.Restarts), hitRate(r.rank))
		row[1].color = phaseColor(r.rank.Phase)
		if wide {
			row = append(row, cells(strconv.FormatUint(r.rank.Requests, 10), number(r.rank.PID), r.rank.Incarnation, r.rank.URL)...)
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
		return age(v.now.Sub(t))
	}
	return t.UTC().Format(time.RFC3339)
}

// age is a duration in its largest unit, as a person says it.
func age(d time.Duration) string {
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

// millis shows a latency; 0 means that nothing was measured yet.
func millis(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1fms", ms)
}

func number(n int) string {
	if n == 0 {
		return "-"
	}
	return strconv.Itoa(n)
}

// oneLine joins the lines of a message for a cell of a table.
func oneLine(s string) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(strings.TrimSpace(s), "\n", "; ")), " ")
}

func statusColor(status string) color {
	switch status {
	case statusRunning:
		return good
	case statusDeploying, statusDeleting:
		return busy
	case statusUnhealthy, statusDeployFailed:
		return bad
	}
	return plain
}

func phaseColor(phase string) color {
	if phase == msg.Unreachable {
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

// rankRow is one rank with the unit and the app it belongs to.
type rankRow struct {
	app  *msg.AppStatus
	unit *msg.UnitStatus
	rank *msg.RankStatus
}

// eachRank walks all ranks in the order of the listing.
func eachRank(apps []msg.AppStatus) func(func(rankRow) bool) {
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

// name is APP/GROUP/RANK, as logs takes it.
func (r rankRow) name() string {
	return fmt.Sprintf("%s/%d/%d", r.app.Name, r.rank.Group, r.rank.Rank)
}

// reason says what a rank waits for, or why it is not ready.
func (r rankRow) reason() string {
	switch {
	case r.rank.Phase == string(state.Ready) && r.rank.Tripped:
		return "tripped: its answers failed in a row"
	case r.rank.Phase == string(state.Ready):
		return ""
	}
	return oneLine(cmp.Or(r.rank.Progress, r.unit.Reason))
}
