package controller

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// noteNodes reports the nodes that differ between two states. What a new leader finds is no change.
func (c *Core) noteNodes(now time.Time, old, s *state.State) {
	if old == nil {
		return
	}
	ids := maps.Clone(s.Nodes)
	maps.Copy(ids, old.Nodes)
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		from, to := wordOf(old.Nodes[id]), wordOf(s.Nodes[id])
		if from == to {
			continue
		}
		e := Event{At: now, Node: id, From: from, To: to}
		switch {
		case from == nodeRemoved: // it is new
			e.From = ""
		case to == nodeLost:
			e.Reason = s.Nodes[id].Reason
		}
		c.emit(ChangeEffect{e})
	}
}

// nodeRemoved stands for a node without a record.
const nodeRemoved = "removed"

func wordOf(n *state.Node) string {
	switch {
	case n == nil:
		return nodeRemoved
	case n.Lost:
		return nodeLost
	case n.Draining:
		return nodeDraining
	default:
		return nodeAlive
	}
}

// Action says what dpserve does because of the change; "" = nothing.
func (e *Event) Action() string {
	switch {
	case e.Unit != "":
		return unitActions[state.Phase(e.To)]
	case e.Node != "":
		return nodeActions[e.To]
	default:
		return appActions[state.AppStatus(e.To)]
	}
}

var unitActions = map[state.Phase]string{
	state.Pending:  "looks for a place",
	state.Starting: "starts its engines",
	state.Ready:    "routes requests to it",
	state.Fenced:   "routes no requests to it",
	state.Killing:  "ends its engines",
	state.Draining: "lets its requests end and sends no new ones",
	state.Backoff:  "starts it again after a wait",
	state.Failed:   "tries it again from time to time, and at once after a deploy",
	state.Gone:     "has released its place",
}

var appActions = map[state.AppStatus]string{
	state.Deploying:    "starts what is missing",
	state.Unhealthy:    "starts what is missing",
	state.DeployFailed: "waits for a corrected file",
	state.Deleting:     "ends its ranks",
}

var nodeActions = map[string]string{
	nodeAlive:    "may place ranks on it",
	nodeLost:     "starts its ranks on other nodes",
	nodeDraining: "moves its ranks to other nodes",
	nodeRemoved:  "refuses its certificate",
}
