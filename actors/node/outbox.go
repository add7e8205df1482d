package node

import (
	"cmp"
	"slices"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// Bounds of a renewal and of the events that wait for one.
const (
	// waiting events; the oldest is dropped above it, as every report has the newest of each unit
	maxWaitingEvents = 1024
	maxSentEvents    = 256     // events in one report; the rest follows at once
	tailBytes        = 1 << 20 // of all log tails in one report; messages are limited
)

// eventOutbox holds the node's events that the leader has not acknowledged, and the newest event of each
// unit. Safe for concurrent use.
type eventOutbox struct {
	mu     sync.Mutex
	queue  []msg.UnitEvent          // not acknowledged, by Number
	newest map[string]msg.UnitEvent // by unit: of its highest epoch
	full   bool                     // events were dropped since the last acknowledgement
}

func newEventOutbox() *eventOutbox { return &eventOutbox{newest: map[string]msg.UnitEvent{}} }

// add takes a numbered event. dropped is true for the first event that displaces an older one.
func (n *eventOutbox) add(e msg.UnitEvent) (dropped bool) {
	e.LogTail = state.Tail(e.LogTail)
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.queue) == maxWaitingEvents {
		n.queue, dropped, n.full = slices.Delete(n.queue, 0, 1), !n.full, true
	}
	n.queue = append(n.queue, e)
	if e.Epoch >= n.newest[e.Unit].Epoch { // an older epoch's end comes after its successor's start
		n.newest[e.Unit] = e
	}
	return dropped
}

// report returns the content of a renewal. Both lists are of one moment: no event is newer than its unit's
// entry in units.
func (n *eventOutbox) report() (events, units []msg.UnitEvent) {
	n.mu.Lock()
	defer n.mu.Unlock()
	events = slices.Clone(n.queue[:min(len(n.queue), maxSentEvents)])
	for _, e := range n.newest {
		units = append(units, e)
	}
	slices.SortFunc(units, func(a, b msg.UnitEvent) int { return cmp.Compare(a.Number, b.Number) })
	budget := tailBytes
	trim(units, &budget)
	trim(events, &budget)
	return events, units
}

// trim removes log tails above the budget.
func trim(events []msg.UnitEvent, budget *int) {
	for i := range events {
		size := 0
		for _, line := range events[i].LogTail {
			size += len(line)
		}
		if size > *budget {
			events[i].LogTail = nil
			continue
		}
		*budget -= size
	}
}

// acknowledge drops the events up to number. more is true if it dropped some and others wait.
func (n *eventOutbox) acknowledge(number uint64) (more bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := len(n.queue)
	n.queue = slices.DeleteFunc(n.queue, func(e msg.UnitEvent) bool { return e.Number <= number })
	if len(n.queue) == before {
		return false
	}
	n.full = false
	return len(n.queue) > 0
}

// forget drops the newest event of a unit that the cluster no longer knows, unless it is of a later epoch.
func (n *eventOutbox) forget(unit string, epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.newest[unit].Epoch <= epoch {
		delete(n.newest, unit)
	}
}

// units returns the epochs of the units in the digest.
func (n *eventOutbox) units() map[string]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make(map[string]uint64, len(n.newest))
	for unit, e := range n.newest {
		out[unit] = e.Epoch
	}
	return out
}

// waiting reports whether events wait.
func (n *eventOutbox) waiting() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.queue) > 0
}
