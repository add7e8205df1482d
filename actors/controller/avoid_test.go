package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// HF50: Hundred ranks that end at one moment do not start at one.
func TestRestartsAreSpread(t *testing.T) {
	c := newFleet(t, newHost("a", 100))
	c.deploy(sim("chat", 100, app.Independent))
	c.renew("a")
	for _, u := range c.core.unitIDs() {
		c.hosts["a"].crash(u)
	}
	c.renew("a")
	due := map[time.Duration]int{}
	for _, u := range c.core.units {
		due[u.m.Due.Sub(c.now).Truncate(25*time.Millisecond)]++
	}
	assert.Len(t, due, 10, "parts of the last quarter of a second")
	for part, n := range due {
		assert.Less(t, n, 25, part)
	}
}

// failsOnA is a cluster in which nothing starts on node a any more.
func failsOnA(t *testing.T, hosts ...*host) *fleet {
	c := newFleet(t, hosts...)
	c.hosts["a"].broken = true
	return c
}

// TestHF51UnitsLeaveANodeOnWhichTheyDoNotStart after the second failed start, at a first deploy and after
// they served. The node says why it is avoided, in status, nodes and plan; nothing is avoided for ever.
func TestHF51UnitsLeaveANodeOnWhichTheyDoNotStart(t *testing.T) {
	chat := sim("chat", 2, app.Independent)
	for name, prepare := range map[string]func() *fleet{
		"first deploy": func() *fleet {
			c := failsOnA(t, newHost("a", 2), newHost("b", 4))
			c.deploy(chat)
			return c
		},
		"after they served": func() *fleet {
			c := newFleet(t, newHost("a", 2), newHost("b", 4))
			c.deploy(chat)
			c.renew("a")
			require.Equal(t, "RUNNING", c.status("chat"))
			c.hosts["a"].broken = true
			c.hosts["a"].crash("chat/0/0")
			c.hosts["a"].crash("chat/0/1")
			return c
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := prepare()
			require.Equal(t, "a:0", c.where("chat/0/0"))
			c.run(12 * time.Second)
			require.Equal(t, "b:0", c.where("chat/0/0"))
			require.Equal(t, "b:1", c.where("chat/0/1"))
			require.Equal(t, "RUNNING", c.status("chat"))
			require.Equal(t, 2, c.saw("grant chat/0/0 attempt 1 on a")+c.saw("grant chat/0/0 attempt 2 on a")-
				c.saw("chat/0/0: ready → fenced"), "two starts there")

			until := c.core.avoided["chat"]["a"].until.UTC().Format(time.RFC3339)
			line := "avoided for chat until " + until + ": start 2 of chat/0/"
			status, nodes := view{c.core}.Status()[0].Message, view{c.core}.Nodes(c.now, "a")
			assert.Contains(t, status, "node a is "+line)
			assert.Contains(t, status, " failed there: no such folder")
			require.Len(t, nodes[0].Notes, 1)
			assert.Contains(t, nodes[0].Notes[0], line)
			assert.Empty(t, nodes[1].Notes)
			more := sim("chat", 4, app.Independent)
			plan, err := planOf(c.state, c.core.avoided, []*app.Application{more}, false)
			require.NoError(t, err)
			assert.Contains(t, plan.Nodes[0].Note, line)
			assert.Empty(t, plan.Nodes[1].Note)
			assert.Equal(t, "b", plan.Apps[0].Units[3].Seats[0].Node)
			other := *more
			other.Model.Source = "other"
			plan, err = planOf(c.state, c.core.avoided, []*app.Application{&other}, false)
			require.NoError(t, err)
			assert.Empty(t, plan.Nodes[0].Note, "something else may start there")

			c.run(avoidFor)
			assert.Empty(t, view{c.core}.Status()[0].Message)
			assert.Empty(t, c.core.avoided.nodesOf(c.core.apps["chat"], ""))
			assert.Equal(t, "b:0", c.where("chat/0/0"), "nothing moves back")
		})
	}
}

// HF51: Where no other node has room a unit stays, and a group leaves only the node that said that it failed.
func TestAvoidedNodesAreTakenWithoutOtherRoom(t *testing.T) {
	c := failsOnA(t, newHost("a", 2), newHost("b", 1))
	c.deploy(sim("chat", 3, app.Independent))
	c.run(time.Minute)
	assert.Equal(t, []string{"a:0", "a:1", "b:2"}, []string{
		c.where("chat/0/0"), c.where("chat/0/1"), c.where("chat/0/2"),
	}, "no room on b")
	c.hosts["a"].broken = false
	c.run(state.DefaultFailedRetry)
	assert.Equal(t, "RUNNING", c.status("chat"))
	assert.Empty(t, c.core.avoided["chat"], "a start there is ready")

	c = failsOnA(t, newHost("a", 2), newHost("b", 2))
	c.hosts["b"].broken = true
	c.deploy(sim("chat", 1, app.Independent))
	at := map[string]int{}
	for range 40 {
		c.run(time.Minute)
		at[c.where("chat/0/0")]++
	}
	assert.Len(t, at, 2, "both nodes are tried")
	assert.NotContains(t, view{c.core}.Status()[0].Message, "avoided", "there is no other node")

	c = failsOnA(t, newHost("a", 2), newHost("b", 2), newHost("c", 2))
	c.deploy(sim("moe", 4, app.Lockstep))
	require.Equal(t, "a:0,1 b:2,3", c.where("moe/0"))
	c.run(10 * time.Second)
	assert.Equal(t, "b:0,1 c:2,3", c.where("moe/0"))
	assert.Equal(t, "RUNNING", c.status("moe"))
	assert.NotContains(t, view{c.core}.Status()[0].Message, "node b")
}

// HF51: The marks are bounded by what there is: they end with their time, and with the application.
func TestAvoidancesEnd(t *testing.T) {
	c := failsOnA(t, newHost("a", 2), newHost("b", 0))
	for i := range 3 {
		name := fmt.Sprint("chat", i)
		c.deploy(sim(name, 1, app.Independent))
		c.run(10 * time.Second)
		require.Equal(t, "DEPLOY_FAILED", c.status(name))
		require.Len(t, c.core.avoided, 1)
		c.delete(name)
		c.run(10 * time.Second)
		require.Empty(t, c.core.avoided)
	}
	marks := avoidances{"chat": {"a": {until: start.Add(avoidFor)}, "b": {until: start.Add(time.Second)}}}
	marks.drop(start.Add(time.Second))
	assert.Len(t, marks["chat"], 1)
	marks.drop(start.Add(-24 * time.Hour))
	assert.Empty(t, marks["chat"], "the clock was set back by a day")
}
