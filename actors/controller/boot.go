package controller

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/state"
)

// resumeAll takes over all grants of the first snapshot.
func (c *Core) resumeAll(now time.Time) {
	c.ledSince = now
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		c.resumeUnit(now, c.state.Units[id])
	}
}

// resumeUnit continues a unit under its epoch. Its nodes report what they have of it; a node that does not
// report is lost.
func (c *Core) resumeUnit(now time.Time, rec *state.Unit) {
	u := c.addFromRecord(rec)
	u.m = state.Machine{
		Phase: rec.Phase, Epoch: rec.Epoch, Attempt: rec.Attempt, Starts: 1, Since: phaseSince(rec, now),
		Attach: c.isAttach(rec.App),
		Reason: rec.Reason, LogTail: rec.LogTail,
	}
	switch rec.Phase {
	case state.Ready:
		u.m.WasReady, u.m.ReadyAt, u.m.Confirmed = true, now, true
	case state.Fenced:
		u.m.WasReady, u.m.Confirmed = true, u.m.Attach
	default:
	}
	if rec.Holds() && !u.m.Confirmed {
		u.m.Due = now.Add(c.timers.Unit.Resend) // the last order may not have arrived
	}
	for _, p := range u.parts {
		if p.adopted = rec.Holds(); !p.adopted {
			p.markGone()
		}
	}
	c.changed(now, u, "", u.m.Phase)
}

// phaseSince is when the phase of a record began; now if the leader that wrote it ran an older version.
func phaseSince(rec *state.Unit, now time.Time) time.Time {
	if rec.Since == 0 {
		return now
	}
	return time.UnixMilli(rec.Since)
}

// addFromRecord makes a unit from a record of the state.
func (c *Core) addFromRecord(rec *state.Unit) *unit {
	u := newUnit(rec.ID, rec.App, rec.Group, nil)
	u.record = rec
	for i := range rec.Ranks {
		u.ranks = append(u.ranks, rec.Ranks[i].Rank)
	}
	u.applyGrant(c.seatOf(rec))
	c.addUnit(u)
	return u
}

func (c *Core) seatOf(rec *state.Unit) seat {
	s := seat{revision: rec.AppRevision, launch: rec.Launch, ranks: rec.Ranks, blocks: rec.Blocks}
	if a := c.apps[rec.App]; a != nil {
		s.spec = a.spec
	}
	return s
}
