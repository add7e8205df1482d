package dpserver

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/engine/openai"
)

// TestControlled: a rank that dpserve has put to sleep or paused takes no request from then on, although its
// health says nothing of it. It takes some again when dpserve has woken it, or when its engine said that it
// slept and says that it does not.
func TestControlled(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		check := func(isAway bool) {
			t.Helper()
			want, cause := msg.Granted, ""
			if isAway {
				want, cause = msg.Full, msg.CauseAsleep
			}
			reply := r.ask()
			assert.Equal(t, want, reply.Refusal)
			assert.Equal(t, cause, r.Status().Away)
			if !isAway {
				r.send(&msg.Done{TicketID: reply.Ticket.ID, Outcome: msg.OK})
			}
		}
		r.Controlled(openai.Sleeps)
		check(true)
		states := r.states()
		require.Len(t, states, 1)
		assert.False(t, states[0].Accepting, "the ingresses hear of it at once")
		time.Sleep(time.Minute)
		check(true)
		r.Controlled(openai.Wakes)
		check(false)

		r.Controlled(openai.Sleeps)
		r.engine.set(func(f *fakeEngine) { f.health = engine.Asleep })
		time.Sleep(2 * time.Second)
		check(true)
		r.engine.set(func(f *fakeEngine) { f.health = engine.Alive })
		time.Sleep(2 * time.Second)
		check(false)
		assert.Empty(t, r.tape.nodeEvents(), "it was never sick")
	})
}
