package dpserver

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
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

// RP62: the stream has the adapters of the file, then those that the engine lists. They are asked for every
// 10 s, and at once after a control call, also one that comes while the engine is asked.
func TestAdaptersOfTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, true, func(_ *Factory, spec *msg.ReplicaSpec) {
			spec.App.Model.Adapters = []app.Adapter{{ID: "file"}}
		})
		synctest.Wait()
		assert.Equal(t, []string{"file"}, r.tape.take()[0].Snapshot.Adapters, "it starts")
		facts := msg.Facts{Incarnation: 7, MaxOngoing: 9, Adapters: []string{"a"}}
		require.NoError(t, r.Ready(t.Context(), facts))
		synctest.Wait()
		assert.Equal(t, []string{"a"}, r.tape.take()[0].Snapshot.Adapters)
		told := func() (out [][]string) {
			synctest.Wait()
			for _, rec := range r.tape.take() {
				if rec.Kind == msg.RecAdapters {
					out = append(out, rec.Adapters)
				}
			}
			return out
		}
		load := func(names ...string) {
			r.engine.set(func(f *fakeEngine) {
				f.models = []engine.Model{{ID: "demo"}}
				for _, name := range names {
					f.models = append(f.models, engine.Model{ID: name, Parent: "demo"})
				}
			})
		}
		time.Sleep(30 * time.Second)
		assert.Empty(t, told(), "the engine tells no list")
		load("a", "b")
		time.Sleep(10 * time.Second)
		assert.Equal(t, [][]string{{"a", "b"}}, told())
		assert.Equal(t, []string{"a", "b"}, r.Status().Adapters)
		load("c")
		r.Controlled(openai.ChangesModels)
		assert.Equal(t, [][]string{{"c"}}, told())

		frozen := make(chan struct{})
		r.engine.set(func(f *fakeEngine) { f.frozen = frozen })
		time.Sleep(time.Second)
		r.Controlled(openai.ChangesModels)
		load()
		r.engine.set(func(f *fakeEngine) { f.frozen = nil })
		close(frozen)
		assert.Equal(t, [][]string{nil}, told())
		assert.Empty(t, r.tape.nodeEvents())

		r.Drain("stop")
		r.Controlled(openai.ChangesModels)
		synctest.Wait()
		asked := r.engine.count("health")
		time.Sleep(5*time.Second + time.Second/2)
		synctest.Wait()
		assert.Equal(t, asked+5, r.engine.count("health"), "it is watched as ever")
	})
}
