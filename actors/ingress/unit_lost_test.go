package ingress

import (
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/state"
)

// TestOneLostUnitIsOneAttempt: all ranks of a lockstep unit break the connection before its stream says that it is lost. The request
// waits until the unit is back.
func TestOneLostUnitIsOneAttempt(t *testing.T) {
	const attempts = 3
	var calls atomic.Int32
	third := make(chan struct{})
	engine := func(w http.ResponseWriter, r *http.Request) {
		switch n := calls.Add(1); {
		case n < attempts:
			resets(w, r)
		case n == attempts:
			close(third)
			resets(w, r)
		default:
			replies(http.StatusOK, `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}`)(w, r)
		}
	}
	g := lockstepRig(t, engine, engine, engine, engine)
	done := make(chan answer, 1)
	go func() { done <- g.postCtx(t.Context(), "/v1/chat/completions", chatBody) }()
	<-third
	g.replicas[0].say(false, true, "process_exit")
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
	assert.Equal(t, int32(attempts+1), calls.Load())
}

// TestRanksThatFailWithoutALoss: the same without a word of the stream is what it is.
func TestRanksThatFailWithoutALoss(t *testing.T) {
	g := lockstepRig(t, resets, resets, resets, resets)
	a := g.post("/v1/chat/completions", chatBody)
	assert.Equal(t, http.StatusBadGateway, a.status)
	assert.Equal(t, "upstream_failed", a.code(t))
}
