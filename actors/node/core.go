package node

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// CoreConfig is what a Core knows from the start.
type CoreConfig struct {
	Node        string
	Incarnation uint64            // random, of this process
	AfterStop   bool              // the previous process of the node was told to end
	Epochs      map[string]uint64 // what the previous process has recorded; nil = nothing
	Found       []*msg.StartRank  // orders of units whose engines an earlier process has left
	OnLeaseLoss LeaseLoss
	LeaseTTL    time.Duration // until the leader says another
	LeaseRenew  time.Duration
	Sought      time.Time // since when this process asks for a leader; zero = since NewCore
}

// Core decides for one node: which orders it takes, what it may run, what it tells the leader, and when it
// asks for its lease. It has no IO, no clock and no goroutines, so a simulation runs many of them on virtual
// time. Not safe for concurrent use.
type Core struct {
	cfg      CoreConfig
	lease    lease
	epochs   epochs
	outbox   eventOutbox
	units    map[string]*Life // the newest of each name
	events   uint64           // told so far
	stopping bool             // nothing starts any more
	restarts time.Duration    // grace of a restart that keeps the engines; 0 = none is under way

	// Renewals.
	begun    uint64        // number of the last one
	ended    uint64        // number of the last one that has ended
	granted  uint64        // number of the last one that was answered with a lease
	sent     time.Time     // when the last one began
	opens    time.Time     // from then on news does not wait
	due      time.Time     // the next one, if there is no news
	retry    time.Duration // the next pause after a failure
	news     bool          // since the last one began
	demanded bool          // since the last one began
	index    uint64        // newest state index of a leader that granted a lease
}

// Parts of lease_renew: 100 ms to 1 s of its 2 s.
const (
	retryFirst = 20 // first pause after a failure; doubles
	retryLast  = 2  // longest such pause
)

// guardPart is how often Check is needed, in parts of a lease: each 500 ms of 10 s, and at each change of the
// state.
const guardPart = 20

// errNoLease refuses what needs a lease.
var errNoLease = errors.New("no lease")

// NewCore returns the Core of a new process.
func NewCore(now time.Time, cfg CoreConfig) *Core {
	if cfg.Sought.IsZero() {
		cfg.Sought = now
	}
	c := &Core{
		cfg: cfg, epochs: newEpochs(cfg.Epochs), outbox: newEventOutbox(), units: map[string]*Life{},
		retry: cfg.LeaseRenew / retryFirst,
		// nothing is known of before
		lease: lease{fence: cfg.OnLeaseLoss == Fence, ttl: cfg.LeaseTTL, beat: now, doubt: now},
	}
	for _, o := range cfg.Found {
		c.addFound(now, o)
	}
	return c
}

// Superseded reports whether the cluster has released the unit, or granted it anew, since that epoch. An
// older copy of the state shows nothing.
func Superseded(s *state.State, unit string, epoch uint64) bool {
	last := s.LastEpoch(unit)
	return last > epoch || last == epoch && s.Units[unit] == nil
}

// MayStart refuses an order to start that is older than an epoch that this node or its copy of the state has
// seen, or that the lease does not cover. It returns the epochs that must be on disk before Start; nil if the
// unit is already here: then its last event is told again, and there is nothing to start.
func (c *Core) MayStart(now time.Time, s *state.State, o *msg.StartRank) (map[string]uint64, error) {
	if l := c.units[o.Unit]; l != nil && l.Order.Epoch == o.Epoch && c.epochs.seen[o.Unit] == o.Epoch {
		c.tell(now, l.last)
		return nil, nil
	}
	if err := c.refuseWhileEnding(o); err != nil {
		return nil, err
	}
	switch {
	case Superseded(s, o.Unit, o.Epoch):
		return nil, problem.New(problem.Conflict,
			"unit %s: %w: epoch %d was asked for, the cluster has released it (it is at %d)", o.Unit,
			ErrStaleEpoch, o.Epoch, s.LastEpoch(o.Unit))
	case c.epochs.isBehind(s):
		return nil, problem.New(problem.Unavailable,
			"unit %s: this node's copy of the state is older than before it was started", o.Unit).
			WithHint("wait until the node has the present state")
	}
	if err := c.MayLaunch(now); err != nil {
		return nil, err
	}
	return c.epochs.begin(s, o.Unit, o.Epoch,
		func(unit string) bool { return unit == o.Unit || c.units[unit] != nil })
}

// refuseWhileEnding refuses to start anything once the node ends or its process is about to be replaced.
func (c *Core) refuseWhileEnding(o *msg.StartRank) error {
	if !c.stopping && c.restarts == 0 {
		return nil
	}
	return problem.New(problem.Unavailable, "unit %s: node %s: %w", o.Unit, c.cfg.Node, msg.ErrNodeStopping)
}

// MayLaunch refuses to start an engine that the lease does not cover.
func (c *Core) MayLaunch(now time.Time) error {
	if c.lease.starts(now) {
		return nil
	}
	return problem.New(problem.Unavailable, "node %s: %w: it may start no engines", c.cfg.Node, errNoLease).
		WithHint("wait until the node reaches the cluster's leader again, or look at its log")
}

// Start takes an order that MayStart has allowed; epochs is what that returned. An older unit of that name
// has to end at once: two owners of a rank must never overlap.
func (c *Core) Start(now time.Time, o *msg.StartRank, epochs map[string]uint64) *Life {
	c.epochs.seen = epochs
	if before := c.units[o.Unit]; before != nil {
		before.AskStop(now, 0, "a newer epoch was granted")
	}
	l := &Life{Order: o}
	c.units[o.Unit] = l
	c.Enter(now, l, msg.UnitStarted, Failure{Rank: -1}, nil)
	return l
}

// MayStop refuses an order to stop that is older than an epoch that this node has seen. It returns the epochs
// that must be on disk before Stop, nil if it has seen this one.
func (c *Core) MayStop(o *msg.StopRank) (map[string]uint64, error) {
	if err := c.epochs.admit(o.Unit, o.Epoch); err != nil || c.epochs.seen[o.Unit] == o.Epoch {
		return nil, err
	}
	return c.epochs.with(o.Unit, o.Epoch), nil
}

// Stop takes an order that MayStop has allowed; epochs is what that returned. A unit that is not here is told
// to be gone, because the controller may have missed its end. A unit that already ends repeats its last
// event, or the controller would repeat the order.
func (c *Core) Stop(now time.Time, o *msg.StopRank, epochs map[string]uint64) {
	if epochs != nil {
		c.epochs.seen = epochs
	}
	l := c.units[o.Unit]
	if l == nil || l.Order.Epoch < o.Epoch {
		c.tell(now, msg.UnitEvent{
			Unit: o.Unit, Epoch: o.Epoch, Kind: msg.UnitGone, Rank: -1, Reason: o.Reason, Asked: true,
		})
	}
	if l == nil {
		return
	}
	ends := l.Phase == state.Draining || l.Phase == state.Killing
	if !l.AskStop(now, o.Grace, o.Reason) || ends {
		c.tell(now, l.last)
	}
}

// Leave refuses starts from now on, and tells the leader so.
func (c *Core) Leave() { c.stopping, c.news = true, true }

// Restart refuses starts from now on. It asks the leader to keep the units' grants for grace, until the next
// process of the node has found their engines.
func (c *Core) Restart(grace time.Duration) { c.restarts, c.news = grace, true }

// StopAll asks every unit to end, within grace and its application's graceful_shutdown_timeout_s.
func (c *Core) StopAll(now time.Time, grace time.Duration) {
	for _, l := range c.units {
		l.AskStop(now, min(grace, app.Seconds(l.Order.App.GracefulShutdownTimeout)), "node is stopping")
	}
}

// Restarting reports whether the node's process is about to be replaced.
func (c *Core) Restarting() bool { return c.restarts > 0 }

// Check finds what this node may no longer run: units that s shows superseded, and with on_lease_loss fence
// all units when the lease is over. It returns the names of those that must be fenced and ended now, each
// once, and the longest time until the next Check. It forgets units that are gone and superseded, because the
// leader knows their end. It decides about found units: the shims of their engines keep the deadline of the
// former process's lease.
func (c *Core) Check(now time.Time, s *state.State) (cut []string, next time.Duration) {
	c.lease.look(now)
	lost := c.lease.fences(now)
	for _, unit := range slices.Sorted(maps.Keys(c.units)) {
		l := c.units[unit]
		over := Superseded(s, unit, l.Order.Epoch)
		switch {
		case over && l.Phase == state.Gone:
			delete(c.units, unit)
		case over && l.cut(now, causeSuperseded), lost && !l.IsFound() && l.cut(now, causeLeaseLost):
			cut = append(cut, unit)
		case l.IsFound():
			c.decideFound(now, s, l)
		}
	}
	c.outbox.forget(func(unit string, epoch uint64) bool { // also units that were never on this node
		return c.units[unit] == nil && Superseded(s, unit, epoch)
	})
	next = c.cfg.LeaseTTL / guardPart
	if in := c.lease.stop().Sub(now); c.lease.fence && in > 0 {
		next = min(next, in)
	}
	return cut, next
}

// CutAll ends every unit as Check ends superseded ones, because the node is no member of its cluster any
// more. It returns their names.
func (c *Core) CutAll(now time.Time) (cut []string) {
	for _, unit := range slices.Sorted(maps.Keys(c.units)) {
		if c.units[unit].cut(now, causeRemoved) {
			cut = append(cut, unit)
		}
	}
	return cut
}

// Has reports whether the node has the unit, at whatever epoch.
func (c *Core) Has(unit string) bool { return c.units[unit] != nil }

// Life returns the newest epoch of a unit; nil if the node does not have the unit.
func (c *Core) Life(unit string) *Life { return c.units[unit] }

// Undecided reports whether the node has found a unit and cannot decide about it yet.
func (c *Core) Undecided() bool {
	for _, l := range c.units {
		if l.found == foundOpen && l.Failure == nil {
			return true
		}
	}
	return false
}

// FenceIn is the time until the node no longer acts on its lease.
func (c *Core) FenceIn(now time.Time) time.Duration { return max(0, c.lease.stop().Sub(now)) }

// Stopping reports whether the node ends.
func (c *Core) Stopping() bool { return c.stopping }

// Enter changes a unit's phase and tells the leader. It returns false for a unit with a failure, which does
// not become ready.
func (c *Core) Enter(now time.Time, l *Life, kind msg.UnitEventKind, why Failure, tail []string) bool {
	if kind == msg.UnitReady && l.Failure != nil {
		return false
	}
	l.Phase = phases[kind]
	l.WasReady = l.WasReady || kind == msg.UnitReady
	l.last = msg.UnitEvent{
		Unit: l.Order.Unit, Epoch: l.Order.Epoch, Kind: kind, Rank: why.Rank, Reason: why.Cause,
		LogTail: tail, Exit: why.Exit, WasReady: l.WasReady,
		Asked: kind == msg.UnitGone && l.stop != nil,
	}
	c.tell(now, l.last)
	return true
}

// tell numbers an event and puts it into the outbox.
func (c *Core) tell(now time.Time, e msg.UnitEvent) {
	c.events++
	e.Node, e.Number, e.At = c.cfg.Node, c.events, now
	c.outbox.add(e)
	c.news = true
}

// Waiting reports whether the leader has not taken all events.
func (c *Core) Waiting() bool { return len(c.outbox.queue) > 0 }

// Renew begins a renewal and returns its report, without the node's record.
func (c *Core) Renew(now time.Time) *msg.NodeReport {
	c.lease.look(now)
	c.begun++
	c.sent, c.news, c.demanded = now, false, false
	r := &msg.NodeReport{
		Incarnation: c.cfg.Incarnation, Wall: now, Stopping: c.stopping, AfterStop: c.cfg.AfterStop,
		RestartGrace: c.restarts,
	}
	r.Events, r.Units = c.outbox.report()
	return r
}

// Renewed takes the end of the renewal: what the leader granted, nil if it failed.
func (c *Core) Renewed(now time.Time, granted *msg.Lease) {
	c.ended = c.begun
	if granted == nil {
		c.lease.ended(c.sent, now, 0)
		c.opens, c.due = now.Add(c.cfg.LeaseRenew/retryFirst), now.Add(c.retry)
		c.retry = min(2*c.retry, c.cfg.LeaseRenew/retryLast)
		return
	}
	ttl := granted.TTL
	if ttl <= 0 {
		ttl = c.cfg.LeaseTTL
	}
	c.lease.ended(c.sent, now, ttl)
	c.granted = c.begun
	c.index = max(c.index, granted.Index)
	c.retry = c.cfg.LeaseRenew / retryFirst
	c.opens, c.due = now, c.sent.Add(c.cfg.LeaseRenew)
	if more := c.outbox.acknowledge(granted.Acked); more {
		c.due = now
	}
}

// RenewAt is when the next renewal begins: at once if it is demanded, soon if there is news.
func (c *Core) RenewAt() time.Time {
	switch {
	case c.demanded:
		return time.Time{}
	case c.news && c.opens.Before(c.due):
		return c.opens
	default:
		return c.due
	}
}

// Demand asks for a renewal at once and returns its number: Ended reaches it when a renewal that began after
// the call has ended.
func (c *Core) Demand() (number uint64) {
	c.demanded = true
	return c.begun + 1
}

// Ended is the number of the last renewal that has ended.
func (c *Core) Ended() uint64 { return c.ended }

// Granted is the number of the last renewal that was answered with a lease.
func (c *Core) Granted() uint64 { return c.granted }

// IsBehind reports whether a copy of the state is older than the leader's at the last lease. Such a copy may
// still show an epoch that was released, and an order of a replaced leader may be on its way.
func (c *Core) IsBehind(s *state.State) bool { return s.Index < c.index }

// Suspended accounts for a suspension of the machine, which the clock did not count.
func (c *Core) Suspended(d time.Duration) {
	c.lease.sleep(d)
	c.sent = c.sent.Add(-d)
}

// AdmitsUntil is when the node stops to admit requests, as far as is known now; zero: it does not admit.
func (c *Core) AdmitsUntil() time.Time { return c.lease.admitsUntil() }

// LeaseLeft is the remaining time of the lease, 0 if it is over.
func (c *Core) LeaseLeft(now time.Time) time.Duration { return c.lease.left(now) }

// addFound adds a unit whose engines an earlier process has left. The first renewal lists it, so that the
// leader does not take it for gone; its phase is not known.
func (c *Core) addFound(now time.Time, o *msg.StartRank) {
	l := &Life{Order: o, Phase: state.Starting, found: foundOpen}
	l.last = msg.UnitEvent{Unit: o.Unit, Epoch: o.Epoch, Kind: msg.UnitPresent, Rank: -1}
	c.units[o.Unit] = l
	c.epochs.seen[o.Unit] = max(c.epochs.seen[o.Unit], o.Epoch)
	c.tell(now, l.last)
}

// decideFound decides whether a found unit may be adopted. That needs a renewal that was answered, and a copy
// of the state that is not older than the answer: a leader that was silent may have granted the unit
// elsewhere. What is not granted to this node at this epoch is ended. Without any answer the copy alone may
// decide (isAlone), and only that a unit goes on: it may lack the newest grants.
func (c *Core) decideFound(now time.Time, s *state.State, l *Life) {
	alone := c.isAlone(now, s)
	if l.found != foundOpen || c.IsBehind(s) || c.MayLaunch(now) != nil && !alone {
		return
	}
	rec := s.Units[l.Order.Unit]
	granted := rec != nil && rec.Epoch == l.Order.Epoch && c.holds(rec, l.Order.Ranks) &&
		(rec.Phase == state.Ready || rec.Phase == state.Starting && !alone)
	switch {
	case granted:
		l.found, l.WasReady, l.byCopy = foundGranted, rec.Phase == state.Ready, alone
	case !alone:
		l.Fail(Failure{Rank: -1, Cause: causeNotGranted})
	}
}

// isAlone reports whether this process serves what its copy of the state grants: with on_lease_loss serve,
// once no leader has answered it for a whole lease. A node that loses its leader while it runs does the same;
// a leader that can be reached answers long before. It gives no lease to a node that it took for lost, which
// the copy shows.
func (c *Core) isAlone(now time.Time, s *state.State) bool {
	self := s.Nodes[c.cfg.Node]
	return !c.lease.fence && c.ended > 0 && c.lease.until.IsZero() && now.Sub(c.cfg.Sought) >= c.lease.ttl &&
		self != nil && !self.Lost
}

// holds reports whether a record grants ranks to this node.
func (c *Core) holds(rec *state.Unit, ranks []state.RankGrant) bool {
	for _, r := range ranks {
		isHere := func(g state.RankGrant) bool { return g.Rank == r.Rank && g.Node == c.cfg.Node }
		if !slices.ContainsFunc(rec.Ranks, isHere) {
			return false
		}
	}
	return true
}

// causeNotGranted ends a found unit.
const causeNotGranted = "its engines run from before, and it is not granted to this node"
