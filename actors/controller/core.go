package controller

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Core decides. It has no IO, no clock and no goroutines: the same inputs at the same times give the same
// effects. It is level-triggered: every step compares the wanted state with the current one, so a lost answer
// only causes a delay.
type Core struct {
	Self string // the leader's node; "" = the leader has no node

	timers    Timers
	state     *state.State // nil before the barrier: nothing is decided
	usable    []string     // nodes that may get ranks
	apps      map[string]*application
	units     map[string]*unit
	order     []string         // ids of units; nil = must be sorted
	peers     map[string]*peer // by node
	leases    *state.Leases
	waiting   []msg.Waiting // units without room after the last reconcile; replaced, never changed
	ledSince  time.Time     // when the first state after the barrier arrived
	lastStep  time.Time     // time of the last step
	blamedAt  time.Time     // when this leader last took a silence for its own fault
	movesWait bool          // moveOffDraining waits for answers of the RankAssigner
	changes   uint64        // counts the inputs that may change what finds room
	noChange  bool          // nothing has changed in this step
	out       []Effect
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
	_, c.noChange = in.(NodeReported) // most renewals bring no news
	if a, ok := in.(GroupAssigned); !ok || len(a.Grant.Units) > 0 {
		c.changes++ // that a group found no room does not make room for others
	}
	c.checkLeases(now)
	c.applyInput(now, in)
	if c.state != nil && !c.noChange {
		c.usable = rankassigner.UsableNodes(c.withStoppingAsDraining(c.state))
		c.reconcile(now)
	}
	return c.out
}

func (c *Core) applyInput(now time.Time, in any) {
	switch in := in.(type) {
	case StateSeen:
		c.applyState(now, in.State)
	case NodeReported:
		c.emit(c.renew(now, in.Report))
	case Refused:
		c.applyRefusal(now, in)
	case GroupAssigned:
		c.groupAssigned(now, in)
	case CommandDone:
		c.commandDone(now, in)
	case AppsRedeployed:
		c.redeploy(now, in)
	case TimerFired:
		for _, id := range c.unitIDs() {
			c.stepUnit(now, c.units[id], state.Event{Kind: state.EvTick})
		}
	}
}

// Due is the time of the next TimerFired that Step needs; zero = none.
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
	c.emit(ChangeEffect{Event{
		At: now, App: u.app, Unit: u.id, Epoch: u.m.Epoch, From: string(from),
		To: string(to), Reason: u.m.Reason,
	}})
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
			c.emit(StopEffect{n, &msg.StopRank{
				Unit: u.id, Epoch: u.m.Epoch, Grace: grace,
				Reason: u.m.Reason,
			}})
		}
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
func (c *Core) commandDone(now time.Time, in CommandDone) {
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
func (c *Core) redeploy(now time.Time, in AppsRedeployed) {
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

// resumeAll takes over all grants of the first snapshot.
func (c *Core) resumeAll(now time.Time) {
	c.ledSince = now
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		c.resumeUnit(now, c.state.Units[id])
	}
}

// resumeUnit continues a unit under its epoch. Its nodes report what they have of it; a node that does not
// report is lost.
func (c *Core) resumeUnit(now time.Time, rec *state.Unit) {
	u := c.addFromRecord(rec)
	u.m = state.Machine{
		Phase: rec.Phase, Epoch: rec.Epoch, Attempt: rec.Attempt, Starts: 1, Since: phaseSince(rec, now),
		Attach: c.isAttach(rec.App),
		Reason: rec.Reason, LogTail: rec.LogTail,
	}
	switch rec.Phase {
	case state.Ready:
		u.m.WasReady, u.m.ReadyAt, u.m.Confirmed = true, now, true
	case state.Fenced:
		u.m.WasReady, u.m.Confirmed = true, u.m.Attach
	default:
	}
	if rec.Holds() && !u.m.Confirmed {
		u.m.Due = now.Add(c.timers.Unit.Resend) // the last order may not have arrived
	}
	for _, p := range u.parts {
		if p.adopted = rec.Holds(); !p.adopted {
			p.markGone()
		}
	}
	c.changed(now, u, "", u.m.Phase)
}

// phaseSince is when the phase of a record began; now if the leader that wrote it ran an older version.
func phaseSince(rec *state.Unit, now time.Time) time.Time {
	if rec.Since == 0 {
		return now
	}
	return time.UnixMilli(rec.Since)
}

// addFromRecord makes a unit from a record of the state.
func (c *Core) addFromRecord(rec *state.Unit) *unit {
	u := newUnit(rec.ID, rec.App, rec.Group, nil)
	u.record = rec
	for i := range rec.Ranks {
		u.ranks = append(u.ranks, rec.Ranks[i].Rank)
	}
	u.applyGrant(c.seatOf(rec))
	c.addUnit(u)
	return u
}

func (c *Core) seatOf(rec *state.Unit) seat {
	s := seat{revision: rec.AppRevision, launch: rec.Launch, ranks: rec.Ranks, blocks: rec.Blocks}
	if a := c.apps[rec.App]; a != nil {
		s.spec = a.spec
	}
	return s
}

// Inputs of the core.
type (
	// StateSeen carries a snapshot of the store. The first one after the barrier starts the core; one older
	// than the last is ignored.
	StateSeen struct{ State *state.State }
	// NodeReported is the renewal of a node's lease with the node's report. The same step answers it with a
	// RenewEffect. Neither the core nor the caller may change the report.
	NodeReported struct{ Report *msg.NodeReport }
	// TimerFired reports that a time returned by Due has come.
	TimerFired struct{}
	// AppsRedeployed reports that applications were deployed again: their failed units are tried again. State
	// holds the change (nil = the core has it).
	AppsRedeployed struct {
		Apps   []string
		Before map[string]uint64 // epochs of the units before the change; nil = all current units
		State  *state.State
	}
	// GroupAssigned is the answer to an AssignEffect.
	GroupAssigned struct{ msg.GroupAssigned }
	// CommandDone is the result of a ProposeEffect or ReleaseEffect: of a unit, of an application (Unit
	// empty), or of a node.
	CommandDone struct {
		App, Unit, Node string
		Err             error
	}
	// Refused reports that a node refused to start a unit.
	Refused struct {
		Node, Unit string
		Epoch      uint64
		Err        error
	}
)

// Effect is an action for the shell. The orders of one node are carried out in sequence, all other effects in
// any order.
type Effect any

// The effects.
type (
	// AssignEffect asks the RankAssigner to place and grant units of one group. Requests are passed on in
	// their order. The answer is GroupAssigned.
	AssignEffect struct{ Request *msg.AssignGroup }
	// ProposeEffect proposes any other command. The answer is CommandDone with the same App, Unit and Node.
	// NodeLost is proposed only if a majority confirms this leader when the effect is carried out, and if the
	// effect still Stands after that.
	ProposeEffect struct {
		App, Unit, Node string
		Command         state.Command
	}
	// ReleaseEffect releases a unit. The answer is CommandDone.
	ReleaseEffect struct {
		App     string
		Release msg.ReleaseRank
	}
	// StartEffect is an order to a node. A refusal is answered by Refused; a missing answer by nothing.
	StartEffect struct {
		Node  string
		Order *msg.StartRank
	}
	// StopEffect is an order to a node.
	StopEffect struct {
		Node  string
		Order *msg.StopRank
	}
	// RenewEffect answers a NodeReported with a lease, or with Err.
	RenewEffect struct {
		Node  string
		Lease msg.Lease
		Err   error
	}
	// StepDownEffect hands the leadership to another voter, because this leader may be the cause of the
	// silence. It has no answer: without another voter nothing happens.
	StepDownEffect struct {
		Overdue []string // nodes that would otherwise be declared lost
	}
	// ChangeEffect is a change for the ring, the log and the metrics.
	ChangeEffect struct{ Event }
	// RanksEffect reports how many ranks of an application are ready and wanted, first and after each change.
	RanksEffect struct {
		App            string
		Ready, Desired int
	}
	// ForgetAppEffect reports that an application is gone.
	ForgetAppEffect struct{ App string }
	// RestartEffect counts a start of a unit after its first one.
	RestartEffect struct{ App, Unit string }
	// ForgetEffect reports that nothing is left of a unit.
	ForgetEffect struct{ App, Unit string }
)
