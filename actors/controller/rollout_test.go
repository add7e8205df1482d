package controller

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

func TestRolloutReplacesOneReadyUnitAtATime(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 3, app.Independent))
	units := []string{"chat/0/0", "chat/0/1", "chat/0/2"}
	w.up(units...)
	next := sim("chat", 3, app.Independent)
	next.Model.Source = "m2"
	w.deploy(next)
	assert.Equal(t, "DEPLOYING", w.status("chat"))
	for i, u := range units {
		ready := 0
		for _, v := range units {
			if w.phase(v) == state.Ready {
				ready++
			}
		}
		require.Equal(t, 2, ready)
		require.Equal(t, state.Draining, w.phase(u))
		w.says("a", u, msg.UnitGone)
		require.Equal(t, state.Starting, w.phase(u))
		require.Equal(t, uint64(2), w.state.Units[u].AppRevision)
		w.up(u)
		require.Equal(t, i == 2, w.status("chat") == "RUNNING")
	}
}

func TestRolloutStopsAtAFailedUnit(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 2, app.Independent))
	w.up("chat/0/0", "chat/0/1")
	next := sim("chat", 2, app.Independent)
	next.Model.Source = "broken"
	w.deploy(next)
	w.says("a", "chat/0/0", msg.UnitGone)
	for range 3 {
		w.says("a", "chat/0/0", msg.UnitGone, because("no such model"))
		w.pass(2 * time.Second)
	}
	assert.Equal(t, "DEPLOY_FAILED", w.status("chat"))
	assert.Equal(t, state.Ready, w.phase("chat/0/1"), "goes on serving")
	w.deploy(sim("chat", 2, app.Independent))
	w.up("chat/0/0")
	assert.Equal(t, "RUNNING", w.status("chat"))
	assert.Equal(t, uint64(1), w.state.Epochs["chat/0/1"], "back to what it was: no restart")
}

func TestRevisionThatChangesNoEngineRestartsNothing(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 2, app.Independent))
	w.up("chat/0/0", "chat/0/1")
	next := sim("chat", 4, app.Independent)
	next.Routing.Policy = "random"
	w.deploy(next)
	assert.Equal(t, "DEPLOYING", w.status("chat"))
	w.up("chat/0/2", "chat/0/3")
	assert.Equal(t, "RUNNING", w.status("chat"))
	assert.Zero(t, w.saw("stop"))
	w.deploy(sim("chat", 2, app.Independent))
	assert.Equal(t, 2, w.saw("stop"), "ranks 2 and 3")
	w.says("a", "chat/0/2", msg.UnitGone)
	w.says("a", "chat/0/3", msg.UnitGone)
	assert.Len(t, w.state.Units, 2)
	assert.Len(t, w.core.units, 2)
	assert.Equal(t, 2, w.saw("forget"))
}

func TestCouplingChangeWaitsForTheOldRanks(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("m", 2, app.Independent))
	w.up("m/0/0", "m/0/1")
	w.deploy(sim("m", 2, app.Lockstep))
	assert.Zero(t, w.saw("grant m/0 "))
	w.says("a", "m/0/0", msg.UnitGone)
	assert.Zero(t, w.saw("grant m/0 "))
	w.says("a", "m/0/1", msg.UnitGone)
	assert.Equal(t, 1, w.saw("grant m/0 "))
	assert.Zero(t, w.saw("refused"))
	w.up("m/0")
	assert.Equal(t, "RUNNING", w.status("m"))
}

// An older version must not end what a newer one started.
func TestSpecThatCannotBeReadLeavesItsUnitsAlone(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	put := &state.PutApps{Apps: []state.AppSpec{{Name: "chat", Spec: []byte(`{"name": 7}`)}}}
	_, err := w.apply(state.Command{PutApps: put})
	require.NoError(t, err)
	w.step(TimerFired{})
	assert.Equal(t, state.Ready, w.phase("chat/0/0"))
	assert.Equal(t, "DEPLOY_FAILED", w.status("chat"))
	assert.Contains(t, view{w.core}.Status()[0].Message, "cannot be read")
	w.deploy(sim("chat", 1, app.Independent))
	assert.Equal(t, "RUNNING", w.status("chat"))
	assert.Equal(t, uint64(1), w.state.Epochs["chat/0/0"])
}

// A lockstep unit that waits for its next start when its group shrinks or grows starts with the new size.
func TestResizeOfAGroupInBackoff(t *testing.T) {
	for _, size := range []int{1, 4} {
		w := newWorld(t)
		w.deploy(sim("gang", 3, app.Lockstep))
		w.up("gang/0")
		w.says("a", "gang/0", msg.UnitGone, because("crash"))
		require.Equal(t, state.Backoff, w.phase("gang/0"))
		spec, err := encodeSpec([]*app.Application{sim("gang", size, app.Lockstep)})
		require.NoError(t, err)
		_, err = w.apply(state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{spec}}})
		require.NoError(t, err)
		w.inbox = nil // the deploy is faster than the store's watch and brings the state along
		w.step(AppsRedeployed{Apps: []string{"gang"}, State: w.state.Clone()})
		require.Equal(t, state.Starting, w.phase("gang/0"))
		assert.Len(t, w.state.Units["gang/0"].Ranks, size)
		assert.Equal(t, uint64(2), w.state.Units["gang/0"].AppRevision)
	}
}

// A grant that is refused because its app was deleted meanwhile is not requested again, and does not keep the
// app.
func TestDeleteOvertakesTheFirstGrant(t *testing.T) {
	w := newWorld(t)
	var asked []*msg.AssignGroup
	w.auto = func(_ *world, e Effect) bool {
		g, ok := e.(AssignEffect)
		if ok {
			asked = append(asked, g.Request)
		}
		return ok
	}
	w.deploy(sim("gang", 2, app.Lockstep))
	require.Len(t, asked, 1)
	w.delete("gang")
	w.step(GroupAssigned{msg.GroupAssigned{Grant: asked[0].Grant, Err: state.ErrDeleting}})
	w.now = w.now.Add(time.Minute)
	w.step(TimerFired{})
	assert.Empty(t, w.state.Apps)
	assert.True(t, w.quiet())
	assert.Len(t, asked, 1)
}

// A unit whose grant is under way during a deploy is not granted twice.
func TestDeployWhileAGrantIsUnderWay(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("gang", 2, app.Lockstep))
	w.up("gang/0")
	w.says("a", "gang/0", msg.UnitGone, wasReady)
	var held []AssignEffect
	w.auto = func(_ *world, e Effect) bool {
		g, ok := e.(AssignEffect)
		if ok {
			held = append(held, g)
		}
		return ok
	}
	w.pass(time.Second)
	require.Len(t, held, 1)
	w.deploy(sim("gang", 2, app.Lockstep))
	out := w.assign(held[0].Request)
	require.NoError(t, out.Err)
	w.step(GroupAssigned{out})
	assert.Equal(t, state.Starting, w.phase("gang/0"))
	w.pass(time.Minute)
	assert.Len(t, held, 1)
}
