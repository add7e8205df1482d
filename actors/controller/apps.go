package controller

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// updateApps decodes the apps of the current state.
func (c *Core) updateApps(now time.Time) {
	for name, s := range c.state.Apps {
		old := c.apps[name]
		if old == nil || old.revision != s.Revision {
			c.apps[name] = readApp(s)
			if old != nil {
				c.apps[name].status = old.status
				c.apps[name].rollOut = rollOut{since: now, busy: old.rollOut.busy}
			}
		}
		c.apps[name].deleting = s.Deleting
		c.updateRollOut(now, c.apps[name], s)
		if !s.Deleting {
			c.apps[name].busy = false // the app was forgotten and deployed again before this snapshot
		}
	}
	for name := range c.apps {
		if c.state.Apps[name] == nil {
			for _, p := range c.apps[name].pools {
				delete(c.avoided, p.PoolName())
			}
			delete(c.apps, name)
		}
	}
}

func (c *Core) isAttach(name string) bool {
	a := c.apps[name]
	return a != nil && a.pools != nil && a.spec().Engine.Kind == app.KindAttach
}

func (c *Core) appNames() []string { return slices.Sorted(maps.Keys(c.apps)) }

// reconcile compares the wanted state with the current one and takes the next steps towards it.
func (c *Core) reconcile(now time.Time) {
	c.adoptGrants(now)
	c.markLostParts(now)
	c.endUnwanted(now)
	for _, name := range c.appNames() {
		if a := c.apps[name]; !a.deleting {
			c.reconcileApp(now, a)
		}
	}
	c.moveOffDraining(now)
	c.leaveUnusable(now)
	c.proposePeerCommands(now)
	c.proposePending(now)
	c.assignWaiting(now)
	c.forgetFinished(now)
	c.waiting = nil
	for _, name := range c.appNames() {
		a := c.apps[name]
		c.updateAppStatus(now, a)
		for _, pool := range a.pools {
			c.addWaiting(a, pool)
		}
	}
}

// adoptGrants takes over grants that are in the state although their command got no answer.
func (c *Core) adoptGrants(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec, u := c.state.Units[id], c.units[id]
		if u != nil && (u.busy || rec.Epoch <= u.m.Epoch || !u.awaitsGrant()) {
			continue
		}
		if u == nil {
			u = c.addFromRecord(rec)
			u.m = state.Machine{
				Phase: state.Gone, Attach: c.isAttach(rec.App), Served: c.state.Served[id], Since: now,
				LastEnd: rec.LastEnd,
			}
		}
		c.startGranted(now, u, c.seatOf(rec), rec.Epoch, rec.Attempt)
	}
}

// endUnwanted stops units whose app is deleted, gone, or does not want them any more. Units of a spec that
// this version cannot read continue, because the spec may still want them.
func (c *Core) endUnwanted(now time.Time) {
	for _, id := range c.unitIDs() {
		u := c.units[id]
		a := c.apps[u.app]
		if a != nil && a.broken != "" && !a.deleting {
			continue
		}
		if a == nil || !a.isWanted(id) {
			u.reserved = nil
			c.stepUnit(now, u, state.Event{Kind: state.EvUnwant, Grace: c.grace(u), Reason: c.endReason(a)})
		}
	}
}

func (c *Core) endReason(a *application) string {
	if a == nil || a.deleting {
		return "deleted"
	}
	return "not wanted by revision " + strconv.FormatUint(a.revision, 10)
}

// grace is how long the unit's running streams may continue: as set for this unit, else by the current
// revision, else by the revision it was started with.
func (c *Core) grace(u *unit) time.Duration {
	if u.drain != nil {
		return *u.drain
	}
	if a := c.apps[u.app]; a != nil && a.pools != nil {
		return app.Seconds(a.spec().GracefulShutdownTimeout)
	}
	if u.seat.spec != nil {
		return app.Seconds(u.seat.spec.GracefulShutdownTimeout)
	}
	return 0
}

// reconcileApp starts missing units and rolls out a newer revision.
func (c *Core) reconcileApp(now time.Time, a *application) {
	c.decideRollOut(now, a)
	for i := range a.units {
		w := &a.units[i]
		u := c.units[w.ID]
		if u == nil {
			u = newUnit(w)
			u.m = state.Machine{Epoch: c.state.LastEpoch(w.ID), Served: c.state.Served[w.ID]}
			c.addUnit(u)
		}
		u.m.Attach = a.spec().Engine.Kind == app.KindAttach
		if u.awaitsGrant() {
			u.ranks = w.Ranks // a lockstep unit keeps its name when its group changes its size
		}
		switch {
		case u.isIdle(c.state):
			c.startUnit(now, u, w)
		case c.isStale(a, u):
			c.rollUnit(now, a, u)
		}
	}
}

// startUnit begins a unit, unless another unit still holds its ranks because the app's coupling has changed.
func (c *Core) startUnit(now time.Time, u *unit, w *app.Unit) {
	for id, rec := range c.state.Units {
		if id != u.id && holdsRanksOf(rec, w) {
			return
		}
	}
	u.ranks = w.Ranks
	c.stepUnit(now, u, state.Event{Kind: state.EvWant})
}

// isStale reports whether the current grant starts something other than the current revision.
func (c *Core) isStale(a *application, u *unit) bool {
	return len(u.seat.ranks) > 0 && !a.startsAs(u.id, u.seat.launch)
}

// rollUnit ends a unit of an older revision, so that it starts anew: at once if it does not serve, else one
// ready unit of the pool at a time, after the one before has passed its probation. A halted roll-out takes no
// further unit, and the other units continue to serve.
func (c *Core) rollUnit(now time.Time, a *application, u *unit) {
	switch u.m.Phase {
	case state.Starting, state.Fenced, state.Killing, state.Backoff, state.Failed, state.Draining:
	case state.Ready:
		if a.isHalted() || a.rollOut.failure != nil || a.rollOut.next.Waits(u.pool) ||
			c.findUnready(a, u, true) != "" {
			return
		}
	default:
		return
	}
	c.stepUnit(now, u, state.Event{
		Kind: state.EvUnwant, Grace: c.grace(u),
		Reason: "replaced by revision " + strconv.FormatUint(a.revision, 10),
	})
}

// findUnready names another unit of the pool that is not ready; "" = none. A unit without room does
// not count, because it may wait for this unit's room.
func (c *Core) findUnready(a *application, but *unit, countFailed bool) string {
	for i := range a.units {
		id := a.units[i].ID
		u := c.units[id]
		switch {
		case u == but || a.units[i].Pool != but.pool:
		case u == nil, u.hasUnreportedPart():
			return id
		case u.m.Phase == state.Ready, u.noRoom != "", u.m.HasFailed() && !countFailed:
		default:
			return id
		}
	}
	return ""
}

// proposePending proposes every pending command except grants. A command that the state has overtaken is
// dropped.
func (c *Core) proposePending(now time.Time) {
	for _, id := range c.unitIDs() {
		u := c.units[id]
		for u.isDue(now, false) {
			w := u.beginCommand()
			if rec := c.state.Units[id]; rec == nil || rec.Epoch != u.m.Epoch {
				u.busy = c.isAheadOfState(u)
				if u.busy {
					c.propose(u, w)
				}
				continue
			}
			c.propose(u, w)
		}
	}
}

// isAheadOfState reports whether the current grant is newer than the snapshot: the grant's answer came first.
func (c *Core) isAheadOfState(u *unit) bool { return u.m.Epoch > c.state.LastEpoch(u.id) }

func (c *Core) propose(u *unit, w pendingCommand) {
	ref := u.ref()
	switch w.kind {
	case state.ProposeReady:
		ref.Reason = ""
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitReady: ref}})
	case state.ProposeFenced:
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitFenced: ref}})
	case state.ProposeFailed:
		ref.LogTail, ref.LastEnd = state.Tail(u.m.LogTail), u.m.LastEnd
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitFailed: ref}})
	default:
		c.emit(ReleaseEffect{u.app, msg.ReleaseRank{
			Unit: u.id, Epoch: u.m.Epoch, Reason: u.m.Reason,
		}})
	}
}

// forgetFinished forgets units of which nothing is left, then apps.
func (c *Core) forgetFinished(now time.Time) {
	left := map[string]int{}
	for _, id := range c.unitIDs() {
		u := c.units[id]
		if a := c.apps[u.app]; (a == nil || !a.isWanted(id)) && u.isIdle(c.state) {
			delete(c.units, id)
			c.order = nil
			c.emit(ForgetEffect{u.poolName(), id})
			continue
		}
		left[u.app]++
	}
	for _, name := range c.appNames() {
		a := c.apps[name]
		if a.deleting && left[name] == 0 && !a.busy && !a.rollOut.busy && !now.Before(a.retryAt) {
			a.busy = true
			c.emit(ProposeEffect{App: name, Command: state.Command{ForgetApp: &state.ForgetApp{Name: name}}})
		}
	}
}

func (c *Core) updateAppStatus(now time.Time, a *application) {
	s := c.deriveStatus(a, a.pools)
	if s == state.Running {
		a.running = a.revision
	}
	if s == a.status {
		return
	}
	c.emit(ChangeEffect{Event{
		At: now, App: a.name, From: string(a.status), To: string(s), Reason: joinMessage(c.messageLines(a)),
	}})
	a.status = s
}

// deriveStatus returns the status of some pools of an application. A pool whose services have no address yet
// waits for its first rank.
func (c *Core) deriveStatus(a *application, pools []*app.Application) state.AppStatus {
	if a.broken != "" && !a.deleting {
		return state.DeployFailed
	}
	seen := state.Seen{Deleting: a.deleting, Halted: a.isHalted(), WasRunning: a.running == a.revision}
	for _, p := range pools {
		for i := range a.units {
			if a.units[i].Pool == p.Pool {
				seen.Units = append(seen.Units, c.wantedPhase(a, a.units[i].ID))
			}
		}
		if p.NumReplicas == 0 && len(p.Engine.Services) > 0 {
			seen.Units = append(seen.Units, state.Pending)
		}
	}
	return state.DeriveStatus(seen)
}

// wantedPhase is a wanted unit's phase; a unit that still runs an older revision counts as Pending.
func (c *Core) wantedPhase(a *application, id string) state.Phase {
	u := c.units[id]
	switch {
	case u == nil || u.m.Phase == "" || c.isStale(a, u):
		return state.Pending
	case u.m.HasFailed(): // also while it is tried again
		return state.Failed
	}
	return u.m.Phase
}

// joinMessage puts the reasons why an app is not RUNNING into one text.
func joinMessage(lines []string) string {
	if left := len(lines) - maxMessageLines; left > 0 {
		lines = append(lines[:maxMessageLines:maxMessageLines], fmt.Sprintf("and %d more", left))
	}
	return strings.Join(lines, "\n")
}

// messageLines says of each unit why it is not ready. Units that find no room, or wait for their turn, for
// the same reason share a line.
func (c *Core) messageLines(a *application) []string {
	if a.broken != "" {
		return []string{a.broken}
	}
	if a.deleting {
		return nil
	}
	out := a.haltLine()
	type line struct {
		unit, phase, why string
		more             int // units with the same reason
	}
	var lines []*line
	byReason := map[string]*line{}
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if u == nil || u.m.Phase == state.Ready {
			continue
		}
		why := u.phaseReason()
		if why == "" {
			continue
		}
		l := &line{unit: u.id, phase: u.m.Phase.Describe(), why: why}
		if why == u.noRoom || why == u.waitsFor {
			_, reason, _ := strings.Cut(why, ": ") // without the name of the group or unit
			if same := byReason[l.phase+reason]; same != nil {
				same.more++
				continue
			}
			byReason[l.phase+reason] = l
		}
		lines = append(lines, l)
	}
	for _, l := range lines {
		text := l.unit + " " + l.phase + ": " + l.why
		if l.more > 0 { // only of units that wait: "is pending", "is in backoff"
			text = fmt.Sprintf("%s and %d more are %s: %s", l.unit, l.more,
				strings.TrimPrefix(l.phase, "is "), l.why)
		}
		out = append(out, text)
	}
	return out
}

// maxMessageLines bounds the message of an app; status lists every unit anyway.
const maxMessageLines = 4

// giveUpUnitsOn gives up the units of a stopping node, except those that already end. The node ends them in
// any case, even without room elsewhere. They are granted anew after their end and do not count as failed. No
// room is reserved: the first unit that ends takes it.
func (c *Core) giveUpUnitsOn(now time.Time, node string) {
	for _, u := range c.unitsOn(node) {
		if a := c.apps[u.app]; u.canMove() && !u.m.Stopping && a != nil && a.isWanted(u.id) {
			c.giveUp(now, u, node)
		}
	}
}

func (c *Core) giveUp(now time.Time, u *unit, node string) {
	u.reserved = nil
	c.stepUnit(now, u, state.Event{
		Kind: state.EvUnwant, Grace: c.grace(u), Reason: "node " + node + " is stopping",
	})
}

// moveOffDraining ends units on draining nodes that find room elsewhere, one ready unit at a time per
// application. It waits for the answers of the RankAssigner, which may be giving that room away.
func (c *Core) moveOffDraining(now time.Time) {
	c.movesWait = false
	for _, u := range c.units {
		c.movesWait = c.movesWait || u.isAssigning()
	}
	if c.movesWait {
		return
	}
	draining := map[string]*state.Node{}
	for id, n := range c.state.Nodes {
		if n.Draining && !n.Lost {
			draining[id] = n
		}
	}
	for _, u := range c.units {
		u.stayReason = ""
	}
	if len(draining) == 0 {
		return
	}
	for _, id := range c.unitIDs() {
		u := c.units[id]
		a := c.apps[u.app]
		if n := u.drainingNode(draining); n != nil && a != nil && a.pools != nil && a.isWanted(id) {
			c.moveUnit(now, a, u, n)
		}
	}
}

// leaveUnusable starts units at once that wait for a restart on nodes which take no ranks any more.
func (c *Core) leaveUnusable(now time.Time) {
	for _, id := range c.unitIDs() {
		u := c.units[id]
		if u.m.Phase == state.Backoff && slices.ContainsFunc(u.nodes, func(node string) bool {
			return !slices.Contains(c.usable, node)
		}) {
			c.stepUnit(now, u, state.Event{Kind: state.EvLeave})
		}
	}
}

// moveUnit ends a unit on a draining node, or notes why it stays.
func (c *Core) moveUnit(now time.Time, a *application, u *unit, n *state.Node) {
	late := n.DrainBy > 0 && !now.Before(time.UnixMilli(n.DrainBy))
	if u.m.Phase == state.Ready && !late {
		if other := c.findUnready(a, u, false); other != "" {
			u.stayReason = "waits on draining node " + n.ID + " until " + other + " is ready"
			return
		}
	}
	to, noRoom := c.placeElsewhere(now, u)
	if to == nil {
		u.stayReason = "stays on draining node " + n.ID + ": " + noRoom
		return
	}
	u.reserved = to
	c.stepUnit(now, u, state.Event{
		Kind: state.EvUnwant, Grace: c.moveGrace(now, u, n), Reason: "node " + n.ID + " is being drained",
	})
}

// placeElsewhere returns the seats that the unit would get if it ended now; else why it would get none.
func (c *Core) placeElsewhere(now time.Time, u *unit) (to *state.UnitGrant, noRoom string) {
	grant, why := rankassigner.Place(c.state, c.groupRequest(now, []*unit{u}), nil)
	if len(grant.Units) == 0 {
		return nil, why[u.id]
	}
	return &grant.Units[0], ""
}

// moveGrace is how long running streams of a moving unit may continue.
func (c *Core) moveGrace(now time.Time, u *unit, n *state.Node) time.Duration {
	if n.DrainBy > 0 {
		return max(0, time.UnixMilli(n.DrainBy).Sub(now))
	}
	return c.grace(u)
}
