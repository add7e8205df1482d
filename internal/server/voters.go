package server

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Timing of the leader's control over the voters.
const (
	// for changes without a change of the state: a standby catches up, a node falls silent
	votersInterval = time.Second
	votersTimeout  = 10 * time.Second
)

// maintainCluster lets the leader change the voters and continue a rotation of the gossip key, one step at a
// time, until ctx ends.
func (n *Node) maintainCluster(ctx context.Context) {
	tick := time.NewTicker(votersInterval)
	defer tick.Stop()
	for {
		changed := n.store.Changed()
		n.probeNextVersion(ctx)
		for n.store.Leader() && (n.changeVoters(ctx) || n.continueKeyRotation(ctx)) &&
			ctx.Err() == nil { //nolint:revive // repeat until nothing changes
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// changeVoters makes the next change. It returns false if there is none, or if the change failed and is
// repeated with the next tick.
func (n *Node) changeVoters(ctx context.Context) bool {
	n.voterMu.Lock()
	defer n.voterMu.Unlock()
	change := state.Electorate(n.electors(n.liveNodes()), n.ident.UID)
	ctx, cancel := context.WithTimeout(ctx, votersTimeout)
	defer cancel()
	var err error
	switch change.Kind {
	case state.NoChange:
		return false
	case state.AddStandby:
		err = n.consensus.AddStandby(ctx, change.UID)
	case state.Promote:
		if !n.isAnswering(ctx, change.UID) {
			return false
		}
		err = n.consensus.Promote(ctx, change.UID)
	case state.Demote:
		err = n.consensus.Demote(ctx, change.UID)
	case state.RemoveMember:
		if !n.isRemovalDelivered(change.UID, time.Now()) {
			return false
		}
		err = n.consensus.Remove(ctx, change.UID)
	}
	if errors.Is(err, cluster.ErrNotLeader) || err != nil && !n.store.Leader() {
		return false // the next leader makes the change
	}
	if err != nil {
		n.log.Warn("voters could not be changed, trying again", slog.String("change", change.Kind.String()),
			slog.String("peer", n.nodeName(change.UID)), slog.Any("err", err))
		return false
	}
	n.log.Info("consensus changed", slog.String("change", change.Kind.String()),
		slog.String("peer", n.nodeName(change.UID)))
	return true
}

// removedMember is the node that consensus removes next, and when this leader first saw that the node is no
// longer a member of the cluster.
type removedMember struct {
	uid   string
	since time.Time
}

// isRemovalDelivered reports whether consensus has continued to send to a removed node for disconnectDelay.
// The node learns of its removal, and ends, only by an entry that is committed there too. Raft stops sending
// at once when the node is taken out of its members.
func (n *Node) isRemovalDelivered(uid string, now time.Time) bool {
	if n.removing.uid != uid {
		n.removing = removedMember{uid, now}
	}
	return now.Sub(n.removing.since) >= disconnectDelay
}

// isAnswering asks a standby for a sign of life. Its lease may be seconds old, and a dead voter can cost a
// small cluster its majority.
func (n *Node) isAnswering(ctx context.Context, uid string) bool {
	ctx, cancel := context.WithTimeout(ctx, votersInterval)
	defer cancel()
	for id, rec := range n.store.State().Nodes {
		if rec.UID != uid {
			continue
		}
		_, _, err := n.peering.nodeView(id).Statuses(ctx)
		if err != nil {
			n.log.Debug("a standby gets no vote yet", slog.String("standby", id), slog.Any("err", err))
		}
		return err == nil
	}
	return false
}

// electors returns the control nodes and the other members of consensus. live holds the names of the nodes
// that answer.
func (n *Node) electors(live map[string]bool) []state.Elector {
	in := map[string]cluster.Member{}
	for _, m := range n.consensus.Members() {
		in[m.UID] = m
	}
	var out []state.Elector
	known := map[string]bool{}
	for _, rec := range n.store.State().Nodes {
		m, member := in[rec.UID]
		known[rec.UID] = true
		control := nodeHasRole(rec, state.RoleControl)
		if !control && !member {
			continue
		}
		out = append(out, state.Elector{
			UID: rec.UID, Node: rec.ID, Zone: rec.Zone, Control: control, Lost: rec.Lost, Member: member,
			Voter: m.Voter,
			Live:  !rec.Lost && live[rec.ID] && (!member || n.consensus.IsCloseBehind(rec.UID)),
		})
	}
	for uid, m := range in {
		if !known[uid] {
			out = append(out, state.Elector{UID: uid, Member: true, Voter: m.Voter})
		}
	}
	return out
}

// liveNodes returns the nodes that renew their leases, and this node.
func (n *Node) liveNodes() map[string]bool {
	out := map[string]bool{n.cfg.NodeID: true}
	l := n.leading.Load()
	if l == nil {
		return out
	}
	list := l.control.Nodes()
	for i := range list {
		if s := list[i].State; s == "alive" || s == "draining" || s == "drained" {
			out[list[i].Node] = true
		}
	}
	return out
}

// isVoter reports whether a node is a voter.
func (n *Node) isVoter(uid string) bool {
	for _, m := range n.members() {
		if m.UID == uid {
			return m.Voter
		}
	}
	return false
}

// describeVoters is a hint for the time without a leader: the voters, and those that gossip does not see.
func (n *Node) describeVoters() string {
	var all, silent []string
	for _, m := range n.members() {
		if !m.Voter {
			continue
		}
		name := n.nodeName(m.UID)
		all = append(all, name)
		if g, ok := n.peering.gossipMember(m.UID); m.UID != n.ident.UID && n.peering != nil &&
			n.peering.gossip != nil && (!ok || g.State != membership.Alive) {
			silent = append(silent, name)
		}
	}
	slices.Sort(all)
	slices.Sort(silent)
	switch {
	case len(all) == 0:
		return "a majority of the voters has to be there"
	case len(silent) == 0:
		return "votes: " + strings.Join(all, ", ")
	case len(silent) == 1:
		return "votes: " + strings.Join(all, ", ") + "; " + silent[0] + " is not heard"
	}
	return "votes: " + strings.Join(all, ", ") + "; " + strings.Join(silent, ", ") + " are not heard"
}

// nodeName is the name of a member of consensus, or its UID if the state does not have it.
func (n *Node) nodeName(uid string) string {
	for id, rec := range n.store.State().Nodes {
		if rec.UID == uid {
			return id
		}
	}
	return uid
}

// errNoLeader answers a request that needs a leader while no node leads.
func (n *Node) errNoLeader() error {
	return problem.New(problem.Unavailable, "no node leads the cluster at this moment").
		WithHint("an election takes a second or two; if it stays so, a majority of the voters is not "+
			"there (%s): "+
			"start those that are down", n.describeVoters())
}

func nodeHasRole(rec *state.Node, role state.Role) bool {
	for _, r := range rec.Roles {
		if r == role {
			return true
		}
	}
	return false
}

// checkLeave reports whether a node could be removed after a drain. It changes nothing. `leave` asks before
// it drains, so that no node is drained in vain.
func (n *Node) checkLeave(ctx context.Context, id string) error {
	n.voterMu.Lock()
	defer n.voterMu.Unlock()
	if err := n.store.State().CheckLeave(id); err != nil {
		return err
	}
	_, err := n.checkVoteTransfer(ctx, id)
	return err
}

// remove takes a node's vote and then removes the node. Demote before removing: removing a live voter can
// leave the rest permanently without a quorum. No vote changes before the removal is known to be acceptable
// and the remaining voters have a living majority. The lock is held to the end, because maintainCluster would
// give the vote back.
func (n *Node) remove(ctx context.Context, l *leaderActors, id string) error {
	n.voterMu.Lock()
	defer n.voterMu.Unlock()
	if err := n.store.State().CheckRemoval(id); err != nil {
		return err
	}
	successor, err := n.checkVoteTransfer(ctx, id)
	if err != nil {
		return err
	}
	if err := n.transferVote(ctx, n.store.State().Nodes[id], successor); err != nil {
		return err
	}
	return l.control.Remove(ctx, id)
}

// checkVoteTransfer is state.CheckUnvote with the voters that answer at this moment.
func (n *Node) checkVoteTransfer(ctx context.Context, id string) (successor string, err error) {
	rec := n.store.State().Nodes[id]
	if rec == nil || !n.isVoter(rec.UID) {
		return "", nil
	}
	return state.CheckUnvote(n.electors(n.answeringMembers(ctx)), n.ident.UID, rec.UID)
}

// answeringMembers returns the members of consensus, by name, that answer at this moment, and this node. A
// lease is too old for this question: a node that died seconds ago still has one.
func (n *Node) answeringMembers(ctx context.Context) map[string]bool {
	out := map[string]bool{n.cfg.NodeID: true}
	member := map[string]bool{}
	for _, m := range n.members() {
		member[m.UID] = m.UID != n.ident.UID
	}
	var mu sync.Mutex
	var asked sync.WaitGroup
	for id, rec := range n.store.State().Nodes {
		if !member[rec.UID] || rec.Lost {
			continue
		}
		asked.Go(func() {
			isAnswering := n.isAnswering(ctx, rec.UID)
			mu.Lock()
			defer mu.Unlock()
			out[id] = isAnswering
		})
	}
	asked.Wait()
	return out
}

// transferVote takes a node's vote after its successor got one. If the node leads, it first hands the
// leadership over, and the caller must ask the new leader.
func (n *Node) transferVote(ctx context.Context, rec *state.Node, successor string) error {
	if !n.isVoter(rec.UID) {
		return nil
	}
	if successor != "" {
		if err := n.consensus.Promote(ctx, successor); err != nil {
			return err
		}
	}
	if rec.UID != n.ident.UID {
		return n.consensus.Demote(ctx, rec.UID) // it stays a standby until it learns of its removal
	}
	if err := n.consensus.StepDown(ctx); err != nil {
		return err
	}
	return problem.New(problem.Unavailable, "node %s leads and votes: another one takes that over first",
		rec.ID).
		WithHint("try again in some seconds")
}
