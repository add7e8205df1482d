package ingress

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/state"
)

// TestOneLostUnitIsOneAttempt: a rank of a lockstep unit fails before its stream reports the loss. The
// request asks no other rank of the unit, and waits until the unit is back. If the engine has reported that
// its core is dead, the wait for the report is longer, because its process has yet to exit.
func TestOneLostUnitIsOneAttempt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fails http.HandlerFunc
		told  time.Duration // after the failure
		waits time.Duration // for the report
	}{
		"reset": {resets, 0, lossWait},
		"dead core": {
			replies(http.StatusInternalServerError, deadCore), lossWait + 100*time.Millisecond,
			deadEngineWait,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			failed := make(chan time.Time, 1)
			engine := func(w http.ResponseWriter, r *http.Request) {
				if calls.Add(1) == 1 {
					failed <- time.Now()
					c.fails(w, r)
					return
				}
				replies(http.StatusOK,
					`{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}`)(w, r)
			}
			g := lockstepRig(t, engine, engine, engine, engine)
			done := make(chan answer, 1)
			go func() { done <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
			first := <-failed
			time.Sleep(c.told)
			g.replicas[0].say(false, true, "process_exit")
			isInTime := time.Since(first) < c.waits // on a slow machine the request has given up waiting
			unit := g.replicas[0].unit
			g.phase(unit, state.Starting, 2)
			for _, r := range g.replicas {
				r.reborn()
			}
			g.phase(unit, state.Ready, 2)
			select {
			case a := <-done:
				assert.Equal(t, http.StatusOK, a.status, a.body)
			case <-time.After(soon):
				t.Fatal("no answer")
			}
			if isInTime {
				assert.Equal(t, int32(2), calls.Load())
			}
		})
	}
}

// TestRefusalsOfALostUnitWaitForIt: a rank of a lost lockstep unit refuses or fails a request before the
// unit's stream reports the loss. The request waits for the report and then for the unit, and asks no other
// rank of it. The rank may be of a node that ended its part of the unit already.
func TestRefusalsOfALostUnitWaitForIt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		admits bool // the rank grants a ticket
		ends   bool // and ends like one that was told to
	}{
		"refuses": {}, "fails": {admits: true}, "was told to end": {admits: true, ends: true},
	} {
		t.Run(name, func(t *testing.T) {
			var g *rig
			var calls atomic.Int32
			var back atomic.Bool
			asked := make(chan time.Time, 1)
			engines := make([]http.HandlerFunc, 5)
			for i := range engines {
				engines[i] = func(w http.ResponseWriter, r *http.Request) {
					switch {
					case back.Load():
						replies(http.StatusOK, wholeAnswer)(w, r)
					case c.ends:
						drain(r)
						g.replicas[i].endAsTold()
						<-r.Context().Done()
					default:
						resets(w, r)
					}
				}
			}
			g = lockstepRig(t, engines...)
			for _, r := range g.replicas {
				r.setRefuse(func(*msg.Admit) msg.Refusal {
					if calls.Add(1) == 1 {
						asked <- time.Now()
					}
					if c.admits {
						return msg.Granted
					}
					return msg.Fenced
				})
			}
			done := make(chan answer, 1)
			go func() { done <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
			first := <-asked
			time.Sleep(lossWait / 5) // the rest of the unit could be asked meanwhile
			for _, r := range g.replicas {
				r.say(false, true, "process_exit")
			}
			isInTime := time.Since(first) < lossWait // on a slow machine the request has given up waiting
			unit := g.replicas[0].unit
			g.phase(unit, state.Starting, 2)
			back.Store(true)
			for _, r := range g.replicas {
				r.setRefuse(nil)
				r.reborn()
			}
			g.phase(unit, state.Ready, 2)
			select {
			case a := <-done:
				assert.Equal(t, http.StatusOK, a.status, a.body)
			case <-time.After(soon):
				t.Fatal("no answer")
			}
			if isInTime {
				assert.Equal(t, int32(1), calls.Load())
			}
		})
	}
}

// endAsTold reports the end of a drain.
func (r *replica) endAsTold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.accepting = false
	r.emit(&msg.Record{
		Kind: msg.RecState, Cause: dispatch.Drained.String(),
		RankState: msg.RankState{Fenced: true, Draining: true},
	})
}

const deadCore = `{"error":{"message":"EngineCore encountered an issue. ` +
	`See stack trace (above) for the root cause.","type":"InternalServerError","param":null,"code":500}}`

// TestRanksThatFailWithoutALoss: without a report of the stream the attempts count one by one.
func TestRanksThatFailWithoutALoss(t *testing.T) {
	t.Parallel()
	g := lockstepRig(t, resets, resets, resets, resets)
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, http.StatusBadGateway, a.status)
	assert.Equal(t, "upstream_failed", a.code(t))
}
