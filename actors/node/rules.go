package node

import (
	"maps"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// Rules are a node's decisions without its engines, clocks and goroutines: its lease, its epochs, and its
// events for the leader. A simulation of many nodes on virtual time drives them; Node uses the same parts.
// Not safe for concurrent use.
type Rules struct {
	lease  lease
	epochs *epochs
	outbox *eventOutbox
}

// NewRules returns the Rules of a new process. seen is the result of Seen of the previous process, nil for a
// new node.
func NewRules(now time.Time, ttl time.Duration, loss LeaseLoss, seen map[string]uint64) *Rules {
	e := &epochs{seen: maps.Clone(seen), earlier: maps.Clone(seen)}
	if e.seen == nil {
		e.seen = map[string]uint64{}
	}
	return &Rules{
		lease: lease{fence: loss == Fence, ttl: ttl, beat: now, doubt: now}, epochs: e,
		outbox: newEventOutbox(),
	}
}

// Look records that the node runs.
func (r *Rules) Look(now time.Time) { r.lease.look(now) }

// Renewed takes the end of a renewal that was sent at sent; ttl 0: it was refused.
func (r *Rules) Renewed(sent, now time.Time, ttl time.Duration) { r.lease.ended(sent, now, ttl) }

// Starts reports whether an engine may be started.
func (r *Rules) Starts(now time.Time) bool { return r.lease.starts(now) }

// Fences reports whether all units must be fenced.
func (r *Rules) Fences(now time.Time) bool { return r.lease.fences(now) }

// FencesAt is when all units must be fenced if no renewal succeeds.
func (r *Rules) FencesAt() time.Time { return r.lease.stop() }

// Admits reports whether requests are admitted, by the last check of the clock.
func (r *Rules) Admits(now time.Time) bool { return now.Before(r.lease.admitsUntil()) }

// Begin records the epoch of a start, or refuses it.
func (r *Rules) Begin(unit string, epoch uint64) error { return r.epochs.begin(unit, epoch) }

// Admit records the epoch of a stop, or refuses it.
func (r *Rules) Admit(unit string, epoch uint64) error { return r.epochs.admit(unit, epoch) }

// Tell takes a numbered event.
func (r *Rules) Tell(e msg.UnitEvent) { r.outbox.add(e) }

// Report returns the content of a renewal: unacknowledged events, and the newest event of each unit.
func (r *Rules) Report() (events, units []msg.UnitEvent) { return r.outbox.report() }

// Taken drops the events up to number; more is true if it dropped some and others wait.
func (r *Rules) Taken(number uint64) (more bool) { return r.outbox.acknowledge(number) }

// Waiting reports whether events wait.
func (r *Rules) Waiting() bool { return r.outbox.waiting() }

// Units returns the epochs of the units in the digest.
func (r *Rules) Units() map[string]uint64 { return r.outbox.units() }

// Forget drops a unit from the digest, unless it is at a later epoch.
func (r *Rules) Forget(unit string, epoch uint64) { r.outbox.forget(unit, epoch) }

// Superseded reports whether the cluster has released the unit, or granted it anew, since that epoch. An
// older copy of the state shows nothing.
func Superseded(s *state.State, unit string, epoch uint64) bool { return superseded(s, unit, epoch) }
