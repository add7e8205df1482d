package server

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

var _ msg.Store = deferredStore{}

// State implements msg.Store.
func (l deferredStore) State() *state.State {
	if s := l.n.openedStore.Load(); s != nil {
		return (*s).State()
	}
	return state.New()
}

// Changed implements msg.Store.
func (l deferredStore) Changed() <-chan struct{} {
	if s := l.n.openedStore.Load(); s != nil {
		return (*s).Changed()
	}
	return nil
}

// peers returns the cluster's nodes by name: those of the state, or the seeds while the state is not there
// yet.
func (n *Node) peers() map[string]*state.Node {
	if nodes := (deferredStore{n}).State().Nodes; len(nodes) > 0 || n.peering == nil {
		return nodes
	}
	out := map[string]*state.Node{}
	for i := range n.peering.seeds {
		out[n.peering.seeds[i].ID] = &n.peering.seeds[i]
	}
	return out
}

// peersAtLastAddress returns peers, each at the address where it was seen last. The state's address may be
// older than a move, and only the moved node can change it, through the leader.
func (n *Node) peersAtLastAddress() map[string]*state.Node {
	nodes := n.peers()
	if n.peering == nil {
		return nodes
	}
	seen, out := n.peering.lastAddresses(), maps.Clone(nodes) // the state's own map is shared
	for id, rec := range nodes {
		if address := seen[rec.UID]; address != "" && address != rec.Address {
			now := *rec
			now.Address = address
			out[id] = &now
		}
	}
	return out
}

// peerAtLastAddress returns one node of peers at the address where it was seen last.
func (n *Node) peerAtLastAddress(id string) *state.Node {
	rec := n.peers()[id]
	if rec == nil || n.peering == nil {
		return rec
	}
	return n.peering.withLastAddress(rec)
}

// leaderUID is the leader's UID, as far as this node knows.
func (n *Node) leaderUID() (uid string, known bool) {
	if s := n.openedStore.Load(); s != nil {
		return (*s).LeaderNode()
	}
	return "", false
}

// isRemoved reports whether the cluster has removed a node.
func (n *Node) isRemoved(uid string) bool {
	return slices.Contains((deferredStore{n}).State().Removed, uid)
}

// hasRole reports whether this node has a role.
func (n *Node) hasRole(role state.Role) bool { return slices.Contains(n.cfg.Roles, string(role)) }

// leaderHandler implements api.Forward: it forwards to the leader unless this node leads. A node that knows
// no leader and whose disk refuses writes answers itself with that fault.
func (n *Node) leaderHandler() (http.Handler, bool) {
	if n.peering == nil || n.leading.Load() != nil {
		return nil, false
	}
	uid, ok := n.leaderUID()
	if !ok || uid == n.ident.UID { // elected a moment ago, and not ready
		return nil, n.diskFault() == nil
	}
	for id, rec := range n.peers() {
		if rec.UID == uid {
			return n.peering.adminProxy(id), true
		}
	}
	return nil, true
}

// watchRemoval ends the connections of nodes that the cluster has removed, and this node when it is removed
// itself.
func (n *Node) watchRemoval(ctx context.Context) {
	for seen := ""; ; {
		changed := n.store.Changed()
		// Removed is bounded, so compare its last entry, not its length
		if gone := n.store.State().Removed; len(gone) > 0 && gone[len(gone)-1] != seen && n.peering != nil {
			seen = gone[len(gone)-1]
			n.loops.Go(func() { n.disconnectRemoved(ctx, gone) })
		}
		if n.isRemoved(n.ident.UID) {
			n.log.Info("this node was removed from its cluster")
			n.peering.noteRemoval()
			n.hasLeft.Store(true)
			close(n.removedFromCluster)
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// disconnectRemoved ends the connections with removed nodes after cluster.DisconnectDelay, so that a node that asked
// to leave still gets the answer.
func (n *Node) disconnectRemoved(ctx context.Context, uids []string) {
	select {
	case <-time.After(cluster.DisconnectDelay):
	case <-ctx.Done():
		return
	}
	for _, uid := range uids {
		n.peering.port.Disconnect(uid)
	}
}

// FirstToken returns the address and the token with which other machines join, after the very first start of
// a cluster; else it is empty.
func (n *Node) FirstToken() (address, token string) {
	if n.firstToken == "" {
		return "", ""
	}
	return n.peering.address, n.firstToken
}

// Left reports whether the cluster has removed this node.
func (n *Node) Left() bool { return n.hasLeft.Load() }

// createFirstToken makes the token that the first start prints.
func (n *Node) createFirstToken(ctx context.Context) error {
	if !n.peering.founding {
		return nil
	}
	t, err := n.newToken(ctx, FirstTokenTTL, FirstTokenUses)
	n.firstToken = t.Token
	return err
}

// registeredTimeout bounds how long a new node waits until the cluster knows its resources. The node's first
// renewal reports them.
const registeredTimeout = 5 * time.Second

// awaitRegistered waits until the cluster knows this node's resources: users often deploy right after `join`
// returns.
func (n *Node) awaitRegistered(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, registeredTimeout)
	defer cancel()
	for {
		changed := n.store.Changed() // Changed comes before State, so that no change in between is missed
		if rec := n.store.State().Nodes[n.cfg.NodeID]; rec != nil && rec.Offer.Slots == n.offer.Slots &&
			rec.Offer.PortLo == n.offer.PortLo {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			// no warning when the node is stopped meanwhile
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				n.log.Warn("the cluster does not know yet what this node offers")
			}
			return
		}
	}
}

// handOverLeadership lets another node lead before this one ends.
func (n *Node) handOverLeadership() {
	if n.consensus == nil || n.peering == nil {
		return
	}
	ctx, cancel := context.WithTimeout(n.runCtx, handOverTime)
	defer cancel()
	if err := n.consensus.StepDown(ctx); err != nil && problem.CodeOf(err) != problem.Conflict {
		n.log.Warn("leadership was not handed over", slog.Any("err", err))
	}
}

// handOverTime bounds a change of leader that this node asks for.
const handOverTime = 3 * time.Second

// raftLayer is raft's transport between nodes.
type raftLayer struct {
	port *nodeport.Port
	net.Listener
	giveUp context.CancelCauseFunc // ends the wait for a leader
}

var _ cluster.Layer = raftLayer{}

// Dial implements cluster.Layer. It connects only to the node with this UID.
func (l raftLayer) Dial(uid, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := l.port.Dial(ctx, nodeport.Raft, address, uid)
	if errors.Is(err, nodeport.ErrRemoved) {
		l.giveUp(err)
	}
	if err != nil {
		return nil, err // not a nil *Conn in an interface
	}
	return c, nil
}

// localAgent returns the agent for the leader's commands, on a node with role worker.
func (n *Node) localAgent() msg.NodeAgent {
	if !n.hasRole(state.RoleWorker) {
		return nil
	}
	return n.node
}

// members returns the nodes that take part in consensus; nil on a node that does not.
func (n *Node) members() []cluster.Member {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Members()
}

// deferredStore is a msg.Store for components that are constructed before the store is open. It is empty
// until then.
type deferredStore struct{ n *Node }

// isVoter reports whether a node is a voter.
func (n *Node) isVoter(uid string) bool {
	return slices.Contains(n.members(), cluster.Member{UID: uid, Voter: true})
}

// renewingNodes returns the nodes that renew their leases with this leader.
func (n *Node) renewingNodes() map[string]bool {
	out := map[string]bool{}
	if l := n.leading.Load(); l != nil {
		for _, s := range l.control.Nodes() {
			out[s.Node] = s.State == "alive" || s.State == "draining" || s.State == "drained"
		}
	}
	return out
}

// askNode asks another node for a sign of life.
func (n *Node) askNode(ctx context.Context, node string) error {
	_, _, err := n.peering.nodeView(node).Statuses(ctx)
	return err
}

// describeVoters is a hint for the time without a leader.
func (n *Node) describeVoters() string {
	return cluster.DescribeVoters(n.store.State(), n.members(), n.peering.isHeard)
}

// isHeard reports whether gossip sees a node. It is true of this node, and of all nodes without gossip.
func (m *peering) isHeard(uid string) bool {
	if m == nil || m.gossip == nil || uid == m.n.ident.UID {
		return true
	}
	g, ok := m.gossipMember(uid)
	return ok && g.State == membership.Alive
}

// errNoLeader answers a request that needs a leader while no node leads.
func (n *Node) errNoLeader() error {
	return problem.New(problem.Unavailable, "no node leads the cluster at this moment").
		WithHint("an election takes a second or two; if it stays so, a majority of the voters is not "+
			"there (%s): start those that are down", n.describeVoters())
}
