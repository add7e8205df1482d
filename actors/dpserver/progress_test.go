package dpserver

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
)

// progressRecords is the requests with a RecProgress since the last call.
func (r *testRig) progressRecords() (out []uint64) {
	for _, rec := range r.tape.take() {
		if rec.Kind == msg.RecProgress {
			out = append(out, rec.ReqID)
		}
	}
	return out
}

func TestAProbeIsAnsweredByAnEngineThatMakesProgress(t *testing.T) {
	cases := map[string]struct {
		before, between func(r *testRig)
		moved           bool
	}{
		"nothing moves": {},
		"tokens come out": {between: func(r *testRig) {
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens++ })
		}, moved: true},
		"prompts are read": {between: func(r *testRig) {
			r.engine.set(func(f *fakeEngine) { f.counters.PromptTokens += 512 })
		}, moved: true},
		"counters cannot be read": {before: func(r *testRig) {
			r.engine.set(func(f *fakeEngine) { f.dumb = errors.New("404") })
		}},
		"a canary moves them": {between: func(r *testRig) {
			r.send(canaryResult{read: counterRead{round: r.state.lastRound}})
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens++ })
		}},
		"another request ends": {between: func(r *testRig) {
			r.send(&msg.Done{
				TicketID: r.ask().Ticket.ID,
				Outcome:  msg.Cancelled,
			})
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			withRank(t, 9, true, func(t *testing.T, r *testRig) {
				r.engine.set(func(f *fakeEngine) { f.counters.Seen = true })
				if c.before != nil {
					c.before(r)
				}
				ticket := r.ask().Ticket
				r.send(&msg.FirstToken{TicketID: ticket.ID})
				r.tape.take()
				r.send(&msg.Probe{TicketID: ticket.ID})
				assert.Empty(t, r.progressRecords(), "there is nothing yet to hold it against")
				if c.between != nil {
					c.between(r)
				}
				r.send(&msg.Probe{TicketID: ticket.ID})
				if c.moved {
					assert.Equal(t, []uint64{1}, r.progressRecords())
				} else {
					assert.Empty(t, r.progressRecords())
				}
				r.send(&msg.Probe{TicketID: ticket.ID})
				assert.Empty(t, r.progressRecords(), "nothing since")
			})
		})
	}
}

// TestProbesShareALook: however many streams are silent, the engine is asked once at a time, and one record
// answers all of them.
func TestProbesShareALook(t *testing.T) {
	withRank(t, 9, true, func(t *testing.T, r *testRig) {
		r.engine.set(func(f *fakeEngine) { f.counters.Seen = true })
		var tickets []uint64
		for range 5 {
			tickets = append(tickets, r.ask().Ticket.ID)
		}
		r.send(&msg.Probe{TicketID: tickets[0]})
		r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens++ })
		before, held := r.engine.count("counters"), make(chan struct{})
		r.engine.set(func(f *fakeEngine) { f.held = held })
		r.tape.take()
		for _, id := range append(tickets, tickets...) {
			r.send(&msg.Probe{TicketID: id})
		}
		r.send(&msg.Probe{TicketID: 999}) // of an unknown ticket
		r.send(&msg.Done{TicketID: tickets[0], Outcome: msg.Cancelled})
		close(held)
		synctest.Wait()
		assert.Equal(t, 1, r.engine.count("counters")-before)
		assert.Equal(t, []uint64{2}, r.progressRecords(), "of one that still runs")
	})
}

// TestAProbeSeesKVEvents: an engine without counters shows its progress by its events.
func TestAProbeSeesKVEvents(t *testing.T) {
	withPublisher(t, true, false, func(t *testing.T, r *testRig, p *publisher) {
		r.engine.set(func(f *fakeEngine) { f.dumb = errors.New("404") })
		id := r.ask().Ticket.ID
		r.send(&msg.FirstToken{TicketID: id})
		r.send(&msg.Probe{TicketID: id})
		r.tape.take()
		p.publish(storedBlocks(1, nil, ids(1, 4)))
		time.Sleep(time.Second)
		r.send(&msg.Probe{TicketID: id})
		require.Len(t, r.progressRecords(), 1)
		r.send(&msg.Probe{TicketID: id})
		assert.Empty(t, r.progressRecords())
	})
}
