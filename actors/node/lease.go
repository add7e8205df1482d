package node

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

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

// Causes of fences by enforceLease.
const (
	causeLeaseLost  = "lease_lost"
	causeSuperseded = "superseded"
)

// guardPart is how often enforceLease checks, in parts of a lease: each 500 ms of 10 s, and at each change of
// the state.
const guardPart = 20

// errNoLease refuses what needs a lease.
var errNoLease = errors.New("no lease")

// enforceLease ends what this node may no longer run: units that the cluster has released or granted anew,
// and with on_lease_loss fence all units when the lease is over. It ends with ctx, which outlives the units.
func (n *Node) enforceLease(ctx context.Context) {
	every := n.timers.LeaseTTL / guardPart
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		var changed <-chan struct{}
		if n.cfg.Store != nil {
			// Changed comes before State, so that no change in between is missed
			changed = n.cfg.Store.Changed()
			n.stopSuperseded(n.cfg.Store.State())
		}
		timer.Reset(min(every, n.checkLease(every)))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// checkLease checks the clock, fences if the lease is over, and returns the longest pause until the next
// check.
func (n *Node) checkLease(every time.Duration) time.Duration {
	if n.leaseKeeper == nil {
		return every
	}
	n.leaseKeeper.look()
	now, in := n.leaseKeeper.fences()
	if now {
		for _, u := range n.list() {
			u.cut(causeLeaseLost)
		}
	}
	if in > 0 {
		return in
	}
	return every
}

// superseded reports whether the cluster has released the unit, or granted it anew, since that epoch. An
// older copy of the state shows nothing.
func superseded(s *state.State, unit string, epoch uint64) bool {
	last := s.LastEpoch(unit)
	return last > epoch || last == epoch && s.Units[unit] == nil
}

// stopSuperseded stops the units that s shows superseded, and forgets ended ones: the leader knows their end.
func (n *Node) stopSuperseded(s *state.State) {
	for _, u := range n.list() {
		if superseded(s, u.m.Unit, u.m.Epoch) && !u.cut(causeSuperseded) && u.heldNow() == "" {
			n.forget(u)
		}
	}
	if n.leaseKeeper == nil {
		return
	}
	for unit, epoch := range n.leaseKeeper.outbox.units() { // also units that were never on this node
		if superseded(s, unit, epoch) && n.unit(unit) == nil {
			n.leaseKeeper.outbox.forget(unit, epoch)
		}
	}
}

func (n *Node) unit(name string) *unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.units[name]
}

func (n *Node) forget(u *unit) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.units[u.m.Unit] == u {
		delete(n.units, u.m.Unit)
	}
}

// mayStart refuses a start that the lease does not cover.
func (n *Node) mayStart() error {
	if n.leaseKeeper == nil || n.leaseKeeper.starts() {
		return nil
	}
	return problem.New(problem.Unavailable, "node %s: %w: it may start no engines", n.cfg.ID, errNoLease).
		WithHint("wait until the node reaches the cluster's leader again, or look at its log")
}

// Renew asks the leader now and returns when the renewal has ended, with or without success. A new leader
// learns the units of its own node before it answers status requests.
func (n *Node) Renew(ctx context.Context) {
	if n.leaseKeeper != nil {
		n.leaseKeeper.ask(ctx, func() bool { return false })
	}
}

// Admits reports whether this node's ranks may admit requests now: always without a leader; otherwise not
// after a freeze until the leader has answered once, and with on_lease_loss fence not without a lease. It is
// cheap, because every request asks.
func (n *Node) Admits() bool { return n.leaseKeeper == nil || n.leaseKeeper.admits() }

// Serves returns a function that reports whether a relay of this node may pass on the next bytes; nil =
// always. With on_lease_loss fence it is Admits.
func (n *Node) Serves() func() bool {
	if n.leaseKeeper == nil || n.cfg.OnLeaseLoss != Fence {
		return nil
	}
	return n.leaseKeeper.admits
}

// LeaseLeft is the remaining time of the lease; 0 without one.
func (n *Node) LeaseLeft() time.Duration {
	if n.leaseKeeper == nil {
		return 0
	}
	return n.leaseKeeper.left()
}
