package node

import (
	"cmp"
	"slices"
	"sync"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Bounds of what one renewal of a lease carries and of what waits for one.
const (
	newsKept  = 1024    // events that wait; over it the oldest goes: the newest of each unit is in every report anyway
	newsSent  = 256     // events in one report; the rest follows at once
	tailBytes = 1 << 20 // of all log tails in one report; a message has a limit
)

// news is what the leader has not taken yet of a node's events, and the newest of each unit. Safe for concurrent use.
type news struct {
	mu     sync.Mutex
	queue  []msg.UnitEvent          // not yet taken, by Number
	newest map[string]msg.UnitEvent // by unit: of its highest epoch
	full   bool                     // events were dropped since some were taken last
}

func newNews() *news { return &news{newest: map[string]msg.UnitEvent{}} }

// add takes an event that has its number. dropped says that older ones have to go from now on.
func (n *news) add(e msg.UnitEvent) (dropped bool) {
	e.LogTail = state.Tail(e.LogTail)
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.queue) == newsKept {
		n.queue, dropped, n.full = slices.Delete(n.queue, 0, 1), !n.full, true
	}
	n.queue = append(n.queue, e)
	if e.Epoch >= n.newest[e.Unit].Epoch { // an older epoch's end comes after its successor's start
		n.newest[e.Unit] = e
	}
	return dropped
}

// report gives what a renewal carries. Both lists are of one moment: none of events is newer than its unit in units.
func (n *news) report() (events, units []msg.UnitEvent) {
	n.mu.Lock()
	defer n.mu.Unlock()
	events = slices.Clone(n.queue[:min(len(n.queue), newsSent)])
	for _, e := range n.newest {
		units = append(units, e)
	}
	slices.SortFunc(units, func(a, b msg.UnitEvent) int { return cmp.Compare(a.Number, b.Number) })
	budget := tailBytes
	trim(units, &budget)
	trim(events, &budget)
	return events, units
}

// trim drops log tails that are over the budget.
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

// taken drops the events up to number. more says that some went and others wait.
func (n *news) taken(number uint64) (more bool) {
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

// forget drops the newest event of a unit that the cluster knows no more, unless a later epoch came meanwhile.
func (n *news) forget(unit string, epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.newest[unit].Epoch <= epoch {
		delete(n.newest, unit)
	}
}

// units are the units in the digest with their epochs.
func (n *news) units() map[string]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make(map[string]uint64, len(n.newest))
	for unit, e := range n.newest {
		out[unit] = e.Epoch
	}
	return out
}

// waiting says whether events wait to be taken.
func (n *news) waiting() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.queue) > 0
}
