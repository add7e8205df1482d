package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// HF40: Each rank starts elsewhere when it has ended, while another one drains for half an hour.
func TestRanksOfAStoppingNodeStartElsewhere(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.deploy(sim("chat", 3, app.Independent))
	c.renew("a", "b")
	require.Equal(t, "a:0", c.where("chat/0/0"))
	c.hosts["a"].close()
	c.renew("a")
	for _, unit := range []string{"chat/0/0", "chat/0/1"} {
		before := c.now
		c.hosts["a"].gone(unit)
		c.renew("a", "b")
		assert.Equal(t, "b", c.state.Units[unit].Ranks[0].Node)
		assert.Equal(t, state.Ready, c.phase(unit))
		assert.Equal(t, before, c.now)
	}
	word, why := c.nodeState("a")
	assert.Equal(t, "stopping", word)
	assert.Equal(t, "chat/0/2 is draining", why)
	c.takeTrace()
	c.run(30 * time.Minute)
	assert.Empty(t, c.takeTrace(), "nothing is ordered from the node that stops, and nothing moves")
	assert.Equal(t, "a:2", c.where("chat/0/2"), "its stream goes on")
	c.drained("chat/0/2")
	c.renew("b")
	assert.Equal(t, "RUNNING", c.status("chat"))
	word, why = c.nodeState("a")
	assert.Equal(t, "stopping", word)
	assert.Empty(t, why)
	assert.Zero(t, c.core.units["chat/0/0"].m.Failures)

	c.hosts["a"].restart()
	c.renew("a")
	word, _ = c.nodeState("a")
	assert.Equal(t, "alive", word)
	c.deploy(sim("more", 2, app.Independent))
	assert.Equal(t, "a:0", c.where("more/0/0"), "the next process of the node is like any other")
}

// HF40: The order was on its way when the node was told to end. That is neither a failed start nor a missing
// answer.
func TestStartMeetsANodeThatStops(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.hosts["a"].stopping = true
	c.deploy(sim("chat", 1, app.Independent))
	assert.Equal(t, "b:0", c.where("chat/0/0"))
	assert.Equal(t, 1, c.saw("start chat/0/0 epoch 1 on a"))
	assert.Equal(t, 1, c.saw("grant chat/0/0 attempt 1 on b"))
	assert.Zero(t, c.saw("restart"))
}

// HF40: The units wait, say why, and start on the node's next process.
func TestNoRoomBesideANodeThatStops(t *testing.T) {
	c := newFleet(t, newHost("a", 2), newHost("b", 1))
	c.deploy(sim("chat", 3, app.Independent))
	c.renew("a", "b")
	c.hosts["b"].close()
	c.hosts["a"].close()
	c.renew("a", "b")
	c.drained("chat/0/0")
	c.drained("chat/0/1")
	c.drained("chat/0/2")
	for _, u := range (view{c.core}).Status()[0].Units {
		assert.Equal(t, "pending", u.Phase)
		assert.Contains(t, u.Reason, "0 of 3 ranks can be placed")
	}
	_, err := planOf(c.core.withStoppingAsDraining(c.state), nil,
		[]*app.Application{sim("more", 1, app.Independent)}, false)
	require.NoError(t, err)
	c.hosts["a"].restart()
	c.hosts["b"].restart()
	c.renew("a", "b")
	c.renew("a", "b")
	assert.Equal(t, "RUNNING", c.status("chat"))
}

// The gang's other nodes drain as well, and the gang starts anew when all parts have ended.
func TestGangWithAStoppingNodeDrainsWhole(t *testing.T) {
	c := newFleet(t, newHost("a", 2), newHost("b", 2), newHost("c", 4))
	moe := sim("moe", 4, app.Lockstep)
	moe.MaxRanksPerNode = 2
	c.deploy(moe)
	c.renew("a", "b", "c")
	require.Equal(t, "a:0,1 b:2,3", c.where("moe/0"))
	c.takeTrace()
	c.hosts["a"].close()
	c.renew("a")
	assert.Equal(t, 1, c.saw("stop moe/0 epoch 1 on b, grace 30s"))
	c.renew("a", "b")
	c.hosts["a"].gone("moe/0")
	c.renew("a")
	assert.Equal(t, "a:0,1 b:2,3", c.where("moe/0"), "b still has its part")
	c.hosts["b"].gone("moe/0")
	c.renew("b", "c")
	assert.Equal(t, "b:0,1 c:2,3", c.where("moe/0"))
	c.renew("b", "c")
	assert.Equal(t, "RUNNING", c.status("moe"))
}

// The new leader learns it from the first report.
func TestStoppingNodeUnderANewLeader(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 4))
	c.deploy(sim("chat", 2, app.Independent))
	c.renew("a", "b")
	c.hosts["a"].close()
	c.renew("a")
	c.newLeader()
	c.renew("b", "a")
	c.drained("chat/0/1")
	c.renew("b")
	assert.Equal(t, "b:1", c.where("chat/0/1"))
	assert.Equal(t, "a:0", c.where("chat/0/0"))
}

// HF42: The first end of the process is free. Before the third start there is a pause; then the unit has
// failed.
func TestUnitThatTakesItsNodeDown(t *testing.T) {
	c := newFleet(t, newHost("a", 4))
	c.deploy(sim("good", 2, app.Independent))
	c.renew("a")
	require.Equal(t, "RUNNING", c.status("good"))
	c.hosts["a"].slow = true
	c.deploy(sim("bad", 1, app.Independent))
	c.renew("a")
	dies := func() { // of bad/0/0; the good units become ready before that
		require.NotZero(t, c.hosts["a"].runs["bad/0/0"])
		c.hosts["a"].restart()
		c.renew("a")
		for _, u := range []string{"good/0/0", "good/0/1"} {
			c.hosts["a"].up(u)
		}
		c.renew("a")
		require.Equal(t, "RUNNING", c.status("good"))
	}
	dies()
	assert.Equal(t, state.Starting, c.phase("bad/0/0"), "one end of a node is no reason to wait")
	dies()
	assert.Equal(t, state.Backoff, c.phase("bad/0/0"))
	assert.Equal(t, "RUNNING", c.status("good"))
	c.pass(2 * time.Second)
	c.renew("a")
	require.Equal(t, state.Starting, c.phase("bad/0/0"))
	dies()
	assert.Equal(t, state.Failed, c.phase("bad/0/0"))
	assert.Equal(t, "dpserve was started again on node a, while the unit was starting",
		c.state.Units["bad/0/0"].Reason)
	c.run(state.DefaultFailedRetry * 3 / 4)
	assert.Equal(t, uint64(3), c.state.Epochs["bad/0/0"], "not soon")
	assert.Equal(t, "RUNNING", c.status("good"))
	assert.Empty(t, c.core.avoided, "the node is not to blame")
}

// HF42: The other units start as slowly. Which unit was the cause shows when each makes its last attempt
// alone.
func TestUnitsBesideOneThatTakesTheNodeDown(t *testing.T) {
	for _, bad := range []string{"chat/0/0", "chat/0/1", "chat/0/2"} {
		for _, newLeader := range []bool{false, true} { // the leader is on the node that ends
			c := newFleet(t, newHost("a", 4))
			c.hosts["a"].slow = true
			c.deploy(sim("chat", 3, app.Independent))
			for range 100 {
				c.run(2 * time.Second)
				if c.hosts["a"].runs[bad] != 0 {
					c.hosts["a"].restart()
					if newLeader {
						c.newLeader()
					}
				} else {
					for u := range c.hosts["a"].runs {
						if !c.hosts["a"].ready[u] {
							c.hosts["a"].up(u)
						}
					}
				}
			}
			for _, u := range []string{"chat/0/0", "chat/0/1", "chat/0/2"} {
				want := state.Ready
				if u == bad {
					want = state.Failed
				}
				assert.Equal(t, want, c.phase(u), "%s, %s takes the node down", u, bad)
			}
			assert.Equal(t, uint64(3), c.state.Epochs[bad])
		}
	}
}

// HF42: A node that is told to end during a start, again and again, and one that is killed once.
func TestStoppedNodesFailNothing(t *testing.T) {
	for _, reports := range []bool{true, false} { // whether its last report is lost
		c := newFleet(t, newHost("a", 4))
		c.hosts["a"].slow = true
		c.deploy(sim("chat", 2, app.Independent))
		for range 10 {
			c.run(10 * time.Second)
			c.hosts["a"].close()
			if reports {
				c.renew("a")
			}
			c.hosts["a"].restart()
		}
		c.run(10 * time.Second)
		assert.Equal(t, state.Starting, c.phase("chat/0/0"))
		assert.Equal(t, 1, c.core.units["chat/0/0"].m.Attempt)
		c.hosts["a"].restart() // killed
		c.run(time.Second)
		assert.Equal(t, state.Starting, c.phase("chat/0/0"))
		c.hosts["a"].up("chat/0/0")
		c.hosts["a"].up("chat/0/1")
		c.run(time.Second)
		assert.Equal(t, "RUNNING", c.status("chat"))
	}
}

// For users the refusal is problem.Unavailable.
func TestRefusalOfANodeThatStopsIsNoSilence(t *testing.T) {
	assert.False(t, isNoAnswer(problem.New(problem.Unavailable, "node a: %w", msg.ErrNodeStopping)))
	assert.True(t, isNoAnswer(problem.New(problem.Unavailable, "node a: no lease")))
}
