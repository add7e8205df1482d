package node

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// renewPatience is the deadline of one renewal, as a part of lease_renew: 1 s of 2 s.
const renewPatience = 2

// copyWait is how long StartRank waits for this node's copy of the state. A copy is usually 10 ms behind. A
// copy that is a second behind has lost its source, for example on a control node with a failing disk, and
// must not keep a node with a lease from working.
const copyWait = time.Second

// leaseKeeper asks the leader for the node's lease when its Core wants it, and tells the Core what the clocks
// and the leader say. The node's lock guards it, with the Core.
type leaseKeeper struct {
	n    *Node
	bell chan struct{} // one slot: the time of the next renewal may have changed
	done chan struct{} // closed when renewals have ended

	base time.Time
	open atomic.Int64 // requests are admitted until base plus this, in ns

	suspended func() time.Duration // of the machine since its boot
	slept     time.Duration        // the part of it that the Core already knows
	tried     chan struct{}        // closed and replaced when a renewal has ended

	// Used by run only.
	failing bool      // the last renewal failed
	warned  bool      // it has failed for long
	full    bool      // events were dropped, because the leader took none
	granted time.Time // when the last successful renewal was sent; at first: the start
}

func newLeaseKeeper(n *Node) *leaseKeeper {
	now := time.Now()
	return &leaseKeeper{
		n: n, bell: make(chan struct{}, 1), done: make(chan struct{}), base: now, granted: now,
		suspended: suspended, slept: suspended(), tried: make(chan struct{}),
	}
}

// ring makes run look again when the next renewal is.
func (k *leaseKeeper) ring() {
	select {
	case k.bell <- struct{}{}:
	default:
	}
}

// run renews until ctx ends, and once more if events wait then.
func (k *leaseKeeper) run(ctx context.Context) {
	defer close(k.done)
	for k.rest(ctx) {
		k.renew(ctx)
	}
	k.n.mu.Lock()
	waiting := k.n.core.Waiting()
	k.n.mu.Unlock()
	if waiting && !k.failing {
		k.renew(context.WithoutCancel(ctx))
	}
}

// rest waits until the next renewal; false when ctx ends.
func (k *leaseKeeper) rest(ctx context.Context) bool {
	over := time.NewTimer(0)
	defer over.Stop()
	for ctx.Err() == nil {
		k.n.mu.Lock()
		in := time.Until(k.n.core.RenewAt())
		k.n.mu.Unlock()
		if in <= 0 {
			return true
		}
		over.Reset(in)
		select {
		case <-over.C:
		case <-k.bell:
		case <-ctx.Done():
		}
	}
	return false
}

// renew asks once.
func (k *leaseKeeper) renew(ctx context.Context) {
	n := k.n
	n.mu.Lock()
	k.countSuspension()
	report := n.core.Renew(time.Now())
	k.publish()
	n.mu.Unlock()
	sent := report.Wall
	report.Node, report.Index = n.cfg.Self(), n.cfg.Store.State().Index
	report.Node.Resources.Taken = n.taken.list(ctx, &n.cfg)
	report.Trouble, report.Loads = n.trouble(), k.loads()
	limit, cancel := context.WithTimeout(ctx, n.timers.LeaseRenew/renewPatience)
	defer cancel()
	granted, err := n.cfg.Leader.Renew(limit, report)
	if err != nil {
		_, _ = k.ended(nil)
		k.failed(ctx, err)
		return
	}
	undecided, fenceIn := k.ended(&granted)
	k.granted, k.failing = sent, false
	if n.cfg.OnLeaseLoss == Fence {
		n.launcher.Extend(fenceIn)
	}
	if undecided {
		n.check(n.cfg.Store.State())
	}
	if k.warned {
		k.warned = false
		n.log.Info("the node's lease is renewed again", slog.String("leader", granted.Leader))
	}
}

// loads returns the load of every rank of this node that is ready.
func (k *leaseKeeper) loads() []msg.RankLoad {
	var out []msg.RankLoad
	for _, u := range k.n.list() {
		k.n.mu.Lock()
		ranks, phase := u.ranks, u.life.Phase
		k.n.mu.Unlock()
		if phase != state.Ready {
			continue
		}
		for _, r := range ranks {
			out = append(out, msg.RankLoad{
				Unit: u.m.Unit, Rank: r.grant.Rank, Tokens: r.replica.Status().OpenTokens,
			})
		}
	}
	return out
}

// ended takes the end of a renewal; nil: it failed. undecided says that found units wait for a decision,
// fenceIn how long engines may run without another renewal.
func (k *leaseKeeper) ended(granted *msg.Lease) (undecided bool, fenceIn time.Duration) {
	k.n.mu.Lock()
	k.countSuspension()
	k.n.core.Renewed(time.Now(), granted)
	k.publish()
	close(k.tried)
	k.tried = make(chan struct{})
	full := k.n.core.outbox.full
	undecided, fenceIn = k.n.core.Undecided(), k.n.core.FenceIn(time.Now())
	k.n.mu.Unlock()
	if full && !k.full {
		k.n.log.Warn(
			"the leader takes no events, the oldest is dropped: it will learn the newest of each unit")
	}
	k.full = full
	return undecided, fenceIn
}

// failed warns once of a lease that is half over. Shorter failures are normal: leaders change, and a node may
// start before its first leader.
func (k *leaseKeeper) failed(ctx context.Context, err error) {
	if ctx.Err() != nil { // cut off by the node's end
		return
	}
	k.failing = true
	k.n.mu.Lock()
	stopping, left := k.n.core.Stopping(), k.n.core.LeaseLeft(time.Now())
	k.n.mu.Unlock()
	if k.warned || stopping || time.Since(k.granted) < k.n.timers.LeaseTTL/2 {
		return
	}
	k.warned = true
	k.n.log.Warn("the node's lease cannot be renewed", slog.Duration("left", left),
		slog.String("err", err.Error()))
}

// suspensionNoted is more than the time between the two clock readings of suspended.
const suspensionNoted = 200 * time.Millisecond

// countSuspension tells the Core of the machine's suspension since the last check. The caller holds mu.
func (k *leaseKeeper) countSuspension() {
	if d := k.suspended() - k.slept; d >= suspensionNoted {
		k.slept += d
		k.n.core.Suspended(d)
	}
}

// publish updates open for admits. The caller holds mu.
func (k *leaseKeeper) publish() {
	var open time.Duration // zero means base itself: over
	if until := k.n.core.AdmitsUntil(); !until.IsZero() {
		open = until.Sub(k.base)
	}
	k.open.Store(int64(open))
}

// admits reports whether requests may be admitted now. After a suspension of the machine the next check finds
// the lease over: with on_lease_loss fence within TTL/20 of the resume.
func (k *leaseKeeper) admits() bool { return int64(time.Since(k.base)) < k.open.Load() }

// mayLaunch refuses to start an engine that the lease does not cover.
func (k *leaseKeeper) mayLaunch() error {
	k.n.mu.Lock()
	defer k.n.mu.Unlock()
	k.countSuspension()
	return k.n.core.MayLaunch(time.Now())
}

// isBehind reports whether this node's copy of the state is older than the leader's at the last lease.
func (k *leaseKeeper) isBehind() bool {
	s := k.n.cfg.Store.State()
	k.n.mu.Lock()
	defer k.n.mu.Unlock()
	return k.n.core.IsBehind(s)
}

// catchUp waits at most copyWait until the copy of the state is not behind.
func (k *leaseKeeper) catchUp(ctx context.Context) {
	if !k.isBehind() { // the usual case
		return
	}
	ctx, cancel := context.WithTimeout(ctx, copyWait)
	defer cancel()
	for {
		changed := k.n.cfg.Store.Changed() // before isBehind, so that no change in between is missed
		if !k.isBehind() {
			return
		}
		select {
		case <-changed:
		case <-k.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

// ask asks the leader. It returns when a renewal that began after the call has ended, or earlier when enough
// returns true, and reports whether such a renewal was answered with a lease.
func (k *leaseKeeper) ask(ctx context.Context, enough func() bool) bool {
	if enough() {
		return false
	}
	k.n.mu.Lock()
	number := k.n.core.Demand()
	k.n.mu.Unlock()
	k.ring()
	for {
		k.n.mu.Lock()
		tried, ended, granted := k.tried, k.n.core.Ended(), k.n.core.Granted()
		k.n.mu.Unlock()
		if ended >= number || enough() {
			return granted >= number
		}
		select {
		case <-tried:
		case <-k.done:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// cutUnits fences units that the Core has cut. The caller holds mu, and interrupts them without it.
func cutUnits(n *Node, names []string) (cut []*unit) {
	for _, name := range names {
		u := n.units[name]
		close(u.hasten)
		u.fence()
		cut = append(cut, u)
	}
	return cut
}
