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
	"github.com/dpserve/dpserve/internal/state"
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

// ask calls a method of a node.
func ask[Q, R any](
	ctx context.Context, n *NodeClient, limit time.Duration,
	method func(dpservev1.NodeClient, context.Context, Q, ...grpc.CallOption) (R, error), request Q,
) (R, error) {
	return callNode(ctx, n.conns, n.node, limit,
		func(ctx context.Context, conn *grpc.ClientConn, opts ...grpc.CallOption) (R, error) {
			return method(dpservev1.NewNodeClient(conn), ctx, request, opts...)
		})
}

// StartRank implements msg.NodeAgent.
func (n *NodeClient) StartRank(ctx context.Context, m *msg.StartRank) error {
	req, err := encodeStartRank(m)
	if err != nil {
		return err
	}
	_, err = ask(ctx, n, orderLimit, dpservev1.NodeClient.StartRank, req)
	return err
}

// StopRank implements msg.NodeAgent.
func (n *NodeClient) StopRank(ctx context.Context, m *msg.StopRank) error {
	_, err := ask(ctx, n, orderLimit, dpservev1.NodeClient.StopRank, encodeStopRank(m))
	return err
}

// Statuses implements msg.NodeView.
func (n *NodeClient) Statuses(ctx context.Context) (msg.NodeCounts, error) {
	r, err := ask(ctx, n, statusLimit, dpservev1.NodeClient.Status, &dpservev1.StatusRequest{})
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
	r, err := ask(ctx, n, resetLimit, dpservev1.NodeClient.ResetRouter,
		&dpservev1.ResetRouterRequest{App: app})
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
	stream, err := dpservev1.NewNodeClient(conn).Logs(inner, encodeQuery(q))
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

// Bounds of one message of log lines.
const (
	maxBatch      = 256
	maxBatchBytes = 1 << 20
)

// NodeConfig is the configuration of a NodeServer. View and Peer are required.
type NodeConfig struct {
	Agent msg.NodeAgent // nil on a node without role worker
	View  msg.NodeView
	Peer  PeerOf
}

// NodeServer answers questions and orders of the leader and of the admin API of other nodes.
type NodeServer struct {
	dpservev1.UnimplementedNodeServer
	cfg NodeConfig
}

var _ dpservev1.NodeServer = (*NodeServer)(nil)

// NewNodeServer makes a NodeServer; register it at a grpc.Server with ServerOptions.
func NewNodeServer(cfg NodeConfig) *NodeServer { return &NodeServer{cfg: cfg} }

// checkOrder refuses orders of nodes that cannot lead, because an order names the program to start.
func (s *NodeServer) checkOrder(ctx context.Context) (msg.NodeAgent, error) {
	if peer, ok := s.cfg.Peer(ctx); !ok || !peer.HasRole(string(state.RoleControl)) {
		return nil, problem.New(problem.PermissionDenied, "node %s has no role control and orders nothing",
			peer.Node)
	}
	if s.cfg.Agent == nil {
		return nil, problem.New(problem.Conflict, "this node has no role worker")
	}
	return s.cfg.Agent, nil
}

// StartRank implements dpservev1.NodeServer.
func (s *NodeServer) StartRank(
	ctx context.Context, r *dpservev1.StartRankRequest,
) (*dpservev1.StartRankReply, error) {
	agent, err := s.checkOrder(ctx)
	if err != nil {
		return nil, err
	}
	m, err := decodeStartRank(r)
	if err != nil {
		return nil, err
	}
	return &dpservev1.StartRankReply{}, agent.StartRank(ctx, m)
}

// StopRank implements dpservev1.NodeServer.
func (s *NodeServer) StopRank(
	ctx context.Context, r *dpservev1.StopRankRequest,
) (*dpservev1.StopRankReply, error) {
	agent, err := s.checkOrder(ctx)
	if err != nil {
		return nil, err
	}
	m, err := decodeStopRank(r)
	if err != nil {
		return nil, err
	}
	return &dpservev1.StopRankReply{}, agent.StopRank(ctx, m)
}

// Status implements dpservev1.NodeServer.
func (s *NodeServer) Status(ctx context.Context, _ *dpservev1.StatusRequest) (*dpservev1.StatusReply, error) {
	counts, err := s.cfg.View.Statuses(ctx)
	if err != nil {
		return nil, err
	}
	var reply dpservev1.StatusReply
	if reply.Ranks, err = json.Marshal(counts.Ranks); err == nil {
		reply.Queued, err = json.Marshal(counts.Queued)
	}
	if err == nil && len(counts.Pairs) > 0 {
		reply.Pairs, err = json.Marshal(counts.Pairs)
	}
	if err != nil {
		return nil, problem.New(problem.Internal, "encode the ranks' status: %w", err)
	}
	return &reply, nil
}

// ResetRouter implements dpservev1.NodeServer.
func (s *NodeServer) ResetRouter(
	ctx context.Context, r *dpservev1.ResetRouterRequest,
) (*dpservev1.ResetRouterReply, error) {
	if err := checkName(r.GetApp(), "app"); err != nil {
		return nil, err
	}
	n, err := s.cfg.View.ResetRouter(ctx, r.GetApp())
	return &dpservev1.ResetRouterReply{Ranks: toInt32(n)}, err
}

// Logs implements dpservev1.NodeServer. Lines that wait together are sent together; a slow reader slows the
// reading of the log.
func (s *NodeServer) Logs(r *dpservev1.LogsRequest, stream dpservev1.Node_LogsServer) error {
	q, err := decodeQuery(r)
	if err != nil {
		return toStatus(err)
	}
	ctx, cancel := context.WithCancel(stream.Context())
	lines := make(chan *dpservev1.LogLine, maxBatch)
	ended := make(chan error, 1)
	go func() {
		defer close(lines)
		ended <- s.cfg.View.Logs(ctx, q, func(l msg.LogLine) error {
			select {
			case lines <- encodeLine(&l):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	err = sendLines(stream, lines)
	cancel()
	if gone := <-ended; err == nil && stream.Context().Err() == nil {
		err = toStatus(gone)
	}
	return err
}

// sendLines sends until lines is closed or the reader has left.
func sendLines(stream dpservev1.Node_LogsServer, lines <-chan *dpservev1.LogLine) error {
	for first := range lines {
		if err := stream.Send(&dpservev1.LogLines{Lines: batchOf(first, lines)}); err != nil {
			return err
		}
	}
	return nil
}

// batchOf is first and the lines that wait behind it, within the bounds of a message.
func batchOf(first *dpservev1.LogLine, lines <-chan *dpservev1.LogLine) []*dpservev1.LogLine {
	batch, size := []*dpservev1.LogLine{first}, len(first.GetText())
	for len(batch) < maxBatch && size < maxBatchBytes {
		select {
		case l, ok := <-lines:
			if !ok {
				return batch
			}
			batch, size = append(batch, l), size+len(l.GetText())
		default:
			return batch
		}
	}
	return batch
}
