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

// progresses is the tickets' requests of which the stream has told progress since it was read last.
func (r *rig) progresses() (out []uint64) {
	for _, rec := range r.tape.take() {
		if rec.Kind == msg.RecProgress {
			out = append(out, rec.ReqID)
		}
	}
	return out
}

func TestAProbeIsAnsweredByAnEngineThatMakesProgress(t *testing.T) {
	cases := map[string]struct {
		before, between func(r *rig)
		moved           bool
	}{
		"nothing moves": {},
		"tokens come out": {between: func(r *rig) {
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens++ })
		}, moved: true},
		"prompts are read": {between: func(r *rig) {
			r.engine.set(func(f *fakeEngine) { f.counters.PromptTokens += 512 })
		}, moved: true},
		"counters cannot be read": {before: func(r *rig) {
			r.engine.set(func(f *fakeEngine) { f.dumb = errors.New("404") })
		}},
		"a canary moves them": {between: func(r *rig) {
			r.send(canaryResult{round: r.state.lastRound})
			r.engine.set(func(f *fakeEngine) { f.counters.GenerationTokens++ })
		}},
		"another request ends": {between: func(r *rig) {
			r.send(&msg.Done{TicketID: r.ask().Ticket.ID,
				Outcome: msg.Cancelled})
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			bubble(t, 9, true, func(t *testing.T, r *rig) {
				r.engine.set(func(f *fakeEngine) { f.counters.Seen = true })
				if c.before != nil {
					c.before(r)
				}
				ticket := r.ask().Ticket
				r.send(&msg.FirstToken{TicketID: ticket.ID})
				r.tape.take()
				r.send(&msg.Probe{TicketID: ticket.ID})
				assert.Empty(t, r.progresses(), "there is nothing yet to hold it against")
				if c.between != nil {
					c.between(r)
				}
				r.send(&msg.Probe{TicketID: ticket.ID})
				if c.moved {
					assert.Equal(t, []uint64{1}, r.progresses())
				} else {
					assert.Empty(t, r.progresses())
				}
				r.send(&msg.Probe{TicketID: ticket.ID})
				assert.Empty(t, r.progresses(), "nothing since")
			})
		})
	}
}

// TestProbesShareALook: however many streams are silent, the engine is asked by one after the other, and one
// record serves them all.
func TestProbesShareALook(t *testing.T) {
	bubble(t, 9, true, func(t *testing.T, r *rig) {
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
		r.send(&msg.Probe{TicketID: 999}) // of nobody
		r.send(&msg.Done{TicketID: tickets[0], Outcome: msg.Cancelled})
		close(held)
		synctest.Wait()
		assert.Equal(t, 1, r.engine.count("counters")-before)
		assert.Equal(t, []uint64{2}, r.progresses(), "of one that still runs")
	})
}

// TestAProbeSeesKVEvents: an engine without counters shows its progress by what it writes down.
func TestAProbeSeesKVEvents(t *testing.T) {
	listener(t, true, false, func(t *testing.T, r *rig, p *publisher) {
		r.engine.set(func(f *fakeEngine) { f.dumb = errors.New("404") })
		id := r.ask().Ticket.ID
		r.send(&msg.FirstToken{TicketID: id})
		r.send(&msg.Probe{TicketID: id})
		r.tape.take()
		p.publish(storedBlocks(1, nil, ids(1, 4)))
		time.Sleep(time.Second)
		r.send(&msg.Probe{TicketID: id})
		require.Len(t, r.progresses(), 1)
		r.send(&msg.Probe{TicketID: id})
		assert.Empty(t, r.progresses())
	})
}
