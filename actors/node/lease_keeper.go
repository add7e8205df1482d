package node

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// Parts of lease_renew: 1 s, and 100 ms to 1 s, of its 2 s.
const (
	renewPatience = 2  // deadline of one renewal
	retryFirst    = 20 // first pause after a failure; doubles
	retryLast     = 2  // longest such pause
)

// copyWait is how long StartRank waits for this node's copy of the state. A copy is usually 10 ms behind. A
// copy that is a second behind has lost its source, for example on a control node with a failing disk, and
// must not keep a node with a lease from working.
const copyWait = time.Second

// leaseKeeper keeps the node's lease and sends the node's events to the leader. It implements msg.Reporter.
type leaseKeeper struct {
	leader      msg.Leader
	self        func() state.Node
	trouble     func() string // may be nil
	store       msg.Store     // may be nil
	incarnation uint64
	ttl         time.Duration // until the leader says another
	period      time.Duration
	log         *slog.Logger
	outbox      *eventOutbox
	wake        chan struct{} // one slot: an event waits
	demand      chan struct{} // one slot: a command waits for the lease
	afterStop   bool          // the previous process of the node was told to end
	closing     atomic.Bool   // the node ends: a leader that ended first is no warning

	// Used by the loop only.
	failing bool      // the last renewal failed
	warned  bool      // it has failed for long
	granted time.Time // when the last successful renewal was sent; at first: the start

	base time.Time
	open atomic.Int64 // requests are admitted until base plus this, in ns

	suspended func() time.Duration // of the machine since its boot

	mu      sync.Mutex
	lease   lease
	slept   time.Duration // the part of suspended that the lease already includes
	sleptAt time.Duration // slept at the start of the current renewal
	tried   chan struct{} // closed and replaced when a renewal has ended
	begun   uint64        // number of renewals
	last    uint64        // number of the last renewal that has ended
	index   uint64        // newest state index of a leader that granted a lease
	done    chan struct{} // closed when renewals have ended
}

var _ msg.Reporter = (*leaseKeeper)(nil)

func newLeaseKeeper(c *Config, t *Timers) *leaseKeeper {
	now := time.Now()
	return &leaseKeeper{
		suspended: suspended, slept: suspended(), leader: c.Leader, self: c.Self, trouble: c.Trouble,
		store: c.Store, incarnation: draw(c.Rand), ttl: t.LeaseTTL, period: t.LeaseRenew, log: c.Log,
		outbox: newEventOutbox(),
		wake:   make(chan struct{}, 1), demand: make(chan struct{}, 1), base: now, granted: now,
		tried: make(chan struct{}), done: make(chan struct{}),
		// nothing is known of before
		lease: lease{fence: c.OnLeaseLoss == Fence, ttl: t.LeaseTTL, beat: now, doubt: now},
	}
}

// Report implements msg.Reporter. The event is sent at once.
func (r *leaseKeeper) Report(e msg.UnitEvent) {
	if r.outbox.add(e) {
		r.log.Warn("the leader takes no events, the oldest is dropped: it will learn the newest of each unit")
	}
	strike(r.wake)
}

func strike(bell chan struct{}) {
	select {
	case bell <- struct{}{}:
	default:
	}
}

// close tells the leader that the node ends.
func (r *leaseKeeper) close() {
	r.closing.Store(true)
	strike(r.wake)
}

// run renews until ctx ends, and once more if events wait then.
func (r *leaseKeeper) run(ctx context.Context) {
	defer close(r.done)
	retry := r.period / retryFirst
	for ctx.Err() == nil {
		sent := time.Now()
		switch more, err := r.renew(ctx); {
		case err != nil:
			r.pause(ctx, r.period/retryFirst, retry)
			retry = min(2*retry, r.period/retryLast)
		case !more:
			r.pause(ctx, 0, r.period-time.Since(sent))
			fallthrough
		default:
			retry = r.period / retryFirst
		}
	}
	if r.outbox.waiting() && !r.failing {
		_, _ = r.renew(context.WithoutCancel(ctx))
	}
}

// pause waits for longest; for least if an event waits; and not at all if a command waits for the lease.
func (r *leaseKeeper) pause(ctx context.Context, least, longest time.Duration) {
	over := time.NewTimer(longest)
	defer over.Stop()
	if least > 0 {
		began := time.NewTimer(least)
		defer began.Stop()
		select {
		case <-began.C:
		case <-r.demand:
			return
		case <-ctx.Done():
			return
		}
	}
	select {
	case <-r.wake:
	case <-r.demand:
	case <-over.C:
	case <-ctx.Done():
	}
}

// renew asks once. more is true if the leader took events and others wait.
func (r *leaseKeeper) renew(ctx context.Context) (more bool, err error) {
	sent := r.begin()
	report := r.report(sent)
	limit, cancel := context.WithTimeout(ctx, r.period/renewPatience)
	defer cancel()
	granted, err := r.leader.Renew(limit, report)
	if err != nil {
		r.ended(sent, 0)
		r.failed(ctx, err)
		return false, err
	}
	more = r.outbox.acknowledge(granted.Taken)
	if granted.TTL <= 0 {
		granted.TTL = r.ttl
	}
	r.mu.Lock()
	r.index = max(r.index, granted.Index)
	r.mu.Unlock()
	r.ended(sent, granted.TTL)
	r.granted, r.failing = sent, false
	if r.warned {
		r.warned = false
		r.log.Info("the node's lease is renewed again", slog.String("leader", granted.Leader))
	}
	return more, nil
}

func (r *leaseKeeper) report(now time.Time) *msg.NodeReport {
	m := &msg.NodeReport{
		Node: r.self(), Incarnation: r.incarnation, Wall: now, Stopping: r.closing.Load(),
		AfterStop: r.afterStop,
	}
	m.Events, m.Units = r.outbox.report()
	if r.store != nil {
		m.Index = r.store.State().Index
	}
	if r.trouble != nil {
		m.Trouble = r.trouble()
	}
	return m
}

// failed warns once of a lease that is half over. Shorter failures are normal: leaders change, and a node may
// start before its first leader.
func (r *leaseKeeper) failed(ctx context.Context, err error) {
	if ctx.Err() != nil { // cut off by the node's end
		return
	}
	r.failing = true
	if r.warned || r.closing.Load() || time.Since(r.granted) < r.ttl/2 {
		return
	}
	r.warned = true
	r.log.Warn("the node's lease cannot be renewed", slog.Duration("left", r.left()),
		slog.String("err", err.Error()))
}

// begin is look for a renewal.
func (r *leaseKeeper) begin() time.Time {
	r.mu.Lock()
	r.begun++
	r.countSuspension()
	r.sleptAt = r.slept
	r.mu.Unlock()
	return r.look()
}

// suspensionNoted is more than the time between the two clock readings of suspended.
const suspensionNoted = 200 * time.Millisecond

// countSuspension subtracts the machine's suspension since the last check from the lease. The caller holds
// mu.
func (r *leaseKeeper) countSuspension() {
	if d := r.suspended() - r.slept; d >= suspensionNoted {
		r.slept += d
		r.lease.sleep(d)
	}
}

// look records that the node runs.
func (r *leaseKeeper) look() time.Time {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	r.lease.look(now)
	r.publish()
	return now
}

func (r *leaseKeeper) ended(sent time.Time, ttl time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	r.lease.ended(sent.Add(r.sleptAt-r.slept), time.Now(), ttl)
	r.publish()
	r.last = r.begun // one at a time
	close(r.tried)
	r.tried = make(chan struct{})
}

// publish updates open for admits. The caller holds mu.
func (r *leaseKeeper) publish() {
	var open time.Duration // zero means base itself: over
	if until := r.lease.admitsUntil(); !until.IsZero() {
		open = until.Sub(r.base)
	}
	r.open.Store(int64(open))
}

// admits reports whether requests may be admitted now. After a suspension of the machine the next look finds
// the lease over: with on_lease_loss fence within TTL/20 of the resume.
func (r *leaseKeeper) admits() bool { return int64(time.Since(r.base)) < r.open.Load() }

// starts reports whether an engine may be started now.
func (r *leaseKeeper) starts() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	return r.lease.starts(time.Now())
}

// ensure asks for the lease once more before a leader's command is refused, because the command shows that a
// leader exists.
func (r *leaseKeeper) ensure(ctx context.Context) { r.ask(ctx, r.starts) }

// isBehind reports whether this node's copy of the state is older than the leader's at the last lease. Such a
// copy may still show an epoch that was released, and an order of a replaced leader may be on its way.
func (r *leaseKeeper) isBehind() bool {
	if r.store == nil {
		return false
	}
	r.mu.Lock()
	index := r.index
	r.mu.Unlock()
	return r.store.State().Index < index
}

// catchUp waits at most copyWait until the copy of the state is not behind.
func (r *leaseKeeper) catchUp(ctx context.Context) {
	if !r.isBehind() { // the usual case
		return
	}
	ctx, cancel := context.WithTimeout(ctx, copyWait)
	defer cancel()
	for {
		changed := r.store.Changed() // Changed comes before isBehind, so that no change in between is missed
		if !r.isBehind() {
			return
		}
		select {
		case <-changed:
		case <-r.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

// ask asks the leader. It returns when a renewal that began after the call has ended, or earlier when enough
// returns true.
func (r *leaseKeeper) ask(ctx context.Context, enough func() bool) {
	r.mu.Lock()
	before := r.begun
	r.mu.Unlock()
	for !enough() {
		r.mu.Lock()
		tried, last := r.tried, r.last
		r.mu.Unlock()
		if last > before {
			return
		}
		strike(r.demand)
		select {
		case <-tried:
		case <-r.done:
			return
		case <-ctx.Done():
			return
		}
	}
}

// fences reports whether all units must be fenced now, and else after which time without a renewal; 0: never.
func (r *leaseKeeper) fences() (now bool, in time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Now()
	if !r.lease.fence || r.lease.fences(at) {
		return r.lease.fence, 0
	}
	return false, r.lease.stop().Sub(at)
}

func (r *leaseKeeper) left() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lease.left(time.Now())
}
