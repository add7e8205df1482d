package node

import "time"

// LeaseLoss says what a node does with its units when its lease is over.
type LeaseLoss string

// Values of LeaseLoss. The zero value means Serve.
const (
	Serve LeaseLoss = "serve" // running units are served; nothing new starts
	Fence LeaseLoss = "fence" // all units are fenced and killed before the leader may grant them elsewhere
)

// leaseMargin is the part of a lease at its end in which the node no longer acts on it: a tenth. The leader
// waits longer than the whole lease, so it never acts first.
const leaseMargin = 10

// lease says what a node may do by its own monotonic clock: start engines, and admit requests. It is pure:
// the time is an argument.
//
// A frozen node (stopped process, starved machine) does not know how long it slept. So its right to admit
// always ends at an instant that only a check of the clock moves on. A node that finds the instant passed
// asks the leader before it continues.
type lease struct {
	fence bool
	ttl   time.Duration
	until time.Time // end, counted from the start of the renewal; zero: never granted
	beat  time.Time // last check of the clock
	doubt time.Time // when a freeze was noticed, until a later renewal has ended; zero: none
}

// look records that the node runs. If more than one TTL passed since the last call, the process was
// suspended.
func (l *lease) look(now time.Time) {
	if now.Sub(l.beat) > l.ttl {
		l.doubt = now
	}
	l.beat = now
}

// sleep accounts for a suspension of the machine, which the clock did not count: everything before is older
// by d.
func (l *lease) sleep(d time.Duration) {
	if !l.until.IsZero() {
		l.until = l.until.Add(-d)
	}
	l.beat = l.beat.Add(-d)
}

// ended takes the end of a renewal that was sent at sent; ttl 0: it was refused.
func (l *lease) ended(sent, now time.Time, ttl time.Duration) {
	l.look(now)
	if until := sent.Add(ttl); ttl > 0 && until.After(l.until) {
		l.until, l.ttl = until, ttl
	}
	if !l.doubt.After(sent) {
		l.doubt = time.Time{}
	}
}

// stop is when the node no longer acts on its lease.
func (l *lease) stop() time.Time { return l.until.Add(-l.ttl / leaseMargin) }

// starts reports whether an engine may be started.
func (l *lease) starts(now time.Time) bool { return l.doubt.IsZero() && now.Before(l.stop()) }

// fences reports whether all units must be fenced.
func (l *lease) fences(now time.Time) bool { return l.fence && !now.Before(l.stop()) }

// admitsUntil is when the node stops to admit requests, as far as is known now; zero: it does not admit.
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

// left is the remaining time of the lease, 0 if it is over.
func (l *lease) left(now time.Time) time.Duration { return max(0, l.until.Sub(now)) }

// Causes of cuts.
const (
	causeLeaseLost  = "lease_lost"
	causeSuperseded = "superseded"
	causeRemoved    = "node_removed"
)
