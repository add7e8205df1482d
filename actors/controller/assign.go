package controller

import (
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

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
		switch {
		case !u.m.NodeDied || u.pending[0].attempt < state.MaxStartAttempts:
		case starting == "":
			starting = u.id
		default:
			u.noRoom, u.retryAt = "waits until "+starting+" has started: their nodes ended while they "+
				"were starting", time.Time{}
			return true
		}
		return false
	})
}

// groupPrefix returns how many units at the head belong to one group.
func groupPrefix(us []*unit) int {
	n := 1
	for n < len(us) && us[n].app == us[0].app && us[n].group == us[0].group {
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
		u.next = seat{spec: a.spec, revision: a.revision, launch: a.launch[u.id]}
		u.askedAt = c.changes
	}
	c.emit(AssignEffect{m})
}

// groupRequest is what the RankAssigner must know to place the units.
func (c *Core) groupRequest(now time.Time, us []*unit) *msg.AssignGroup {
	a := c.apps[us[0].app]
	m := &msg.AssignGroup{App: a.spec, Nodes: c.usable, Grant: state.GrantGroup{
		App: a.name, AppRevision: a.revision, Group: us[0].group, At: now.UnixMilli(),
	}}
	for _, u := range us {
		m.Grant.Units = append(m.Grant.Units, state.UnitGrant{
			Unit: u.id, ExpectEpoch: max(u.m.Epoch, c.state.LastEpoch(u.id)), Launch: a.launch[u.id],
			Restarts: u.nextRestarts(a.launch[u.id]),
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
			if _, asked := in.NoRoom[other.id]; !asked && other.group == u.group && other.app == u.app &&
				other.isDue(now, true) {
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

// addWaiting adds an application's units without room to what leases tell the ingresses.
func (c *Core) addWaiting(a *application) {
	left := maxWaiting
	for i := range c.waiting {
		left -= len(c.waiting[i].Units)
	}
	w := msg.Waiting{App: a.name, Revision: a.revision}
	for i := range a.units {
		u := c.units[a.units[i].ID]
		if a.deleting || u == nil || u.m.Phase != state.Pending || u.noRoom == "" || len(w.Units) == left {
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

// releaseOf is the release of a whole unit.
func releaseOf(u *unit) msg.ReleaseRank {
	return msg.ReleaseRank{Unit: u.id, Rank: -1, Epoch: u.m.Epoch, Reason: u.m.Reason}
}
