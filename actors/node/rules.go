package node

import (
	"maps"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Rules are what a node decides by, without its engines, clocks and goroutines: its lease, its epochs, and the news it has for the
// leader. A simulation of many nodes on virtual time drives them; Node has the same parts. Not safe for concurrent use.
type Rules struct {
	lease  lease
	epochs *epochs
	news   *news
}

// NewRules are those of a process that begins now; seen is what Seen gave of the process before it, nil for a new node.
func NewRules(now time.Time, ttl time.Duration, loss LeaseLoss, seen map[string]uint64) *Rules {
	e := &epochs{seen: maps.Clone(seen), earlier: maps.Clone(seen)}
	if e.seen == nil {
		e.seen = map[string]uint64{}
	}
	return &Rules{lease: lease{fence: loss == Fence, ttl: ttl, beat: now, doubt: now}, epochs: e, news: newNews()}
}

// Look notes that the node runs.
func (r *Rules) Look(now time.Time) { r.lease.look(now) }

// Renewed takes the end of a renewal that was sent at sent; ttl 0: it was not granted.
func (r *Rules) Renewed(sent, now time.Time, ttl time.Duration) { r.lease.ended(sent, now, ttl) }

// Starts says whether an engine may be started.
func (r *Rules) Starts(now time.Time) bool { return r.lease.starts(now) }

// Fences says whether all units must be out.
func (r *Rules) Fences(now time.Time) bool { return r.lease.fences(now) }

// FencesAt is when that will be if nothing is renewed.
func (r *Rules) FencesAt() time.Time { return r.lease.stop() }

// Admits says whether requests are admitted, by the last look at the clock.
func (r *Rules) Admits(now time.Time) bool { return now.Before(r.lease.admitsUntil()) }

// Begin records the epoch of a start, or refuses it.
func (r *Rules) Begin(unit string, epoch uint64) error { return r.epochs.begin(unit, epoch) }

// Admit records the epoch of a stop, or refuses it.
func (r *Rules) Admit(unit string, epoch uint64) error { return r.epochs.admit(unit, epoch) }

// Tell takes an event that has its number.
func (r *Rules) Tell(e msg.UnitEvent) { r.news.add(e) }

// Report gives what a renewal carries: events not taken yet, and the newest of each unit.
func (r *Rules) Report() (events, units []msg.UnitEvent) { return r.news.report() }

// Taken drops the events up to number; more says that some went and others wait.
func (r *Rules) Taken(number uint64) (more bool) { return r.news.taken(number) }

// Waiting says whether events wait to be taken.
func (r *Rules) Waiting() bool { return r.news.waiting() }

// Units are the units in the digest with their epochs.
func (r *Rules) Units() map[string]uint64 { return r.news.units() }

// Forget drops a unit from the digest, unless a later epoch came meanwhile.
func (r *Rules) Forget(unit string, epoch uint64) { r.news.forget(unit, epoch) }

// Superseded says that the cluster has given the unit away, or taken it back, since that epoch. A copy of the state that lags
// behind says nothing.
func Superseded(s *state.State, unit string, epoch uint64) bool { return superseded(s, unit, epoch) }
