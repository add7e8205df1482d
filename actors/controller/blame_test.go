package controller

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// ledBy is a fleet whose leader is on node a; downs counts its step-downs.
func ledBy(t *testing.T, ids ...string) (c *fleet, downs *int) {
	t.Helper()
	var hosts []*host
	for _, id := range ids {
		hosts = append(hosts, newHost(id, 2))
	}
	c, downs = newFleet(t, hosts...), new(int)
	c.core.Self = "a"
	c.auto = func(w *world, e Effect) bool {
		if _, ok := e.(StepDownEffect); ok {
			*downs++
			return true
		}
		return c.carry(w, e)
	}
	c.deploy(sim("chat", 4, app.Independent))
	c.run(4 * time.Second)
	require.Equal(t, "RUNNING", c.status("chat"))
	return c, downs
}

func (c *fleet) cut(cut bool, ids ...string) {
	for _, id := range ids {
		c.hosts[id].cut = cut
	}
}

// HF2: The leader's own node is silent too, so the leader is the fault. No node is lost, and a node that
// renews within another lease stays.
func TestLeaderThatHearsNobodyBlamesItself(t *testing.T) {
	c, downs := ledBy(t, "a", "b", "c")
	c.cut(true, "a", "b", "c")
	c.run(20 * time.Second)
	assert.Equal(t, 1, *downs)
	c.cut(false, "a", "b", "c")
	c.run(time.Minute)
	assert.Equal(t, 1, *downs)
	assert.Zero(t, c.saw("node_lost"))
	assert.Equal(t, uint64(1), c.state.Epochs["chat/0/0"])
}

func TestLeaderThatDoesNotHearItsOwnNodeBlamesItself(t *testing.T) {
	c, downs := ledBy(t, "a", "b", "c", "d", "e")
	c.cut(true, "a")
	c.run(13 * time.Second)
	assert.Equal(t, 1, *downs)
	assert.Zero(t, c.saw("node_lost"))
}

// One silent node of two, or two of four, do not speak against the leader.
func TestHalfOfTheNodesMayBeLost(t *testing.T) {
	for _, ids := range [][]string{{"a", "b"}, {"a", "b", "c", "d"}} {
		c, downs := ledBy(t, ids...)
		dead := ids[len(ids)/2:]
		c.cut(true, dead...)
		c.run(15 * time.Second)
		assert.Zero(t, *downs)
		assert.Equal(t, len(dead), c.saw("node_lost"))
	}
}

// HF2: The only control node cannot be replaced, and two of its three nodes are dead.
func TestDeadMajorityIsLostAtTheSecondLook(t *testing.T) {
	c, downs := ledBy(t, "a", "b", "c")
	c.hosts["c"].cut = true
	c.pass(2 * time.Second) // the last renewals are not simultaneous
	c.renew("a", "b")
	c.hosts["b"].cut = true
	c.run(14 * time.Second)
	assert.Equal(t, 1, *downs)
	assert.Zero(t, c.saw("node_lost"), "it may be the leader")
	c.run(14 * time.Second)
	assert.Equal(t, 1, *downs)
	assert.Equal(t, 2, c.saw("node_lost"))
}

// HF2: The next leader has never heard the dead nodes, so their silence does not speak against it.
func TestNextLeaderDecidesOnADeadMajority(t *testing.T) {
	c, downs := ledBy(t, "a", "b", "c", "d", "e")
	c.cut(true, "c", "d", "e")
	c.run(13 * time.Second)
	require.Equal(t, 1, *downs)
	c.newLeader()
	c.core.Self = "b"
	c.run(13 * time.Second)
	assert.Equal(t, 1, *downs)
	assert.Equal(t, 3, c.saw("node_lost"))
}

// Nodes that said that they end are expected to fall silent, however many they are. The leader's own node is
// not: its silence is the leader's fault in any case.
func TestStoppedNodesDoNotSpeakAgainstTheLeader(t *testing.T) {
	c, downs := ledBy(t, "a", "b", "c", "d", "e")
	for _, id := range []string{"c", "d", "e"} {
		c.hosts[id].close()
	}
	c.renew(c.ids()...)
	c.cut(true, "c", "d", "e")
	c.run(15 * time.Second)
	assert.Zero(t, *downs)
	assert.Equal(t, 3, c.saw("node_lost"))

	c, downs = ledBy(t, "a", "b", "c", "d", "e")
	c.hosts["a"].close()
	c.renew(c.ids()...)
	c.cut(true, "a")
	c.run(13 * time.Second)
	assert.Equal(t, 1, *downs)
	assert.Zero(t, c.saw("node_lost"))
}

// After a renewal the waiting command does not stand any more.
func TestRenewalWithdrawsALoss(t *testing.T) {
	c, _ := ledBy(t, "a", "b", "c")
	var waiting *ProposeEffect
	carry := c.auto
	c.auto = func(w *world, e Effect) bool {
		if p, ok := e.(ProposeEffect); ok && p.Command.NodeLost != nil {
			waiting = &p
			return true
		}
		return carry(w, e)
	}
	c.cut(true, "b")
	c.run(13 * time.Second)
	require.NotNil(t, waiting)
	assert.True(t, c.core.Stands(waiting))
	c.cut(false, "b")
	c.renew("b")
	require.NoError(t, c.lease["b"].Err)
	assert.False(t, c.core.Stands(waiting))
	assert.True(t, c.core.Stands(&ProposeEffect{
		Node:    "b",
		Command: state.Command{NodeBack: &state.NodeRef{}},
	}))
}

// silentNode has node a renew once, and joins node b, which renews once and is silent then. beat keeps a
// alive.
func silentNode(t *testing.T, r *rig) (say func(id string), beat func(time.Duration)) {
	t.Helper()
	say = func(id string) {
		_, err := r.Renew(t.Context(), &msg.NodeReport{Node: node(id, 8), Incarnation: 1, Wall: time.Now()})
		assert.NoError(t, err)
	}
	_, err := r.store.Propose(t.Context(), state.Command{PutNode: &state.PutNode{Node: node("b", 8)}})
	require.NoError(t, err)
	say("a")
	say("b")
	return say, func(d time.Duration) {
		for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
			say("a")
		}
	}
}

// HF2: Without a majority no node is lost. When the majority is back, the node has renewed before the
// question.
func TestLossIsConfirmedFirst(t *testing.T) {
	var asked atomic.Int32
	var follows atomic.Bool
	rigged(t, func(c *Config) {
		c.Self, c.Timers.LeaseTTL = "a", 10*time.Second
		c.Confirm = func(context.Context) error {
			asked.Add(1)
			if !follows.Load() {
				return errors.New("no majority")
			}
			return nil
		}
	}, func(t *testing.T, r *rig) {
		say, beat := silentNode(t, r)
		beat(11 * time.Second)
		assert.Zero(t, asked.Load(), "asked after the silence, not before")
		beat(10 * time.Second)
		assert.NotZero(t, asked.Load())
		assert.False(t, r.store.State().Nodes["b"].Lost)
		say("b")
		follows.Store(true)
		beat(5 * time.Second)
		assert.False(t, r.store.State().Nodes["b"].Lost)
		beat(10 * time.Second)
		assert.True(t, r.store.State().Nodes["b"].Lost, "silent again, and a majority says so")
	})
}

// full is a Proposer whose disk is full until it is told otherwise, as the only voter's may be.
type full struct {
	msg.Proposer
	refused, emptied atomic.Int32
}

func (f *full) Propose(ctx context.Context, cmd state.Command) (state.Result, error) {
	if cmd.NodeLost != nil && f.emptied.Load() == 0 {
		f.refused.Add(1)
		return state.Result{}, problem.New(problem.Unavailable, "propose: %w", cluster.ErrDisk)
	}
	return f.Proposer.Propose(ctx, cmd)
}

// The only voter says once, in the log of the cluster, that its disk takes no writes. That a silent node
// cannot be declared lost meanwhile is not said every second.
func TestLossWaitsForTheDiskWithoutAWarningEachSecond(t *testing.T) {
	var disk full
	rigged(t, func(c *Config) {
		c.Self, c.Timers.LeaseTTL = "a", 10*time.Second
		disk.Proposer, c.Proposer = c.Proposer, &disk
	}, func(t *testing.T, r *rig) {
		_, beat := silentNode(t, r)
		beat(time.Minute)
		assert.Greater(t, disk.refused.Load(), int32(10), "it is tried again")
		assert.NotContains(t, r.logs.String(), "command failed")
		assert.False(t, r.store.State().Nodes["b"].Lost)
		disk.emptied.Store(1)
		beat(2 * time.Second)
		assert.True(t, r.store.State().Nodes["b"].Lost)
	})
}

// HF2: The renewal and the loss waited for the same majority.
func TestRenewalBeforeTheConfirmationWithdrawsTheLoss(t *testing.T) {
	var speak func(id string)
	rigged(t, func(c *Config) {
		c.Self, c.Timers.LeaseTTL = "a", 10*time.Second
		c.Confirm = func(context.Context) error {
			speak("b")
			return nil
		}
	}, func(t *testing.T, r *rig) {
		say, beat := silentNode(t, r)
		speak = say
		beat(40 * time.Second)
		synctest.Wait()
		assert.False(t, r.store.State().Nodes["b"].Lost)
		assert.NotContains(t, r.logs.String(), "command failed")
	})
}

// If the hand-over fails, the leader continues and decides after the next lease.
func TestLeaderHandsOver(t *testing.T) {
	var downs atomic.Int32
	rigged(t, func(c *Config) {
		c.Self, c.Timers.LeaseTTL = "a", 10*time.Second
		c.StepDown = func(context.Context) error {
			downs.Add(1)
			return errors.New("no other node votes")
		}
	}, func(t *testing.T, r *rig) {
		silentNode(t, r)
		time.Sleep(20 * time.Second) // no renewals, not even of node a
		synctest.Wait()
		assert.Equal(t, int32(1), downs.Load())
		assert.False(t, r.store.State().Nodes["b"].Lost)
		assert.Contains(t, r.logs.String(), "the leader cannot hand over")
		time.Sleep(10 * time.Second)
		assert.True(t, r.store.State().Nodes["b"].Lost)
		assert.Equal(t, int32(1), downs.Load())
	})
}
