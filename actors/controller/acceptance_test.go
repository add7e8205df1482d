package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// Rank 5 of 8 of a lockstep group fails at every start.
func TestAUnitFailsAfterThreeFailedStarts(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("moe", 8, app.Lockstep))
	var tail []string
	for i := range 30 {
		tail = append(tail, fmt.Sprint("line ", i))
	}
	var waits []time.Duration
	for attempt := 1; attempt <= 3; attempt++ {
		require.Equal(t, state.Starting, w.phase("moe/0"))
		require.Equal(t, attempt, w.state.Units["moe/0"].Attempt)
		w.says("a", "moe/0", msg.UnitStarted)
		w.says("a", "moe/0", msg.UnitKilling, because("rank 5 exited with code 1", tail...))
		w.says("a", "moe/0", msg.UnitGone, because("rank 5 exited with code 1", tail...))
		if attempt < 3 {
			require.Equal(t, state.Backoff, w.phase("moe/0"))
			waits = append(waits, w.core.Due().Sub(w.now))
			w.pass(waits[attempt-1])
		}
	}
	assert.Equal(t, []time.Duration{time.Second, 2 * time.Second}, waits)
	assert.Zero(t, w.saw("unit_ready"), "never routable")
	assert.Equal(t, "DEPLOY_FAILED", w.status("moe"))
	rec := w.state.Units["moe/0"]
	assert.Equal(t, state.Failed, rec.Phase)
	assert.Equal(t, uint64(3), rec.Epoch)
	assert.Equal(t, "rank 5 exited with code 1", rec.Reason)
	assert.Equal(t, tail[10:], rec.LogTail)
	assert.Equal(t, "moe/0 has failed: rank 5 exited with code 1", view{w.core}.Status()[0].Message)

	w.takeTrace()
	w.pass(3 * time.Minute)
	assert.Empty(t, w.takeTrace(), "failed for some minutes, or until the next deploy")
	w.reboot()
	w.pass(3 * time.Minute)
	assert.Equal(t, state.Failed, w.phase("moe/0"), "also over a restart")
	assert.Equal(t, tail[10:], view{w.core}.Status()[0].Units[0].LogTail)
	end := view{w.core}.Status()[0].Units[0].LastEnd
	assert.True(t, end.At.Equal(time.UnixMilli(rec.Since)), "the end of the third start")
	assert.Equal(t, "rank 5 exited with code 1", end.Cause)
	assert.Equal(t, "line 29", end.Line)

	w.deploy(sim("moe", 8, app.Lockstep))
	assert.Equal(t, state.Starting, w.phase("moe/0"), "the same file again")
	assert.Equal(t, 1, w.state.Units["moe/0"].Attempt)
	w.says("a", "moe/0", msg.UnitReady)
	assert.Equal(t, "RUNNING", w.status("moe"))
}

// TestHF52FailedUnitIsTriedAgain every few minutes. The application is DEPLOY_FAILED until it is ready, also
// for the next leader, and a deploy meanwhile waits for the start under way.
func TestHF52FailedUnitIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	fails := func() {
		w.says("a", "chat/0/0", msg.UnitKilling, because("no such folder", "line"))
		w.says("a", "chat/0/0", msg.UnitGone)
	}
	status := func() client.AppStatus { return view{w.core}.Status()[0] }
	for range 3 {
		require.Equal(t, "DEPLOYING", w.status("chat"))
		fails()
		if w.phase("chat/0/0") == state.Backoff {
			w.pass(w.core.Due().Sub(w.now))
		}
	}
	for try := 4; try < 8; try++ {
		s := status()
		require.Equal(t, "DEPLOY_FAILED", s.Status)
		wait := s.Units[0].NextTry.Sub(w.now)
		require.LessOrEqual(t, wait, state.DefaultFailedRetry)
		require.GreaterOrEqual(t, wait, state.DefaultFailedRetry*3/4)
		w.pass(wait)
		s = status()
		require.Equal(t, "DEPLOY_FAILED", s.Status, "while it starts")
		require.Equal(t, "chat/0/0 is starting: no such folder", s.Message)
		require.Equal(t, try, s.Units[0].Attempt)
		if try == 5 {
			w.core = NewCore(w.timers)
			w.step(StateSeen{w.state.Clone()})
			require.Equal(t, "DEPLOY_FAILED", w.status("chat"), "for the next leader")
		}
		if try < 7 {
			fails()
		}
	}
	w.step(AppsRedeployed{Apps: []string{"chat"}})
	assert.Equal(t, "DEPLOYING", w.status("chat"))
	w.up("chat/0/0")
	assert.Equal(t, "RUNNING", w.status("chat"))
}

// The others keep their epoch. The rank keeps its number and slot, and gets new ports.
func TestOneOfFourIndependentRanksRestartsAlone(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 4, app.Independent))
	w.up("chat/0/0", "chat/0/1", "chat/0/2", "chat/0/3")
	before := w.state.Units["chat/0/2"]
	w.says("a", "chat/0/2", msg.UnitFenced, because("signal: killed"))
	assert.Equal(t, state.Fenced, w.state.Units["chat/0/2"].Phase)
	w.says("a", "chat/0/2", msg.UnitKilling)
	w.says("a", "chat/0/2", msg.UnitGone, wasReady)
	w.pass(time.Second)
	w.up("chat/0/2")
	after := w.state.Units["chat/0/2"]
	assert.Equal(t, uint64(2), after.Epoch)
	assert.Equal(t, before.Ranks, after.Ranks)
	assert.NotEqual(t, before.Blocks, after.Blocks)
	for _, u := range []string{"chat/0/0", "chat/0/1", "chat/0/3"} {
		assert.Equal(t, uint64(1), w.state.Epochs[u])
	}
	assert.Equal(t, "RUNNING", w.status("chat"))
}

// Epochs rise over crash, restart and redeploy, for both couplings.
func TestRG13EpochsOverCrashRestartAndRedeploy(t *testing.T) {
	for _, c := range []struct {
		coupling app.Coupling
		unit     string
	}{{app.Lockstep, "m/0"}, {app.Independent, "m/0/1"}} {
		t.Run(string(c.coupling), func(t *testing.T) {
			w := newWorld(t)
			w.deploy(sim("m", 2, c.coupling))
			all := func() []string {
				if c.coupling == app.Lockstep {
					return []string{"m/0"}
				}
				return []string{"m/0/0", "m/0/1"}
			}()
			w.up(all...)
			w.says("a", c.unit, msg.UnitFenced)
			w.says("a", c.unit, msg.UnitGone, wasReady)
			w.pass(time.Second)
			w.up(c.unit)
			require.Equal(t, uint64(2), w.state.Epochs[c.unit], "killed by hand")

			w.reboot()
			require.Equal(t, uint64(3), w.state.Epochs[c.unit], "node restarted")
			require.Equal(t, 1, w.saw("start "+c.unit+" epoch 3"))
			w.up(all...)
			require.Equal(t, "RUNNING", w.status("m"))

			w.delete("m")
			for _, u := range all {
				w.says("a", u, msg.UnitGone)
			}
			require.Empty(t, w.state.Apps)
			w.reboot()
			require.Equal(t, uint64(3), w.state.Epochs[c.unit], "tombstone")
			w.deploy(sim("m", 2, c.coupling))
			require.Equal(t, uint64(4), w.state.Epochs[c.unit], "deployed again")
			w.up(all...)
			assert.Equal(t, uint64(4), view{w.core}.Status()[0].Units[len(all)-1].Epoch)
			assert.Zero(t, view{w.core}.Status()[0].Units[0].Restarts)
		})
	}
}
