package controller

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// Core decides. It has no IO, no clock and no goroutines: the same inputs at the same times give the same
// effects. It is level-triggered: every step compares the wanted state with the current one, so a lost answer
// only causes a delay.
type Core struct {
	Self string // the leader's node; "" = the leader has no node

	timers   Timers
	state    *state.State     // nil before the barrier: nothing is decided
	nodes    []placement.Node // nodes that may get ranks
	apps     map[string]*application
	units    map[string]*unit
	order    []string         // ids of units; nil = must be sorted
	peers    map[string]*peer // by node
	leases   *state.Leases
	waiting  []msg.Waiting // units without room after the last reconcile; replaced, never changed
	ledSince time.Time     // when the first state after the barrier arrived
	lastStep time.Time     // time of the last step
	blamedAt time.Time     // when this leader last took a silence for its own fault
	noChange bool          // nothing has changed in this step
	out      []Effect
}

// NewCore makes a Core without state.
func NewCore(t Timers) *Core {
	t = t.withDefaults()
	return &Core{
		timers: t, apps: map[string]*application{}, units: map[string]*unit{}, peers: map[string]*peer{},
		leases: state.NewLeases(t.LeaseTTL, t.Regrant-t.LeaseTTL),
	}
}

// Step handles one input at time now and returns the effects.
func (c *Core) Step(now time.Time, in any) []Effect {
	c.out = nil
	_, c.noChange = in.(NodeSeen) // most renewals bring no news
	c.checkLeases(now)
	c.applyInput(now, in)
	if c.state != nil && !c.noChange {
		c.nodes = placementNodes(c.withStoppingAsDraining(c.state))
		c.reconcile(now)
	}
	return c.out
}

func (c *Core) applyInput(now time.Time, in any) {
	switch in := in.(type) {
	case StateSeen:
		c.applyState(now, in.State)
	case NodeSeen:
		c.emit(c.renew(now, in.Report))
	case Refused:
		c.applyRefusal(now, in)
	case Granted:
		c.grantDone(now, in)
	case Concluded:
		c.commandDone(now, in)
	case Redeployed:
		c.redeploy(now, in)
	case Ticked:
		for _, id := range c.unitIDs() {
			c.stepUnit(now, c.units[id], state.Event{Kind: state.EvTick})
		}
	}
}

// Due is the next time at which Step needs a Ticked; zero = none.
func (c *Core) Due() time.Time {
	var due time.Time
	earlier := func(t time.Time) {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	for _, u := range c.units {
		earlier(u.m.Due)
		if len(u.pending) > 0 && !u.busy {
			earlier(u.retryAt)
		}
	}
	for _, a := range c.apps {
		if a.deleting && !a.busy {
			earlier(a.retryAt)
		}
	}
	c.addNodeDueTimes(earlier)
	return due
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

// unitIDs returns the unit ids in order, so that the order of effects is fixed.
func (c *Core) unitIDs() []string {
	if c.order == nil {
		c.order = slices.Sorted(maps.Keys(c.units))
	}
	return c.order
}

func (c *Core) addUnit(u *unit) { c.units[u.id], c.order = u, nil }

func (c *Core) dropUnit(id string) {
	delete(c.units, id)
	c.order = nil
}

// applyState takes a snapshot. The first one resumes the units that are granted in it.
func (c *Core) applyState(now time.Time, s *state.State) {
	old := c.state
	if old != nil && s.Index < old.Index {
		return
	}
	c.state = s
	c.updateApps()
	c.updatePeers(now)
	if old == nil {
		c.resumeAll(now)
		return
	}
	for _, u := range c.units {
		u.retryAt = c.retryAfterChange(u)
		u.keepRecord(s.Units[u.id])
	}
	if hasNewNode(old, s) {
		c.retryFailed(now)
	}
}

// A refused grant may be retried immediately after a state change, because the conflict may be resolved.
func (c *Core) retryAfterChange(u *unit) time.Time {
	if len(u.pending) > 0 && u.pending[0].kind == state.DoGrant {
		return time.Time{}
	}
	return u.retryAt
}

// stepUnit passes an event to the unit's state machine and applies its effects.
func (c *Core) stepUnit(now time.Time, u *unit, e state.Event) {
	c.noChange = false
	before := u.m.Phase
	m, effects := state.Next(u.m, e, now, c.timers.Unit)
	u.m = m
	if m.Phase != before {
		c.changed(now, u, before, m.Phase)
		if m.Phase == state.Gone {
			u.pending, u.noRoom, u.record = nil, "", nil // a grant that was not begun is not wanted any more
		}
	}
	for _, f := range effects {
		c.applyEffect(u, f)
	}
}

func (c *Core) changed(now time.Time, u *unit, from, to state.Phase) {
	c.emit(ChangeEffect{Event{At: now, App: u.app, Unit: u.id, Epoch: u.m.Epoch, From: string(from),
		To: string(to), Reason: u.m.Reason}})
}

func (c *Core) applyEffect(u *unit, f state.Effect) {
	switch f.Kind {
	case state.DoGrant, state.ProposeReady, state.ProposeFenced, state.ProposeFailed, state.ProposeRelease:
		u.queueCommand(pendingCommand{kind: f.Kind, attempt: f.Attempt})
	case state.DoStart:
		c.start(u)
	case state.DoStop:
		c.stop(u, isGone, f.Grace)
	case state.DoStopOthers:
		c.stop(u, isEnded, 0)
	case state.CountRestart:
		c.emit(RestartEffect{u.app, u.id})
	}
}

// start sends StartRank to the nodes that have not confirmed. A node that may have the unit from before this
// leader led must report first.
func (c *Core) start(u *unit) {
	for _, n := range u.nodes {
		if p := u.parts[n]; !p.started && !p.gone && (!p.adopted || p.absent) {
			c.startOn(u, n)
		}
	}
}

func (c *Core) startOn(u *unit, node string) {
	if u.seat.spec != nil {
		c.emit(StartEffect{node, u.startOrder(node)})
	}
}

// stop sends StopRank to the nodes of the unit that are not done.
func (c *Core) stop(u *unit, done func(*part) bool, grace time.Duration) {
	for _, n := range u.nodes {
		if !done(u.parts[n]) {
			c.emit(StopEffect{n, &msg.StopRank{Unit: u.id, Epoch: u.m.Epoch, Grace: grace,
				Reason: u.m.Reason}})
		}
	}
}

// grantDone takes the result of a grant. A grant with an unknown result may be in the state, where
// adoptGrants finds it.
func (c *Core) grantDone(now time.Time, in Granted) {
	for _, id := range in.Units {
		u := c.units[id]
		if u == nil {
			continue
		}
		u.busy = false
		epoch := in.Result.Epochs[id]
		if in.Err != nil || epoch == 0 {
			if u.m.Phase != state.Gone { // else the unit was given up meanwhile
				u.requeue(now.Add(c.timers.Retry))
			}
			continue
		}
		c.startGranted(now, u, u.next, epoch, u.currentAttempt())
	}
}

// startGranted starts a granted unit. The grant replaces all pending commands.
func (c *Core) startGranted(now time.Time, u *unit, s seat, epoch uint64, attempt int) {
	u.noRoom, u.drain, u.reserved, u.stayReason, u.pending = "", nil, nil, "", nil
	u.applyGrant(s)
	c.stepUnit(now, u, state.Event{Kind: state.EvGranted, Epoch: epoch, Attempt: attempt})
}

// commandDone takes the result of any other command. A typed refusal means that the state has changed without
// it.
func (c *Core) commandDone(now time.Time, in Concluded) {
	if in.Node != "" {
		c.nodeCommandDone(now, in)
		return
	}
	if in.Unit == "" {
		if a := c.apps[in.App]; a != nil {
			a.busy = a.deleting && in.Err == nil // wait for the state without the app
			a.retryAt = time.Time{}
			if in.Err != nil {
				a.retryAt = now.Add(c.timers.Retry)
			}
		}
		return
	}
	u := c.units[in.Unit]
	if u == nil {
		return
	}
	u.busy = false
	if in.Err != nil && !isTypedRefusal(in.Err) {
		u.requeue(now.Add(c.timers.Retry))
	}
}

// isTypedRefusal distinguishes a refusal by the state, which is final, from a command that did not get
// through.
func isTypedRefusal(err error) bool {
	switch problem.CodeOf(err) {
	case problem.Conflict, problem.NotFound, problem.InvalidArgument:
		return true
	default:
		return errors.Is(err, state.ErrStaleEpoch)
	}
}

// redeploy applies the new state first, but never resumes from it: only the first snapshot after the barrier
// does that.
func (c *Core) redeploy(now time.Time, in Redeployed) {
	if c.state != nil && in.State != nil {
		c.applyState(now, in.State)
	}
	for _, id := range c.unitIDs() {
		u := c.units[id]
		if !slices.Contains(in.Apps, u.app) {
			continue
		}
		// A start that the change itself caused and that has already failed is not forgiven.
		if epoch, there := in.Before[id]; in.Before == nil || there && epoch == u.m.Epoch {
			c.stepUnit(now, u, state.Event{Kind: state.EvRedeploy})
		}
	}
}

// sortByGroup orders units by app, group and rank.
func sortByGroup(us []*unit) {
	slices.SortFunc(us, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.app, b.app), cmp.Compare(a.group, b.group),
			slices.Compare(a.ranks, b.ranks), cmp.Compare(a.id, b.id))
	})
}
