package ingress

import (
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/test/memnet"
)

// outageRig is an ingress in fake time, in front of one rank that is not ready.
type outageRig struct {
	*rig
	rank *replica
}

func newOutageRig(t *testing.T, kind app.Kind) *outageRig {
	t.Helper()
	o := options{network: &memnet.Network{}}
	g := &outageRig{rig: newFrame(t, &o)}
	a := demoApp()
	a.Engine.Kind, a.Timeouts.QueueS = kind, 60
	if kind == app.KindAttach {
		a.Engine.Ranks = []app.AttachRank{{URL: "http://127.0.0.1:1"}}
	}
	g.deploy(a, 1)
	g.phase(state.Fenced)
	g.start(&o)
	g.rank = g.feed.add("demo", "demo/0/0", routing.ID(0, 0), "http://127.0.0.1:1", o.max)
	return g
}

func (g *outageRig) phase(p state.Phase) {
	g.store.set(func(st *state.State) { st.Units["demo/0/0"].Phase = p })
}

// comeBack makes the rank ready.
func (g *outageRig) comeBack() {
	g.phase(state.Ready)
	g.rank.mu.Lock()
	g.rank.snapshot()
	g.rank.mu.Unlock()
	synctest.Wait()
}

// ask sends a request and returns the answer, and its time.
func (g *outageRig) ask() (a answer, took time.Duration) {
	began := time.Now()
	a = g.post("/v1/chat/completions", chatBody)
	return a, time.Since(began)
}

// RP17: dpserve does not start attached engines, so requests wait for them as long as a restart under a
// supervisor takes. After that time waiting requests are refused, and new ones at once.
func TestAnOutageOfAttachedEnginesIsAnsweredAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newOutageRig(t, app.KindAttach)
		time.Sleep(defaultOutage / 2)
		a, took := g.ask()
		assert.Equal(t, http.StatusServiceUnavailable, a.status)
		assert.Contains(t, a.body, "no_ready_rank")
		assert.Equal(t, "1", a.header.Get("Retry-After"))
		assert.Equal(t, defaultOutage/2, took, "what is left of the time since the outage began")
		for range 3 {
			a, took = g.ask()
			assert.Equal(t, http.StatusServiceUnavailable, a.status)
			assert.Equal(t, "1", a.header.Get("Retry-After"))
			assert.Zero(t, took)
			time.Sleep(time.Minute)
		}
		g.store.set(func(st *state.State) { st.Units["demo/0/0"].Phase = state.Starting })
		synctest.Wait()
		_, took = g.ask()
		assert.Zero(t, took, "a start that goes on for ever is no end of the outage")
	})
}

// RP17: requests wait again for a rank that was back and is lost again.
func TestTheNextOutageBeginsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newOutageRig(t, app.KindAttach)
		time.Sleep(time.Minute)
		g.comeBack()
		require.True(t, g.in.Ready())
		time.Sleep(time.Minute)
		g.rank.say(false, true, "engine_lost")
		g.phase(state.Fenced)
		synctest.Wait()
		time.Sleep(time.Second)
		a, took := g.ask()
		assert.Equal(t, http.StatusServiceUnavailable, a.status)
		assert.Equal(t, defaultOutage-time.Second, took)
	})
}

// RP34: dpserve restarts these engines, so requests wait as long as they may if nobody knows how long that
// takes. The answer says what they waited for.
func TestRequestsWaitForEnginesThatDpserveStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newOutageRig(t, app.KindSim)
		time.Sleep(time.Minute)
		a, took := g.ask()
		assert.Contains(t, a.body, "no_ready_rank")
		assert.Contains(t, a.body, "is ready, demo/0/0 restarts since 2m0s; see")
		assert.Equal(t, time.Minute, took)
	})
}

// RP34: TestNoRequestWaitsForAStartThatTakesLonger than its time in the queue: the last start took 70 s, and
// requests wait for 60 s.
func TestNoRequestWaitsForAStartThatTakesLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newOutageRig(t, app.KindSim)
		synctest.Wait()
		g.phase(state.Starting)
		time.Sleep(70 * time.Second)
		g.comeBack()
		time.Sleep(time.Minute)

		g.rank.say(false, true, "rank 0 died")
		time.AfterFunc(time.Second, func() { g.phase(state.Fenced) })
		time.AfterFunc(2*time.Second, func() { g.phase(state.Starting) })
		for _, c := range []struct {
			took, sleep time.Duration // sleep: after it
			since       string
			retryAfter  string
		}{
			{time.Second, 0, "1s", "60"},     // the state says only then that the unit starts anew
			{0, 6 * time.Second, "1s", "60"}, // 70 s are left
			{0, 5 * time.Second, "7s", "60"}, // 65 s
			{time.Minute, 0, "1m12s", "1"},   // it might have been there in time
		} {
			a, took := g.ask()
			assert.Equal(t, http.StatusServiceUnavailable, a.status)
			assert.Contains(t, a.body, "no_ready_rank")
			assert.Contains(t, a.body, "demo/0/0 restarts since "+c.since+
				" (rank 0 died); the last start took 1m10s")
			assert.Equal(t, c.retryAfter, a.header.Get("Retry-After"))
			assert.Equal(t, c.took, took)
			time.Sleep(c.sleep)
		}
	})
}
