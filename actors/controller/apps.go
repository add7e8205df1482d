package controller

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/state"
)

// application is a committed app, decoded once per revision.
type application struct {
	name     string
	revision uint64
	deleting bool
	spec     *app.Application // nil if broken
	broken   string           // why the spec cannot be read
	units    []app.Unit       // wanted
	launch   map[string]string

	running uint64 // the last revision that was RUNNING
	status  state.AppStatus
	counted *RanksEffect // told last; nil = nothing yet
	busy    bool         // ForgetApp is under way
	retryAt time.Time
}

// wants says whether the app wants the unit.
func (a *application) wants(id string) bool {
	_, ok := a.launch[id]
	return ok && !a.deleting
}

func readApp(s *state.App) *application {
	a := &application{name: s.Name, revision: s.Revision, launch: map[string]string{}}
	spec := new(app.Application)
	if err := json.Unmarshal(s.Spec, spec); err != nil {
		a.broken = "the stored spec cannot be read: " + err.Error()
		return a
	}
	if err := a.fill(spec); err != nil {
		a.broken = "the stored spec cannot be hashed: " + err.Error()
	}
	return a
}

func (a *application) fill(spec *app.Application) error {
	units := spec.Units()
	for i := range units {
		h, err := launchHash(spec, &units[i])
		if err != nil {
			return err
		}
		a.launch[units[i].ID] = h
	}
	a.spec, a.units = spec, units
	return nil
}

// lookAtApps brings the decoded apps up to the state.
func (c *Core) lookAtApps() {
	for name, s := range c.state.Apps {
		old := c.apps[name]
		if old == nil || old.revision != s.Revision {
			c.apps[name] = readApp(s)
			if old != nil {
				c.apps[name].status, c.apps[name].counted = old.status, old.counted
			}
		}
		c.apps[name].deleting = s.Deleting
		if !s.Deleting {
			c.apps[name].busy = false // forgotten, and deployed again before we looked
		}
	}
	for name := range c.apps {
		if c.state.Apps[name] == nil {
			delete(c.apps, name)
			c.emit(ForgetAppEffect{name})
		}
	}
}

func (c *Core) isAttach(name string) bool {
	a := c.apps[name]
	return a != nil && a.spec != nil && a.spec.Engine.Kind == app.KindAttach
}

// names are the apps in order.
func (c *Core) names() []string { return slices.Sorted(maps.Keys(c.apps)) }

// reconcile compares what is wanted with what is, and does the next thing towards it.
func (c *Core) reconcile(now time.Time) {
	c.adoptGrants(now)
	c.loseParts(now)
	c.endUnwanted(now)
	for _, name := range c.names() {
		if a := c.apps[name]; !a.deleting {
			c.reconcileApp(now, a)
		}
	}
	c.moveAway(now)
	c.tend(now)
	c.tellRaft(now)
	c.grantAll(now)
	c.sweep(now)
	c.waiting = nil
	for _, name := range c.names() {
		c.sumUp(now, c.apps[name])
		c.noteWaiting(c.apps[name])
	}
}

// adoptGrants takes over grants that stand in the state and were not answered: their command was thought lost.
func (c *Core) adoptGrants(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec, u := c.state.Units[id], c.units[id]
		if u != nil && (u.busy || rec.Epoch <= u.m.Epoch || !u.awaitsGrant()) {
			continue
		}
		if u == nil {
			u = c.adopt(rec)
			u.m = state.Machine{Phase: state.Gone, Attach: c.isAttach(rec.App), Since: now}
		}
		c.begun(now, u, c.seatOf(rec), rec.Epoch, rec.Attempt)
	}
}

// endUnwanted stops units whose app is being deleted, is gone, or does not want them any more. The units of a spec that this
// version cannot read run on: nobody said that they are not wanted.
func (c *Core) endUnwanted(now time.Time) {
	for _, id := range c.ids() {
		u := c.units[id]
		a := c.apps[u.app]
		if a != nil && a.broken != "" && !a.deleting {
			continue
		}
		if a == nil || !a.wants(id) {
			u.away = nil
			c.feed(now, u, state.Event{Kind: state.EvUnwant, Grace: c.grace(u), Reason: c.endReason(a)})
		}
	}
}

func (c *Core) endReason(a *application) string {
	if a == nil || a.deleting {
		return "deleted"
	}
	return "not wanted by revision " + strconv.FormatUint(a.revision, 10)
}

// grace is how long running streams of the unit may go on: what was ordered, else what the present revision says, else what it
// was started with.
func (c *Core) grace(u *unit) time.Duration {
	if u.drain != nil {
		return *u.drain
	}
	if a := c.apps[u.app]; a != nil && a.spec != nil {
		return app.Seconds(a.spec.GracefulShutdownTimeout)
	}
	if u.seat.spec != nil {
		return app.Seconds(u.seat.spec.GracefulShutdownTimeout)
	}
	return 0
}

// reconcileApp starts what is missing and rolls a newer revision out.
func (c *Core) reconcileApp(now time.Time, a *application) {
	for i := range a.units {
		w := &a.units[i]
		u := c.units[w.ID]
		if u == nil {
			u = newUnit(w.ID, w.App, w.Group, w.Ranks)
			u.m = state.Machine{Epoch: c.state.LastEpoch(w.ID)}
			c.add(u)
		}
		u.m.Attach = a.spec.Engine.Kind == app.KindAttach
		if u.awaitsGrant() {
			u.ranks = w.Ranks // a lockstep unit keeps its name when its group changes its size
		}
		switch {
		case u.idle(c.state):
			c.want(now, u, w)
		case c.stale(a, u):
			c.roll(now, a, u)
		}
	}
}

// want begins a unit, unless another unit still holds its ranks: the coupling of the app has changed.
func (c *Core) want(now time.Time, u *unit, w *app.Unit) {
	for id, rec := range c.state.Units {
		if id != u.id && rec.App == w.App && rec.Group == w.Group && rec.Holds() && shares(rec, w.Ranks) {
			return
		}
	}
	u.ranks = w.Ranks
	c.feed(now, u, state.Event{Kind: state.EvWant})
}

func shares(rec *state.Unit, ranks []int) bool {
	return slices.ContainsFunc(rec.Ranks, func(r state.RankGrant) bool { return slices.Contains(ranks, r.Rank) })
}

// stale says whether the grant in hand starts something else than the present revision.
func (c *Core) stale(a *application, u *unit) bool {
	return len(u.seat.ranks) > 0 && u.seat.launch != a.launch[u.id]
}

// roll ends a unit of an older revision, so that it starts anew: at once if it does not serve, else one ready unit of the app
// at a time. A unit that fails under the new revision stops the roll-out; the others go on serving.
func (c *Core) roll(now time.Time, a *application, u *unit) {
	switch u.m.Phase {
	case state.Starting, state.Fenced, state.Killing, state.Backoff, state.Failed, state.Draining:
	case state.Ready:
		if c.underWay(a, u) {
			return
		}
	default:
		return
	}
	c.feed(now, u, state.Event{Kind: state.EvUnwant, Grace: c.grace(u), Reason: "replaced by revision " + strconv.FormatUint(a.revision, 10)})
}

// underWay says whether another unit of the app is not ready. One that finds no room does not count: it may wait for this one's.
func (c *Core) underWay(a *application, but *unit) bool {
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if u != but && (u == nil || (u.m.Phase != state.Ready && u.noRoom == "") || u.unsure()) {
			return true
		}
	}
	return false
}

// tellRaft carries out every wish but grants. A wish that the state has overtaken is dropped.
func (c *Core) tellRaft(now time.Time) {
	for _, id := range c.ids() {
		u := c.units[id]
		for u.due(now, false) {
			w := u.begin()
			if rec := c.state.Units[id]; rec == nil || rec.Epoch != u.m.Epoch {
				u.busy = c.unseen(u)
				if u.busy {
					c.propose(u, w)
				}
				continue
			}
			c.propose(u, w)
		}
	}
}

// unseen says whether the grant in hand is newer than the snapshot: its answer came before the snapshot that holds it.
func (c *Core) unseen(u *unit) bool { return u.m.Epoch > c.state.LastEpoch(u.id) }

func (c *Core) propose(u *unit, w wish) {
	ref := u.ref()
	switch w.kind {
	case state.ProposeReady:
		ref.Reason = ""
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitReady: ref}})
	case state.ProposeFenced:
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitFenced: ref}})
	case state.ProposeFailed:
		ref.LogTail = state.Tail(u.m.LogTail)
		c.emit(ProposeEffect{App: u.app, Unit: u.id, Command: state.Command{UnitFailed: ref}})
	default:
		c.emit(ReleaseEffect{u.app, releaseOf(u)})
	}
}

// sweep forgets units of which nothing is left, then apps.
func (c *Core) sweep(now time.Time) {
	left := map[string]int{}
	for _, id := range c.ids() {
		u := c.units[id]
		if a := c.apps[u.app]; (a == nil || !a.wants(id)) && u.idle(c.state) {
			c.drop(id)
			c.emit(ForgetEffect{u.app, id})
			continue
		}
		left[u.app]++
	}
	for _, name := range c.names() {
		a := c.apps[name]
		if a.deleting && left[name] == 0 && !a.busy && !now.Before(a.retryAt) {
			a.busy = true
			c.emit(ProposeEffect{App: name, Command: state.Command{ForgetApp: &state.ForgetApp{Name: name}}})
		}
	}
}

// sumUp derives the app's status and notes its change.
func (c *Core) sumUp(now time.Time, a *application) {
	if ranks := c.countRanks(a); a.counted == nil || *a.counted != ranks {
		a.counted = &ranks
		c.emit(ranks)
	}
	s := c.derive(a)
	if s == state.Running {
		a.running = a.revision
	}
	if s == a.status {
		return
	}
	c.emit(ChangeEffect{Event{At: now, App: a.name, From: string(a.status), To: string(s), Reason: c.message(a)}})
	a.status = s
}

// countRanks counts the ranks that are ready, and those that are wanted.
func (c *Core) countRanks(a *application) RanksEffect {
	out := RanksEffect{App: a.name}
	for i := range a.units {
		w := &a.units[i]
		if !a.wants(w.ID) {
			continue
		}
		out.Desired += len(w.Ranks)
		if u := c.units[w.ID]; u != nil && u.m.Phase == state.Ready {
			out.Ready += len(u.ranks)
		}
	}
	return out
}

func (c *Core) derive(a *application) state.AppStatus {
	if a.broken != "" && !a.deleting {
		return state.DeployFailed
	}
	seen := state.Seen{Deleting: a.deleting, WasRunning: a.running == a.revision}
	for i := range a.units {
		seen.Units = append(seen.Units, c.phaseOf(a, a.units[i].ID))
	}
	return state.DeriveStatus(seen)
}

// phaseOf is a wanted unit's phase; what still runs an older revision is on its way.
func (c *Core) phaseOf(a *application, id string) state.Phase {
	u := c.units[id]
	if u == nil || u.m.Phase == "" || c.stale(a, u) {
		return state.Pending
	}
	return u.m.Phase
}

// message says in words why the app is not RUNNING.
func (c *Core) message(a *application) string { return joinMessage(c.messageLines(a)) }

func joinMessage(lines []string) string {
	return strings.Join(lines[:min(len(lines), maxMessageLines)], "\n")
}

func (c *Core) messageLines(a *application) []string {
	if a.broken != "" {
		return []string{a.broken}
	}
	if a.deleting {
		return nil
	}
	var out []string
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if u == nil || u.m.Phase == state.Ready {
			continue
		}
		if why := u.why(); why != "" {
			out = append(out, u.id+" is "+string(u.m.Phase)+": "+why)
		}
	}
	return out
}

// maxMessageLines bounds the message of an app; status shows every unit anyway.
const maxMessageLines = 4

// why is the reason for the unit's phase.
func (u *unit) why() string {
	if u.stays != "" {
		return u.stays
	}
	if (u.m.Phase == state.Pending || u.m.Phase == state.Backoff) && u.noRoom != "" {
		return u.noRoom
	}
	return u.m.Reason
}
