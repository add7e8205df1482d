package node

import (
	"cmp"
	"maps"
	"slices"

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
// unit. It is pure.
type eventOutbox struct {
	queue  []msg.UnitEvent          // not acknowledged, by Number
	newest map[string]msg.UnitEvent // by unit: of its highest epoch
	full   bool                     // events were dropped since the last acknowledgement
}

func newEventOutbox() eventOutbox { return eventOutbox{newest: map[string]msg.UnitEvent{}} }

// add takes a numbered event.
func (o *eventOutbox) add(e msg.UnitEvent) {
	e.LogTail = state.Tail(e.LogTail)
	if e.Kind == msg.UnitPresent { // only in the list of all units
		o.newest[e.Unit] = e
		return
	}
	if len(o.queue) == maxWaitingEvents {
		o.queue, o.full = slices.Delete(o.queue, 0, 1), true
	}
	o.queue = append(o.queue, e)
	if e.Epoch >= o.newest[e.Unit].Epoch { // an older epoch's end comes after its successor's start
		o.newest[e.Unit] = e
	}
}

// report returns the content of a renewal. Both lists are of one moment: no event is newer than its unit's
// entry in units.
func (o *eventOutbox) report() (events, units []msg.UnitEvent) {
	events = slices.Clone(o.queue[:min(len(o.queue), maxSentEvents)])
	units = slices.SortedFunc(maps.Values(o.newest),
		func(a, b msg.UnitEvent) int { return cmp.Compare(a.Number, b.Number) })
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
func (o *eventOutbox) acknowledge(number uint64) (more bool) {
	before := len(o.queue)
	o.queue = slices.DeleteFunc(o.queue, func(e msg.UnitEvent) bool { return e.Number <= number })
	if len(o.queue) == before {
		return false
	}
	o.full = false
	return len(o.queue) > 0
}

// forget drops the newest events of units that the cluster no longer knows.
func (o *eventOutbox) forget(isOver func(unit string, epoch uint64) bool) {
	maps.DeleteFunc(o.newest, func(unit string, e msg.UnitEvent) bool { return isOver(unit, e.Epoch) })
}
