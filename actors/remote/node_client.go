package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
)

// How long a node may take.
const (
	orderLimit  = 5 * time.Second
	statusLimit = 2 * time.Second
	resetLimit  = 5 * time.Second
	logsIdle    = 60 * time.Second // between two pieces of a log that is not followed
)

// NodeClient is another node: msg.NodeAgent and msg.NodeView over the wire. It holds no connection of its own.
type NodeClient struct {
	conns *Conns
	node  string
}

var (
	_ msg.NodeAgent = (*NodeClient)(nil)
	_ msg.NodeView  = (*NodeClient)(nil)
)

// Node gives the client of a node by name. Its calls fail with state.ErrUnknownNode, ErrNoAddress or ErrUnreachable where the node
// cannot be asked.
func (c *Conns) Node(node string) *NodeClient { return &NodeClient{c, node} }

// StartRank implements msg.NodeAgent.
func (n *NodeClient) StartRank(ctx context.Context, m *msg.StartRank) error {
	req, err := encodeStartRank(m)
	if err != nil {
		return err
	}
	_, err = call(ctx, n.conns, n.node, orderLimit, func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (*dpservev1.StartRankReply, error) {
		return dpservev1.NewNodeClient(conn).StartRank(ctx, req, opts...)
	})
	return err
}

// StopRank implements msg.NodeAgent.
func (n *NodeClient) StopRank(ctx context.Context, m *msg.StopRank) error {
	_, err := call(ctx, n.conns, n.node, orderLimit, func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (*dpservev1.StopRankReply, error) {
		return dpservev1.NewNodeClient(conn).StopRank(ctx, encodeStopRank(m), opts...)
	})
	return err
}

// Statuses implements msg.NodeView.
func (n *NodeClient) Statuses(ctx context.Context) (ranks map[string][]msg.RankStatus, queued map[string]int, err error) {
	r, err := call(ctx, n.conns, n.node, statusLimit, func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (*dpservev1.StatusReply, error) {
		return dpservev1.NewNodeClient(conn).Status(ctx, &dpservev1.StatusRequest{}, opts...)
	})
	if err != nil {
		return nil, nil, err
	}
	if err = json.Unmarshal(r.GetRanks(), &ranks); err == nil {
		err = json.Unmarshal(r.GetQueued(), &queued)
	}
	if err != nil {
		return nil, nil, problem.New(problem.Internal, "read the status of node %s: %w", n.node, err).WithHint("run the same version of dpserve on every node")
	}
	return ranks, queued, nil
}

// ResetRouter implements msg.NodeView.
func (n *NodeClient) ResetRouter(ctx context.Context, app string) (int, error) {
	r, err := call(ctx, n.conns, n.node, resetLimit, func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (*dpservev1.ResetRouterReply, error) {
		return dpservev1.NewNodeClient(conn).ResetRouter(ctx, &dpservev1.ResetRouterRequest{App: app}, opts...)
	})
	return int(r.GetRanks()), err
}

// errIdle is the cause of a log that was given up.
var errIdle = errors.New("the log stands still")

// Logs implements msg.NodeView.
func (n *NodeClient) Logs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) error {
	conn, err := n.conns.Get(n.node)
	if err != nil {
		return unreached(err, errUnsent)
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !q.Follow {
		idle := time.AfterFunc(logsIdle, func() { cancel(errIdle) })
		defer idle.Stop()
		line := give
		give = func(l msg.LogLine) error { idle.Reset(logsIdle); return line(l) }
	}
	stream, err := dpservev1.NewNodeClient(conn).Logs(inner, encodeQuery(q), callOptions()...)
	if err == nil {
		err = n.read(stream, give)
	}
	return n.ended(ctx, inner, err)
}

// readerError wraps the error of a reader of lines, which goes back to it as it is.
type readerError struct{ err error }

func (e *readerError) Error() string { return e.err.Error() }

func (n *NodeClient) read(stream dpservev1.Node_LogsClient, give func(msg.LogLine) error) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, l := range m.GetLines() {
			if err := give(decodeLine(l)); err != nil {
				return &readerError{err}
			}
		}
	}
}

// ended says why a log came to its end; nil for its last line and, as in-process, for the end of ctx.
func (n *NodeClient) ended(ctx, inner context.Context, err error) error {
	var mine *readerError
	switch {
	case errors.Is(err, io.EOF) || over(ctx):
		return nil // the reader has what it wanted
	case errors.As(err, &mine):
		return mine.err
	case inner.Err() != nil:
		return problem.New(problem.Timeout, "node %s: %w for %s", n.node, context.Cause(inner), logsIdle).WithHint("look at `dpserve nodes`")
	default:
		return fmt.Errorf("logs: %w", fromStatus(n.node, err))
	}
}
