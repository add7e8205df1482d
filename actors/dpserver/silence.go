package dpserver

import (
	"context"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
)

// silence answers the ingresses whose streams are silent: has the engine made progress since the question before? What other streams
// say of the engine, its first tokens and its output, is in the rank's stream already. The engine's counters and its KV events are not,
// so they are looked at here, at most one look at a time.
type silence struct {
	askers  []uint64 // tickets that wait for the look under way
	looking bool

	looked   bool   // there was a look, and no canary since: a canary moves the counters itself
	batches  uint64 // of KV events at that look
	counted  bool   // counters are those of a look
	counters engine.Counters
}

// silenceLook is the end of a look. round is the keeper's.
type silenceLook struct {
	round    uint64
	counters engine.Counters
	err      error
}

// forget drops the last look: nothing that comes is held against it.
func (s *silence) forget() { s.looked, s.counted = false, false }

// onProbe looks at the engine beside the actor.
func (r *replica) onProbe(m msg.Probe) {
	q := &r.silence
	if r.account.tickets[m.TicketID] == nil || slices.Contains(q.askers, m.TicketID) {
		return
	}
	q.askers = append(q.askers, m.TicketID)
	if q.looking {
		return
	}
	q.looking = true
	s, round := r.Server, r.keeper.round
	r.probe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(silenceLook{round, c, err})
	})
}

// onSilenceLook tells the stream of progress by one record: what it says holds for every silent stream of the rank. An engine whose
// counters cannot be read shows its progress by its KV events and its other streams alone.
func (r *replica) onSilenceLook(m silenceLook) {
	q, batches := &r.silence, r.eventStats().Batches
	askers := q.askers
	moved := q.looked && batches != q.batches || m.err == nil && q.counted && m.counters.Moved(q.counters)
	q.askers, q.looking, q.looked, q.batches = q.askers[:0], false, true, batches
	if m.err == nil {
		q.counted, q.counters = true, m.counters
	}
	if !moved {
		return
	}
	r.keeper.moved()
	for _, id := range askers {
		if t := r.account.tickets[id]; t != nil {
			r.record(msg.RecProgress, &t.req, "", time.Now())
			return
		}
	}
}
