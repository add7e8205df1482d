// Package noderpc is the wire between nodes: gRPC services over the interfaces of actors/msg, the ranks'
// streams, and the data port, each with both its ends.
package noderpc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
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
// fails. Errors: state.ErrUnknownNode, errNoAddress, errUnreachable after Close.
func (c *Conns) Get(node string) (*grpc.ClientConn, error) {
	nodes := c.cfg.Nodes()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, problem.New(problem.Unavailable, "node %s %w: this node is stopping", node,
			errUnreachable)
	}
	c.prune(nodes)
	n := nodes[node]
	if n == nil {
		return nil, problem.New(problem.NotFound, "%w %q", state.ErrUnknownNode,
			node).WithHint("see `dpserve nodes`")
	}
	if n.Address == "" {
		return nil, problem.New(problem.Unavailable, "node %s %w", node,
			errNoAddress).WithHint("start it with --advertise IP")
	}
	if h, ok := c.open[node]; ok {
		return h.conn, nil
	}
	conn, err := c.cfg.Dial(n.Address, n.UID)
	if err != nil {
		return nil, problem.New(problem.Unavailable, "node %s %w: %s", node, errUnreachable, err.Error())
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

// errUnsent is in the chain beside errUnreachable if the node has not received the call.
var errUnsent = errors.New("not sent")

// callNode calls a node, for at most limit, and returns its answer or its error as an in-process call would:
// typed refusals, errUnreachable, context.DeadlineExceeded (problem.Timeout) after limit, and the cause of
// ctx if that ended first.
func callNode[In, Out any](
	ctx context.Context, conns *Conns, node string, limit time.Duration, c call[In, Out], in *In,
) (none Out, err error) {
	conn, err := conns.Get(node)
	if err != nil {
		return none, addUnreachable(err, errUnsent)
	}
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var at peer.Peer
	out, err := c.to(inner, conn, in, grpc.Peer(&at))
	switch {
	case err == nil:
		return out, nil
	case hasEnded(ctx):
		return none, fmt.Errorf("ask node %s: %w", node, context.Cause(ctx))
	}
	err = fromStatus(node, err)
	if at.Addr == nil && mayRetryElsewhere(err) {
		err = addUnreachable(err, errUnsent)
	}
	return none, err
}

// hasEnded says whether ctx has ended. If its deadline has passed it waits for the end: the node that was
// called has the same deadline, and may have reached it a moment earlier.
func hasEnded(ctx context.Context) bool {
	if d, ok := ctx.Deadline(); ok && !time.Now().Before(d) {
		<-ctx.Done()
	}
	return ctx.Err() != nil
}

// addUnreachable adds errUnreachable and the errors of is to the chain of err.
func addUnreachable(err error, is ...error) error {
	e := problem.New(problem.CodeOf(err), "%w",
		&wireError{text: err.Error(), is: append([]error{err, errUnreachable}, is...)})
	if inner, ok := errors.AsType[*problem.Error](err); ok {
		e.Hint = inner.Hint
	}
	return e
}

// mayRetryElsewhere says whether an error comes from the node that was asked, and not from the question:
// another node, or the next leader, may answer it.
func mayRetryElsewhere(err error) bool {
	return slices.ContainsFunc([]error{
		errUnreachable, cluster.ErrNotLeader, cluster.ErrClosed, inbox.ErrStopped, context.DeadlineExceeded,
	}, func(e error) bool { return errors.Is(err, e) })
}

// Bounds of requests, in bytes. The largest one is a report with all its log lines. The connections of the
// node port bound the replies.
const (
	maxRequest     = 16 << 20
	maxEnroll      = 1 << 20
	maxEnrollCalls = 64     // calls of strangers on one connection
	maxMemberCalls = 10_000 // calls of one member on one connection; the bound is admission
)

// ServerOptions are the options of the gRPC server for members: bounds, and a counter of methods that this
// version does not know, which it refuses.
func ServerOptions(unknown func(what string)) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxRequest), grpc.MaxConcurrentStreams(maxMemberCalls),
		grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
			unknown("method")
			return status.Error(codes.Unimplemented, "unknown method")
		}),
	}
}

// EnrollOptions are the options of the gRPC server for strangers: it serves Enroll alone, in small messages.
func EnrollOptions() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.MaxRecvMsgSize(maxEnroll), grpc.MaxConcurrentStreams(maxEnrollCalls)}
}
