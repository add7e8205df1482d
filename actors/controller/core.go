package controller

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/app"
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
	avoided   avoidances
	balances  map[poolID]*balance // of pools with a ready rank
	waiting   []msg.Waiting       // units without room after the last reconcile; replaced, never changed
	ledSince  time.Time           // when the first state after the barrier arrived
	lastStep  time.Time           // time of the last step
	blamedAt  time.Time           // when this leader last took a silence for its own fault
	movesWait bool                // moveOffDraining waits for answers of the RankAssigner
	changes   uint64              // counts the inputs that may change what finds room
	noChange  bool                // nothing has changed in this step
	out       []Effect
}

// NewCore makes a Core without state.
func NewCore(t Timers) *Core {
	t = t.withDefaults()
	return &Core{
		timers: t, apps: map[string]*application{}, units: map[string]*unit{}, peers: map[string]*peer{},
		leases: state.NewLeases(t.LeaseTTL, t.Regrant-t.LeaseTTL), avoided: avoidances{},
		balances: map[poolID]*balance{},
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
		c.avoided.drop(now)
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
		switch {
		case !a.deleting:
			earlier(a.rollOut.next.Due)
			if !a.rollOut.busy {
				earlier(a.rollOut.retryAt)
			}
		case !a.busy:
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

// applyState takes a snapshot. The first one resumes the units that are granted in it.
func (c *Core) applyState(now time.Time, s *state.State) {
	old := c.state
	if old != nil && s.Index < old.Index {
		return
	}
	c.state = s
	c.updateApps(now)
	c.updatePeers(now)
	c.noteNodes(now, old, s)
	if old == nil {
		c.resumeAll(now)
		return
	}
	for _, u := range c.units {
		u.retryAt = c.retryAfterChange(u)
		if rec := s.Units[u.id]; rec != nil && u.m.Phase != state.Gone {
			u.record = rec
		}
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
	e.Spread = spreadOf(u.id, u.m.Epoch)
	m, effects := state.Next(u.m, e, now, c.timers.Unit)
	u.m = m
	if m.Phase != before {
		c.emit(ChangeEffect{u.change(now, before)})
		switch m.Phase {
		case state.Gone:
			// a grant that was not begun is not wanted any more
			u.pending, u.noRoom, u.waitsFor, u.record = nil, "", "", nil
		case state.Backoff, state.Failed:
			c.avoided.noteFailedStart(now, u)
		case state.Ready:
			c.avoided.forgive(u)
		default:
		}
	}
	for _, f := range effects {
		c.applyEffect(u, f)
	}
}

// change describes the change of a unit to its present phase.
func (u *unit) change(at time.Time, from state.Phase) Event {
	return Event{
		At: at, App: u.app, Pool: u.poolName(), Unit: u.id, Epoch: u.m.Epoch, From: string(from),
		To: string(u.m.Phase), Reason: u.m.Reason,
	}
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
				Unit: u.id, Epoch: u.m.Epoch, Grace: grace, Reason: u.m.Reason,
			}})
		}
	}
}

// startGranted starts a granted unit. The grant replaces all pending commands.
func (c *Core) startGranted(now time.Time, u *unit, s seat, epoch uint64, attempt int) {
	u.noRoom, u.waitsFor, u.drain, u.reserved, u.stayReason, u.pending = "", "", nil, nil, "", nil
	u.applyGrant(s)
	c.stepUnit(now, u, state.Event{
		Kind: state.EvGranted, Epoch: epoch, Attempt: attempt, Launch: s.launch,
	})
}

// commandDone takes the result of any other command. A typed refusal means that the state has changed without
// it.
func (c *Core) commandDone(now time.Time, in CommandDone) {
	if in.Node != "" {
		c.nodeCommandDone(now, in)
		return
	}
	if in.Unit == "" {
		c.appCommandDone(now, in)
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

// appCommandDone takes the result of the one command of an application that is under way.
func (c *Core) appCommandDone(now time.Time, in CommandDone) {
	a := c.apps[in.App]
	if a == nil {
		return
	}
	if a.rollOut.busy {
		a.rollOut.busy, a.rollOut.retryAt = false, now.Add(c.timers.Retry)
		return
	}
	a.busy = a.deleting && in.Err == nil // wait for the state without the app
	a.retryAt = time.Time{}
	if in.Err != nil {
		a.retryAt = now.Add(c.timers.Retry)
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

func sortByGroup(us []*unit) {
	slices.SortFunc(us, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.app, b.app), cmp.Compare(a.pool, b.pool),
			cmp.Compare(a.group, b.group), slices.Compare(a.ranks, b.ranks), cmp.Compare(a.id, b.id))
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
		Phase: rec.Phase, Epoch: rec.Epoch, Launch: rec.Launch, Served: c.state.Served[rec.ID],
		Attempt: rec.Attempt, Failures: max(0, rec.Attempt-1), Since: time.UnixMilli(rec.Since),
		Attach: c.isAttach(rec.App), Reason: rec.Reason, LogTail: rec.LogTail, LastEnd: rec.LastEnd,
	}
	switch rec.Phase {
	case state.Ready:
		u.m.WasReady, u.m.ReadyAt, u.m.Confirmed = true, now, true
	case state.Fenced:
		u.m.WasReady, u.m.Confirmed = true, u.m.Attach
	case state.Failed:
		u.m.Due = now.Add(c.timers.Unit.FailedWait(spreadOf(u.id, rec.Epoch)))
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
	e := u.change(u.m.Since, "")
	e.Former = true
	c.emit(ChangeEffect{e})
}

func (c *Core) addFromRecord(rec *state.Unit) *unit {
	u := newUnit(&app.Unit{ID: rec.ID, App: rec.App, Pool: rec.Pool, Group: rec.Group})
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
		s.spec = a.pool(rec.Pool)
	}
	return s
}

// assignWaiting asks the RankAssigner for the units that wait for a grant, group by group.
func (c *Core) assignWaiting(now time.Time) {
	var waiting []*unit
	for _, u := range c.units {
		if a := c.apps[u.app]; u.isDue(now, true) && a != nil && a.isWanted(u.id) {
			waiting = append(waiting, u)
		}
	}
	sortByGroup(waiting)
	waiting = c.delaySuspects(waiting)
	for len(waiting) > 0 {
		n := groupPrefix(waiting)
		c.assignGroup(now, waiting[:n])
		waiting = waiting[n:]
	}
}

// delaySuspects removes units whose last attempt must wait from waiting. If the node of a unit ended twice
// during its start, the unit may be the cause. So its last attempt is made while no other such unit starts:
// if the node ends again, the cause is known.
func (c *Core) delaySuspects(waiting []*unit) []*unit {
	starting := ""
	for _, id := range c.unitIDs() {
		if u := c.units[id]; u.m.NodeDied &&
			(u.m.Phase == state.Starting || u.isAssigning()) {
			starting = id
			break
		}
	}
	return slices.DeleteFunc(waiting, func(u *unit) bool {
		u.waitsFor = ""
		switch {
		case !u.m.NodeDied || u.pending[0].attempt < state.MaxStartAttempts:
		case starting == "":
			starting = u.id
		default:
			u.noRoom, u.retryAt = "", time.Time{}
			u.waitsFor = "waits until " + starting + " has started: their nodes ended while they were " +
				"starting"
			return true
		}
		return false
	})
}

// groupPrefix returns how many units at the head belong to one group.
func groupPrefix(us []*unit) int {
	n := 1
	for n < len(us) && us[n].isInGroupOf(us[0]) {
		n++
	}
	return n
}

// assignGroup asks for the units of one group, unless nothing has changed since they found no room.
func (c *Core) assignGroup(now time.Time, us []*unit) {
	if !slices.ContainsFunc(us, func(u *unit) bool { return u.askedAt != c.changes }) {
		return
	}
	m := c.groupRequest(now, us)
	a := c.apps[us[0].app]
	for i, u := range us {
		m.Grant.Units[i].Attempt = u.beginCommand().attempt
		u.next = seat{spec: m.App, revision: a.revision, launch: a.launch[u.id]}
		u.askedAt = c.changes
	}
	c.emit(AssignEffect{m})
}

// groupRequest is what the RankAssigner must know to place the units.
func (c *Core) groupRequest(now time.Time, us []*unit) *msg.AssignGroup {
	a, pool := c.apps[us[0].app], us[0].pool
	m := &msg.AssignGroup{
		App: a.pool(pool), Nodes: c.usable, Avoid: c.avoided.nodesOf(a, pool),
		Grant: state.GrantGroup{
			App: a.name, Pool: pool, AppRevision: a.revision, Group: us[0].group, At: now.UnixMilli(),
		},
	}
	for _, u := range us {
		m.Grant.Units = append(m.Grant.Units, state.UnitGrant{
			Unit: u.id, ExpectEpoch: max(u.m.Epoch, c.state.LastEpoch(u.id)), Launch: a.launch[u.id],
			Restarts: u.nextRestarts(a.launch[u.id]), LastEnd: u.m.LastEnd,
		})
	}
	for _, id := range c.unitIDs() {
		if u := c.units[id]; u.reserved != nil && !slices.Contains(us, u) {
			m.Reserved = append(m.Reserved, *u.reserved)
		}
	}
	return m
}

// groupAssigned takes the answer of the RankAssigner. A grant with an unknown result may be in the state,
// where adoptGrants finds it. Units without room are tried again after every change, or if others of their
// group wait by now: they are placed together. That they found none again changes nothing.
func (c *Core) groupAssigned(now time.Time, in GroupAssigned) {
	c.noChange = len(in.Grant.Units) == 0 && !c.movesWait
	for id, why := range in.NoRoom {
		u := c.units[id]
		if u == nil {
			continue
		}
		u.busy = false
		c.noChange = c.noChange && u.m.Phase != state.Gone && u.noRoom == why && u.askedAt == c.changes
		if u.m.Phase != state.Gone { // else the unit was given up meanwhile
			u.requeue(time.Time{})
			u.noRoom = why
		}
		for _, other := range c.units {
			if _, asked := in.NoRoom[other.id]; !asked && other.isInGroupOf(u) && other.isDue(now, true) {
				u.askedAt, c.noChange = 0, false
			}
		}
	}
	for i := range in.Grant.Units {
		g := &in.Grant.Units[i]
		u := c.units[g.Unit]
		if u == nil {
			continue
		}
		u.busy = false
		epoch := in.Result.Epochs[g.Unit]
		if in.Err != nil || epoch == 0 {
			if u.m.Phase != state.Gone {
				u.requeue(now.Add(c.timers.Retry))
			}
			continue
		}
		u.next.ranks, u.next.blocks = g.Ranks, g.Blocks
		c.startGranted(now, u, u.next, epoch, u.currentAttempt())
	}
}

// maxWaiting bounds the units without room that a lease names. Ingresses treat further units as starting, and
// requests wait for them.
const maxWaiting = 4096

// addWaiting adds a pool's units without room to what leases tell the ingresses.
func (c *Core) addWaiting(a *application, pool *app.Application) {
	left := maxWaiting
	for i := range c.waiting {
		left -= len(c.waiting[i].Units)
	}
	w := msg.Waiting{App: pool.PoolName(), Revision: a.revision}
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if a.deleting || u == nil || u.pool != pool.Pool || !u.isWithoutRoom() || len(w.Units) == left {
			continue
		}
		if w.Units == nil {
			w.Reason, _, _ = strings.Cut(u.noRoom, "; ") // the rest lists the nodes
			w.Units = map[string]uint64{}
		}
		w.Units[u.id] = c.state.Epochs[u.id]
	}
	if w.Units != nil {
		c.waiting = append(c.waiting, w)
	}
}
