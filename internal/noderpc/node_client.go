package noderpc

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
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
)

// How long a node may take to answer.
const (
	orderLimit  = 5 * time.Second
	statusLimit = 2 * time.Second
	resetLimit  = 5 * time.Second
	logsIdle    = 60 * time.Second // between two pieces of a log that is not followed
)

// NodeClient is another node: msg.NodeAgent and msg.NodeView over the wire. It holds no connection of its
// own.
type NodeClient struct {
	conns *Conns
	node  string
}

var (
	_ msg.NodeAgent = (*NodeClient)(nil)
	_ msg.NodeView  = (*NodeClient)(nil)
)

// Node returns the client of a node by name. Its calls fail with state.ErrUnknownNode, errNoAddress or
// errUnreachable if the node cannot be called.
func (c *Conns) Node(node string) *NodeClient { return &NodeClient{c, node} }

// StartRank implements msg.NodeAgent.
func (n *NodeClient) StartRank(ctx context.Context, m *msg.StartRank) error {
	req, err := encodeStartRank(m)
	if err != nil {
		return err
	}
	_, err = callNode(ctx, n.conns, n.node, orderLimit, func(ctx context.Context, conn *grpc.ClientConn,
		opts ...grpc.CallOption,
	) (*dpservev1.StartRankReply, error) {
		return dpservev1.NewNodeClient(conn).StartRank(ctx, req, opts...)
	})
	return err
}

// StopRank implements msg.NodeAgent.
func (n *NodeClient) StopRank(ctx context.Context, m *msg.StopRank) error {
	_, err := callNode(ctx, n.conns, n.node, orderLimit, func(ctx context.Context, conn *grpc.ClientConn,
		opts ...grpc.CallOption,
	) (*dpservev1.StopRankReply, error) {
		return dpservev1.NewNodeClient(conn).StopRank(ctx, encodeStopRank(m), opts...)
	})
	return err
}

// Statuses implements msg.NodeView.
func (n *NodeClient) Statuses(ctx context.Context) (msg.NodeCounts, error) {
	r, err := callNode(ctx, n.conns, n.node, statusLimit, func(ctx context.Context, conn *grpc.ClientConn,
		opts ...grpc.CallOption,
	) (*dpservev1.StatusReply, error) {
		return dpservev1.NewNodeClient(conn).Status(ctx, &dpservev1.StatusRequest{}, opts...)
	})
	var counts msg.NodeCounts
	if err != nil {
		return counts, err
	}
	if err = json.Unmarshal(r.GetRanks(), &counts.Ranks); err == nil {
		err = json.Unmarshal(r.GetQueued(), &counts.Queued)
	}
	if pairs := r.GetPairs(); err == nil && len(pairs) > 0 { // older versions send none
		err = json.Unmarshal(pairs, &counts.Pairs)
	}
	if err != nil {
		return msg.NodeCounts{}, problem.New(problem.Internal, "read the status of node %s: %w", n.node,
			err).WithHint("run the same version of dpserve on every node")
	}
	return counts, nil
}

// ResetRouter implements msg.NodeView.
func (n *NodeClient) ResetRouter(ctx context.Context, app string) (int, error) {
	r, err := callNode(ctx, n.conns, n.node, resetLimit, func(ctx context.Context, conn *grpc.ClientConn,
		opts ...grpc.CallOption,
	) (*dpservev1.ResetRouterReply, error) {
		return dpservev1.NewNodeClient(conn).ResetRouter(ctx, &dpservev1.ResetRouterRequest{App: app},
			opts...)
	})
	return int(r.GetRanks()), err
}

// errLogIdle is the cause of the end of a log without lines for logsIdle.
var errLogIdle = errors.New("the log stands still")

// Logs implements msg.NodeView.
func (n *NodeClient) Logs(ctx context.Context, q msg.LogQuery, give func(msg.LogLine) error) error {
	conn, err := n.conns.Get(n.node)
	if err != nil {
		return addUnreachable(err, errUnsent)
	}
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !q.Follow {
		idle := time.AfterFunc(logsIdle, func() { cancel(errLogIdle) })
		defer idle.Stop()
		line := give
		give = func(l msg.LogLine) error { idle.Reset(logsIdle); return line(l) }
	}
	stream, err := dpservev1.NewNodeClient(conn).Logs(inner, encodeQuery(q), callOptions()...)
	if err == nil {
		err = n.readLines(stream, give)
	}
	return n.logError(ctx, inner, err)
}

// readerError wraps the error of the function that takes the lines, which is returned as it is.
type readerError struct{ err error }

func (e *readerError) Error() string { return e.err.Error() }

func (n *NodeClient) readLines(stream dpservev1.Node_LogsClient, give func(msg.LogLine) error) error {
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

// logError is the error of a log that has ended; nil after its last line and, as in-process, after the end of
// ctx.
func (n *NodeClient) logError(ctx, inner context.Context, err error) error {
	var mine *readerError
	switch {
	case errors.Is(err, io.EOF) || hasEnded(ctx):
		return nil // the reader has all lines, or has left
	case errors.As(err, &mine):
		return mine.err
	case inner.Err() != nil:
		return problem.New(problem.Timeout, "node %s: %w for %s", n.node, context.Cause(inner),
			logsIdle).WithHint("look at `dpserve nodes`")
	default:
		return fmt.Errorf("logs: %w", fromStatus(n.node, err))
	}
}
