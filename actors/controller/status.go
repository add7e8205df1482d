package controller

import (
	"cmp"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/state"
)

// Status returns the status of all applications, ordered by name. The caller adds what the replicas report of
// their ranks.
func (c *Core) Status() []msg.AppStatus { return c.StatusWithout(nil) }

// StatusWithout is Status while some nodes do not answer; unreachable gives the reason for each. Their ranks
// are shown as msg.Unreachable and do not count as ready, and an application that would be RUNNING is shown
// as UNHEALTHY. No decision depends on it.
func (c *Core) StatusWithout(unreachable map[string]string) []msg.AppStatus {
	out := make([]msg.AppStatus, 0, len(c.apps))
	for _, name := range c.appNames() {
		out = append(out, c.appStatus(c.apps[name], unreachable))
	}
	return out
}

func (c *Core) appStatus(a *application, unreachable map[string]string) msg.AppStatus {
	s := msg.AppStatus{Name: a.name, Status: string(c.deriveStatus(a)), Revision: a.revision}
	if a.spec != nil {
		setSpecFields(&s, a.spec)
	}
	var missing []string // messages of ready units that are unreachable
	for _, id := range c.statusUnits(a) {
		us := c.unitStatus(a, id)
		ready := us.Phase == string(state.Ready) && a.isWanted(id)
		switch hidden := markUnreachable(&us, unreachable); {
		case ready && hidden:
			missing = append(missing, id+" is "+us.Phase+": "+us.Reason)
		case ready:
			s.Ready += len(us.Ranks)
		}
		s.Units = append(s.Units, us)
	}
	if len(missing) > 0 && s.Status == string(state.Running) {
		s.Status = string(state.Unhealthy)
	}
	s.Message = joinMessage(append(missing, c.messageLines(a)...))
	return s
}

// markUnreachable shows the ranks on nodes that do not answer as unreachable, and their unit too: a lockstep
// unit serves on all of its nodes or not at all. A unit without processes does not change.
func markUnreachable(u *msg.UnitStatus, unreachable map[string]string) (marked bool) {
	switch state.Phase(u.Phase) {
	case state.Starting, state.Ready, state.Fenced, state.Killing, state.Draining:
	default:
		return false
	}
	for i := range u.Ranks {
		if why := unreachable[u.Ranks[i].Node]; why != "" {
			u.Ranks[i].Phase, u.Phase, u.Reason, marked = msg.Unreachable, msg.Unreachable, why, true
		}
	}
	return marked
}

func setSpecFields(s *msg.AppStatus, a *app.Application) {
	s.Model, s.Kind, s.Coupling, s.Policy = a.Model.ID, string(a.Engine.Kind),
		string(a.DataParallel.Coupling), a.Routing.Policy
	s.DPSize, s.Groups, s.Desired = a.DataParallel.DPSize, a.NumGroups, a.NumReplicas
}

// statusUnits returns the wanted units of an app, then its units that are still ending.
func (c *Core) statusUnits(a *application) []string {
	var out []string
	for i := range a.units {
		if id := a.units[i].ID; !a.deleting || c.units[id] != nil {
			out = append(out, id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.units)) {
		if c.units[id].app == a.name && !slices.Contains(out, id) {
			out = append(out, id)
		}
	}
	return out
}

func (c *Core) unitStatus(a *application, id string) msg.UnitStatus {
	u := c.units[id]
	if u == nil {
		return waitingUnit(a, id)
	}
	phase := u.m.Phase
	if phase == "" {
		phase = state.Pending
	}
	s := msg.UnitStatus{
		Unit: id, Group: u.group, Phase: string(phase), Epoch: u.m.Epoch, Attempt: u.m.Attempt,
		Since:  u.m.Since,
		Reason: u.phaseReason(), LogTail: u.m.LogTail,
	}
	if rec := cmp.Or(c.state.Units[id], u.record); rec != nil {
		s.Restarts = rec.Restarts
	}
	s.Ranks = u.rankStatus(phase)
	return s
}

// rankStatus lists the ranks of the current grant or, without one, the wanted ranks.
func (u *unit) rankStatus(phase state.Phase) []msg.RankStatus {
	out := make([]msg.RankStatus, 0, len(u.ranks))
	if len(u.seat.ranks) > 0 {
		for _, r := range u.seat.ranks {
			out = append(out, msg.RankStatus{
				Group: u.group, Rank: r.Rank, Node: r.Node, Devices: r.Devices, Phase: string(phase),
				Epoch: u.m.Epoch,
			})
		}
		return out
	}
	for _, r := range u.ranks {
		out = append(out, msg.RankStatus{Group: u.group, Rank: r, Phase: string(phase), Epoch: u.m.Epoch})
	}
	return out
}

// waitingUnit is the status of a wanted unit that the core has not begun.
func waitingUnit(a *application, id string) msg.UnitStatus {
	s := msg.UnitStatus{Unit: id, Phase: string(state.Pending)}
	for i := range a.units {
		if w := &a.units[i]; w.ID == id {
			u := newUnit(id, w.App, w.Group, w.Ranks)
			s.Group, s.Ranks = w.Group, u.rankStatus(state.Pending)
		}
	}
	return s
}
