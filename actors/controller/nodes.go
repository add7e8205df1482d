package controller

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/state"
)

// A leader that did nothing for longer than lease_ttl / frozenPart was frozen. It did not receive renewals,
// so it declares no node lost. A leader with nodes checks the leases tickPart times per lease_ttl.
const (
	frozenPart = 2
	tickPart   = 4
)

// peer is the core's knowledge of a node beside its record in the state.
type peer struct {
	uid     string
	process uint64     // incarnation that renewed last; 0 = none under this leader
	past    []uint64   // earlier incarnations, the latest last
	node    state.Node // the node's own record in that renewal
	wall    time.Time  // by the node's clock
	warning string     // warning for the node's status

	stopping  bool      // the node is ending, or refused a start because of that
	afterStop bool      // the node's previous process was told to end
	seen      time.Time // last renewal, by the leader's clock

	losing   bool // its lease is over and NodeLost is to be proposed
	returned bool // it was lost, and renews with no processes left
	changed  bool // its record differs from its report
	declined []byte
	why      string // why its record was not changed to declined

	busy    bool // a command about it is under way
	retryAt time.Time
}

// withStoppingAsDraining returns s with stopping nodes marked as draining, as placement must treat them. It
// does not change s.
func (c *Core) withStoppingAsDraining(s *state.State) *state.State {
	out := s
	for id, p := range c.peers {
		if n := s.Nodes[id]; p.stopping && n != nil && n.UID == p.uid {
			if out == s {
				out = s.Clone()
			}
			marked := *n
			marked.Draining = true
			out.Nodes[id] = &marked
		}
	}
	return out
}

// hasNewNode reports whether a node joined after old.
func hasNewNode(old, s *state.State) bool {
	for id, n := range s.Nodes {
		if was := old.Nodes[id]; n.Takes() && (was == nil || was.UID != n.UID) {
			return true
		}
	}
	return false
}

// retryFailed tries failed units again, because there is a new node.
func (c *Core) retryFailed(now time.Time) {
	for _, id := range c.unitIDs() {
		if u := c.units[id]; u.m.Phase == state.Failed {
			c.stepUnit(now, u, state.Event{Kind: state.EvRedeploy})
		}
	}
}

// updatePeers updates the peers and their leases from the state.
func (c *Core) updatePeers(now time.Time) {
	for id, n := range c.state.Nodes {
		p := c.peers[id]
		if p == nil || p.uid != n.UID {
			p = &peer{uid: n.UID}
			c.peers[id] = p
			c.leases.Forget(id)
		}
		switch {
		case n.Lost:
			p.losing = false
			c.leases.Forget(id)
		case p.losing:
		default:
			p.returned = false
			c.leases.Track(id, now)
		}
	}
	for id := range c.peers {
		if c.state.Nodes[id] == nil {
			delete(c.peers, id)
			c.leases.Forget(id)
		}
	}
}

// checkLeases marks nodes with an expired lease as lost. If this process was suspended, or if this leader is
// the likelier fault, each node gets a new lease instead; in the second case the leader also hands over to
// another one.
func (c *Core) checkLeases(now time.Time) {
	if !c.lastStep.IsZero() && now.Sub(c.lastStep) > c.timers.LeaseTTL/frozenPart {
		c.prolongLeases(now)
	}
	c.lastStep = now
	over := c.leases.Overdue(now)
	if len(over) > 0 && c.isLeaderAtFault(now) {
		c.blamedAt, c.noChange = now, false
		c.prolongLeases(now)
		c.emit(StepDownEffect{Overdue: over})
		return
	}
	for _, id := range over {
		c.peers[id].losing, c.noChange = true, false
		c.leases.Forget(id)
	}
}

// isLeaderAtFault reports whether this leader is the likelier cause of the silence: its own node, or more
// than half of all nodes, are silent. Only nodes that have renewed since this leader began, or since it last
// blamed itself, count. So each silence is held against one leader once, and nodes that are really gone are
// declared lost by the next leader, or by this one if no other can lead.
func (c *Core) isLeaderAtFault(now time.Time) bool {
	all, silent := 0, 0
	for id, p := range c.peers {
		if c.state.Nodes[id].Lost {
			continue
		}
		all++
		if p.seen.After(c.blamedAt) && c.leases.Left(id, now) < c.timers.LeaseTTL/silentPart {
			if id == c.Self {
				return true
			}
			silent++
		}
	}
	return 2*silent > all
}

// Stands reports whether a command may still be proposed. A renewal withdraws the loss of its node.
func (c *Core) Stands(e *ProposeEffect) bool {
	if e.Command.NodeLost == nil {
		return true
	}
	p := c.peers[e.Node]
	return p != nil && p.losing
}

func (c *Core) prolongLeases(now time.Time) {
	for id, p := range c.peers {
		if !c.state.Nodes[id].Lost {
			p.losing = false
			c.leases.Seen(id, now)
		}
	}
}

// addNodeDueTimes reports the times at which leases and commands about nodes need a tick.
func (c *Core) addNodeDueTimes(earlier func(time.Time)) {
	if due := c.leases.Due(); !due.IsZero() {
		earlier(due)
		earlier(c.lastStep.Add(c.timers.LeaseTTL / tickPart))
	}
	for id, p := range c.peers {
		if !p.busy && c.peerCommand(id) != nil {
			earlier(p.retryAt)
		}
		if by := time.UnixMilli(c.state.Nodes[id].DrainBy); by.After(c.lastStep) {
			earlier(by)
		}
	}
}

// peerCommand is the next command about a node; nil = none.
func (c *Core) peerCommand(id string) *state.Command {
	p, n := c.peers[id], c.state.Nodes[id]
	ref := &state.NodeRef{Node: id, UID: n.UID}
	switch {
	case n.Lost && p.returned:
		return &state.Command{NodeBack: ref}
	case !n.Lost && p.losing:
		ref.Reason = "silent for " + c.timers.Regrant.String()
		return &state.Command{NodeLost: ref}
	case !n.Lost && p.changed:
		return &state.Command{PutNode: &state.PutNode{Node: p.node}}
	default:
		return nil
	}
}

// proposePeerCommands proposes the pending commands about nodes.
func (c *Core) proposePeerCommands(now time.Time) {
	for _, id := range slices.Sorted(maps.Keys(c.peers)) {
		p := c.peers[id]
		if p.busy || now.Before(p.retryAt) {
			continue
		}
		if cmd := c.peerCommand(id); cmd != nil {
			p.busy = true
			c.emit(ProposeEffect{Node: id, Command: *cmd})
		}
	}
}

// nodeCommandDone takes the result of a command about a node. The state may show it a moment later.
func (c *Core) nodeCommandDone(now time.Time, in CommandDone) {
	p := c.peers[in.Node]
	if p == nil {
		return
	}
	p.busy, p.retryAt = false, now.Add(c.timers.Retry)
	if in.Err != nil && isTypedRefusal(in.Err) && p.changed {
		p.declined, p.why = reportedRecord(&p.node), in.Err.Error()
	}
	if in.Err == nil || isTypedRefusal(in.Err) {
		p.changed = false
	}
}

// reportedRecord encodes the part of a record that the node itself determines, for comparison.
func reportedRecord(n *state.Node) []byte {
	own := *n
	// set by the leader, not by the node
	own.Lost, own.Reason, own.Draining, own.DrainBy, own.Key = false, "", false, 0, ""
	own.Offer.Devices = append([]int(nil), n.Offer.Devices...)
	b, _ := json.Marshal(&own) // plain data cannot fail
	return b
}

// compareRecord notes whether a node's record differs from its report, unless the state has refused that
// change.
func (p *peer) compareRecord(n *state.Node) {
	said := reportedRecord(&p.node)
	switch {
	case bytes.Equal(said, reportedRecord(n)):
		p.changed, p.declined, p.why = false, nil, ""
	default:
		p.changed = !bytes.Equal(said, p.declined)
	}
}

// nodeGoneReason says why nothing of a unit is left on a node; "" = the node is there.
func (c *Core) nodeGoneReason(id string) string {
	n := c.state.Nodes[id]
	switch {
	case len(c.state.Nodes) == 0:
		return "" // the state is from a version without node records; they will follow
	case n == nil:
		return "node " + id + " was removed"
	case n.Lost:
		return "node " + id + " is lost: " + n.Reason
	default:
		return ""
	}
}

// markLostParts marks the parts of units on lost nodes as gone.
func (c *Core) markLostParts(now time.Time) {
	for _, id := range c.unitIDs() {
		u := c.units[id]
		for _, n := range u.nodes {
			why := c.nodeGoneReason(n)
			if p := u.parts[n]; why != "" && !p.gone {
				p.markGone()
				c.stepUnit(now, u, state.Event{
					Kind: state.EvNodeLost, Reason: why,
					Others: u.othersLack(n, isGone),
				})
			}
		}
	}
}

// hasRankOn reports whether a unit has a rank on a node.
func hasRankOn(rec *state.Unit, node string) bool {
	return slices.ContainsFunc(rec.Ranks, func(r state.RankGrant) bool { return r.Node == node })
}

// States of a node.
const (
	nodeAlive    = "alive"
	nodeSilent   = "silent" // no renewal for more than half of its lease
	nodeLost     = "lost"
	nodeDraining = "draining"
	nodeStopping = "stopping" // its process was told to end
	nodeDrained  = "drained"
	nodeUnknown  = "unknown" // no renewal under this leader
)

const (
	silentPart = 2 // of lease_ttl
	// skewNoted is the clock difference that users are told of: certificates and logs depend on the clocks.
	skewNoted  = time.Second
	seenLeader = "leader"
)

// Nodes returns the status of all nodes, in order. The caller fills in Voter and InFlight.
func (c *Controller) Nodes() []msg.NodeStatus {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Nodes(now, c.cfg.Self)
}

// Silence is the time since a node's last renewal, or since this leader began if the node has not renewed
// since.
type Silence struct {
	For  time.Duration
	Long bool // more than half of its lease: user requests do not wait for this node
}

// Silences returns the silence of every node that is not lost.
func (c *Controller) Silences() map[string]Silence {
	now := c.cfg.Clock()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.core.Silences(now)
}

// Silences returns the silence of every node that is not lost.
func (c *Core) Silences(now time.Time) map[string]Silence {
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
func (c *Core) Nodes(now time.Time, leader string) []msg.NodeStatus {
	if c.state == nil {
		return nil
	}
	out := make([]msg.NodeStatus, 0, len(c.state.Nodes))
	for _, id := range slices.Sorted(maps.Keys(c.state.Nodes)) {
		out = append(out, c.nodeStatus(now, c.state.Nodes[id], leader))
	}
	return out
}

func (c *Core) nodeStatus(now time.Time, n *state.Node, leader string) msg.NodeStatus {
	s := msg.NodeStatus{
		Node: n.ID, Address: n.Address, Zone: n.Zone, Version: n.Version, Leader: n.ID == leader,
		Slots: n.Offer.Slots, GPUs: len(n.Offer.Devices),
	}
	for _, r := range n.Roles {
		s.Roles = append(s.Roles, string(r))
	}
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

// addLoad adds the resources that units use on the node.
func (c *Core) addLoad(s *msg.NodeStatus) {
	for _, id := range slices.Sorted(maps.Keys(c.state.Units)) {
		rec := c.state.Units[id]
		if !rec.Holds() || !hasRankOn(rec, s.Node) {
			continue
		}
		if g := rec.App + "/" + strconv.Itoa(rec.Group); !slices.Contains(s.Groups, g) {
			s.Groups = append(s.Groups, g)
		}
		for i := range rec.Ranks {
			if r := &rec.Ranks[i]; r.Node == s.Node {
				s.Ranks++
				s.SlotsUsed += slotsOf(r)
				s.GPUsUsed += len(r.Devices)
			}
		}
	}
}

// nodeState is the state of a node, and its reason.
func (c *Core) nodeState(now time.Time, n *state.Node, p *peer) (word, reason string) {
	left := c.unitsOn(n.ID)
	switch {
	case n.Lost:
		return nodeLost, n.Reason
	case p != nil && p.stopping && !c.isSilent(now, p) && len(left) == 0:
		return nodeStopping, ""
	case p != nil && p.stopping && !c.isSilent(now, p):
		return nodeStopping, leftReason(left)
	case n.Draining && len(left) == 0:
		return nodeDrained, ""
	case n.Draining:
		return nodeDraining, leftReason(left)
	case p == nil || p.seen.IsZero():
		return nodeUnknown, "it has not renewed its lease since this leader leads"
	case c.isSilent(now, p):
		return nodeSilent, "it has not renewed its lease for " + now.Sub(p.seen).Round(time.Second).String()
	default:
		return nodeAlive, ""
	}
}

// isSilent reports whether the node has not renewed for more than half of its lease.
func (c *Core) isSilent(now time.Time, p *peer) bool {
	return now.Sub(p.seen) > c.timers.LeaseTTL/silentPart
}

// leftReason is the first reason why a unit is still on a draining or stopping node.
func leftReason(left []*unit) string {
	for _, u := range left {
		if u.stayReason != "" {
			return u.id + " " + u.stayReason
		}
	}
	return left[0].id + " is " + string(left[0].m.Phase)
}

// nodeNotes lists the warnings for the node's status.
func (c *Core) nodeNotes(s *msg.NodeStatus, p *peer, leader string) []string {
	var out []string
	if skew := time.Duration(s.SkewMs) * time.Millisecond; skew.Abs() > skewNoted {
		out = append(out, "its clock differs by "+skew.Round(time.Millisecond).String()+" from the leader's")
	}
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
