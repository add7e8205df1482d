package node

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/state"
)

// Parts of lease_renew: 1 s, and 100 ms to 1 s, of its 2 s.
const (
	renewPatience = 2  // the deadline of one renewal
	retryFirst    = 20 // the first wait after one that failed; doubles
	retryLast     = 2  // the longest such wait
)

// copyWait is how long an order to start waits for this node's copy of the state. A copy is some 10 ms behind; one that is a second
// behind has lost its source (a control node whose disk is sick, say), and that must not keep a node with a lease from its work.
const copyWait = time.Second

// renewer keeps the node's lease and tells the leader what happened here. It implements msg.Reporter.
type renewer struct {
	leader      msg.Leader
	self        func() state.Node
	trouble     func() string // may be nil
	store       msg.Store     // may be nil
	incarnation uint64
	ttl         time.Duration // unless the leader says another
	period      time.Duration
	log         *slog.Logger
	news        *news
	wake        chan struct{} // one slot: there is news
	demand      chan struct{} // one slot: a command waits for the lease
	afterStop   bool          // the process of the node before this one was told to end
	closing     atomic.Bool   // the node ends: that its leader went first is no news

	// The loop's own.
	failing bool      // the last renewal failed
	warned  bool      // it has failed for long
	granted time.Time // when the last one that did not was sent; at first: the beginning

	base time.Time
	open atomic.Int64 // requests are admitted until base plus this, in ns: one load and a look at the clock for each

	suspended func() time.Duration // of the machine since its boot

	mu      sync.Mutex
	lease   lease
	slept   time.Duration // what of suspended is in the lease already
	sleptAt time.Duration // slept when the renewal that is under way was sent
	tried   chan struct{} // closed and replaced when a renewal has ended
	begun   uint64        // renewals
	last    uint64        // the number of the last that has ended
	index   uint64        // of the newest state of a leader that has granted a lease
	done    chan struct{} // closed when nothing is renewed any more
}

var _ msg.Reporter = (*renewer)(nil)

func newRenewer(c *Config, t *Timers) *renewer {
	now := time.Now()
	return &renewer{
		suspended: suspended, slept: suspended(), leader: c.Leader, self: c.Self, trouble: c.Trouble, store: c.Store, incarnation: draw(c.Rand), ttl: t.LeaseTTL, period: t.LeaseRenew, log: c.Log, news: newNews(),
		wake: make(chan struct{}, 1), demand: make(chan struct{}, 1), base: now, granted: now, tried: make(chan struct{}), done: make(chan struct{}),
		lease: lease{fence: c.OnLeaseLoss == Fence, ttl: t.LeaseTTL, beat: now, doubt: now}, // nothing is known of before
	}
}

// Report implements msg.Reporter: the event goes out at once.
func (r *renewer) Report(e msg.UnitEvent) {
	if r.news.add(e) {
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

// close has the leader told that the node ends.
func (r *renewer) close() {
	r.closing.Store(true)
	strike(r.wake)
}

// run renews until ctx ends, and once more if events wait then and somebody takes them.
func (r *renewer) run(ctx context.Context) {
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
	if r.news.waiting() && !r.failing {
		_, _ = r.renew(context.WithoutCancel(ctx))
	}
}

// pause waits for longest, until there is news, but then for least, or until a command waits for the lease.
func (r *renewer) pause(ctx context.Context, least, longest time.Duration) {
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

// renew asks once. more says that the leader took events and others wait.
func (r *renewer) renew(ctx context.Context) (more bool, err error) {
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
	more = r.news.taken(granted.Taken)
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

func (r *renewer) report(now time.Time) *msg.NodeReport {
	m := &msg.NodeReport{Node: r.self(), Incarnation: r.incarnation, Wall: now, Stopping: r.closing.Load(), AfterStop: r.afterStop}
	m.Events, m.Units = r.news.report()
	if r.store != nil {
		m.Index = r.store.State().Index
	}
	if r.trouble != nil {
		m.Trouble = r.trouble()
	}
	return m
}

// failed tells once of a lease that is half over: leaders change, and a node may be there before its first one.
func (r *renewer) failed(ctx context.Context, err error) {
	if ctx.Err() != nil { // cut off: it says nothing of the leader
		return
	}
	r.failing = true
	if r.warned || r.closing.Load() || time.Since(r.granted) < r.ttl/2 {
		return
	}
	r.warned = true
	r.log.Warn("the node's lease cannot be renewed", slog.Duration("left", r.left()), slog.String("err", err.Error()))
}

// begin is look, for a renewal.
func (r *renewer) begin() time.Time {
	r.mu.Lock()
	r.begun++
	r.countSuspension()
	r.sleptAt = r.slept
	r.mu.Unlock()
	return r.look()
}

// suspensionNoted is more than the time between the two looks at clocks that suspended takes.
const suspensionNoted = 200 * time.Millisecond

// countSuspension takes what the machine slept since the last look off the lease, under mu.
func (r *renewer) countSuspension() {
	if d := r.suspended() - r.slept; d >= suspensionNoted {
		r.slept += d
		r.lease.sleep(d)
	}
}

// look notes that the node runs.
func (r *renewer) look() time.Time {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	r.lease.look(now)
	r.publish()
	return now
}

func (r *renewer) ended(sent time.Time, ttl time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	r.lease.ended(sent.Add(r.sleptAt-r.slept), time.Now(), ttl)
	r.publish()
	r.last = r.begun // one at a time
	close(r.tried)
	r.tried = make(chan struct{})
}

// publish tells admits, under mu.
func (r *renewer) publish() {
	var open time.Duration // base itself: over
	if until := r.lease.admitsUntil(); !until.IsZero() {
		open = until.Sub(r.base)
	}
	r.open.Store(int64(open))
}

// admits says whether requests may be admitted now. After a suspension of the machine it is the next look that finds the lease over:
// in fence within TTL/20 of the thaw.
func (r *renewer) admits() bool { return int64(time.Since(r.base)) < r.open.Load() }

// starts says whether an engine may be started now.
func (r *renewer) starts() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.countSuspension()
	return r.lease.starts(time.Now())
}

// ensure is starts for a command of the leader: before it is refused the lease is asked for once more, as a leader is there.
func (r *renewer) ensure(ctx context.Context) { r.ask(ctx, r.starts) }

// isBehind says whether this node's copy of the state is older than what the leader had when it granted the last lease. Such a copy
// may still show an epoch that was released, and an order of a leader that was replaced may be on its way.
func (r *renewer) isBehind() bool {
	if r.store == nil {
		return false
	}
	r.mu.Lock()
	index := r.index
	r.mu.Unlock()
	return r.store.State().Index < index
}

// catchUp waits until the copy of the state is not behind, at most copyWait.
func (r *renewer) catchUp(ctx context.Context) {
	if !r.isBehind() { // nearly always
		return
	}
	ctx, cancel := context.WithTimeout(ctx, copyWait)
	defer cancel()
	for {
		changed := r.store.Changed() // before isBehind, or a change in between goes unseen
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

// ask asks the leader, and returns when a renewal that began after the call has ended, or enough says so before.
func (r *renewer) ask(ctx context.Context, enough func() bool) {
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

// fences says whether all units must be out, and else when that will be if nothing is renewed; 0: never.
func (r *renewer) fences() (now bool, in time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	at := time.Now()
	if !r.lease.fence || r.lease.fences(at) {
		return r.lease.fence, 0
	}
	return false, r.lease.stop().Sub(at)
}

func (r *renewer) left() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lease.left(time.Now())
}
