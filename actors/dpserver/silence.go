package dpserver

import (
	"context"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/engine"
)

// progressCheck answers the Probes of ingresses whose streams are silent: has the engine made progress since
// the Probe before? First tokens and output of other streams are in the rank's stream already. The engine's
// counters and its KV events are not, so they are read here, one read at a time.
type progressCheck struct {
	tickets   []uint64 // whose ingresses wait for the current read
	isPending bool

	hasBatches  bool   // there was a read, and no canary since: a canary moves the counters itself
	batches     uint64 // of KV events at that read
	hasCounters bool   // counters are those of a read
	counters    engine.Counters
}

// progressResult is the result of a read. round is that of the health monitor.
type progressResult struct {
	round    uint64
	counters engine.Counters
	err      error
}

// discard drops the last read, so that the next one is compared with nothing.
func (s *progressCheck) discard() { s.hasBatches, s.hasCounters = false, false }

// onProbe reads the engine's counters beside the actor.
func (r *replica) onProbe(m msg.Probe) {
	q := &r.progress
	if r.account.tickets[m.TicketID] == nil || slices.Contains(q.tickets, m.TicketID) {
		return
	}
	q.tickets = append(q.tickets, m.TicketID)
	if q.isPending {
		return
	}
	q.isPending = true
	s, round := r.Server, r.monitor.round
	r.runProbe(r.timers.CounterLimit, func(ctx context.Context) {
		c, err := s.engine.Counters(ctx)
		s.box.Send(progressResult{round, c, err})
	})
}

// onProgressResult reports progress by one record, which holds for every silent stream of the rank. An engine
// whose counters cannot be read shows its progress only by its KV events and its other streams.
func (r *replica) onProgressResult(m progressResult) {
	q, batches := &r.progress, r.eventStats().Batches
	askers := q.tickets
	moved := q.hasBatches && batches != q.batches || m.err == nil && q.hasCounters &&
		m.counters.Moved(q.counters)
	q.tickets, q.isPending, q.hasBatches, q.batches = q.tickets[:0], false, true, batches
	if m.err == nil {
		q.hasCounters, q.counters = true, m.counters
	}
	if !moved {
		return
	}
	r.monitor.noteProgress()
	for _, id := range askers {
		if t := r.account.tickets[id]; t != nil {
			r.emitRequestRecord(msg.RecProgress, &t.req, "", time.Now())
			return
		}
	}
}
