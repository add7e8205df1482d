package wiring

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// late is the state for those who are made before the store.
type late struct{ n *Node }

var _ msg.Store = late{}

// State implements msg.Store.
func (l late) State() *state.State {
	if s := l.n.opened.Load(); s != nil {
		return (*s).State()
	}
	return state.New()
}

// Changed implements msg.Store.
func (l late) Changed() <-chan struct{} {
	if s := l.n.opened.Load(); s != nil {
		return (*s).Changed()
	}
	return nil
}

// peers are the nodes there are, by name: those of the state, or while it is not there yet those that this node joined at.
func (n *Node) peers() map[string]*state.Node {
	if nodes := (late{n}).State().Nodes; len(nodes) > 0 || n.mesh == nil {
		return nodes
	}
	out := map[string]*state.Node{}
	for i := range n.mesh.seeds {
		out[n.mesh.seeds[i].ID] = &n.mesh.seeds[i]
	}
	return out
}

// reachable are peers, each at the address where it was seen last: the state's may be older than a move, and only the node that moved
// could change it, by way of the leader.
func (n *Node) reachable() map[string]*state.Node {
	nodes := n.peers()
	if n.mesh == nil {
		return nodes
	}
	seen, out := n.mesh.sightings(), maps.Clone(nodes) // the state's own map is shared
	for id, rec := range nodes {
		if address := seen[rec.UID]; address != "" && address != rec.Address {
			now := *rec
			now.Address = address
			out[id] = &now
		}
	}
	return out
}

// peer is one of peers, at the address where it was seen last.
func (n *Node) peer(id string) *state.Node {
	rec := n.peers()[id]
	if rec == nil || n.mesh == nil {
		return rec
	}
	return n.mesh.moved(rec)
}

// leaderUID is the node that leads, as far as this one knows.
func (n *Node) leaderUID() (uid string, known bool) {
	if s := n.opened.Load(); s != nil {
		return (*s).LeaderNode()
	}
	return "", false
}

// removed says that a node was removed from the cluster.
func (n *Node) removed(uid string) bool { return slices.Contains((late{n}).State().Removed, uid) }

// has says whether this node has a role.
func (n *Node) has(role state.Role) bool { return slices.Contains(n.cfg.Roles, string(role)) }

// forward is api.Forward: the way to the leader, unless it is here. A node that knows no leader and whose disk refuses writes answers
// itself, and says so.
func (n *Node) forward() (http.Handler, bool) {
	if n.mesh == nil || n.leads.Load() != nil {
		return nil, false
	}
	uid, ok := n.leaderUID()
	if !ok || uid == n.ident.UID { // elected a moment ago, and not ready
		return nil, n.diskFault() == nil
	}
	for id, rec := range n.peers() {
		if rec.UID == uid {
			return n.mesh.toAdmin(id), true
		}
	}
	return nil, true
}

// watchOut ends the connections of nodes that the cluster has removed, and this node when it is one of them.
func (n *Node) watchOut(ctx context.Context) {
	for seen := ""; ; {
		changed := n.store.Changed()
		if gone := n.store.State().Removed; len(gone) > 0 && gone[len(gone)-1] != seen && n.mesh != nil { // its length is bounded
			seen = gone[len(gone)-1]
			n.loops.Go(func() { n.partFrom(ctx, gone) })
		}
		if n.removed(n.ident.UID) {
			n.log.Info("this node was removed from its cluster")
			n.mesh.noteRemoval()
			n.left.Store(true)
			close(n.out)
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// partFrom ends the connections with removed nodes: a moment later, or a node that asked to leave would not hear that it has.
func (n *Node) partFrom(ctx context.Context, uids []string) {
	select {
	case <-time.After(farewell):
	case <-ctx.Done():
		return
	}
	for _, uid := range uids {
		n.mesh.port.Disconnect(uid)
	}
}

// farewell is how long the connections of a removed node live on.
const farewell = time.Second

// FirstToken is where and with what other machines join, right after the very first start of a cluster; else empty.
func (n *Node) FirstToken() (address, token string) {
	if n.firstToken == "" {
		return "", ""
	}
	return n.mesh.address, n.firstToken
}

// Left says that this node was removed from its cluster.
func (n *Node) Left() bool { return n.left.Load() }

// firstJoin makes the token that the first start prints.
func (n *Node) firstJoin(ctx context.Context) error {
	if !n.mesh.founding {
		return nil
	}
	t, err := n.newToken(ctx, FirstTokenTTL, FirstTokenUses)
	n.firstToken = t.Token
	return err
}

// knownWait bounds how long a node that has just come waits until the cluster knows what it offers. Its first renewal says it.
const knownWait = 5 * time.Second

// known waits until a deploy would find room on this node: who is told that a node has joined deploys next.
func (n *Node) known(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, knownWait)
	defer cancel()
	for {
		changed := n.store.Changed() // before State, or a change in between goes unseen
		if rec := n.store.State().Nodes[n.cfg.NodeID]; rec != nil && rec.Offer.Slots == n.offer.Slots && rec.Offer.PortLo == n.offer.PortLo {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) { // not a node that is told to end at once
				n.log.Warn("the cluster does not know yet what this node offers")
			}
			return
		}
	}
}

// handOver lets another node lead before this one goes.
func (n *Node) handOver() {
	if n.consensus == nil || n.mesh == nil {
		return
	}
	ctx, cancel := context.WithTimeout(n.killed, handOverTime)
	defer cancel()
	if err := n.consensus.StepDown(ctx); err != nil && problem.CodeOf(err) != problem.Conflict {
		n.log.Warn("leadership was not handed over", slog.Any("err", err))
	}
}

// handOverTime bounds a change of leaders that this node asks for.
const handOverTime = 3 * time.Second

// raftLayer is raft's way between nodes.
type raftLayer struct {
	port *nodeport.Port
	net.Listener
	giveUp context.CancelCauseFunc // ends the wait for a leader
}

var _ cluster.Layer = raftLayer{}

// Dial implements cluster.Layer: nobody but the node with the UID will do.
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

// ranksHere takes the leader's orders, on a node with role worker.
func (n *Node) ranksHere() msg.NodeAgent {
	if !n.has(state.RoleWorker) {
		return nil
	}
	return n.node
}

// members are the nodes that take part in consensus; none are known on a node that does not.
func (n *Node) members() []cluster.Member {
	if n.consensus == nil {
		return nil
	}
	return n.consensus.Members()
}

// dial is the way of remote.Conns; a node that stands alone reaches nobody.
func (m *mesh) dial(address, uid string) (*grpc.ClientConn, error) {
	if m == nil {
		return nil, errors.New("this node stands alone")
	}
	return m.port.GRPC(address, uid)
}

// resolve finds a node's port before the state does: as the gossip knows it, or where this node joined.
func (m *mesh) resolve(uid string) (string, bool) {
	if address, ok := m.sighted(uid); ok {
		return address, true
	}
	for i := range m.seeds {
		if m.seeds[i].UID == uid {
			return m.seeds[i].Address, true
		}
	}
	return "", false
}
