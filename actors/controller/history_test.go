package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// eventsOf returns the changes among effects, without those of applications.
func eventsOf(effects []Effect) (out []Event) {
	for _, e := range effects {
		if c, ok := e.(ChangeEffect); ok && (c.Unit != "" || c.Node != "") {
			out = append(out, c.Event)
		}
	}
	return out
}

// What happens to nodes is an event, and a new leader begins with what the state says of each unit.
func TestEventsOfNodesAndOfANewLeader(t *testing.T) {
	c := newFleet(t, newHost("a", 4))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	rec := c.state.Units["chat/0/0"]

	leader := NewCore(c.timers)
	assert.Equal(t, []Event{{
		At: time.UnixMilli(rec.Since), Former: true, App: "chat", Pool: "chat", Unit: "chat/0/0", Epoch: 1,
		To: "ready",
	}}, eventsOf(leader.Step(c.now, StateSeen{c.state.Clone()})))

	ref := &state.NodeRef{Node: "b", UID: "uid-b", Reason: "silent for 12s"}
	b := newHost("b", 4).node
	b.UID = ref.UID
	for _, step := range []struct {
		name                     string
		cmd                      state.Command
		from, to, reason, action string
	}{
		{
			"joins",
			state.Command{PutNode: &state.PutNode{Node: b}},
			"", "alive", "", "may place ranks on it",
		},
		{
			"drains",
			state.Command{DrainNode: &state.DrainNode{Node: "b"}},
			"alive", "draining", "", "moves its ranks to other nodes",
		},
		{
			"is lost",
			state.Command{NodeLost: ref},
			"draining", "lost", ref.Reason, "starts its ranks on other nodes",
		},
		{"is back", state.Command{NodeBack: ref}, "lost", "draining", "", "moves its ranks to other nodes"},
		{
			"may stay",
			state.Command{DrainNode: &state.DrainNode{Node: "b", Undo: true}},
			"draining", "alive", "", "may place ranks on it",
		},
	} {
		next := c.state.Clone()
		_, err := next.Apply(next.Index+1, &step.cmd)
		require.NoError(t, err, step.name)
		c.state = next
		events := eventsOf(leader.Step(c.now, StateSeen{next.Clone()}))
		if assert.Len(t, events, 1, step.name) {
			assert.Equal(t, Event{
				At: c.now, Node: "b", From: step.from, To: step.to, Reason: step.reason,
			}, events[0], step.name)
			assert.Equal(t, step.action, events[0].Action(), step.name)
		}
	}
}

// Every phase of a unit and every status of an application but RUNNING says what dpserve does.
func TestEveryChangeHasAnAction(t *testing.T) {
	for _, p := range []state.Phase{
		state.Pending, state.Starting, state.Ready, state.Fenced, state.Killing, state.Draining,
		state.Backoff, state.Failed, state.Gone,
	} {
		assert.NotEmpty(t, (&Event{Unit: "u", To: string(p)}).Action(), p)
	}
	for _, s := range []state.AppStatus{
		state.Deploying, state.Unhealthy, state.DeployFailed, state.Deleting,
	} {
		assert.NotEmpty(t, (&Event{App: "a", To: string(s)}).Action(), s)
	}
	assert.Empty(t, (&Event{App: "a", To: string(state.Running)}).Action())
}
