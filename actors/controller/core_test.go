package controller

import (
	"context"
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

func TestDeployRunDeleteTranscript(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 2, app.Independent))
	assert.Equal(t, []string{
		"chat/0/0:  → pending", "chat/0/1:  → pending", "grant chat/0/0 attempt 1 on a:0",
		"grant chat/0/1 attempt 1 on a:1", "chat:  → DEPLOYING",
		"chat/0/0: pending → starting", "start chat/0/0 epoch 1 on a", "chat/0/1: pending → starting",
		"start chat/0/1 epoch 1 on a",
	}, w.takeTrace())
	w.up("chat/0/0", "chat/0/1")
	assert.Equal(t, []string{
		"chat/0/0: starting → ready", "unit_ready chat/0/0", "chat/0/1: starting → ready",
		"mark_good ", "unit_ready chat/0/1", "chat: DEPLOYING → RUNNING",
	}, w.takeTrace())
	assert.Equal(t, state.Ready, w.state.Units["chat/0/1"].Phase)

	w.delete("chat")
	assert.Equal(t, []string{
		"chat/0/0: ready → draining", "stop chat/0/0 epoch 1 on a, grace 30s",
		"chat/0/1: ready → draining", "stop chat/0/1 epoch 1 on a, grace 30s", "chat: RUNNING → DELETING",
	}, w.takeTrace())
	for _, u := range []string{"chat/0/0", "chat/0/1"} {
		w.says("a", u, msg.UnitDraining)
		w.says("a", u, msg.UnitKilling)
		w.says("a", u, msg.UnitGone)
	}
	assert.Equal(t, []string{
		"chat/0/0: draining → killing", "chat/0/0: killing → gone", "release chat/0/0 epoch 1",
		"forget chat/0/0",
		"chat/0/1: draining → killing", "chat/0/1: killing → gone", "release chat/0/1 epoch 1",
		"forget chat/0/1", "forget_app ",
	}, w.takeTrace())
	assert.Empty(t, w.state.Apps)
	assert.Empty(t, w.state.Units)
	assert.Equal(t, map[string]uint64{"chat/0/0": 1, "chat/0/1": 1}, w.state.Epochs)
	assert.Empty(t, view{w.core}.Status())
}

func TestStartIsSentAgainUntilConfirmed(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	w.takeTrace()
	w.pass(5 * time.Second)
	assert.Equal(t, []string{"start chat/0/0 epoch 1 on a", "start chat/0/0 epoch 1 on a"}, w.takeTrace())
	w.says("a", "chat/0/0", msg.UnitStarted)
	w.pass(time.Hour)
	assert.Empty(t, w.takeTrace())
}

func TestStopIsSentAgainWithTheGraceThatIsLeft(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	w.delete("chat")
	w.takeTrace()
	w.pass(4 * time.Second)
	assert.Equal(t, []string{
		"stop chat/0/0 epoch 1 on a, grace 28s",
		"stop chat/0/0 epoch 1 on a, grace 26s",
	}, w.takeTrace())
	w.says("a", "chat/0/0", msg.UnitDraining)
	w.pass(time.Hour)
	assert.Empty(t, w.takeTrace())
}

// A group over two nodes: its parts are told to end once the last of them is idle or ends.
func TestPartsOfAGroupDrainTogether(t *testing.T) {
	for name, c := range map[string]struct {
		says [][2]string // node and event
		want []string    // what follows the last one
	}{
		"one is idle":             {[][2]string{{"a", "idle"}, {"b", "draining"}}, nil},
		"one is idle, told twice": {[][2]string{{"a", "idle"}, {"a", "idle"}}, nil},
		"both are idle": {[][2]string{{"a", "idle"}, {"b", "draining"}, {"b", "idle"}}, []string{
			"stop moe/0 epoch 1 on a, grace 0s", "stop moe/0 epoch 1 on b, grace 0s",
		}},
		"idle is the answer to the end": {[][2]string{{"a", "idle"}, {"b", "idle"}, {"b", "idle"}}, nil},
		"the busy one ends": {[][2]string{{"a", "idle"}, {"b", "killing"}}, []string{
			"moe/0: draining → killing", "stop moe/0 epoch 1 on a, grace 0s",
		}},
		"the busy one has ended": {[][2]string{{"b", "gone"}, {"a", "idle"}}, []string{
			"stop moe/0 epoch 1 on a, grace 0s",
		}},
		"it ends while the other is busy": {[][2]string{{"a", "draining"}, {"b", "killing"}}, []string{
			"moe/0: draining → killing",
		}},
	} {
		w := newWorld(t, node("a", 2), node("b", 2))
		moe := sim("moe", 4, app.Lockstep)
		moe.MaxRanksPerNode = 2
		w.deploy(moe)
		for _, n := range []string{"a", "b"} {
			w.says(n, "moe/0", msg.UnitStarted)
			w.says(n, "moe/0", msg.UnitReady)
		}
		require.Equal(t, state.Ready, w.phase("moe/0"))
		w.delete("moe")
		for _, s := range c.says {
			w.takeTrace()
			w.says(s[0], "moe/0", msg.UnitEventKind(s[1]))
		}
		assert.Equal(t, c.want, w.takeTrace(), name)
	}
}

func TestReportsAreTakenOncePerNumberAndForTheEpochInHandOnly(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	fenced := msg.UnitEvent{Node: "a", Number: 3, Unit: "chat/0/0", Epoch: 1, Kind: msg.UnitFenced}
	w.renews("a", fenced)
	w.number++
	w.says("a", "chat/0/0", msg.UnitGone, wasReady)
	w.pass(time.Second)
	w.up("chat/0/0")
	w.takeTrace()
	w.renews("a", fenced)
	fenced.Epoch = 2
	w.renews("a", fenced)
	w.says("a", "chat/0/0", msg.UnitGone, at(1))
	assert.Empty(t, w.takeTrace())
	assert.Equal(t, "RUNNING", w.status("chat"))
}

// The old incarnation came back after its successor was granted.
func TestOldIncarnationIsToldToStop(t *testing.T) {
	w := newWorld(t, node("a", 4), node("b", 4))
	w.deploy(sim("chat", 1, app.Independent))
	w.reboot()
	w.takeTrace()
	w.says("a", "chat/0/0", msg.UnitReady, at(1))
	assert.Equal(t, []string{"stop chat/0/0 epoch 1 on a, grace 0s"}, w.takeTrace())
	w.says("b", "chat/0/0", msg.UnitReady)
	assert.Equal(t, []string{"stop chat/0/0 epoch 2 on b, grace 0s"}, w.takeTrace(), "not granted there")
	assert.Equal(t, state.Starting, w.phase("chat/0/0"))
}

func TestRefusedStartIsAFailedStart(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 1, app.Independent))
	w.step(Refused{"a", "chat/0/0", 1, errLost})
	assert.Equal(t, state.Backoff, w.phase("chat/0/0"))
	assert.Contains(t, view{w.core}.Status()[0].Message, "node a refused: leadership was lost")
	w.step(Refused{"a", "chat/0/0", 1, errLost})
	w.pass(time.Second)
	assert.Equal(t, state.Starting, w.phase("chat/0/0"))
}

func TestLockstepOverTwoNodes(t *testing.T) {
	w := newWorld(t, node("a", 2), node("b", 2))
	w.deploy(sim("moe", 4, app.Lockstep))
	require.Equal(t, []string{"start moe/0 epoch 1 on a", "start moe/0 epoch 1 on b"}, w.takeTrace()[4:])
	w.says("a", "moe/0", msg.UnitReady)
	assert.Equal(t, state.Starting, w.phase("moe/0"), "one of two nodes")
	w.says("b", "moe/0", msg.UnitReady)
	assert.Equal(t, state.Ready, w.phase("moe/0"))
	w.takeTrace()
	w.says("b", "moe/0", msg.UnitFenced, because("rank 3 died"))
	assert.Equal(t, []string{
		"moe/0: ready → fenced", "stop moe/0 epoch 1 on a, grace 0s", "unit_fenced moe/0",
		"moe: RUNNING → UNHEALTHY",
	}, w.takeTrace())
	w.says("b", "moe/0", msg.UnitGone, wasReady)
	assert.Equal(t, state.Killing, w.phase("moe/0"), "node a still has processes")
	w.says("a", "moe/0", msg.UnitGone, wasReady)
	assert.Equal(t, state.Backoff, w.phase("moe/0"))
	w.pass(time.Second)
	assert.Equal(t, uint64(2), w.state.Epochs["moe/0"])
	assert.Equal(t, "rank 3 died", view{w.core}.Status()[0].Units[0].Reason)
}

// A group over two nodes fails after three starts in which one node's ranks never got ready, although the
// other's did: it was not ready.
func TestAGroupThatIsReadyOnOneNodeAloneHasNotStarted(t *testing.T) {
	w := newWorld(t, node("a", 2), node("b", 2))
	w.deploy(sim("moe", 4, app.Lockstep))
	for start := range state.MaxStartAttempts {
		require.Equal(t, state.Starting, w.phase("moe/0"), start)
		w.says("a", "moe/0", msg.UnitReady)
		w.says("b", "moe/0", msg.UnitKilling, because("rank 3: out of memory"))
		w.says("b", "moe/0", msg.UnitGone, because("rank 3: out of memory"))
		w.says("a", "moe/0", msg.UnitGone, wasReady)
		w.pass(state.DefaultStartRetry << start)
	}
	assert.Equal(t, state.Failed, w.phase("moe/0"))
	assert.Equal(t, "DEPLOY_FAILED", w.status("moe"))
}

func TestAttachedUnitComesBackUnderItsEpoch(t *testing.T) {
	w := newWorld(t)
	a := sim("ext", 2, app.Independent)
	a.Engine = app.Engine{Kind: app.KindAttach, Ranks: []app.AttachRank{{URL: "http://x"}, {URL: "http://y"}}}
	w.deploy(a)
	w.up("ext/0/0", "ext/0/1")
	require.Equal(t, -1, w.state.Units["ext/0/0"].Ranks[0].Slot)
	require.Empty(t, w.state.Units["ext/0/0"].Blocks)
	w.takeTrace()
	w.says("a", "ext/0/0", msg.UnitFenced, because("connection refused"))
	w.says("a", "ext/0/0", msg.UnitReady)
	assert.Equal(t, []string{
		"ext/0/0: ready → fenced", "unit_fenced ext/0/0", "ext: RUNNING → UNHEALTHY",
		"ext/0/0: fenced → ready", "unit_ready ext/0/0", "ext: UNHEALTHY → RUNNING",
	}, w.takeTrace())
	assert.Equal(t, uint64(1), w.state.Epochs["ext/0/0"])

	more := *a
	more.Engine.Ranks = append(more.Engine.Ranks, app.AttachRank{URL: "http://z"})
	more.DataParallel.DPSize, more.NumReplicas = 3, 3
	w.deploy(&more)
	w.up("ext/0/2")
	assert.Equal(t, "RUNNING", w.status("ext"))
	assert.Equal(t, uint64(1), w.state.Epochs["ext/0/0"], "adding a rank leaves the others alone")
}

func TestPendingSaysWhyAndStartsWhenThereIsRoom(t *testing.T) {
	w := newWorld(t, node("a", 2))
	w.deploy(sim("one", 2, app.Independent))
	w.up("one/0/0", "one/0/1")
	w.deploy(sim("two", 1, app.Independent))
	assert.Equal(t, state.Pending, w.phase("two/0/0"))
	assert.Contains(t, view{w.core}.Status()[1].Message, "two/0/0 is pending: place two/0")
	assert.True(t, w.quiet(), "no polling")
	w.delete("one")
	w.says("a", "one/0/0", msg.UnitGone)
	w.says("a", "one/0/1", msg.UnitGone)
	assert.Equal(t, state.Starting, w.phase("two/0/0"))
}

func TestDeleteInEveryPhaseLeavesNothing(t *testing.T) {
	ways := map[string]func(w *world){
		"starting": func(*world) {},
		"ready":    func(w *world) { w.up("chat/0/0") },
		"fenced":   func(w *world) { w.up("chat/0/0"); w.says("a", "chat/0/0", msg.UnitFenced) },
		"killing":  func(w *world) { w.says("a", "chat/0/0", msg.UnitKilling) },
		"backoff":  func(w *world) { w.says("a", "chat/0/0", msg.UnitGone) },
		"failed": func(w *world) {
			for range 3 {
				w.says("a", "chat/0/0", msg.UnitGone)
				w.pass(2 * time.Second)
			}
		},
		"rebooted": func(w *world) { w.up("chat/0/0"); w.reboot() },
	}
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.deploy(sim("chat", 1, app.Independent))
			way(w)
			w.delete("chat")
			w.says("a", "chat/0/0", msg.UnitGone)
			assert.Empty(t, w.state.Apps)
			assert.Empty(t, w.state.Units)
			assert.Empty(t, w.core.units)
			assert.True(t, w.quiet())
		})
	}
}

func TestDeletingAppOverARestart(t *testing.T) {
	w := newWorld(t)
	w.deploy(sim("chat", 2, app.Independent))
	w.up("chat/0/0", "chat/0/1")
	w.delete("chat")
	w.reboot()
	assert.Empty(t, w.state.Apps)
	assert.Empty(t, w.state.Units)
}

// The grant is started all the same, once.
func TestGrantWhoseAnswerIsLost(t *testing.T) {
	w := newWorld(t)
	w.after = func(c state.Command) error {
		if c.GrantGroup != nil {
			w.after = nil
			return context.DeadlineExceeded
		}
		return nil
	}
	w.deploy(sim("chat", 1, app.Independent))
	assert.Equal(t, state.Starting, w.phase("chat/0/0"))
	assert.Equal(t, uint64(1), w.state.Epochs["chat/0/0"])
	assert.Equal(t, 1, w.saw("start"))
	w.up("chat/0/0")
	assert.Equal(t, "RUNNING", w.status("chat"))
}

// Every kind of command is repeated after a second.
func TestCommandsThatDoNotGetThroughAreRepeated(t *testing.T) {
	w := newWorld(t)
	failed := map[string]bool{}
	w.lose = func(c state.Command) error {
		if c.PutApps != nil || c.DeleteApp != nil || failed[c.Kind()] {
			return nil
		}
		failed[c.Kind()] = true
		return errLost
	}
	w.deploy(sim("chat", 1, app.Independent))
	w.pass(time.Second)
	w.up("chat/0/0")
	w.pass(time.Second)
	assert.Equal(t, state.Ready, w.state.Units["chat/0/0"].Phase)
	w.delete("chat")
	w.says("a", "chat/0/0", msg.UnitGone)
	w.pass(time.Second)
	w.pass(time.Second)
	assert.Empty(t, w.state.Apps)
	assert.Len(t, failed, 5)
}

func TestUnitWithoutItsNodeIsPlacedElsewhere(t *testing.T) {
	w := newWorld(t, node("a", 1), node("b", 1))
	w.deploy(sim("chat", 1, app.Independent))
	w.up("chat/0/0")
	_, err := w.apply(state.Command{NodeLost: &state.NodeRef{Node: "a", UID: "uid-a"}})
	require.NoError(t, err)
	w.reboot()
	assert.Equal(t, "b", w.state.Units["chat/0/0"].Ranks[0].Node)
}

func TestOfAPartOnlyTheNewestNewsCount(t *testing.T) {
	var p part
	for _, c := range []struct {
		process, number uint64
		news            bool
	}{
		{1, 2, true},
		{1, 1, false},
		{1, 2, false},
		{1, 4, true},
		{1, 0, true},
		{1, 3, false},
		{2, 1, true},
		{2, 1, false},
		{2, 2, true},
	} {
		assert.Equal(t, c.news, p.isNewer(c.process, c.number), c)
	}
}

// BenchmarkRenewal measures one renewal on the leader of 64 nodes with 1024 ranks.
func BenchmarkRenewal(b *testing.B) {
	var hosts []*host
	for i := range 64 {
		hosts = append(hosts, newHost(fmt.Sprintf("n%02d", i), 16))
	}
	c := newFleet(b, hosts...)
	c.deploy(sim("chat", 1024, app.Independent))
	c.renew(c.ids()...)
	if c.status("chat") != "RUNNING" {
		b.Fatal(c.status("chat"))
	}
	b.ReportAllocs()
	for b.Loop() {
		c.core.Step(c.now, NodeReported{hosts[7].report(c.now)})
	}
}

// Status is the status while all nodes answer.
func (c view) Status() []client.AppStatus { return c.StatusWithout(nil) }
