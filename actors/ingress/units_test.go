package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

const noRoomReason = "place demo/0: 0 of 1 rank can be placed (PACK)"

// withoutRoom is the leader's report on the application demo at a revision, whose one unit had an epoch.
func withoutRoom(revision, epoch uint64) []msg.Waiting {
	return []msg.Waiting{{
		App: "demo", Revision: revision, Reason: noRoomReason,
		Units: map[string]uint64{"demo/0/0": epoch},
	}}
}

// emptyRig is an ingress with the application demo, whose one unit was never granted.
func emptyRig(t *testing.T) *rig {
	t.Helper()
	g := newRig(t, options{noApp: true})
	g.deploy(demoApp(), 1)
	g.store.set(func(st *state.State) { clear(st.Units); clear(st.Epochs) })
	eventually(t, func() bool { return g.onTheWay() == 1 }, "the ingress has seen the application")
	return g
}

// onTheWay is the number of pending units of demo in the Router; -1 without the application.
func (g *rig) onTheWay() int {
	ar := g.in.findAppRouter("demo")
	if ar == nil || ar.revision.Load() == nil {
		return -1
	}
	ar.mu.Lock()
	defer ar.mu.Unlock()
	return ar.pendingUnits + len(ar.unseenUnits) + len(ar.fencedUnits)
}

func TestRequestWaitingForAnAppIsRefusedWhenThereIsNoRoom(t *testing.T) {
	g := emptyRig(t)
	got := make(chan answer, 1)
	go func() { got <- g.post("/v1/chat/completions", chatBody) }()
	eventually(t, func() bool { return g.in.QueueLen("demo") == 1 }, "nothing was refused yet: it waits")
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	a := <-got
	assert.Equal(t, http.StatusServiceUnavailable, a.status)
	assert.Equal(t, "no_ready_rank", a.code(t))
	assert.Contains(t, a.body, "there is no room to start one: "+noRoomReason+"; see `dpserve status`")
	assert.NotEmpty(t, a.header.Get("Retry-After"))
}

// TestWaitingForRoomIsOfOneRevision: the leader's report on the last revision does not apply to the next one,
// which was not placed yet.
func TestWaitingForRoomIsOfOneRevision(t *testing.T) {
	g := emptyRig(t)
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "no unit is on its way")
	g.store.set(func(st *state.State) {
		a := *st.Apps["demo"]
		a.Revision = 2
		st.Apps["demo"] = &a
	})
	eventually(t, func() bool { return g.onTheWay() == 1 }, "the new revision may find room")
}

// TestWaitingForRoomEndsWithTheGrant: a unit that was granted is pending even before the leader reports it; a
// unit that is restarted always is.
func TestWaitingForRoomEndsWithTheGrant(t *testing.T) {
	g := emptyRig(t)
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "no unit is on its way")
	g.phase("demo/0/0", state.Starting, 1)
	assert.Equal(t, 1, g.onTheWay())
	g.phase("demo/0/0", state.Fenced, 1)
	assert.Equal(t, 1, g.onTheWay())
	g.in.TakeWaiting(withoutRoom(1, 1), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "its last grant counts for nothing")
	g.in.TakeWaiting(nil, time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 1 }, "the leader says so no more")
}

// TestReadyRecordOfAUnitWithoutRoomIsNotWaitedFor: a unit that is ready in the state does not count when the
// leader has no room to start it again, because its process is gone.
func TestReadyRecordOfAUnitWithoutRoomIsNotWaitedFor(t *testing.T) {
	g := emptyRig(t)
	g.phase("demo/0/0", state.Ready, 3)
	require.Equal(t, 1, g.onTheWay(), "its stream has not told of it")
	g.in.TakeWaiting(withoutRoom(1, 3), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "it is not coming")
}

// TestWaitingForRoomLapses: the leader's report is valid as long as the lease with which it came.
func TestWaitingForRoomLapses(t *testing.T) {
	g := emptyRig(t)
	g.in.TakeWaiting(withoutRoom(1, 0), 50*time.Millisecond)
	eventually(t, func() bool { return g.onTheWay() == 1 }, "no leader says so any more")
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "one says so again")
}
