package remote

import (
	"errors"
	"sync"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ConnsConfig is what a Conns is made of. Both are required.
type ConnsConfig struct {
	// Dial makes a connection to the node port at address that accepts the node with that UID only. It must not wait for the peer.
	Dial func(address, uid string) (*grpc.ClientConn, error)
	// Nodes are the nodes there are, by name: those of the state, or the seeds of a join while the state is not there yet.
	Nodes func() map[string]*state.Node
}

// Conns holds one gRPC connection per node, made at its first use. A node that moved gets a new one, one that was removed none.
// Safe for concurrent use.
type Conns struct {
	cfg ConnsConfig

	mu     sync.Mutex
	held   map[string]held // by node; never more than there are nodes
	closed bool
}

// held is a connection and whom it was made for.
type held struct {
	address, uid string
	conn         *grpc.ClientConn
}

// NewConns makes a Conns without connections.
func NewConns(cfg ConnsConfig) *Conns { return &Conns{cfg: cfg, held: map[string]held{}} }

// Get gives the connection to a node. It does not wait: a node that cannot be reached fails the first call. Errors:
// state.ErrUnknownNode, ErrNoAddress, ErrUnreachable after Close.
func (c *Conns) Get(node string) (*grpc.ClientConn, error) {
	nodes := c.cfg.Nodes()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, problem.New(problem.Unavailable, "node %s %w: this node is stopping", node, ErrUnreachable)
	}
	c.prune(nodes)
	n := nodes[node]
	if n == nil {
		return nil, problem.New(problem.NotFound, "%w %q", state.ErrUnknownNode, node).WithHint("see `dpserve nodes`")
	}
	if n.Address == "" {
		return nil, problem.New(problem.Unavailable, "node %s %w", node, ErrNoAddress).WithHint("start it with --advertise IP")
	}
	if h, ok := c.held[node]; ok {
		return h.conn, nil
	}
	conn, err := c.cfg.Dial(n.Address, n.UID)
	if err != nil {
		return nil, problem.New(problem.Unavailable, "node %s %w: %s", node, ErrUnreachable, err.Error())
	}
	c.held[node] = held{address: n.Address, uid: n.UID, conn: conn}
	return conn, nil
}

// prune closes the connections to nodes that are no more, or are elsewhere now.
func (c *Conns) prune(nodes map[string]*state.Node) {
	for node, h := range c.held {
		if n := nodes[node]; n == nil || n.Address != h.address || n.UID != h.uid {
			_ = h.conn.Close() // it can only say that it is closed already
			delete(c.held, node)
		}
	}
}

// Close ends every connection. Calls under way fail. Idempotent.
func (c *Conns) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var errs []error
	for node, h := range c.held {
		errs = append(errs, h.conn.Close())
		delete(c.held, node)
	}
	return errors.Join(errs...)
}
