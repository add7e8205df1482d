package remote

import (
	"errors"
	"sync"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// ConnsConfig is the configuration of a Conns. All fields are required.
type ConnsConfig struct {
	// Dial makes a connection to the node port at address that accepts the node with that UID only. It must
	// not wait for the peer.
	Dial func(address, uid string) (*grpc.ClientConn, error)
	// Nodes returns the known nodes by name: those of the state, or the seeds of a join while the state is
	// not there yet.
	Nodes func() map[string]*state.Node
}

// Conns holds one gRPC connection per node and opens it at its first use. A node that moved gets a new one;
// that of a removed node is closed. Safe for concurrent use.
type Conns struct {
	cfg ConnsConfig

	mu     sync.Mutex
	open   map[string]openConn // by node; never more than there are nodes
	closed bool
}

// openConn is a connection and the node it was made for.
type openConn struct {
	address, uid string
	conn         *grpc.ClientConn
}

// NewConns makes a Conns without connections.
func NewConns(cfg ConnsConfig) *Conns { return &Conns{cfg: cfg, open: map[string]openConn{}} }

// Get returns the connection to a node. It does not wait: if the node cannot be reached, the first call
// fails. Errors: state.ErrUnknownNode, ErrNoAddress, ErrUnreachable after Close.
func (c *Conns) Get(node string) (*grpc.ClientConn, error) {
	nodes := c.cfg.Nodes()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, problem.New(problem.Unavailable, "node %s %w: this node is stopping", node,
			ErrUnreachable)
	}
	c.prune(nodes)
	n := nodes[node]
	if n == nil {
		return nil, problem.New(problem.NotFound, "%w %q", state.ErrUnknownNode,
			node).WithHint("see `dpserve nodes`")
	}
	if n.Address == "" {
		return nil, problem.New(problem.Unavailable, "node %s %w", node,
			ErrNoAddress).WithHint("start it with --advertise IP")
	}
	if h, ok := c.open[node]; ok {
		return h.conn, nil
	}
	conn, err := c.cfg.Dial(n.Address, n.UID)
	if err != nil {
		return nil, problem.New(problem.Unavailable, "node %s %w: %s", node, ErrUnreachable, err.Error())
	}
	c.open[node] = openConn{address: n.Address, uid: n.UID, conn: conn}
	return conn, nil
}

// prune closes the connections to nodes that were removed, or moved.
func (c *Conns) prune(nodes map[string]*state.Node) {
	for node, h := range c.open {
		if n := nodes[node]; n == nil || n.Address != h.address || n.UID != h.uid {
			_ = h.conn.Close() // the only error is that it is closed already
			delete(c.open, node)
		}
	}
}

// Close ends every connection. Calls under way fail. It is idempotent.
func (c *Conns) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var errs []error
	for node, h := range c.open {
		errs = append(errs, h.conn.Close())
		delete(c.open, node)
	}
	return errors.Join(errs...)
}
