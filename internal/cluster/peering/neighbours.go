package peering

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Neighbours knows the nodes of the cluster and where they are. The state's addresses may be older than a
// move, and only the moved node can change them, through the leader; gossip sees a move first. Before the
// state is there, the nodes at the time of the join are known.
type Neighbours struct {
	self    string // UID of this node
	store   Store
	log     *slog.Logger
	seeds   []state.Node       // the other nodes at the time of the join
	gossip  *membership.Gossip // nil on a network without packets
	address string             // of this node's gossip

	// the control node at the address of a join with a member's data dir, with UID and address only; nil =
	// unknown, or no longer needed
	met atomic.Pointer[state.Node]
}

// All returns the cluster's nodes by name, each at the address where it was seen last.
func (b *Neighbours) All() map[string]*state.Node {
	nodes := b.known()
	out := make(map[string]*state.Node, len(nodes)) // the state's own map is shared
	for id := range nodes {
		out[id] = b.Get(id)
	}
	return out
}

// Get returns one node of All; nil if there is none.
func (b *Neighbours) Get(id string) *state.Node {
	rec := b.known()[id]
	if rec == nil {
		return nil
	}
	address, ok := b.lastAddress(rec.UID)
	if !ok || address == rec.Address {
		return rec
	}
	moved := *rec
	moved.Address = address
	return &moved
}

// known returns the nodes of the state by name, or the seeds while the state is not there yet.
func (b *Neighbours) known() map[string]*state.Node {
	if nodes := b.store.State().Nodes; len(nodes) > 0 {
		return nodes
	}
	out := map[string]*state.Node{}
	for i := range b.seeds {
		out[b.seeds[i].ID] = &b.seeds[i]
	}
	return out
}

// lastAddress is a node's address as gossip reports it, or as the operator gave it with a join.
func (b *Neighbours) lastAddress(uid string) (address string, ok bool) {
	if g, ok := b.Seen(uid); ok && g.Address != "" {
		return g.Address, true
	}
	if met := b.met.Load(); met != nil && met.UID == uid {
		return met.Address, true
	}
	return "", false
}

// Resolve finds a node's address before the state is there: from gossip, or from the seeds of the join.
func (b *Neighbours) Resolve(uid string) (string, bool) {
	if address, ok := b.lastAddress(uid); ok {
		return address, true
	}
	for i := range b.seeds {
		if b.seeds[i].UID == uid {
			return b.seeds[i].Address, true
		}
	}
	return "", false
}

// Seen returns the gossip entry of a node that is alive.
func (b *Neighbours) Seen(uid string) (found membership.Member, ok bool) {
	if b.gossip == nil {
		return found, false
	}
	return b.gossip.Find(uid)
}

// IsHeard reports whether gossip sees a node. It is true of this node, and of all nodes without gossip.
func (b *Neighbours) IsHeard(uid string) bool {
	_, ok := b.Seen(uid)
	return ok || b.gossip == nil || uid == b.self
}

// rejoinRetry is the pause between two attempts to identify the node at the address of a join.
const rejoinRetry = time.Second

// FindAt finds out which control node is at the address of a join with a member's data dir. That node may
// have moved there while this one was off. The result is used until ctx ends, when the state is there.
func (b *Neighbours) FindAt(ctx context.Context, port *nodeport.Port, address string) {
	defer b.met.Store(nil)
	for warned := false; ; {
		c, err := port.Dial(ctx, nodeport.Renew, address, "")
		if err == nil {
			b.met.Store(&state.Node{UID: c.Peer.UID, Address: address})
			_ = c.Close() // the handshake has identified the node
			<-ctx.Done()
			return
		}
		if !warned && ctx.Err() == nil {
			warned = true
			b.log.Info("the address of the join does not answer yet",
				slog.String("address", address), slog.Any("err", err))
		}
		if pause.For(ctx, rejoinRetry) != nil {
			return
		}
	}
}

// gossipSeeds returns the gossip addresses of the other nodes.
func (b *Neighbours) gossipSeeds() []string {
	var out []string
	for _, rec := range b.known() {
		if rec.UID != b.self && rec.Gossip != "" {
			out = append(out, rec.Gossip)
		}
	}
	return out
}

// Transports holds the HTTP connections to other nodes. A node that moved gets new ones; a removed node gets
// none. Safe for concurrent use.
type Transports struct {
	port *nodeport.Port
	node func(id string) *state.Node

	mu   sync.Mutex
	open map[string]transports // by node
}

// transports are those to one node.
type transports struct {
	address, uid string
	data         *nodeport.Transport
	admin        *http.Transport
}

func newTransports(port *nodeport.Port, node func(id string) *state.Node) *Transports {
	return &Transports{port: port, node: node, open: map[string]transports{}}
}

// Data returns the transport to a node's data port and does not wait for a connection.
func (w *Transports) Data(id string) (*nodeport.Transport, error) {
	t, err := w.to(id)
	return t.data, err
}

// Admin returns the transport to a node's admin API and does not wait for a connection.
func (w *Transports) Admin(id string) (http.RoundTripper, error) {
	t, err := w.to(id)
	return t.admin, err
}

func (w *Transports) to(id string) (transports, error) {
	n := w.node(id)
	if n == nil || n.Address == "" {
		return transports{}, problem.New(problem.Unavailable, "there is no way to node %s", id).
			WithHint("see `dpserve nodes`")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if t, ok := w.open[id]; ok && t.address == n.Address && t.uid == n.UID {
		return t, nil
	}
	for old, t := range w.open {
		if now := w.node(old); now == nil || now.Address != t.address || now.UID != t.uid {
			t.close() // the node has moved: requests on these connections have failed already
			delete(w.open, old)
		}
	}
	t := transports{
		address: n.Address, uid: n.UID, data: w.port.Transport(n.Address, n.UID),
		admin: w.port.AdminTransport(n.Address, n.UID),
	}
	w.open[id] = t
	return t, nil
}

func (t transports) close() {
	t.data.Close()
	t.admin.CloseIdleConnections()
}

func (w *Transports) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, t := range w.open {
		t.close()
		delete(w.open, id)
	}
}
