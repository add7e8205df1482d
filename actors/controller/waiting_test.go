package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// waitingAt is what a node's renewal tells it of applications without room.
func (c *fleet) waitingAt(t *testing.T, node string) []msg.Waiting {
	t.Helper()
	c.renew(node)
	require.NoError(t, c.lease[node].Err)
	return c.lease[node].Lease.Waiting
}

func TestLeaseTellsIngressesWhichUnitsFindNoRoom(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 6))
	worker := newHost("w", 0)
	worker.node.Roles = []state.Role{state.RoleWorker}
	c.join(worker)
	assert.Empty(t, c.waitingAt(t, "a"))
	c.deploy(groups("moe", 3, 4))
	c.run(4 * time.Second)
	want := []msg.Waiting{{App: "moe", Revision: 1,
		Reason: "place moe/2: 2 of 4 ranks can be placed (STRICT_PACK)",
		Units:  map[string]uint64{"moe/2": 0}}}
	assert.Equal(t, want, c.waitingAt(t, "a"))
	assert.Equal(t, want, c.waitingAt(t, "b"))
	assert.Nil(t, c.waitingAt(t, "w"), "it has no ingress")

	c.newLeader()
	c.run(4 * time.Second)
	assert.Equal(t, want, c.waitingAt(t, "a"), "the next leader finds the same")
	c.join(newHost("c", 4))
	c.run(4 * time.Second)
	assert.Empty(t, c.waitingAt(t, "a"))
	assert.Equal(t, "RUNNING", c.status("moe"))
}

// A unit that waits for its next start has its seat, and requests wait for it.
func TestUnitInBackoffDoesNotWaitForRoom(t *testing.T) {
	a := newHost("a", 1)
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	a.crash("chat/0/0")
	c.renew("a")
	require.Equal(t, state.Backoff, c.phase("chat/0/0"))
	assert.Empty(t, c.waitingAt(t, "a"))
	c.delete("chat")
	c.run(4 * time.Second)
	assert.Empty(t, c.waitingAt(t, "a"))
}

// A unit that lost its node is listed with its last epoch.
func TestUnitOfALostNodeWaitsWithItsEpoch(t *testing.T) {
	a, b := newHost("a", 1), newHost("b", 0)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a", "b")
	a.cut = true
	c.run(15 * time.Second)
	list := c.waitingAt(t, "b")
	require.Len(t, list, 1)
	assert.Equal(t, map[string]uint64{"chat/0/0": 1}, list[0].Units)
	c.delete("chat")
	c.run(4 * time.Second)
	assert.Empty(t, c.waitingAt(t, "b"))
}

func TestUnitsWithoutRoomInALeaseAreBounded(t *testing.T) {
	c := NewCore(Timers{})
	c.state = state.New()
	for _, name := range []string{"one", "two"} {
		a := &application{name: name, units: sim(name, maxWaiting*2/3, app.Independent).Units()}
		for i := range a.units {
			u := newUnit(a.units[i].ID, name, 0, nil)
			u.m.Phase, u.noRoom = state.Pending, "no room; node a: full"
			c.addUnit(u)
		}
		c.addWaiting(a)
	}
	require.Len(t, c.waiting, 2)
	assert.Equal(t, maxWaiting, len(c.waiting[0].Units)+len(c.waiting[1].Units))
	assert.Equal(t, "no room", c.waiting[0].Reason)
}
