package node

import "time"

// LeaseLoss is what a node does with the units it has when its lease has run out.
type LeaseLoss string

// The choices. The zero value means Serve.
const (
	Serve LeaseLoss = "serve" // what runs is served; nothing new starts
	Fence LeaseLoss = "fence" // everything is fenced and killed before the leader may grant it elsewhere
)

// leaseMargin is the part of a lease at whose beginning the node stops to act on it: a tenth, so the leader, which waits longer
// than the whole, never acts first.
const leaseMargin = 10

// lease is what a node may do by its own monotonic clock: start engines, and admit requests. Pure: the time is an argument.
//
// A node that was frozen (stopped process, starved machine) does not know how much it slept through. So its right to admit always
// ends at an instant that only looking at the clock moves on; who finds that instant passed asks the leader before it goes on.
type lease struct {
	fence bool
	ttl   time.Duration
	until time.Time // granted till then, counted from when the renewal was sent; zero: never
	beat  time.Time // last look at the clock
	doubt time.Time // when a freeze was noticed, until a renewal that began later has ended; zero: none
}

// look notes that the node runs. Who has not looked for as long as a lease lasts was frozen.
func (l *lease) look(now time.Time) {
	if now.Sub(l.beat) > l.ttl {
		l.doubt = now
	}
	l.beat = now
}

// sleep takes the machine's suspension for d, which its clock did not count: all that was before is longer ago by that.
func (l *lease) sleep(d time.Duration) {
	if !l.until.IsZero() {
		l.until = l.until.Add(-d)
	}
	l.beat = l.beat.Add(-d)
}

// ended takes the end of a renewal that was sent at sent; ttl 0: it was not granted.
func (l *lease) ended(sent, now time.Time, ttl time.Duration) {
	l.look(now)
	if until := sent.Add(ttl); ttl > 0 && until.After(l.until) {
		l.until, l.ttl = until, ttl
	}
	if !l.doubt.After(sent) {
		l.doubt = time.Time{}
	}
}

// stop is when the node stops to act on its lease.
func (l *lease) stop() time.Time { return l.until.Add(-l.ttl / leaseMargin) }

// starts says whether an engine may be started.
func (l *lease) starts(now time.Time) bool { return l.doubt.IsZero() && now.Before(l.stop()) }

// fences says whether all units must be out.
func (l *lease) fences(now time.Time) bool { return l.fence && !now.Before(l.stop()) }

// admitsUntil is the instant at which requests are no longer admitted, as far as is known now; zero: they are not.
func (l *lease) admitsUntil() time.Time {
	if !l.doubt.IsZero() {
		return time.Time{}
	}
	open := l.beat.Add(l.ttl)
	if stop := l.stop(); l.fence && stop.Before(open) {
		return stop
	}
	return open
}

// left is what the lease still lasts, 0 if it is over.
func (l *lease) left(now time.Time) time.Duration { return max(0, l.until.Sub(now)) }
