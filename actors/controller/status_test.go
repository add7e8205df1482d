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

// statusOf is an application's status while a node does not answer; node "" means that all answer.
func (c *fleet) statusOf(t *testing.T, name, node string) msg.AppStatus {
	t.Helper()
	for _, s := range c.core.StatusWithout(map[string]string{node: "node " + node + " is silent for 7s"}) {
		if s.Name == name {
			return s
		}
	}
	require.Fail(t, "no such application", name)
	return msg.AppStatus{}
}

// phases lists the phases of an application's ranks, in order.
func phases(s *msg.AppStatus) (out []string) {
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
	before := c.core.Status()

	s := c.statusOf(t, "chat", "b")
	assert.Equal(t, "UNHEALTHY", s.Status)
	assert.Equal(t, 2, s.Ready)
	assert.Equal(t, []string{"ready", "ready", "unreachable", "unreachable"}, phases(&s))
	assert.Equal(t,
		"chat/0/2 is unreachable: node b is silent for 7s\nchat/0/3 is unreachable: node b is silent for "+
			"7s", s.Message)
	assert.Equal(t, before, c.core.Status(), "it is shown, and nothing else")

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
	assert.Equal(t, msg.Unreachable, s.Units[0].Phase)
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

func TestAgesAndRestartsSurviveAChangeOfLeader(t *testing.T) {
	a, b := newHost("a", 2), newHost("b", 2)
	c := newFleet(t, a, b)
	c.deploy(sim("chat", 2, app.Independent), sim("moe", 1, app.Lockstep))
	c.renew("a", "b")
	a.crash("chat/0/0")
	c.run(20 * time.Second)
	require.Equal(t, "RUNNING", c.status("chat"))
	c.run(time.Hour)
	before := c.core.Status()
	require.Equal(t, 1, before[0].Units[0].Restarts)
	require.NotEqual(t, before[0].Units[0].Since, before[0].Units[1].Since)
	c.newLeader()
	c.run(time.Minute)
	after := c.core.Status()
	for i := range before {
		for j, u := range before[i].Units {
			assert.True(t, u.Since.Truncate(time.Millisecond).Equal(after[i].Units[j].Since),
				"%s: since %s, then %s", u.Unit, u.Since, after[i].Units[j].Since)
			assert.Equal(t, u.Restarts, after[i].Units[j].Restarts, u.Unit)
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
	require.Equal(t, 1, c.core.Status()[0].Units[0].Restarts)
	a.cut = true
	c.run(15 * time.Second)
	u := c.core.Status()[0].Units[0]
	assert.Equal(t, string(state.Pending), u.Phase)
	assert.Equal(t, 1, u.Restarts)
	b := newHost("b", 1)
	c.join(b)
	c.renew("b")
	require.Equal(t, "RUNNING", c.status("chat"))
	assert.Equal(t, 2, c.core.Status()[0].Units[0].Restarts)
}

func TestSilenceIsCountedFromTheLastRenewalOrTheLeadersFirstMoment(t *testing.T) {
	a, b := newHost("a", 1), newHost("b", 1)
	c := newFleet(t, a, b)
	c.renew("a", "b")
	c.pass(3 * time.Second)
	c.renew("a")
	assert.Equal(t, map[string]Silence{"a": {}, "b": {For: 3 * time.Second}}, c.core.Silences(c.now))
	c.newLeader()
	c.pass(6 * time.Second)
	c.renew("a")
	assert.Equal(t, map[string]Silence{"a": {}, "b": {For: 6 * time.Second, Long: true}},
		c.core.Silences(c.now))
	c.pass(7 * time.Second)
	assert.NotContains(t, c.core.Silences(c.now), "b", "it is lost by now")
}
