package ingress

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

// unknownPhase is that of a unit that was never granted, or that a stream alone shows as fenced: its engine
// may live, and the rank be back at once.
const unknownPhase state.Phase = ""

// comingUnit is a unit that may still become ready. Its times are those at which this ingress heard of it.
type comingUnit struct {
	phase    state.Phase
	phaseAt  time.Time
	since    time.Time // it is not ready
	restarts bool      // it was ready before
	reason   string    // why it left, the last that was told
}

// comings are the units that may still become ready.
type comings struct {
	units     map[string]comingUnit
	lastStart time.Duration // of a unit of the application, from its grant to ready; 0: not known
}

// note stores that a unit is not ready.
func (c *comings) note(id string, phase state.Phase, reason string, wasReady bool, now time.Time) {
	u, known := c.units[id]
	if !known {
		u.since, u.restarts = now, wasReady
	}
	if !known || u.phase != phase {
		u.phase, u.phaseAt = phase, now
	}
	if reason != "" {
		u.reason = reason
	}
	c.units[id] = u
}

// noteReady stores that a unit is ready, and how long its start took.
func (c *comings) noteReady(id string, now time.Time) {
	if u, known := c.units[id]; known && u.phase == state.Starting {
		c.lastStart = now.Sub(u.phaseAt)
	}
	delete(c.units, id)
}

// readyIn is the least time until one of the units is ready, if it starts in the time of the last start. 0:
// that is not known, or the start takes longer already.
func (c *comings) readyIn(now time.Time) time.Duration {
	least := time.Duration(math.MaxInt64)
	for _, u := range c.units {
		left := c.lastStart
		switch u.phase {
		case unknownPhase:
			return 0
		case state.Starting:
			left = max(0, left-now.Sub(u.phaseAt))
		default: // its next start is yet to come
		}
		least = min(least, left)
	}
	if len(c.units) == 0 {
		return 0
	}
	return least
}

// text continues the sentence that no rank is ready.
func (c *comings) text(now time.Time) string {
	const most, longest = 3, 160
	var out strings.Builder
	for i, id := range slices.Sorted(maps.Keys(c.units)) {
		u := c.units[id]
		if i == most {
			fmt.Fprintf(&out, ", %d more units start", len(c.units)-most)
			break
		}
		verb := "starts"
		if u.restarts {
			verb = "restarts"
		}
		fmt.Fprintf(&out, ", %s %s since %s", id, verb, now.Sub(u.since).Round(time.Second))
		reason, _, _ := strings.Cut(u.reason, "; hint: ")
		if reason, _, _ = strings.Cut(reason, "\n"); reason != "" {
			out.WriteString(" (" + reason[:min(len(reason), longest)] + ")")
		}
	}
	if c.lastStart > 0 && len(c.units) > 0 {
		fmt.Fprintf(&out, "; the last start took %s", c.lastStart.Round(time.Second))
	}
	return out.String()
}

// followUnits notes which units the replicated state has as ready and which are coming. Units that a stream
// showed as fenced are coming too.
func (t *unitTable) followUnits(coming map[string]*state.Unit, now time.Time) {
	c := &t.coming
	for id, u := range coming {
		if u == nil {
			c.note(id, unknownPhase, "", false, now)
			continue
		}
		c.note(id, u.Phase, u.Reason, u.Restarts > 0 || u.Phase != state.Starting, now)
	}
	for id := range t.readyUnits {
		if _, fenced := t.fencedUnits[id]; !fenced {
			c.noteReady(id, now)
		}
	}
	maps.DeleteFunc(c.units, func(id string, _ comingUnit) bool {
		_, isComing := coming[id]
		_, fenced := t.fencedUnits[id]
		return !isComing && !fenced
	})
}
