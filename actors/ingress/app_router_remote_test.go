package ingress

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
)

// silence reports to the ingress whether the rank's node is silent.
func (r *replica) silence(on bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.feed.deliver(&msg.Record{
		App: r.app, Unit: r.unit, Rank: r.id, Epoch: r.epoch, Incarnation: r.incarnation, Kind: msg.RecSilent,
		RankState: msg.RankState{Silent: on},
	})
}

func (r *replica) fenced() {
	r.say(false, true, "exit_1")
}

// states is the state of every rank, as explain reports it.
func (g *rig) states() (out []string) {
	e, err := g.in.ExplainRoute(context.Background(), "demo", &client.Query{Request: []byte(chatBody)})
	require.NoError(g.t, err)
	for _, r := range e.Ranks {
		out = append(out, r.State)
	}
	return out
}

// TestSilentRanksArePickedLast: a silent rank gets no request while another rank is heard, and all requests
// when none is. It becomes an ordinary rank again without a snapshot, and also with one.
func TestSilentRanksArePickedLast(t *testing.T) {
	whole := replies(http.StatusOK, wholeAnswer)
	g := newRig(t, options{engines: []http.HandlerFunc{whole, whole}})
	first, second := g.replicas[0], g.replicas[1]
	ask := func(n int) {
		for range n {
			require.Equal(t, http.StatusOK, g.post("/v1/chat/completions", chatBody).status)
		}
	}
	first.silence(true)
	assert.Equal(t, []string{"silent", "ok"}, g.states())
	ask(6)
	assert.Zero(t, first.granted())
	second.silence(true)
	assert.Equal(t, []string{"silent", "silent"}, g.states())
	ask(2)
	first.silence(false)
	before := second.granted()
	ask(4)
	assert.Equal(t, before, second.granted())
	second.publish()
	assert.Equal(t, []string{"ok", "ok"}, g.states())

	first.silence(true)
	g.in.listRanks() // whoever lists again hears of a silence by the missing snapshot
	assert.Equal(t, []string{"ok", "ok"}, g.states())
}

// lockstepRig is a rig with one lockstep unit that has one rank per engine.
func lockstepRig(t *testing.T, engines ...http.HandlerFunc) *rig {
	g := newRig(t, options{engines: engines, app: func(a *app.Application) {
		a.DataParallel, a.NumReplicas = app.DataParallel{DPSize: len(engines), Coupling: app.Lockstep}, 1
	}})
	for _, r := range g.replicas {
		r.mu.Lock()
		r.unit, r.incarnation = "demo/0", r.incarnation+100
		r.snapshot()
		r.mu.Unlock()
	}
	return g
}

// TestOneFencedRankFencesItsUnit: one record takes every rank of a lockstep unit out of routing, on all
// nodes, and cancels its attempts without a first byte. Later records of the other ranks change nothing until
// they are another incarnation.
func TestOneFencedRankFencesItsUnit(t *testing.T) {
	var h hangingEngine
	g := lockstepRig(t, h.sends(), h.sends(), h.sends())
	answers := make(chan answer, 3)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 3 {
		go func() { answers <- g.postCtx(ctx, "/v1/chat/completions", streamBody) }()
	}
	eventually(t, func() bool { return h.came.Load() == 3 }, "one request on each rank")
	g.replicas[1].fenced()
	assert.Equal(t, []string{"not-ready", "not-ready", "not-ready"}, g.states())
	eventually(t, func() bool { return h.left.Load() == 3 }, "given up")

	g.replicas[0].say(true, false, "")
	g.replicas[2].publish()
	g.replicas[2].fenced()
	assert.Equal(t, []string{"not-ready", "not-ready", "not-ready"}, g.states())
	eventually(t, func() bool { return g.in.QueueLen("demo") == 3 }, "they wait: the unit will be back")

	for _, r := range g.replicas {
		r.reborn()
	}
	g.phase("demo/0", state.Ready, 2)
	eventually(t, func() bool { return h.came.Load() == 6 }, "the next epoch serves")
	cancel()
	for range 3 {
		<-answers
	}
}

// TestAFenceStaysWithItsUnit: a fence affects no independent ranks, no other unit, no other epoch, and is not
// caused by the end of a drain.
func TestAFenceStaysWithItsUnit(t *testing.T) {
	whole := replies(http.StatusOK, wholeAnswer)
	g := newRig(t, options{engines: []http.HandlerFunc{whole, whole}})
	g.replicas[0].fenced()
	assert.Equal(t, []string{"not-ready", "ok"}, g.states())

	g = lockstepRig(t, whole, whole)
	g.replicas[0].mu.Lock()
	g.replicas[0].emit(&msg.Record{
		Kind: msg.RecState, RankState: msg.RankState{Fenced: true, Draining: true},
		Cause: dispatch.Drained.String(),
	})
	g.replicas[0].mu.Unlock()
	assert.Equal(t, []string{"not-ready", "ok"}, shortened(g.states()))

	g = lockstepRig(t, whole, whole)
	r := g.replicas[1]
	r.id, r.unit = routing.ID(1, 0), "demo/1" // and 0/1 goes on without it
	r.publish()
	g.phase("demo/1", state.Ready, 1)
	eventually(t, func() bool { return fmt.Sprint(g.states()) == "[ok ok ok]" }, "another unit")
	g.replicas[0].fenced()
	assert.Equal(t, []string{"not-ready", "not-ready", "ok"}, g.states())
}

func shortened(states []string) []string {
	for i, s := range states {
		if s == "draining" {
			states[i] = "not-ready"
		}
	}
	return states
}
