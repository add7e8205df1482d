package dpserver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
)

// statusNote is the note in the status of a rank whose engine reports facts.
func statusNote(t *testing.T, facts msg.Facts, args app.Args, policy string) (note string, shown bool) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true, func(_ *Factory, spec *msg.ReplicaSpec) {
			a := *spec.App
			a.Engine.Args, a.Routing.Policy = args, policy
			spec.App = &a
		})
		facts.Incarnation, facts.MaxOngoing = 7, 99
		require.NoError(t, r.Ready(t.Context(), facts))
		if !facts.CachingOff {
			r.sendPrompt(prompt(ids(0, 16)...), 0)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if kv := r.Status().KV; kv != nil {
			note, shown = kv.Note, true
		}
	})
	return note, shown
}

func TestStatusSaysWhatThePromptHitsDependOn(t *testing.T) {
	asked := app.Args{{Name: "block_size", Value: int64(16)}}
	const scoring, even = "scoring", "power-of-two"
	for name, c := range map[string]struct {
		facts  msg.Facts
		args   app.Args
		policy string
		note   string
		shown  bool
	}{
		"as asked":      {msg.Facts{BlockSize: 16, Blocks: 100}, asked, scoring, "", true},
		"nothing asked": {msg.Facts{BlockSize: 768, Blocks: 100}, nil, scoring, "", true},
		"settled on another": {
			msg.Facts{BlockSize: 768, Blocks: 100},
			asked, scoring,
			"the engine's kv blocks are of 768 tokens, engine.args asks for 16", true,
		},
		"caches nothing": {
			msg.Facts{BlockSize: 16, CachingOff: true},
			asked, scoring,
			"the engine runs without prefix caching: no prompt hits", true,
		},
		"nobody asks for hits": {msg.Facts{BlockSize: 16, CachingOff: true}, asked, even, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			note, shown := statusNote(t, c.facts, c.args, c.policy)
			assert.Equal(t, c.note, note)
			assert.Equal(t, c.shown, shown)
		})
	}
}
