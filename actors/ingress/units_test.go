package ingress

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
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
	return ar.comingUnits()
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

// TestBestWorkerSaysThatThereIsNoRoom: as the answer to a request does.
func TestBestWorkerSaysThatThereIsNoRoom(t *testing.T) {
	g := emptyRig(t)
	_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1}})
	require.ErrorContains(t, err, "no rank of this application is ready", "one is on its way")
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "no unit is on its way")
	for _, id := range []string{"", "r1"} { // a question, a reservation
		_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{
			TokenIDs: []uint32{1}, RequestID: id,
		})
		require.ErrorContains(t, err, "no rank of this application is ready", id)
		require.ErrorContains(t, err, "and there is no room to start one: "+noRoomReason, id)
	}
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

// ST2: a unit that was granted is pending even before the leader reports it; a unit that is restarted always
// is.
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

// ST2: the leader's report is valid as long as the lease with which it came.
func TestWaitingForRoomLapses(t *testing.T) {
	g := emptyRig(t)
	g.in.TakeWaiting(withoutRoom(1, 0), 50*time.Millisecond)
	eventually(t, func() bool { return g.onTheWay() == 1 }, "no leader says so any more")
	g.in.TakeWaiting(withoutRoom(1, 0), time.Minute)
	eventually(t, func() bool { return g.onTheWay() == 0 }, "one says so again")
}

// TestPicksOfARemovedRankAreForgotten: a rank that has ended and that the present revision does not have
// loses its series, whichever of the two the ingress hears first. A rank that only restarts keeps them.
func TestPicksOfARemovedRankAreForgotten(t *testing.T) {
	for name, remove := range map[string]func(g *rig, smaller *app.Application){
		"revision first": func(g *rig, smaller *app.Application) {
			g.deploy(smaller, 2)
			eventually(t, func() bool { return g.in.findAppRouter("demo").revision.Load().revision == 2 },
				"the revision")
			g.replicas[1].gone()
		},
		"rank first": func(g *rig, smaller *app.Application) {
			g.replicas[1].gone()
			g.deploy(smaller, 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			ok := replies(http.StatusOK, wholeAnswer)
			g := newRig(t, options{engines: []http.HandlerFunc{ok, ok}})
			for range 4 {
				require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", chatBody).status)
			}
			require.Len(t, picksOf(t, g), 2)
			g.replicas[0].gone()
			require.Len(t, picksOf(t, g), 2)
			smaller := demoApp()
			remove(g, smaller)
			eventually(t, func() bool { return len(picksOf(t, g)) == 1 }, "rank 1 is forgotten")
			assert.Contains(t, picksOf(t, g)[0], `rank="0"`)
		})
	}
}

// picksOf returns the samples of dpserve_router_picks_total.
func picksOf(t *testing.T, g *rig) []string {
	t.Helper()
	var out []string
	for line := range strings.Lines(g.page()) {
		if strings.HasPrefix(line, "dpserve_router_picks_total{") {
			out = append(out, line)
		}
	}
	return out
}

// TestNoDecisionIsBetweenReadyAndOnTheWay: a unit that leaves is on its way before its ranks leave routing,
// and stays so until they are back: there is no moment at which a request would be refused.
func TestNoDecisionIsBetweenReadyAndOnTheWay(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{sends(textChunk)}})
	ar := g.in.findAppRouter("demo")
	decide := func() routing.Kind {
		d, _ := ar.router.Load().Why(&routing.Request{})
		return d.Kind
	}
	require.Equal(t, routing.Route, decide())
	stop, done := make(chan struct{}), make(chan routing.Kind)
	go func() {
		for {
			select {
			case <-stop:
				done <- routing.Route
				return
			default:
				if kind := decide(); kind == routing.Reject {
					done <- kind
					return
				}
			}
		}
	}()
	for range 2000 {
		ar.setUnits(nil, map[string]*state.Unit{"demo/0/0": nil}, "")
		ar.setUnits(map[string]uint64{"demo/0/0": 1}, nil, "")
	}
	close(stop)
	assert.NotEqual(t, routing.Reject, <-done)
}

// RP51, RP52: no request goes to a rank whose engine says that it sleeps or scales. Where no other is left,
// requests wait for one that scales, and are refused if all sleep.
func TestAnEngineThatDoesNotCompute(t *testing.T) {
	t.Parallel()
	engine := replies(http.StatusOK, wholeAnswer)
	g := newRig(t, options{engines: []http.HandlerFunc{engine, engine}})
	first, second := g.replicas[0], g.replicas[1]
	for _, why := range []string{msg.CauseAsleep, msg.CauseScaling} {
		first.say(false, false, why)
		before := second.granted()
		for range 4 {
			assert.Equal(t, "1", g.post("/v1/chat/completions", chatBody).header.Get("X-Dpserve-Rank"), why)
		}
		assert.Equal(t, before+4, second.granted())
		info, err := g.in.RouterInfo("demo")
		require.NoError(t, err)
		assert.Equal(t, map[string]int{why: 1}, info.Away)
	}
	first.say(false, false, msg.CauseAsleep)
	second.say(false, false, msg.CauseAsleep)
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, "no_ready_rank", a.code(t))
	assert.Contains(t, a.body, "no rank of this application is ready, 2 say that their engine is asleep")

	second.say(false, false, msg.CauseScaling)
	got := make(chan answer, 1)
	go func() { got <- g.post("/v1/chat/completions", chatBody) }()
	eventually(t, func() bool { return g.in.QueueLen("demo") == 1 }, "it waits")
	second.say(true, false, "")
	assert.Equal(t, http.StatusOK, (<-got).status)
	first.say(true, false, "")
	eventually(t, func() bool {
		info, err := g.in.RouterInfo("demo")
		return err == nil && info.Away == nil
	}, "both are back")
}
