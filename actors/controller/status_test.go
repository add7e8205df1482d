package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// statusOf is an application's status while a node does not answer; node "" means that all answer.
func (c *fleet) statusOf(t *testing.T, name, node string) client.AppStatus {
	t.Helper()
	unreachable := map[string]string{node: "node " + node + " is silent for 7s"}
	for _, s := range (view{c.core}).StatusWithout(unreachable) {
		if s.Name == name {
			return s
		}
	}
	require.Fail(t, "no such application", name)
	return client.AppStatus{}
}

// phases lists the phases of an application's ranks, in order.
func phases(s *client.AppStatus) (out []string) {
	for i := range s.Units {
		for _, r := range s.Units[i].Ranks {
			out = append(out, r.Phase)
		}
	}
	return out
}

func TestRanksOnANodeThatDoesNotAnswerAreShownUnreachable(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 4, app.Independent))
	c.renew("a", "b")
	before := view{c.core}.Status()

	s := c.statusOf(t, "chat", "b")
	assert.Equal(t, "UNHEALTHY", s.Status)
	assert.Equal(t, 2, s.Ready)
	assert.Equal(t, []string{"ready", "ready", "unreachable", "unreachable"}, phases(&s))
	assert.Equal(t,
		"chat/0/2 is unreachable: node b is silent for 7s\nchat/0/3 is unreachable: node b is silent for "+
			"7s", s.Message)
	assert.Equal(t, before, view{c.core}.Status(), "it is shown, and nothing else")

	s = c.statusOf(t, "chat", "c")
	assert.Equal(t, "RUNNING", s.Status, "a node without ranks of the application")
}

// A lockstep unit serves on all of its nodes or not at all.
func TestLockstepUnitWithANodeThatDoesNotAnswerIsShownUnreachable(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("moe", 4, app.Lockstep))
	c.renew("a", "b")
	s := c.statusOf(t, "moe", "b")
	assert.Equal(t, "UNHEALTHY", s.Status)
	assert.Zero(t, s.Ready)
	assert.Equal(t, client.Unreachable, s.Units[0].Phase)
	assert.Equal(t, []string{"ready", "ready", "unreachable", "unreachable"}, phases(&s))
	assert.Equal(t, "moe/0 is unreachable: node b is silent for 7s", s.Message)
}

// A unit without processes keeps its own phase and reason, whatever its node does.
func TestUnitInBackoffIsNotShownUnreachable(t *testing.T) {
	a := newHost("a", 1)
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	a.crash("chat/0/0")
	c.renew("a")
	s := c.statusOf(t, "chat", "a")
	assert.Equal(t, []string{"backoff"}, phases(&s))
	assert.NotContains(t, s.Message, "unreachable")
}

// ST1: a new leader shows the ages, restarts and last ends of units that the old one showed.
func TestAgesAndRestartsSurviveAChangeOfLeader(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 2, app.Independent), sim("moe", 1, app.Lockstep))
	c.renew("a", "b")
	a.crash("chat/0/0")
	c.run(20 * time.Second)
	require.Equal(t, "RUNNING", c.status("chat"))
	c.run(time.Hour)
	before := view{c.core}.Status()
	require.Equal(t, 1, before[0].Units[0].Restarts)
	require.Equal(t, "signal: killed", before[0].Units[0].LastEnd.Cause)
	require.Nil(t, before[0].Units[1].LastEnd)
	require.NotEqual(t, before[0].Units[0].Since, before[0].Units[1].Since)
	c.newLeader()
	c.run(time.Minute)
	after := view{c.core}.Status()
	for i := range before {
		for j, u := range before[i].Units {
			assert.True(t, u.Since.Truncate(time.Millisecond).Equal(after[i].Units[j].Since),
				"%s: since %s, then %s", u.Unit, u.Since, after[i].Units[j].Since)
			assert.Equal(t, u.Restarts, after[i].Units[j].Restarts, u.Unit)
			assert.Equal(t, u.LastEnd, after[i].Units[j].LastEnd, u.Unit)
		}
	}
}

// A unit that waits for room because its node is lost keeps its count of restarts, and its next start is one
// more.
func TestRestartsSurviveTheLossOfANode(t *testing.T) {
	a := newHost("a", 1)
	// most nodes renew, so the leader does not blame itself
	c := newFleet(t, a, newHost("c", 0), newHost("d", 0))
	c.deploy(sim("chat", 1, app.Independent))
	c.renew(c.ids()...)
	a.crash("chat/0/0")
	c.run(20 * time.Second)
	require.Equal(t, 1, view{c.core}.Status()[0].Units[0].Restarts)
	a.cut = true
	c.run(15 * time.Second)
	u := view{c.core}.Status()[0].Units[0]
	assert.Equal(t, string(state.Pending), u.Phase)
	assert.Equal(t, 1, u.Restarts)
	b := newHost("b", 1)
	c.join(b)
	c.renew("b")
	require.Equal(t, "RUNNING", c.status("chat"))
	u = view{c.core}.Status()[0].Units[0]
	assert.Equal(t, 2, u.Restarts)
	assert.Contains(t, u.LastEnd.Cause, "node a", "the new grant keeps why the one before it ended")
}

func TestSilenceIsCountedFromTheLastRenewalOrTheLeadersFirstMoment(t *testing.T) {
	a, b := newHost("a", 1), newHost("b", 1)
	c := newFleet(t, a, b)
	c.renew("a", "b")
	c.pass(3 * time.Second)
	c.renew("a")
	assert.Equal(t, map[string]Silence{"a": {}, "b": {For: 3 * time.Second}}, view{c.core}.Silences(c.now))
	c.newLeader()
	c.pass(6 * time.Second)
	c.renew("a")
	assert.Equal(t, map[string]Silence{"a": {}, "b": {For: 6 * time.Second, Long: true}},
		view{c.core}.Silences(c.now))
	c.pass(7 * time.Second)
	assert.NotContains(t, view{c.core}.Silences(c.now), "b", "it is lost by now")
}

// waitingAt is what a node's renewal tells it of applications without room.
func (c *fleet) waitingAt(t *testing.T, node string) []msg.Waiting {
	t.Helper()
	c.renew(node)
	require.NoError(t, c.lease[node].Err)
	return c.lease[node].Lease.Waiting
}

// ST2: every node with an ingress hears with its lease which units cannot be placed, and why.
func TestLeaseTellsIngressesWhichUnitsFindNoRoom(t *testing.T) {
	c := newFleet(t, newHost("a", 4), newHost("b", 6))
	worker := newHost("w", 0)
	worker.node.Roles = []state.Role{state.RoleWorker}
	c.join(worker)
	assert.Empty(t, c.waitingAt(t, "a"))
	c.deploy(groups("moe", 3, 4))
	c.run(4 * time.Second)
	want := []msg.Waiting{{
		App: "moe", Revision: 1,
		Reason: "place moe/2: 2 of 4 ranks can be placed (STRICT_PACK): short of slots on one node",
		Units:  map[string]uint64{"moe/2": 0},
	}}
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

// The unit's node stays but takes nothing new, so that its next start finds no room: requests do not wait.
func TestUnitInBackoffWithoutRoomIsListed(t *testing.T) {
	a := newHost("a", 1)
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent))
	c.renew("a")
	c.drain("a", time.Time{})
	require.Equal(t, state.Ready, c.phase("chat/0/0"), "there is no room for it elsewhere")
	a.crash("chat/0/0")
	c.renew("a")
	require.Equal(t, state.Backoff, c.phase("chat/0/0"))
	c.run(4 * time.Second)
	list := c.waitingAt(t, "a")
	require.Len(t, list, 1)
	assert.Equal(t, map[string]uint64{"chat/0/0": 1}, list[0].Units)
	assert.Contains(t, list[0].Reason, "0 of 1 rank can be placed")
	c.undrain("a")
	c.run(4 * time.Second)
	assert.Empty(t, c.waitingAt(t, "a"))
	assert.Equal(t, "RUNNING", c.status("chat"))
}

// A unit whose last attempt waits for its turn is on its way: it is not listed, and no client reads what
// another application does. Its own status says what it waits for.
func TestUnitThatWaitsForItsTurnIsOnItsWay(t *testing.T) {
	a := newHost("a", 2)
	a.slow = true
	c := newFleet(t, a)
	c.deploy(sim("chat", 1, app.Independent), sim("other", 1, app.Independent))
	c.renew("a")
	for range 2 {
		a.restart()
		c.renew("a", "a") // the second report confirms the start
	}
	c.pass(2 * time.Second)
	c.renew("a")
	require.Equal(t, state.Starting, c.phase("chat/0/0"))
	require.Equal(t, state.Backoff, c.phase("other/0/0"))
	assert.Equal(t, "waits until chat/0/0 has started: their nodes ended while they were starting",
		view{c.core}.Status()[1].Units[0].Reason)
	assert.Empty(t, c.waitingAt(t, "a"))
	assert.Equal(t, "other/0/0", c.core.findUnready(c.core.apps["other"], &unit{}, false), "a roll-out waits")
	a.up("chat/0/0")
	c.renew("a")
	assert.Equal(t, state.Starting, c.phase("other/0/0"))
	assert.NotContains(t, view{c.core}.Status()[1].Units[0].Reason, "waits until")
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
		pool := sim(name, maxWaiting*2/3, app.Independent)
		a := &application{name: name, units: pool.Units()}
		for i := range a.units {
			u := newUnit(&a.units[i])
			u.m.Phase, u.noRoom = state.Pending, "no room; node a: full"
			c.addUnit(u)
		}
		c.addWaiting(a, pool)
	}
	require.Len(t, c.waiting, 2)
	assert.Equal(t, maxWaiting, len(c.waiting[0].Units)+len(c.waiting[1].Units))
	assert.Equal(t, "no room", c.waiting[0].Reason)
}
