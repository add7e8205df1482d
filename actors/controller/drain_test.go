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

func (c *fleet) drain(node string, by time.Time) {
	d := &state.DrainNode{Node: node}
	if !by.IsZero() {
		d.By = by.UnixMilli()
	}
	_, err := c.apply(state.Command{DrainNode: d})
	require.NoError(c.t, err)
	c.step(TimerFired{})
}

func (c *fleet) undrain(node string) {
	_, err := c.apply(state.Command{DrainNode: &state.DrainNode{Node: node, Undo: true}})
	require.NoError(c.t, err)
	c.step(TimerFired{})
}

func (c *fleet) nodeState(id string) (string, string) {
	s := view{c.core}.nodeStatus(c.now, c.state.Nodes[id], "a")
	return s.State, s.Reason
}

func (c *fleet) ready(app string) int {
	for _, s := range (view{c.core}).Status() {
		if s.Name == app {
			return s.Ready
		}
	}
	return 0
}

// TestUnitInBackoffLeavesADrainingNode: it does not wait for minutes, because the node is left anyway.
func TestUnitInBackoffLeavesADrainingNode(t *testing.T) {
	c := newFleet(t, newHost("a", 1))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	c.hosts["a"].broken = true
	c.hosts["a"].crash("chat/0/0")
	c.run(5 * time.Minute)
	require.Equal(t, state.Backoff, c.phase("chat/0/0"))
	c.join(newHost("b", 1))
	require.Greater(t, c.core.units["chat/0/0"].m.Due.Sub(c.now), time.Minute)
	c.drain("a", time.Time{})
	c.renew("b")
	assert.Equal(t, "b:0", c.where("chat/0/0"))
	assert.Equal(t, "RUNNING", c.status("chat"))
	word, _ := c.nodeState("a")
	assert.Equal(t, "drained", word)
}

// One unit of each application moves at a time, and both applications at once.
func TestDrainMovesOneUnitAtATime(t *testing.T) {
	c := newFleet(t, newHost("a", 5), newHost("b", 9))
	c.deploy(sim("chat", 3, app.Independent))
	c.deploy(sim("moe", 2, app.Lockstep))
	c.renew("a", "b")
	require.Equal(t, "a:2", c.where("chat/0/2"))
	require.Equal(t, "a:0,1", c.where("moe/0"))
	c.takeTrace()
	c.drain("a", time.Time{})
	assert.Equal(t, []string{
		"chat/0/0: ready → draining", "stop chat/0/0 epoch 1 on a, grace 30s", "moe/0: ready → draining",
		"stop moe/0 epoch 1 on a, grace 30s",
		"chat: RUNNING → UNHEALTHY", "moe: RUNNING → UNHEALTHY",
	}, c.takeTrace())
	word, why := c.nodeState("a")
	assert.Equal(t, "draining", word)
	assert.Equal(t, "chat/0/1 waits on draining node a until chat/0/0 is ready", why)
	for i := range 3 {
		unit := fmt.Sprint("chat/0/", i)
		require.Equal(t, state.Draining, c.phase(unit))
		require.Equal(t, 2, c.ready("chat"))
		c.drained(unit)
		c.renew("b")
		require.Contains(t, c.where(unit), "b:")
	}
	c.drained("moe/0")
	c.renew("b")
	assert.Equal(t, "b:0,1", c.where("moe/0"), "whole")
	assert.Equal(t, "RUNNING", c.status("chat"))
	assert.Equal(t, "RUNNING", c.status("moe"))
	word, why = c.nodeState("a")
	assert.Equal(t, "drained", word)
	assert.Empty(t, why)
	assert.Equal(t, uint64(2), c.state.Epochs["chat/0/0"])
	c.undrain("a")
	c.run(time.Minute)
	assert.Equal(t, uint64(2), c.state.Epochs["chat/0/0"], "nothing moves back")
}

// A node is drained once it can be removed: the release of its last unit is in the state.
func TestDrainedMeansReleased(t *testing.T) {
	c := newFleet(t, newHost("a", 1), newHost("b", 1))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	c.drain("a", time.Time{})
	var release Effect
	c.auto = func(_ *world, e Effect) bool {
		if _, isRelease := e.(ReleaseEffect); isRelease {
			release = e
		}
		return release != nil
	}
	c.drained("chat/0/0")
	require.NotNil(t, release)
	word, why := c.nodeState("a")
	assert.Equal(t, "draining", word)
	assert.Equal(t, "chat/0/0 has ended and is being released", why)
	require.ErrorIs(t, c.state.CheckRemoval("a"), state.ErrUnitsLeft)
	c.auto = nil
	c.do(release)
	c.renew("a", "b")
	word, _ = c.nodeState("a")
	assert.Equal(t, "drained", word)
	require.NoError(t, c.state.CheckRemoval("a"))
}

// A node that drains, or has nothing left, and is dead is not shown as if it were there.
func TestDrainingNodeThatIsSilentIsShownSo(t *testing.T) {
	c := newFleet(t, newHost("a", 1), newHost("b", 0), newHost("c", 0))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	c.drain("a", time.Time{})
	c.drain("b", time.Time{})
	shown := func() []string {
		a, _ := c.nodeState("a")
		b, _ := c.nodeState("b")
		return []string{a, b}
	}
	c.renew("a", "b", "c")
	assert.Equal(t, []string{"draining", "drained"}, shown())
	c.cut(true, "a", "b")
	c.run(6 * time.Second)
	assert.Equal(t, []string{"silent", "silent"}, shown())
	_, why := c.nodeState("b")
	assert.Contains(t, why, "it has not renewed its lease for 6s")
	c.newLeader()
	assert.Equal(t, []string{"unknown", "unknown"}, shown())
	c.cut(false, "a", "b")
	c.renew("a", "b")
	assert.Equal(t, []string{"draining", "drained"}, shown())
}

func TestDrainLeavesWhatFindsNoRoom(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.deploy(sim("big", 4, app.Lockstep))
	c.deploy(sim("small", 2, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "a:0,1,2,3", c.where("big/0"))
	c.takeTrace()
	c.drain("a", time.Time{})
	c.run(20 * time.Second)
	assert.Zero(t, c.saw("stop"))
	assert.Equal(t, "RUNNING", c.status("big"))
	_, why := c.nodeState("a")
	assert.Contains(t, why, "big/0 stays on draining node a: place big/0: 2 of 4 ranks can be placed (PACK)")
	assert.Contains(t, view{c.core}.Status()[0].Units[0].Reason, "stays on draining node a")
	c.join(newHost("c", 4))
	c.drained("big/0")
	c.renew("c")
	assert.Equal(t, "c:0,1,2,3", c.where("big/0"))
	assert.Equal(t, "RUNNING", c.status("big"))
}

// The first unit's new room is reserved while it drains.
func TestTwoUnitsThatMoveDoNotCountOnTheSameRoom(t *testing.T) {
	c := newFleet(t, newHost("a", 4))
	c.deploy(sim("x", 2, app.Lockstep))
	c.deploy(sim("y", 2, app.Lockstep))
	c.renew("a")
	c.join(newHost("b", 2))
	c.drain("a", time.Time{})
	require.Equal(t, state.Draining, c.phase("x/0"))
	assert.Equal(t, state.Ready, c.phase("y/0"))
	c.run(10 * time.Second)
	assert.Equal(t, state.Ready, c.phase("y/0"))
	c.deploy(sim("z", 1, app.Lockstep))
	assert.Equal(t, state.Pending, c.phase("z/0"), "nor does who comes")
	c.drained("x/0")
	c.renew("b")
	assert.Equal(t, "b:0,1", c.where("x/0"))
	assert.Equal(t, "RUNNING", c.status("x"))
	assert.Equal(t, "RUNNING", c.status("y"))
}

func TestDrainWithADeadline(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "a:0", c.where("chat/0/0"))
	c.takeTrace()
	c.drain("a", c.now.Add(100*time.Second))
	assert.Equal(t, 1, c.saw("stop chat/0/0 epoch 1 on a, grace 1m40s"))
	c.run(100 * time.Second)
	assert.Equal(t, 1, c.saw("stop chat/0/1 epoch 1 on a, grace 0s"), "late: no waiting for the other")
	assert.Equal(t, "b:1", c.where("chat/0/1"))
}

func TestDrainOverALeaderChange(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.deploy(sim("chat", 3, app.Independent))
	c.renew("a", "b")
	c.drain("a", time.Time{})
	c.renew("a")
	require.Equal(t, state.Draining, c.phase("chat/0/0"))
	c.newLeader()
	assert.Equal(t, 3, c.ready("chat"), "it has not heard of the drain yet")
	c.renew("b", "a")
	assert.Equal(t, 2, c.ready("chat"), "and starts no second one")
	c.drained("chat/0/0")
	c.run(3 * time.Second)
	assert.Equal(t, "b:0", c.where("chat/0/0"))
	assert.Equal(t, state.Draining, c.phase("chat/0/1"))
}

// A unit that fails meanwhile starts elsewhere.
func TestDrainMovesWhatIsNotReadyAtOnce(t *testing.T) {
	a := newHost("a", 4)
	a.slow = true
	c := newFleet(t, a, newHost("b", 4))
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a")
	a.up("chat/0/1")
	a.crash("chat/0/1")
	c.renew("a")
	require.Equal(t, state.Starting, c.phase("chat/0/0"))
	require.Equal(t, state.Backoff, c.phase("chat/0/1"))
	c.drain("a", time.Time{})
	c.run(5 * time.Second)
	assert.Equal(t, "b:0", c.where("chat/0/0"))
	assert.Equal(t, "b:1", c.where("chat/0/1"))
	assert.Equal(t, "RUNNING", c.status("chat"))
	word, _ := c.nodeState("a")
	assert.Equal(t, "drained", word)
}

// Attached engines stay where they are; their replicas move.
func TestDrainMovesAttachedRanks(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	e := attachedTo("http://1", "http://2")
	e.Engine.Ranks[1].Node = "a"
	c.deploy(e)
	c.renew("a", "b")
	require.Equal(t, "a:1", c.where("ext/0/1"))
	other := c.where("ext/0/0")
	c.drain("a", time.Time{})
	if other == "a:0" {
		c.drained("ext/0/0")
	}
	c.renew("b")
	assert.Equal(t, "b:0", c.where("ext/0/0"))
	assert.Equal(t, state.Ready, c.phase("ext/0/1"))
	_, why := c.nodeState("a")
	assert.Contains(t, why, "ext/0/1 stays on draining node a: place ext/0: node a is not there")
}
