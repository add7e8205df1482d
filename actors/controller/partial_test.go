package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

func groups(name string, n, dp int) *app.Application {
	a := sim(name, dp, app.Lockstep)
	a.NumGroups, a.NumReplicas = n, n*dp
	a.PlacementGroupStrategy = "STRICT_PACK"
	return a
}

// What fits runs. The third gang waits, and starts when a node joins.
func TestRG7ThreeGangsOnTenSlots(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 6))
	c.deploy(groups("moe", 3, 4))
	c.run(4 * time.Second)
	assert.Equal(t, "DEPLOYING", c.status("moe"))
	assert.Equal(t, 8, c.ready("moe"))
	assert.Equal(t, state.Pending, c.phase("moe/2"))
	assert.Contains(t, c.core.Status()[0].Message,
		"moe/2 is pending: place moe/2: 2 of 4 ranks can be placed")
	c.join(newHost("c", 4))
	c.renew("c")
	assert.Equal(t, 12, c.ready("moe"))
	assert.Equal(t, "RUNNING", c.status("moe"))
	assert.Equal(t, uint64(1), c.state.Epochs["moe/0"])
}

func TestNodeThatJoinsGivesFailedUnitsAnotherChance(t *testing.T) {
	a := newHost("a", 1)
	a.slow = true
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	for range 3 {
		a.crash("chat/0/0")
		c.run(3 * time.Second)
	}
	require.Equal(t, state.Failed, c.phase("chat/0/0"))
	a.cut = true
	c.run(15 * time.Second)
	a.cut = false
	c.run(5 * time.Second)
	require.Equal(t, state.Failed, c.phase("chat/0/0"), "a node that comes back is no new one")
	c.join(newHost("b", 1))
	assert.Equal(t, state.Starting, c.phase("chat/0/0"))
	assert.Equal(t, 1, c.state.Units["chat/0/0"].Attempt)
}

// The app goes from 4 to 2 to 8 groups; groups that stay keep their epoch.
func TestPL3WholeGroupsOnly(t *testing.T) {
	c := newFleet(t, newHost("a", 12), newHost("b", 12), newHost("c", 12))
	for _, n := range []int{4, 2, 8} {
		c.deploy(groups("moe", n, 4))
		for i := n; i < 8; i++ {
			c.drained(fmt.Sprint("moe/", i))
		}
		c.run(2 * time.Second)
		require.Equal(t, "RUNNING", c.status("moe"))
		require.Equal(t, n*4, c.ready("moe"))
		require.Len(t, c.state.Units, n)
		for id, rec := range c.state.Units {
			require.Len(t, rec.Ranks, 4, id)
		}
		require.Equal(t, uint64(1), c.state.Epochs["moe/0"])
		require.Equal(t, uint64(1), c.state.Epochs["moe/1"])
	}
	assert.Equal(t, uint64(2), c.state.Epochs["moe/2"])
}

// Two groups of 8 over two nodes of 8, then one group of 16.
func TestRG1RanksInConsecutiveBlocks(t *testing.T) {
	for range 20 {
		c := newFleet(t, newHost("a", 8), newHost("b", 8))
		c.deploy(groups("moe", 2, 8))
		c.renew("a", "b")
		require.Equal(t, "a:0,1,2,3,4,5,6,7", c.where("moe/0"))
		require.Equal(t, "b:0,1,2,3,4,5,6,7", c.where("moe/1"))
		c.delete("moe")
		c.drained("moe/0")
		c.drained("moe/1")
		c.deploy(sim("big", 16, app.Lockstep))
		c.renew("a", "b")
		require.Equal(t, "a:0,1,2,3,4,5,6,7 b:8,9,10,11,12,13,14,15", c.where("big/0"))
		require.Equal(t, "RUNNING", c.status("big"))
	}
}
