package controller

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// changed is an application with another model than that of sim, and with the default of `rollout:`.
func changed(dp int) *app.Application {
	a := sim("chat", dp, app.Independent)
	a.Model.Source = "m2"
	a.Rollout = app.Rollout{MinReadyS: 10, OnFailure: app.OnFailureRollback}
	return a
}

func TestRolloutReplacesOneReadyUnitAtATime(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 3, app.Independent))
	units := []string{"chat/0/0", "chat/0/1", "chat/0/2"}
	w.up(units...)
	w.deploy(changed(3))
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
		require.True(t, view{w.core}.Status()[0].RollingOut)
		w.pass(9 * time.Second)
		for _, v := range units[i+1:] {
			require.Equal(t, state.Ready, w.phase(v), "waits until "+u+" has passed its probation")
		}
		w.pass(time.Second)
	}
	assert.False(t, view{w.core}.Status()[0].RollingOut)
	assert.Equal(t, uint64(2), w.state.LastGood("chat"))
}

func TestAUnitThatEndsOnProbationTakesTheRevisionBack(t *testing.T) {
	for _, onFailure := range []string{app.OnFailureRollback, app.OnFailureHalt} {
		t.Run(onFailure, func(t *testing.T) {
			w := newWorld(t)
			w.deploy(sim("chat", 3, app.Independent))
			w.up("chat/0/0", "chat/0/1", "chat/0/2")
			next := changed(3)
			next.Rollout.OnFailure = onFailure
			w.deploy(next)
			w.says("a", "chat/0/0", msg.UnitGone)
			w.up("chat/0/0")
			w.pass(3 * time.Second)
			w.says("a", "chat/0/0", msg.UnitGone, because("out of memory", "CUDA error"))

			status := view{w.core}.Status()[0]
			require.NotNil(t, status.Halt)
			assert.Equal(t, []string{"CUDA error"}, status.Halt.LogTail)
			assert.Equal(t, "out of memory", status.Halt.Cause)
			assert.Contains(t, status.Message, "the roll-out of revision 2 was halted")
			assert.False(t, status.RollingOut)
			for _, other := range []string{"chat/0/1", "chat/0/2"} {
				assert.Equal(t, state.Ready, w.phase(other))
				assert.Equal(t, uint64(1), w.state.Epochs[other], "was never touched")
			}
			if onFailure == app.OnFailureHalt {
				w.pass(2 * time.Second)
				w.up("chat/0/0")
				w.pass(time.Minute)
				assert.Equal(t, "DEPLOY_FAILED", w.status("chat"))
				assert.Equal(t, state.Ready, w.phase("chat/0/1"))
				w.deploy(next)
				assert.Equal(t, state.Draining, w.phase("chat/0/1"), "deployed again, it goes on")
				return
			}
			w.up("chat/0/0")
			assert.Equal(t, "RUNNING", w.status("chat"))
			assert.Equal(t, uint64(3), w.state.LastGood("chat"))
			w.reboot()
			assert.NotNil(t, view{w.core}.Status()[0].Halt, "the next leader knows it")
		})
	}
}

// inRollOut has replaced the first of two units, which is on probation.
func inRollOut(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.deploy(sim("chat", 2, app.Independent))
	w.up("chat/0/0", "chat/0/1")
	w.deploy(changed(2))
	w.says("a", "chat/0/0", msg.UnitGone)
	w.up("chat/0/0")
	return w
}

func TestAnEndThatANodeCausedHaltsNothing(t *testing.T) {
	w := inRollOut(t)
	w.step(StateSeen{w.state.Clone()})
	w.core.stepUnit(w.now, w.core.units["chat/0/0"], state.Event{Kind: state.EvLost, Reason: "restarted"})
	w.step(TimerFired{})
	assert.Nil(t, view{w.core}.Status()[0].Halt)
	assert.True(t, view{w.core}.Status()[0].RollingOut)
}

// A deletion does not wait for the end of a probation, nor does a command of the roll-out that is under way
// keep the application.
func TestDeleteDuringARollout(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	var under []ProposeEffect
	w.auto = func(_ *world, e Effect) bool {
		p, ok := e.(ProposeEffect)
		if ok = ok && p.Command.MarkGood != nil; ok {
			under = append(under, p)
		}
		return ok
	}
	w.up("chat/0/0")
	require.Len(t, under, 1)
	w.delete("chat")
	w.says("a", "chat/0/0", msg.UnitGone)
	require.NotEmpty(t, w.state.Apps, "waits for the result")
	w.step(CommandDone{App: "chat"})
	assert.Empty(t, w.state.Apps)

	w.auto = nil
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	w.deploy(changed(1))
	w.says("a", "chat/0/0", msg.UnitGone)
	w.up("chat/0/0")
	w.delete("chat")
	w.pass(time.Minute)
	w.says("a", "chat/0/0", msg.UnitGone)
	assert.Empty(t, w.state.Apps)
	assert.True(t, w.quiet())
}

func TestAHaltThatDoesNotGetThroughIsRepeated(t *testing.T) {
	w := inRollOut(t)
	lost := 0
	w.lose = func(c state.Command) error {
		if c.HaltRollout != nil && lost < 2 {
			lost++
			return errLost
		}
		return nil
	}
	w.says("a", "chat/0/0", msg.UnitGone, because("crash"))
	require.Equal(t, 1, lost)
	w.pass(500 * time.Millisecond)
	require.Equal(t, 1, lost, "it waits")
	w.pass(2 * time.Second)
	assert.Equal(t, 2, lost)
	assert.Equal(t, uint64(3), w.state.Apps["chat"].Revision)
}

func TestRollback(t *testing.T) {
	source := func(model string) *app.Application {
		a := sim("chat", 2, app.Independent)
		a.Model.Source = model
		return a
	}
	for _, c := range []struct {
		name  string
		to    uint64
		begin func(t *testing.T, r *rig)
		want  string // the model that runs then, or the error
	}{
		{"to the good one before", 0, func(t *testing.T, r *rig) {
			r.deploy(t, source("m1"))
			r.deploy(t, source("m2"))
		}, "m1"},
		{"of what a rollback brought", 0, func(t *testing.T, r *rig) {
			r.deploy(t, source("m1"))
			r.deploy(t, source("m2"))
			r.deploy(t, source("m1"))
		}, "m2"},
		{"to a number", 1, func(t *testing.T, r *rig) {
			r.deploy(t, source("m1"))
			r.deploy(t, source("m2"))
			r.deploy(t, source("m3"))
		}, "m1"},
		{"while a roll-out runs", 0, func(t *testing.T, r *rig) {
			r.deploy(t, source("m1"))
			next := source("m2")
			next.Rollout.MinReadyS = 10
			r.deploy(t, next)
			require.True(t, r.Status()[0].RollingOut)
		}, "m1"},
		{
			"of the first revision", 0, func(t *testing.T, r *rig) { r.deploy(t, source("m1")) },
			"chat is at revision 1, and no other one before it is known as good",
		},
		{
			"to the current one", 1, func(t *testing.T, r *rig) { r.deploy(t, source("m1")) },
			"chat is at revision 1",
		},
		{
			"to one that is not kept", 7, func(t *testing.T, r *rig) { r.deploy(t, source("m1")) },
			`application "chat": there is no revision 7`,
		},
		{
			"of an unknown application", 0, func(*testing.T, *rig) {},
			`there is no application "chat"`,
		},
		{"of an attached application", 0, func(t *testing.T, r *rig) {
			for _, url := range []string{"http://a", "http://b"} {
				a := attachedTo(url)
				a.Name = "chat"
				r.deploy(t, a)
			}
		}, "the engines of chat are attached: a former revision may list engines that are gone"},
		{"to one that does not fit any more", 0, func(t *testing.T, r *rig) {
			big := source("m1")
			big.DataParallel.DPSize, big.NumReplicas = 8, 8
			r.deploy(t, big)
			r.deploy(t, source("m2"))
			r.deploy(t, sim("other", 6, app.Independent))
		}, "place chat/0: 2 of 8 ranks can be placed (PACK)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rigged(t, nil, func(t *testing.T, r *rig) {
				c.begin(t, r)
				before := r.store.State().Revision
				_, _, err := r.Rollback(t.Context(), "chat", c.to)
				synctest.Wait()
				if err != nil {
					assert.Contains(t, err.Error(), c.want)
					assert.Equal(t, before, r.store.State().Revision, "nothing has changed")
					return
				}
				pools, err := r.store.State().Apps["chat"].Pools()
				require.NoError(t, err)
				assert.Equal(t, c.want, pools[0].Model.Source)
				assert.Equal(t, "RUNNING", r.Status()[0].Status)
			})
		})
	}
}

// What `get` prints deploys the same application again.
func TestTheFileOfARevisionDeploysIt(t *testing.T) {
	text := "applications:\n- name: chat\n  model: {id: m1}\n  engine: {kind: sim, args: {seed: 7}, " +
		"env: {A: \"1\"}}\n  data_parallel: {dp_size: 2}\n  rollout: {min_ready_s: 3}\n"
	w := newWorld(t)
	deploy := func(text []byte) {
		file, _, err := app.Parse(app.Default(), "app.yaml", text)
		require.NoError(t, err)
		w.deploy(file.Applications...)
	}
	deploy([]byte(text))
	first, at, err := PastFile(w.state, "chat", 0)
	require.NoError(t, err)
	assert.Equal(t, uint64(1), at)
	deploy(first)
	assert.Equal(t, uint64(1), w.state.Apps["chat"].Revision, "no change")
	deploy(bytes.ReplaceAll([]byte(text), []byte("m1"), []byte("m2")))
	again, _, err := PastFile(w.state, "chat", 1)
	require.NoError(t, err)
	assert.Equal(t, string(first), string(again))

	list, err := History(w.state, "chat")
	require.NoError(t, err)
	assert.Len(t, list, 2)
	assert.True(t, list[0].IsCurrent && list[0].Revision == 2)
	_, err = History(w.state, "nope")
	assert.Equal(t, problem.NotFound, problem.CodeOf(err))
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
