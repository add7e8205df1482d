package ingress

import (
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
	"github.com/dpserve/dpserve/test/pairengine"
)

// breaksOff ends the connection without an answer. The body is read already.
func breaksOff(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// TestPrefillFails: a 400 of the prefill rank goes to the client as it is. After a 500 or a reset another
// prefill rank is asked once. Its fault is not charged to the decode rank, whose engine is not asked before.
func TestPrefillFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		engine      http.HandlerFunc
		status      int
		asked       int
		outcome     msg.Outcome
		charge      bool
		checkHealth bool
	}{
		"400":   {replies(400, `{"error":{"message":"bad","code":400}}`), 400, 1, msg.OK, false, false},
		"500":   {replies(500, `{}`), 200, 2, msg.FailedOutcome, true, false},
		"reset": {breaksOff, 200, 2, msg.FailedOutcome, false, true},
		"busy":  {replies(503, busyError), 200, 2, msg.FailedOutcome, false, false},
		"junk":  {replies(200, `{"choices":[]}`), 200, 2, msg.FailedOutcome, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newPairRig(t, options{prefills: 2, decodes: 1})
			g.p[0].Do(answers(c.engine))
			var a answer
			// the policy takes the prefill ranks in turn: ask until the first one was the first
			for g.prefills[0].granted() == 0 {
				a = g.post("/v1/chat/completions", streamBody)
			}
			require.Equal(t, c.status, a.status, a.body)
			if c.status == 400 {
				assert.JSONEq(t, `{"error":{"message":"bad","code":400}}`, a.body)
			} else {
				g.served(a, "remote")
				assert.Equal(t, "0/1", a.header.Get("X-Dpserve-Prefill-Rank"))
			}
			d := g.prefills[0].oneDone(t)
			assert.Equal(t, c.outcome, d.Outcome)
			assert.Equal(t, c.charge, d.Charge, "charge")
			assert.Equal(t, c.checkHealth, d.CheckHealth, "health check")
			for _, d := range g.decodes[0].allDones() {
				assert.NotEqual(t, msg.FailedOutcome, d.Outcome)
				assert.False(t, d.Charge || d.CheckHealth || d.BusyFor > 0)
			}
		})
	}
}

func (r *replica) allDones() []msg.Done {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]msg.Done(nil), r.dones...)
}

// TestDecodeRejects: a 4xx of the decode rank goes to the client as it is, streamed or not.
func TestDecodeRejects(t *testing.T) {
	g := newPairRig(t, options{prefills: 1, decodes: 1})
	const said = `{"error":{"message":"too long","type":"BadRequestError","code":400}}`
	g.d[0].Do(answers(replies(400, said)))
	a := g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 400, a.status)
	assert.JSONEq(t, said, a.body)
	assert.Equal(t, "remote", a.header.Get("X-Dpserve-Prefill"))
	g.d[0].Do(answers(sends(said, doneEvent)))
	a = g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 400, a.status)
	assert.JSONEq(t, said, a.body)
	g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="rejected",way="remote"}`, "2")
	assert.Len(t, g.fleet.Legs(pairengine.Prefill), 2, "nothing is done again")
}

// TestReservedDecodeRankIsLost: while a prefill rank computes, the unit of the decode rank is lost that the
// request has reserved. It is given up at once, and another one answers.
func TestReservedDecodeRankIsLost(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 1, decodes: 2})
	computes, isLost := make(chan struct{}), make(chan struct{})
	g.p[0].Do(func(*pairengine.Leg) bool {
		close(computes)
		<-isLost
		return false
	})
	answered := make(chan answer, 1)
	go func() { answered <- g.post("/v1/chat/completions", streamBody) }()
	<-computes
	other := g.decodes[0].granted() // the number of the rank that the request has not reserved
	g.decodes[1-other].say(false, true, "exit_1")
	eventually(t, func() bool { return len(g.decodes[1-other].allDones()) == 1 }, "it is given up")
	close(isLost)
	a := <-answered
	g.served(a, "remote")
	assert.Equal(t, strconv.Itoa(other), a.header.Get("X-Dpserve-Rank"))
}

func (r *replica) ref() routing.RankRef {
	r.mu.Lock()
	defer r.mu.Unlock()
	return routing.RankRef{ID: r.id, Incarnation: r.incarnation}
}

func (r *replica) firstTokens() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.firsts
}

// TestNoPrefill: a request that no prefill rank can compute is refused at once, with the reason of the
// placement.
func TestNoPrefill(t *testing.T) {
	t.Parallel()
	g := newPairRig(t, options{prefills: 2, decodes: 3, change: func(p, d *app.Application) {
		p.Disaggregation.Fallback, d.Disaggregation.Fallback = app.FallbackFail, app.FallbackFail
	}})
	g.served(g.post("/v1/chat/completions", streamBody), "remote")
	for _, r := range g.prefills {
		r.say(false, true, "exit_1")
	}
	a := g.post("/v1/chat/completions", streamBody)
	assert.Equal(t, 503, a.status, a.body)
	assert.Equal(t, "no_ready_rank", a.code(t))
	assert.Contains(t, a.body, "fallback")
	assert.NotContains(t, a.body, "no room")

	pool := app.PoolName("demo", app.PoolPrefill)
	g.in.TakeWaiting([]msg.Waiting{{
		App: pool, Revision: 1, Reason: noRoomReason, Units: map[string]uint64{pool + "/0/0": 1},
	}}, time.Minute)
	eventually(t, func() bool {
		a = g.post("/v1/chat/completions", streamBody)
		return strings.Contains(a.body, "there is no room to start one: "+noRoomReason)
	}, "the reason of the placement")
	_, err := g.in.BestWorker(t.Context(), "demo", &client.BestWorkerRequest{TokenIDs: []uint32{1}})
	require.ErrorContains(t, err, "no prefill rank can compute the prompt")
	require.ErrorContains(t, err, "and there is no room to start one: "+noRoomReason)
}

// TestSplitDeadline: a request whose own deadline is over leaves nothing behind, whatever leg runs.
func TestSplitDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var h hangingEngine
		g := newPairRig(t, options{prefills: 1, decodes: 1, network: &memnet.Network{}})
		g.p[0].Do(answers(h.sends()))
		a := g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", "50")
		assert.Equal(t, "deadline_exceeded", a.code(t))
		g.p[0].Do(nil)
		g.d[0].Do(answers(h.sends()))
		a = g.post("/v1/chat/completions", streamBody, "X-Dpserve-Timeout-Ms", "100")
		assert.Equal(t, "deadline_exceeded", a.code(t))
		g.requireMetric(`dpserve_pd_requests_total{app="demo",outcome="deadline",way="remote"}`, "2")
	})
}
