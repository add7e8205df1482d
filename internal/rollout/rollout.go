// Package rollout decides how a new revision of an application replaces the units that run: which unit may be
// replaced next, when a revision has proven itself, and which end of a unit halts it. It is pure: time is an
// argument.
package rollout

import "time"

// Unit is what the decisions need of a wanted unit.
type Unit struct {
	ID   string
	Pool string
	// Stale: the unit runs what an earlier revision starts, and is to be replaced.
	Stale bool
	// New: its engines are started as the last good revision starts none. Only such units are on probation.
	New    bool
	Ready  bool
	Since  time.Time // Ready: since when
	Proven bool      // New: it has passed its probation under this grant
	// Ended: it was ready under this grant and has ended by itself. An end that a node or an operator caused
	// does not count.
	Ended  bool
	Failed bool // its first starts have failed
}

// Decision is what follows from the units of an application.
type Decision struct {
	Good   bool            // every unit runs the newest revision and has proven itself
	Failed string          // the unit whose end halts the roll-out; "" = none
	Proven []string        // units that pass their probation now
	Due    time.Time       // when the next unit may pass its probation; zero = none is on probation
	waits  map[string]bool // pools with a unit on probation
}

// Waits reports whether no unit of the pool may be replaced yet, because one is on probation.
func (d *Decision) Waits(pool string) bool { return d.waits[pool] }

// Decide looks at all units of an application at time now. minReady is how long a New unit is on probation.
func Decide(now time.Time, minReady time.Duration, units []Unit) Decision {
	d := Decision{Good: true, waits: map[string]bool{}}
	for i := range units {
		u := &units[i]
		d.Good = d.Good && u.Ready && !u.Stale
		if !u.New || u.Stale {
			continue
		}
		switch end := u.Since.Add(minReady); {
		case u.Failed, u.Ended && !u.Proven && minReady > 0:
			if d.Failed == "" {
				d.Failed = u.ID
			}
		case !u.Ready || u.Proven:
		case !now.Before(end):
			d.Proven = append(d.Proven, u.ID)
		default:
			d.Good, d.waits[u.Pool] = false, true
			if d.Due.IsZero() || end.Before(d.Due) {
				d.Due = end
			}
		}
	}
	return d
}
