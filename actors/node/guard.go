package node

import (
	"context"
	"errors"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Causes of what the guard does.
const (
	causeLeaseLost  = "lease_lost"
	causeSuperseded = "superseded"
)

// guardPart is how often the guard looks, in parts of a lease: each 500 ms of 10 s, and at each change of the state.
const guardPart = 20

// errNoLease refuses what needs a lease.
var errNoLease = errors.New("no lease")

// guard ends what this node may no longer run: units that the cluster has released or granted anew, and with on_lease_loss fence
// all of them when the lease is over. It ends with ctx, which outlives the units.
func (n *Node) guard(ctx context.Context) {
	every := n.timers.LeaseTTL / guardPart
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		var changed <-chan struct{}
		if n.cfg.Store != nil {
			changed = n.cfg.Store.Changed() // before State, or a change in between goes unseen
			n.supersede(n.cfg.Store.State())
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

// checkLease looks at the clock, fences if it is time, and says when to look again at the latest.
func (n *Node) checkLease(every time.Duration) time.Duration {
	if n.renewer == nil {
		return every
	}
	n.renewer.look()
	now, in := n.renewer.fences()
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

// superseded says that the cluster has given the unit away, or taken it back, since that epoch. A copy of the state that lags
// behind says nothing.
func superseded(s *state.State, unit string, epoch uint64) bool {
	last := s.LastEpoch(unit)
	return last > epoch || last == epoch && s.Units[unit] == nil
}

// supersede stops what s shows to be over, and forgets what is gone: its leader has heard of it.
func (n *Node) supersede(s *state.State) {
	for _, u := range n.list() {
		if superseded(s, u.m.Unit, u.m.Epoch) && !u.cut(causeSuperseded) && u.heldNow() == "" {
			n.forget(u)
		}
	}
	if n.renewer == nil {
		return
	}
	for unit, epoch := range n.renewer.news.units() { // also those that were asked for and never were here
		if superseded(s, unit, epoch) && n.unit(unit) == nil {
			n.renewer.news.forget(unit, epoch)
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
	if n.renewer == nil || n.renewer.starts() {
		return nil
	}
	return problem.New(problem.Unavailable, "node %s: %w: it may start no engines", n.cfg.ID, errNoLease).
		WithHint("wait until the node reaches the cluster's leader again, or look at its log")
}

// Renew asks the leader now, and returns when that has ended, well or not: who has just begun to lead learns what its own node has
// before anybody asks it.
func (n *Node) Renew(ctx context.Context) {
	if n.renewer != nil {
		n.renewer.ask(ctx, func() bool { return false })
	}
}

// Admits says whether this node's ranks may admit requests now: always without a leader; else not after the node was frozen, until
// it has asked the leader once, and with on_lease_loss fence not without a lease. Cheap: it is asked for every request.
func (n *Node) Admits() bool { return n.renewer == nil || n.renewer.admits() }

// Serves says whether a relay of this node may pass on the next bytes; nil = always. With on_lease_loss fence it is Admits.
func (n *Node) Serves() func() bool {
	if n.renewer == nil || n.cfg.OnLeaseLoss != Fence {
		return nil
	}
	return n.renewer.admits
}

// LeaseLeft is what the lease still lasts; 0 without one.
func (n *Node) LeaseLeft() time.Duration {
	if n.renewer == nil {
		return 0
	}
	return n.renewer.left()
}
