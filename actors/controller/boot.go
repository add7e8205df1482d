package controller

import (
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/state"
)

// boot takes up what is granted.
func (c *Core) boot(now time.Time) {
	c.led = now
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		c.resume(now, c.state.Units[id])
	}
}

// resume goes on with a unit under its epoch. Its nodes will say what they have of it; one that does not is lost.
func (c *Core) resume(now time.Time, rec *state.Unit) {
	u := c.adopt(rec)
	u.m = state.Machine{
		Phase: rec.Phase, Epoch: rec.Epoch, Attempt: rec.Attempt, Starts: 1, Since: sinceOf(rec, now), Attach: c.isAttach(rec.App),
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
		u.m.Due = now.Add(c.timers.Unit.Resend) // the last order may not have come through
	}
	for _, p := range u.parts {
		if p.adopted = rec.Holds(); !p.adopted {
			p.end()
		}
	}
	c.changed(now, u, "", u.m.Phase)
}

// sinceOf is when the phase of a record began; now where no leader has told, because it ran an older version.
func sinceOf(rec *state.Unit, now time.Time) time.Time {
	if rec.Since == 0 {
		return now
	}
	return time.UnixMilli(rec.Since)
}

// adopt makes a unit of a record.
func (c *Core) adopt(rec *state.Unit) *unit {
	u := newUnit(rec.ID, rec.App, rec.Group, nil)
	u.record = rec
	for i := range rec.Ranks {
		u.ranks = append(u.ranks, rec.Ranks[i].Rank)
	}
	u.sit(c.seatOf(rec))
	c.add(u)
	return u
}

func (c *Core) seatOf(rec *state.Unit) seat {
	s := seat{revision: rec.AppRevision, launch: rec.Launch, ranks: rec.Ranks, blocks: rec.Blocks}
	if a := c.apps[rec.App]; a != nil {
		s.spec = a.spec
	}
	return s
}
