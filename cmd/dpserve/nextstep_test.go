package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/state"
)

// HF52: the table of what `status` says to do next.
func TestNextStep(t *testing.T) {
	const noRoom = "place demo/0: 2 of 4 ranks can be placed (PACK); need: 4 ranks of 1 slot each, PACK; " +
		"a: 2 slots free; hint: add nodes or slots, ask for fewer ranks, or delete an application"
	lost := client.NodeStatus{Node: "b", State: "lost", Reason: "no renewal for 12s"}
	full := client.NodeStatus{Node: "b", State: "alive", Notes: []string{"its disk is full"}}
	uneven := func(policies ...string) []client.Imbalance {
		return []client.Imbalance{{Pool: "demo", MaxMean: 2.5, Policy: "power-of-two", Policies: policies}}
	}
	for name, c := range map[string]struct {
		app   func(a *client.AppStatus) // changes an application of two ready ranks
		nodes []client.NodeStatus
		want  string
	}{
		"all is well": {want: ""},
		"it is being started": {
			app: func(a *client.AppStatus) { setPhase(a, 0, state.Starting, "") },
		},
		"one restart": {
			app: func(a *client.AppStatus) {
				setPhase(a, 0, state.Backoff, "exit code 1")
				a.Units[0].Restarts = 1
			},
		},
		"many restarts, and ready again": {
			app: func(a *client.AppStatus) { a.Units[0].Restarts = 9 },
		},
		"a rank that has failed": {
			app: func(a *client.AppStatus) {
				setPhase(a, 1, state.Failed, "exit code 1\nhint: deploy again")
				a.Units[1].Attempt = 3
				a.Units[1].NextTry = time.Date(2026, 1, 1, 12, 5, 0, 0, time.UTC)
			},
			want: "`dpserve logs demo/0/1`, correct what it says, and deploy again: demo/0/1 failed 3 " +
				"times (exit code 1); it is tried again at 2026-01-01T12:05:00Z",
		},
		"the last line of one that has failed": {
			app: func(a *client.AppStatus) {
				setPhase(a, 1, state.Failed, "exit code 1")
				a.Units[1].LastEnd = &client.LastEnd{Cause: "exit code 1", Line: "no such\tmodel"}
			},
			want: "`dpserve logs demo/0/1`, correct what it says, and deploy again: demo/0/1 failed 1 time " +
				"(exit code 1); its last line: no such model",
		},
		"several that have failed": {
			app: func(a *client.AppStatus) {
				setPhase(a, 0, state.Failed, "")
				setPhase(a, 1, state.Failed, "")
			},
			want: "`dpserve logs demo/0/0`, correct what it says, and deploy again: demo/0/0 failed 1 time " +
				"(and 1 more like it)",
		},
		"a rank that is restarted again and again": {
			app: func(a *client.AppStatus) {
				setPhase(a, 1, state.Starting, "out of memory")
				a.Units[1].Restarts = 5
			},
			want: "`dpserve logs demo/0/1`: demo/0/1 was restarted 5 times (out of memory)",
		},
		"the last end of one that is restarted again and again": {
			app: func(a *client.AppStatus) {
				setPhase(a, 1, state.Starting, "")
				a.Units[1].Restarts = 5
				a.Units[1].LastEnd = &client.LastEnd{
					At: time.Date(2026, 1, 1, 12, 5, 0, 0, time.UTC), Exit: "code 1",
					Cause: "engine exited with code 1 after 2s", Line: "it is too large",
				}
			},
			want: "`dpserve logs demo/0/1`: demo/0/1 was restarted 5 times; it ended last at " +
				"2026-01-01T12:05:00Z: engine exited with code 1 after 2s; its last line: it is too large",
		},
		"no room": {
			app: func(a *client.AppStatus) {
				setPhase(a, 0, state.Pending, noRoom)
				setPhase(a, 1, state.Pending, noRoom)
			},
			want: "add nodes or slots, ask for fewer ranks, or delete an application: demo/0 finds no " +
				"room: 2 of 4 ranks can be placed (PACK)",
		},
		"no room, without a hint": {
			app: func(a *client.AppStatus) { setPhase(a, 0, state.Backoff, "place demo/0: nothing is free") },
			want: "start another node with `dpserve join`, or lower num_replicas: demo/0 finds no room: " +
				"nothing is free",
		},
		"an attached engine that does not answer": {
			app: func(a *client.AppStatus) {
				a.Kind = "attach"
				setPhase(a, 0, state.Fenced, "connection refused")
			},
			want: "start the engine of demo/0/0 at http://127.0.0.1:20000, or `dpserve ranks remove`: " +
				"connection refused",
		},
		"an ejected rank": {
			app:  func(a *client.AppStatus) { a.Units[1].Ranks[0].Ejected = true },
			want: "`dpserve logs demo/0/1`: its last answers failed",
		},
		"a full queue": {
			app: func(a *client.AppStatus) { a.Queued, a.MaxQueued = 1000, 1000 },
			want: "raise num_replicas of demo: 1000 requests wait, and a queue holds 1000; more are " +
				"refused",
		},
		"a queue with room": {
			app: func(a *client.AppStatus) { a.Queued, a.MaxQueued = 999, 1000 },
		},
		"silent events": {
			app: func(a *client.AppStatus) {
				a.Units[0].Ranks[0].KV = &client.KVStatus{
					Events: &client.EventStatus{State: client.EventsSilent},
				}
			},
			want: "`dpserve doctor`: no KV events come from demo/0/0 while requests complete",
		},
		"a lost node comes first": {
			app:   func(a *client.AppStatus) { setPhase(a, 1, state.Failed, "") },
			nodes: []client.NodeStatus{full, lost},
			want: "start dpserve on b again, or `dpserve nodes remove b`: it is lost (no renewal for " +
				"12s)",
		},
		"a node that does not answer": {
			app: func(a *client.AppStatus) {
				setPhase(a, 0, client.Unreachable, "node n1 is silent for 3s")
			},
			want: "look at node n1, its network and its dpserve: node n1 is silent for 3s",
		},
		"what a node says": {
			app:   func(a *client.AppStatus) { a.Imbalances = uneven("mex") },
			nodes: []client.NodeStatus{full}, want: "look at node b: its disk is full",
		},
		"uneven load": {
			app: func(a *client.AppStatus) { a.Imbalances = uneven("mex", "kv") },
			want: "write routing: {policy: mex} into the file of demo and deploy it: the load of its ranks " +
				"is uneven, max/mean 2.5",
		},
		"uneven load that no policy balances": {
			app: func(a *client.AppStatus) { a.Imbalances = uneven() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := demo(client.StatusRunning, 1, state.Ready, state.Ready)
			if c.app != nil {
				c.app(&a)
			}
			assert.Equal(t, c.want, nextStep([]client.AppStatus{a}, c.nodes))
		})
	}
	assert.Empty(t, nextStep(nil, nil))
}

// TestStatusTellsTheLastEnd of each unit in the wide table and in the JSON, also of a unit that is ready
// again.
func TestStatusTellsTheLastEnd(t *testing.T) {
	a := demo(client.StatusRunning, 1, state.Ready, state.Ready)
	a.Units[1].LastEnd = &client.LastEnd{
		At: time.Date(2026, 1, 1, 12, 5, 0, 0, time.UTC), Exit: "signal killed",
		Cause: "engine was ended by signal killed after 2s", Line: "so long",
	}
	a.Units[1].Ranks = append(a.Units[1].Ranks, a.Units[1].Ranks[0])
	for format, want := range map[string][]string{
		"table": {},
		"wide": {
			"LAST-END", "2026-01-01T12:05:00Z: engine was ended by signal killed after 2s; its last line: " +
				"so long", "as above",
		},
		"json": {`"last_end": {`, `"exit": "signal killed"`, `"line": "so long"`},
	} {
		c := newCLI(t)
		c.cluster.script = [][]client.AppStatus{{a}}
		require.Zero(t, c.run([]string{"status", "-o", format}), c.stderr())
		for _, text := range want {
			assert.Contains(t, c.stdout(), text, format)
		}
		assert.Equal(t, len(want) > 0, strings.Contains(c.stdout(), "signal killed"), format)
	}
	view := statusView{now: a.Units[1].LastEnd.At.Add(3 * time.Minute), relative: true}
	assert.Equal(t, []string{
		"-", "3m ago: engine was ended by signal killed after 2s; its last line: so long", "as above",
	}, view.lastEnds(rankRows([]client.AppStatus{a})))
}

// setPhase gives the unit of a rank another phase and a reason.
func setPhase(a *client.AppStatus, unit int, phase state.Phase, reason string) {
	u := &a.Units[unit]
	u.Phase, u.Reason = string(phase), reason
	u.Ranks[0].Phase = u.Phase
}

// TestStatusEndsWithTheNextStep: it is the last line, and a field of the JSON; without need there is none.
func TestStatusEndsWithTheNextStep(t *testing.T) {
	c := newCLI(t)
	well := demo(client.StatusRunning, 1, state.Ready)
	c.cluster.script = [][]client.AppStatus{{well}}
	require.Zero(t, c.run([]string{"status"}), c.stderr())
	assert.NotContains(t, c.stdout(), "next:")

	failed := demo(client.StatusDeployFailed, 1, state.Failed)
	failed.Units[0].Attempt = 3
	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{failed}}
	require.Zero(t, c.run([]string{"status"}), c.stderr())
	assert.Regexp(t, "\n\nnext: `dpserve logs demo/0/0`, .*failed 3 times\n$", c.stdout())

	c = newCLI(t)
	c.cluster.script = [][]client.AppStatus{{failed}}
	require.Zero(t, c.run([]string{"status", "-o", "json"}), c.stderr())
	assert.Contains(t, c.stdout(), `"next": "`+"`dpserve logs demo/0/0`, ")
}
