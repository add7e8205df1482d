package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// nextStep returns what a person should do next about the applications and nodes: one sentence about the
// most urgent thing. It returns "" if all is well, or will be without a person.
func nextStep(apps []client.AppStatus, nodes []client.NodeStatus) string {
	return cmp.Or(
		lostNodeStep(apps, nodes), rankStep(apps, failedStep), rankStep(apps, noRoomStep),
		rankStep(apps, attachedStep), rankStep(apps, restartedStep), rankStep(apps, ejectedStep),
		fullQueueStep(apps), rankStep(apps, silentEventsStep), nodeNoteStep(nodes), unevenStep(apps),
	)
}

// lostNodeStep is about nodes that do not answer: those that the cluster has given up, and those with ranks.
func lostNodeStep(apps []client.AppStatus, nodes []client.NodeStatus) string {
	for i := range nodes {
		if n := &nodes[i]; n.State == "lost" {
			return fmt.Sprintf("start dpserve on %s again, or `dpserve nodes remove %s`: it is lost%s",
				n.Node, n.Node, inBrackets(joinLines(n.Reason)))
		}
	}
	for r := range allRanks(apps) {
		if r.rank.Phase == client.Unreachable {
			return fmt.Sprintf("look at node %s, its network and its dpserve: %s", r.rank.Node,
				joinLines(r.unit.Reason))
		}
	}
	return ""
}

// rankStep returns the step of the first rank that needs one, and how many more need the same.
func rankStep(apps []client.AppStatus, step func(r rankRow) (what, about string)) string {
	first, more := "", map[string]bool{}
	for r := range allRanks(apps) {
		if what, about := step(r); what != "" {
			first = cmp.Or(first, what)
			more[about] = true
		}
	}
	if len(more) > 1 {
		first += fmt.Sprintf(" (and %d more like it)", len(more)-1)
	}
	return first
}

// failedStep is about a unit whose first starts have failed.
func failedStep(r rankRow) (what, about string) {
	if r.rank.Phase != string(state.Failed) {
		return "", ""
	}
	reason, _, _ := strings.Cut(joinLines(r.unit.Reason), "; hint: ")
	times := formatCount(max(r.unit.Attempt, 1), "time")
	return fmt.Sprintf("`dpserve logs %s`, correct what it says, and deploy again: %s failed %s%s%s%s",
		r.name(), r.unit.Unit, times, inBrackets(reason), lastLineOf(r.unit.LastEnd),
		r.nextTry()), r.unit.Unit
}

// noRoomStep is about a unit that finds no room.
func noRoomStep(r rankRow) (what, about string) {
	why := joinLines(r.unit.Reason)
	waits := r.rank.Phase == string(state.Pending) || r.rank.Phase == string(state.Backoff)
	if !waits || !isPlacementReason(r.pool(), why) {
		return "", ""
	}
	text, hint, _ := strings.Cut(why, "; hint: ")
	group, fits, _ := strings.Cut(strings.TrimPrefix(text, "place "), ": ")
	fits, _, _ = strings.Cut(fits, "; ")
	return fmt.Sprintf("%s: %s finds no room: %s", cmp.Or(hint, "start another node with `dpserve join`, or "+
		"lower num_replicas"), group, fits), r.pool()
}

// attachedStep is about an engine that somebody else runs and that does not answer.
func attachedStep(r rankRow) (what, about string) {
	waits := []string{string(state.Starting), string(state.Fenced), string(state.Backoff)}
	if r.app.Kind != string(app.KindAttach) || !slices.Contains(waits, r.rank.Phase) || r.reason() == "" {
		return "", ""
	}
	at := cmp.Or(r.rank.URL, "its URL")
	return fmt.Sprintf("start the engine of %s at %s, or `dpserve ranks remove`: %s", r.name(), at,
		r.reason()), r.name()
}

// restartsNoted is how many restarts of a unit that is not ready are more than bad luck.
const restartsNoted = 3

// restartedStep is about a unit that starts and ends again and again.
func restartedStep(r rankRow) (what, about string) {
	if r.unit.Restarts < restartsNoted || r.rank.Phase == string(state.Ready) ||
		r.rank.Phase == string(state.Draining) {
		return "", ""
	}
	what = fmt.Sprintf("`dpserve logs %s`: %s was restarted %s", r.name(), r.unit.Unit,
		formatCount(r.unit.Restarts, "time"))
	if e := r.unit.LastEnd; e != nil {
		return fmt.Sprintf("%s; it ended last at %s: %s", what, e.At.UTC().Format(time.RFC3339),
			describeEnd(e)), r.unit.Unit
	}
	return what + inBrackets(joinLines(r.unit.Reason)), r.unit.Unit
}

// describeEnd says why a unit ended last, and what its engine wrote last.
func describeEnd(e *client.LastEnd) string {
	return cmp.Or(joinLines(e.Cause), e.Exit, "unknown") + lastLineOf(e)
}

// lastLineOf says, as one more clause, what the engine wrote last; "" if that is not known.
func lastLineOf(e *client.LastEnd) string {
	if e == nil || e.Line == "" {
		return ""
	}
	return "; its last line: " + joinLines(e.Line)
}

// ejectedStep is about a rank whose answers failed.
func ejectedStep(r rankRow) (what, about string) {
	if !r.rank.Ejected {
		return "", ""
	}
	return fmt.Sprintf("`dpserve logs %s`: its last answers failed", r.name()), r.name()
}

// fullQueueStep is about an application that has less room than its clients want.
func fullQueueStep(apps []client.AppStatus) string {
	for i := range apps {
		if a := &apps[i]; a.MaxQueued > 0 && a.Queued >= a.MaxQueued {
			return fmt.Sprintf("raise num_replicas of %s: %d requests wait, and a queue holds %d; more are "+
				"refused", a.Name, a.Queued, a.MaxQueued)
		}
	}
	return ""
}

// silentEventsStep is about a rank whose KV events do not come.
func silentEventsStep(r rankRow) (what, about string) {
	if kv := r.rank.KV; kv == nil || kv.Events == nil || kv.Events.State != client.EventsSilent {
		return "", ""
	}
	return fmt.Sprintf("`dpserve doctor`: no KV events come from %s while requests complete", r.name()),
		r.name()
}

// nodeNoteStep is about what a node itself says: its clock, version, disk or certificate.
func nodeNoteStep(nodes []client.NodeStatus) string {
	for i := range nodes {
		if n := &nodes[i]; len(n.Notes) > 0 {
			return fmt.Sprintf("look at node %s: %s", n.Node, joinLines(n.Notes[0]))
		}
	}
	return ""
}

// unevenStep is about ranks with much more load than the others, if another policy would balance them.
func unevenStep(apps []client.AppStatus) string {
	for i := range apps {
		for _, im := range apps[i].Imbalances {
			if len(im.Policies) > 0 {
				return fmt.Sprintf("write routing: {policy: %s} into the file of %s and deploy it: the load "+
					"of its ranks is uneven, max/mean %.1f", im.Policies[0], im.Pool, im.MaxMean)
			}
		}
	}
	return ""
}

// inBrackets returns a reason as an addition to a sentence.
func inBrackets(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}
