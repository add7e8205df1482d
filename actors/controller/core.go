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

// Core decides; it has no IO, no clock and no goroutines. Same inputs at the same times: same effects. It is level-triggered:
// every step compares what is wanted with what is, so a lost answer only delays.
type Core struct {
	Self string // the node that leads; "" = it has no node of its own

	timers  Timers
	state   *state.State     // nil before the barrier: nothing is decided
	nodes   []placement.Node // that may get ranks
	apps    map[string]*application
	units   map[string]*unit
	order   []string         // ids of units; nil = to be sorted
	peers   map[string]*peer // by node
	leases  *state.Leases
	waiting []msg.Waiting // units without room, as of the last reconcile; never changed, only replaced
	led     time.Time     // when the first state behind the barrier was seen
	last    time.Time     // of the last step
	blamed  time.Time     // when this leader last took a silence for its own fault
	still   bool          // nothing has happened in this step
	out     []Effect
}

// NewCore makes a Core that has seen nothing.
func NewCore(t Timers) *Core {
	t = t.withDefaults()
	return &Core{
		timers: t, apps: map[string]*application{}, units: map[string]*unit{}, peers: map[string]*peer{},
		leases: state.NewLeases(t.LeaseTTL, t.Regrant-t.LeaseTTL),
	}
}

// Step takes one input at a time now, and returns what is to be done.
func (c *Core) Step(now time.Time, in any) []Effect {
	c.out = nil
	_, c.still = in.(NodeSeen) // most renewals say nothing new
	c.keepTime(now)
	c.take(now, in)
	if c.state != nil && !c.still {
		c.nodes = nodesOf(c.withoutStopping(c.state))
		c.reconcile(now)
	}
	return c.out
}

func (c *Core) take(now time.Time, in any) {
	switch in := in.(type) {
	case StateSeen:
		c.look(now, in.State)
	case NodeSeen:
		c.emit(c.renew(now, in.Report))
	case Refused:
		c.refuse(now, in)
	case Granted:
		c.conclude(now, in)
	case Concluded:
		c.answered(now, in)
	case Redeployed:
		c.redeploy(now, in)
	case Ticked:
		for _, id := range c.ids() {
			c.feed(now, c.units[id], state.Event{Kind: state.EvTick})
		}
	}
}

// Due is the next time at which a tick is wanted; zero = none.
func (c *Core) Due() time.Time {
	var due time.Time
	earlier := func(t time.Time) {
		if !t.IsZero() && (due.IsZero() || t.Before(due)) {
			due = t
		}
	}
	for _, u := range c.units {
		earlier(u.m.Due)
		if len(u.wishes) > 0 && !u.busy {
			earlier(u.retryAt)
		}
	}
	for _, a := range c.apps {
		if a.deleting && !a.busy {
			earlier(a.retryAt)
		}
	}
	c.dueOfNodes(earlier)
	return due
}

func (c *Core) emit(e Effect) { c.out = append(c.out, e) }

// ids are the unit ids in order, so that effects have one.
func (c *Core) ids() []string {
	if c.order == nil {
		c.order = slices.Sorted(maps.Keys(c.units))
	}
	return c.order
}

func (c *Core) add(u *unit) { c.units[u.id], c.order = u, nil }

func (c *Core) drop(id string) {
	delete(c.units, id)
	c.order = nil
}

// look takes a snapshot. The first one is the boot: what is granted in it goes on, if its nodes say so.
func (c *Core) look(now time.Time, s *state.State) {
	old := c.state
	if old != nil && s.Index < old.Index {
		return
	}
	c.state = s
	c.lookAtApps()
	c.lookAtNodes(now)
	if old == nil {
		c.boot(now)
		return
	}
	for _, u := range c.units {
		u.retryAt = c.retryAfterChange(u)
		u.keepRecord(s.Units[u.id])
	}
	if joined(old, s) {
		c.retryFailed(now)
	}
}

// retryAfterChange lets a grant that was refused try again at once: what it met has changed.
func (c *Core) retryAfterChange(u *unit) time.Time {
	if len(u.wishes) > 0 && u.wishes[0].kind == state.DoGrant {
		return time.Time{}
	}
	return u.retryAt
}

// feed gives a machine an event and does what it asks for.
func (c *Core) feed(now time.Time, u *unit, e state.Event) {
	c.still = false
	before := u.m.Phase
	m, effects := state.Next(u.m, e, now, c.timers.Unit)
	u.m = m
	if m.Phase != before {
		c.changed(now, u, before, m.Phase)
		if m.Phase == state.Gone {
			u.wishes, u.noRoom, u.record = nil, "", nil // a grant that was not begun is not wanted any more
		}
	}
	for _, f := range effects {
		c.obey(u, f)
	}
}

func (c *Core) changed(now time.Time, u *unit, from, to state.Phase) {
	c.emit(ChangeEffect{Event{At: now, App: u.app, Unit: u.id, Epoch: u.m.Epoch, From: string(from), To: string(to), Reason: u.m.Reason}})
}

func (c *Core) obey(u *unit, f state.Effect) {
	switch f.Kind {
	case state.DoGrant, state.ProposeReady, state.ProposeFenced, state.ProposeFailed, state.ProposeRelease:
		u.wantRaft(wish{kind: f.Kind, attempt: f.Attempt})
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

// start tells the nodes that have not confirmed. Those that may have it from before this leader led say so first.
func (c *Core) start(u *unit) {
	for _, n := range u.nodes {
		if p := u.parts[n]; !p.started && !p.gone && (!p.adopted || p.absent) {
			c.startOn(u, n)
		}
	}
}

func (c *Core) startOn(u *unit, node string) {
	if u.seat.spec != nil {
		c.emit(StartEffect{node, u.startOn(node)})
	}
}

// stop tells the nodes of the unit that are not done.
func (c *Core) stop(u *unit, done func(*part) bool, grace time.Duration) {
	for _, n := range u.nodes {
		if !done(u.parts[n]) {
			c.emit(StopEffect{n, &msg.StopRank{Unit: u.id, Epoch: u.m.Epoch, Grace: grace, Reason: u.m.Reason}})
		}
	}
}

// conclude takes the outcome of a grant. A grant whose outcome is unknown may be in the state: reconcile finds it there.
func (c *Core) conclude(now time.Time, in Granted) {
	for _, id := range in.Units {
		u := c.units[id]
		if u == nil {
			continue
		}
		u.busy = false
		epoch := in.Result.Epochs[id]
		if in.Err != nil || epoch == 0 {
			if u.m.Phase != state.Gone { // else it was given up meanwhile: there is nothing to try again
				u.again(now.Add(c.timers.Retry))
			}
			continue
		}
		c.begun(now, u, u.next, epoch, u.attempted())
	}
}

// begun starts what was granted. What was wished before is answered with it.
func (c *Core) begun(now time.Time, u *unit, s seat, epoch uint64, attempt int) {
	u.noRoom, u.drain, u.away, u.stays, u.wishes = "", nil, nil, "", nil
	u.sit(s)
	c.feed(now, u, state.Event{Kind: state.EvGranted, Epoch: epoch, Attempt: attempt})
}

// answered takes the outcome of any other command. A typed refusal means that the state went on without it.
func (c *Core) answered(now time.Time, in Concluded) {
	if in.Node != "" {
		c.answeredNode(now, in)
		return
	}
	if in.Unit == "" {
		if a := c.apps[in.App]; a != nil {
			a.busy = a.deleting && in.Err == nil // forgotten: the state that says so is on its way
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
	if in.Err != nil && !typedRefusal(in.Err) {
		u.again(now.Add(c.timers.Retry))
	}
}

// typedRefusal tells a refusal by the state, which stays one, from a command that did not get through.
func typedRefusal(err error) bool {
	switch problem.CodeOf(err) {
	case problem.Conflict, problem.NotFound, problem.InvalidArgument:
		return true
	default:
		return errors.Is(err, state.ErrStaleEpoch)
	}
}

// redeploy looks at the new state first, but never boots from it: that is for the first snapshot after the barrier.
func (c *Core) redeploy(now time.Time, in Redeployed) {
	if c.state != nil && in.State != nil {
		c.look(now, in.State)
	}
	for _, id := range c.ids() {
		u := c.units[id]
		if !slices.Contains(in.Apps, u.app) {
			continue
		}
		// A start that the change itself brought about, and that has failed by now, is not forgiven.
		if epoch, there := in.Before[id]; in.Before == nil || there && epoch == u.m.Epoch {
			c.feed(now, u, state.Event{Kind: state.EvRedeploy})
		}
	}
}

// inGroups orders units by app, group and rank.
func inGroups(us []*unit) {
	slices.SortFunc(us, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.app, b.app), cmp.Compare(a.group, b.group), slices.Compare(a.ranks, b.ranks), cmp.Compare(a.id, b.id))
	})
}
