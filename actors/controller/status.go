package controller

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// view shows people what the core knows. It changes nothing, and no decision depends on it.
type view struct{ *Core }

// StatusWithout returns the status of all applications, ordered by name, while some nodes do not answer;
// unreachable gives the reason for each. Their ranks are shown as msg.Unreachable and do not count as ready,
// and an application that would be RUNNING is shown as UNHEALTHY. The caller adds what the replicas report of
// their ranks.
func (c view) StatusWithout(unreachable map[string]string) []client.AppStatus {
	out := make([]client.AppStatus, 0, len(c.apps))
	for _, name := range c.appNames() {
		out = append(out, c.appStatus(c.apps[name], unreachable))
	}
	return out
}

func (c view) appStatus(a *application, unreachable map[string]string) client.AppStatus {
	s := client.AppStatus{
		Name: a.name, Status: string(c.deriveStatus(a, a.pools)), Revision: a.revision,
		Pools: c.poolStatuses(a), RollingOut: a.isRollingOut(), Halt: a.haltStatus(),
	}
	if spec := a.spec(); spec != nil {
		s.Model, s.Kind, s.Coupling, s.Policy = spec.Model.ID, string(spec.Engine.Kind),
			string(spec.DataParallel.Coupling), spec.Routing.Policy
		s.DPSize, s.MaxQueued = spec.DataParallel.DPSize, spec.MaxQueuedRequests
	}
	var missing []string // messages of ready units that are unreachable
	for _, id := range c.statusUnits(a) {
		us := c.unitStatus(a, id)
		ready := us.Phase == string(state.Ready) && a.isWanted(id)
		hidden := markUnreachable(&us, unreachable)
		s.Units = append(s.Units, us)
		if !ready {
			continue
		}
		pool := &s.Pools[a.poolAt(us.Pool)]
		if !hidden {
			pool.Ready += len(us.Ranks)
			continue
		}
		missing = append(missing, id+" "+state.Phase(us.Phase).Describe()+": "+us.Reason)
		for _, status := range []*string{&s.Status, &pool.Status} {
			if *status == string(state.Running) {
				*status = string(state.Unhealthy)
			}
		}
	}
	for i := range s.Pools {
		p := &s.Pools[i]
		s.Groups, s.Desired, s.Ready = s.Groups+p.Groups, s.Desired+p.Desired, s.Ready+p.Ready
	}
	if len(s.Pools) == 1 { // it has no name of its own
		s.Pools = nil
	}
	s.Imbalances = c.imbalances(a)
	s.Message = joinMessage(slices.Concat(missing, c.messageLines(a), c.avoidedLines(a)))
	return s
}

func (c view) poolStatuses(a *application) []client.PoolStatus {
	out := make([]client.PoolStatus, len(a.pools))
	for i, p := range a.pools {
		out[i] = client.PoolStatus{
			Pool: p.Pool, Name: p.PoolName(), Status: string(c.deriveStatus(a, []*app.Application{p})),
			Policy: p.Routing.Policy, Coupling: string(p.DataParallel.Coupling),
			DPSize: p.DataParallel.DPSize, Groups: p.NumGroups, Desired: p.NumReplicas,
		}
	}
	return out
}

// avoidedLines says which nodes an application avoids.
func (c view) avoidedLines(a *application) []string {
	var out []string
	for _, node := range slices.Sorted(maps.Keys(c.avoided[a.name])) {
		for _, note := range c.avoided.notesOn(node, map[string]*application{a.name: a}, len(c.usable)) {
			out = append(out, "node "+node+" is "+note)
		}
	}
	return out
}

// markUnreachable shows the ranks on nodes that do not answer as unreachable, and their unit too: a lockstep
// unit serves on all of its nodes or not at all. A unit without processes does not change.
func markUnreachable(u *client.UnitStatus, unreachable map[string]string) (marked bool) {
	switch state.Phase(u.Phase) {
	case state.Starting, state.Ready, state.Fenced, state.Killing, state.Draining:
	default:
		return false
	}
	for i := range u.Ranks {
		if why := unreachable[u.Ranks[i].Node]; why != "" {
			u.Ranks[i].Phase, u.Phase, u.Reason, marked = client.Unreachable, client.Unreachable, why, true
		}
	}
	return marked
}

// statusUnits returns the wanted units of an app, then its units that are still ending.
func (c view) statusUnits(a *application) []string {
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

func (c view) unitStatus(a *application, id string) client.UnitStatus {
	u := c.units[id]
	if u == nil {
		return waitingUnit(a, id)
	}
	phase := u.m.Phase
	if phase == "" {
		phase = state.Pending
	}
	s := client.UnitStatus{
		Unit: id, Pool: u.pool, Group: u.group, Phase: string(phase), Epoch: u.m.Epoch, Attempt: u.m.Attempt,
		Since: u.m.Since, Reason: u.phaseReason(), LogTail: u.m.LogTail,
	}
	if end := u.m.LastEnd; end != nil {
		s.LastEnd = &client.LastEnd{
			At: time.UnixMilli(end.At), Exit: end.Exit, Cause: end.Cause, Line: end.Line,
		}
	}
	if phase == state.Backoff || phase == state.Failed {
		s.NextTry = u.m.Due.Round(0)
	}
	if rec := cmp.Or(c.state.Units[id], u.record); rec != nil {
		s.Restarts = rec.Restarts
	}
	s.Ranks = u.rankStatus(phase)
	return s
}

// waitingUnit is the status of a wanted unit that the core has not begun.
func waitingUnit(a *application, id string) client.UnitStatus {
	s := client.UnitStatus{Unit: id, Phase: string(state.Pending)}
	for i := range a.units {
		if w := &a.units[i]; w.ID == id {
			s.Pool, s.Group, s.Ranks = w.Pool, w.Group, newUnit(w).rankStatus(state.Pending)
		}
	}
	return s
}

// States of a node.
const (
	nodeAlive    = "alive"
	nodeSilent   = "silent" // no renewal for more than half of its lease
	nodeLost     = "lost"
	nodeDraining = "draining"
	nodeStopping = "stopping" // its process was told to end
	nodeRestarts = "restarting"
	nodeDrained  = "drained"
	nodeUnknown  = "unknown" // no renewal under this leader
)

const (
	silentPart = 2 // of lease_ttl
	// skewNoted is the clock difference that users are told of: certificates and logs depend on the clocks.
	skewNoted  = time.Second
	seenLeader = "leader"
)

// Silence is the time since a node's last renewal, or since this leader began if the node has not renewed
// since.
type Silence struct {
	For  time.Duration
	Long bool // more than half of its lease: user requests do not wait for this node
}

// Silences returns the silence of every node that is not lost.
func (c view) Silences(now time.Time) map[string]Silence {
	out := map[string]Silence{}
	if c.state == nil {
		return out
	}
	for id, n := range c.state.Nodes {
		if n.Lost {
			continue
		}
		heard := c.ledSince
		if p := c.peers[id]; p != nil && !p.seen.IsZero() {
			heard = p.seen
		}
		silent := now.Sub(heard)
		out[id] = Silence{For: silent, Long: silent > c.timers.LeaseTTL/silentPart}
	}
	return out
}

// Nodes returns the status of all nodes, in order. leader is the name of the leading node.
func (c view) Nodes(now time.Time, leader string) []client.NodeStatus {
	if c.state == nil {
		return nil
	}
	out := make([]client.NodeStatus, 0, len(c.state.Nodes))
	for _, id := range slices.Sorted(maps.Keys(c.state.Nodes)) {
		out = append(out, c.nodeStatus(now, c.state.Nodes[id], leader))
	}
	return out
}

func (c view) nodeStatus(now time.Time, n *state.Node, leader string) client.NodeStatus {
	s := StatusOfRecord(n)
	s.Leader = n.ID == leader
	c.addLoad(&s)
	p := c.peers[n.ID]
	if p != nil && !p.seen.IsZero() {
		s.LastSeen, s.SeenBy = p.seen, seenLeader
		s.LeaseLeftS = c.leases.Left(n.ID, now).Seconds()
		if !p.wall.IsZero() {
			s.SkewMs = p.wall.Sub(p.seen.Round(0)).Milliseconds()
		}
	}
	s.State, s.Reason = c.nodeState(now, n, p)
	s.Notes = c.nodeNotes(&s, p, leader)
	return s
}

// StatusOfRecord is what a node's record says of its status.
func StatusOfRecord(n *state.Node) client.NodeStatus {
	s := client.NodeStatus{
		Node: n.ID, Address: n.Address, Zone: n.Zone, Version: n.Version, Slots: n.Resources.Slots,
		GPUs: len(n.Resources.Devices), Devices: deviceModels(n),
	}
	for _, r := range n.Roles {
		s.Roles = append(s.Roles, string(r))
	}
	return s
}

func deviceModels(n *state.Node) []client.DeviceModel {
	var out []client.DeviceModel
	for _, m := range n.Resources.Models {
		out = append(out, client.DeviceModel(m))
	}
	return out
}

func (c view) addLoad(s *client.NodeStatus) {
	parts, shared := 0, sharedDevices{}
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec := c.state.Units[id]
		if !rec.Holds() || !rec.IsOn(s.Node) {
			continue
		}
		if g := groupName(rec.PoolName(), rec.Group); !slices.Contains(s.Groups, g) {
			s.Groups = append(s.Groups, g)
		}
		for i := range rec.Ranks {
			if r := &rec.Ranks[i]; r.Node == s.Node {
				s.Ranks++
				s.SlotsUsed += slotsOf(r)
				parts += r.DeviceParts()
				shared.add(rec.PoolName(), rec.Group, r)
			}
		}
	}
	s.GPUsUsed, s.Shared = share.Devices(parts), shared.on(s.Node)
}

// sharedDevices collects, for people, which ranks share which devices of which nodes.
type sharedDevices map[nodeDevice]*sharedDevice

type nodeDevice struct {
	node   string
	device int
}

type sharedDevice struct {
	parts int // of the device, that the ranks have
	ranks []string
}

// add adds a rank. It has no effect on one that has whole devices, or none.
func (s sharedDevices) add(pool string, group int, r *state.RankGrant) {
	if r.Share == 0 {
		return
	}
	for _, d := range r.Devices {
		at := nodeDevice{r.Node, d}
		if s[at] == nil {
			s[at] = &sharedDevice{}
		}
		s[at].parts += r.Share
		s[at].ranks = append(s[at].ranks, fmt.Sprintf("%s/%d/%d", pool, group, r.Rank))
	}
}

// on returns the shared devices of a node, in order.
func (s sharedDevices) on(node string) []client.SharedDevice {
	var out []client.SharedDevice
	inOrder := func(a, b nodeDevice) int { return a.device - b.device }
	for _, at := range slices.SortedFunc(maps.Keys(s), inOrder) {
		if at.node == node {
			slices.Sort(s[at].ranks)
			out = append(out, client.SharedDevice{
				Device: at.device, Used: share.Devices(s[at].parts), Ranks: s[at].ranks,
			})
		}
	}
	return out
}

// nodeState is the state of a node, and its reason.
func (c view) nodeState(now time.Time, n *state.Node, p *peer) (word, reason string) {
	left := c.unitsOn(n.ID)
	switch {
	case n.Lost:
		return nodeLost, n.Reason
	case p != nil && p.stopping && !c.isSilent(now, p) && len(left) == 0:
		return nodeStopping, ""
	case p != nil && p.stopping && !c.isSilent(now, p):
		return nodeStopping, leftReason(left)
	case p != nil && p.restarts && c.leases.IsKept(n.ID, now):
		return nodeRestarts, "its process is being replaced, its engines run"
	case p == nil || p.seen.IsZero():
		return nodeUnknown, "it has not renewed its lease since this leader leads"
	case c.isSilent(now, p):
		return nodeSilent, "it has not renewed its lease for " + now.Sub(p.seen).Round(time.Second).String()
	case n.Draining:
		return c.drainState(n.ID, left)
	default:
		return nodeAlive, ""
	}
}

// drainState is the state of a node that drains. The node is drained once it can be removed: no unit holds
// anything on it in the state either.
func (c view) drainState(node string, left []*unit) (word, reason string) {
	if len(left) > 0 {
		return nodeDraining, leftReason(left)
	}
	if held := c.state.UnitsOn(node); len(held) > 0 {
		return nodeDraining, held[0] + " has ended and is being released"
	}
	return nodeDrained, ""
}

// isSilent reports whether the node has not renewed for more than half of its lease.
func (c view) isSilent(now time.Time, p *peer) bool {
	return now.Sub(p.seen) > c.timers.LeaseTTL/silentPart
}

// leftReason is the first reason why a unit is still on a draining or stopping node.
func leftReason(left []*unit) string {
	for _, u := range left {
		if u.stayReason != "" {
			return u.id + " " + u.stayReason
		}
	}
	return left[0].id + " " + left[0].m.Phase.Describe()
}

func (c view) nodeNotes(s *client.NodeStatus, p *peer, leader string) []string {
	var out []string
	if skew := time.Duration(s.SkewMs) * time.Millisecond; skew.Abs() > skewNoted {
		out = append(out, "its clock differs by "+skew.Round(time.Millisecond).String()+" from the leader's")
	}
	out = append(out, c.avoided.notesOn(s.Node, c.apps, len(c.usable))...)
	if l := c.state.Nodes[leader]; l != nil && l.Version != s.Version {
		out = append(out, "it runs version "+s.Version+", the leader "+l.Version)
	}
	if p == nil {
		return out
	}
	for _, why := range []string{p.why, p.warning} {
		if why != "" {
			out = append(out, why)
		}
	}
	return out
}
