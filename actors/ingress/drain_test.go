package ingress

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// TestTheEndOfADrainCutsAttachedStreams: dpserve does not stop an attached engine, so nothing else would end
// its streams. A fence for another reason leaves them to the engine, and the node ends an engine that it
// owns.
func TestTheEndOfADrainCutsAttachedStreams(t *testing.T) {
	for name, c := range map[string]struct {
		owned, drained, cut bool
	}{
		"attached, drained": {drained: true, cut: true},
		"attached, fenced":  {},
		"owned, drained":    {owned: true, drained: true},
	} {
		t.Run(name, func(t *testing.T) {
			var h hangingEngine
			g := newRig(t, options{engines: []http.HandlerFunc{h.sends(textChunk)}})
			r := g.replicas[0]
			r.mu.Lock()
			r.owned = c.owned
			r.incarnation++
			r.mu.Unlock()
			r.publish()
			got := make(chan answer, 1)
			go func() { got <- g.postCtx(t.Context(), "/v1/chat/completions", streamBody) }()
			eventually(t, func() bool { return r.firstsSeen() == 1 }, "streams")
			r.mu.Lock()
			r.accepting = false
			r.emit(&msg.Record{
				Kind: msg.RecState, RankState: msg.RankState{Fenced: true, Draining: c.drained},
				Cause: map[bool]string{true: "drained", false: "no answer"}[c.drained],
			})
			r.mu.Unlock()
			if !c.cut {
				select {
				case a := <-got:
					t.Fatalf("cut: %s", a.body)
				case <-time.After(50 * time.Millisecond):
				}
				return
			}
			a := <-got
			require.Error(t, a.err)
			assert.Contains(t, a.body, `"code":"drained"`)
			done := r.lastDone(t)
			assert.Equal(t, msg.Cancelled, done.Outcome)
			assert.False(t, done.Charge)
			eventually(t, func() bool { return h.left.Load() == 1 }, "the engine's request is closed")
		})
	}
}
