package ingress

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/test/memnet"
)

// freeFor reports that a request of another ingress has ended, and for which ingress the room is.
func (r *replica) freeFor(req uint64, ingress string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emit(&msg.Record{Kind: msg.RecDone, ReqID: req, Ingress: "n2", OfferedTo: ingress})
}

// others lets the rank admit a request of another ingress.
func (r *replica) others(req uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emit(&msg.Record{Kind: msg.RecAdmitted, ReqID: req, Ingress: "n2"})
}

func (g *rig) room() int {
	rk := g.in.ensureAppRouter("demo").router.Load().Snapshot().Ranks[0]
	return rk.MaxOngoing - rk.Load.O()
}

// RP6: an ingress asks a rank for capacity only if the capacity is offered to it.
func TestRoomOfAnotherIngressIsLeftAlone(t *testing.T) {
	synctest.Test(t, testRoomOfAnotherIngress)
}

func testRoomOfAnotherIngress(t *testing.T) {
	g := newRig(t, options{
		engines: []http.HandlerFunc{replies(200, wholeAnswer)}, max: 2, network: &memnet.Network{},
		timers: Timers{FullRecheck: 100 * time.Millisecond},
	})
	r := g.replicas[0]
	r.others(1)
	r.others(2)
	require.Zero(t, g.room())
	r.freeFor(1, "n3")
	assert.LessOrEqual(t, g.room(), 0, "it is n3's")
	r.freeFor(2, "n1")
	assert.Equal(t, 2, g.room(), "this ingress may ask")
	r.freeFor(9, "n3")
	assert.Equal(t, 2, g.room(), "what it was offered stays its own")
	assert.Equal(t, 200, g.post("/v1/chat/completions", chatBody).status)
	r.others(3)
	r.freeFor(3, "n3")
	assert.LessOrEqual(t, g.room(), 0)
	r.mu.Lock()
	r.emit(&msg.Record{Kind: msg.RecState, RankState: msg.RankState{Accepting: true}})
	r.mu.Unlock()
	assert.Equal(t, 2, g.room(), "n3 has not taken it: it is for all")
	r.others(4)
	r.freeFor(4, "n3")
	assert.LessOrEqual(t, g.room(), 0)
	eventually(t, func() bool { return g.room() == 2 }, "a word that is lost blocks for a while only")
}

func TestRanksAreToldThatRequestsWait(t *testing.T) {
	t.Parallel()
	e := newGatedEngine()
	g := newRig(t, options{engines: []http.HandlerFunc{e.ServeHTTP}, max: 1})
	r := g.replicas[0]
	told := func() []bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return append([]bool(nil), r.demands...)
	}
	done := make(chan answer, 2)
	for range 2 {
		go func() { done <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
	}
	eventually(t, func() bool { return g.in.QueueLen("demo") == 1 && len(told()) > 0 }, "one waits")
	assert.True(t, told()[0])
	eventually(t, func() bool { return len(told()) > 1 }, "said again while it lasts")
	for range 2 {
		e.open <- struct{}{}
	}
	for range 2 {
		assert.Equal(t, 200, (<-done).status)
	}
	eventually(t, func() bool { l := told(); return !l[len(l)-1] }, "nobody waits")
}

func TestARequestSaysHowManySequencesItIs(t *testing.T) {
	g := newRig(t, options{engines: []http.HandlerFunc{replies(200, wholeAnswer)}})
	r := g.replicas[0]
	weights := make(chan int, 1)
	r.setRefuse(func(m *msg.Admit) msg.Refusal {
		weights <- m.Weight
		return msg.Granted
	})
	for body, want := range map[string]int{
		`{"model":"demo","prompt":"a"}`: 1, `{"model":"demo","prompt":"a","n":5}`: 5,
		`{"model":"demo","prompt":["a","b",""],"n":2}`: 6,
	} {
		g.post("/v1/completions", body)
		assert.Equal(t, want, <-weights, body)
	}
}
