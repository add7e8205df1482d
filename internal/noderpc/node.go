package noderpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// How long a node may take to answer.
const (
	orderLimit  = 5 * time.Second
	statusLimit = 2 * time.Second
	resetLimit  = 5 * time.Second
	callLimit   = 30 * time.Second // the caller's deadline is shorter
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

// The calls of the Node service, which every node serves.
const (
	nodeService = "dpserve.v1.Node"

	startRankCall   = call[msg.StartRank, struct{}]("/" + nodeService + "/StartRank")
	stopRankCall    = call[msg.StopRank, struct{}]("/" + nodeService + "/StopRank")
	statusCall      = call[struct{}, msg.NodeCounts]("/" + nodeService + "/Status")
	resetRouterCall = call[string, int]("/" + nodeService + "/ResetRouter")
	engineCall      = call[msg.EngineCall, []client.RankAnswer]("/" + nodeService + "/CallEngines")
	pagesStream     = stream[struct{}, msg.EnginePage]("/" + nodeService + "/EngineMetrics")
	logsStream      = stream[msg.LogQuery, msg.LogLines]("/" + nodeService + "/Logs")
)

// StartRank implements msg.NodeAgent.
func (n *NodeClient) StartRank(ctx context.Context, m *msg.StartRank) error {
	_, err := callNode(ctx, n.conns, n.node, orderLimit, startRankCall, m)
	return err
}

// StopRank implements msg.NodeAgent.
func (n *NodeClient) StopRank(ctx context.Context, m *msg.StopRank) error {
	_, err := callNode(ctx, n.conns, n.node, orderLimit, stopRankCall, m)
	return err
}

// Statuses implements msg.NodeView.
func (n *NodeClient) Statuses(ctx context.Context) (msg.NodeCounts, error) {
	return callNode(ctx, n.conns, n.node, statusLimit, statusCall, &struct{}{})
}

// CallEngines implements msg.NodeView.
func (n *NodeClient) CallEngines(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
	return callNode(ctx, n.conns, n.node, callLimit, engineCall, q)
}

// EngineMetrics implements msg.NodeView.
func (n *NodeClient) EngineMetrics(ctx context.Context, give func(*msg.EnginePage) error) error {
	conn, err := n.conns.Get(n.node)
	if err != nil {
		return addUnreachable(err, errUnsent)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pages, err := pagesStream.ask(ctx, conn, &struct{}{})
	for err == nil {
		var page *msg.EnginePage
		if page, err = pages.Recv(); err != nil {
			break
		}
		if err := give(page); err != nil {
			return err
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return fmt.Errorf("metrics of engines: %w", fromStatus(n.node, err))
}

// ResetRouter implements msg.NodeView.
func (n *NodeClient) ResetRouter(ctx context.Context, app string) (int, error) {
	return callNode(ctx, n.conns, n.node, resetLimit, resetRouterCall, &app)
}

// errLogIdle is the cause of the end of a log without lines for logsIdle.
var errLogIdle = errors.New("the log does not grow")

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
	lines, err := logsStream.ask(inner, conn, &q)
	if err == nil {
		err = readLines(lines, give)
	}
	return n.logError(ctx, inner, err)
}

// readerError wraps the error of the function that takes the lines, which is returned as it is.
type readerError struct{ err error }

func (e *readerError) Error() string { return e.err.Error() }

func readLines(from *pipe[msg.LogQuery, msg.LogLines], give func(msg.LogLine) error) error {
	for {
		lines, err := from.Recv()
		if err != nil {
			return err
		}
		for _, l := range *lines {
			if err := give(l); err != nil {
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
	Agent   msg.NodeAgent // nil on a node without role worker
	View    msg.NodeView
	Peer    PeerOf
	Unknown func(what string) // counts what this version does not understand; nil: not counted
}

// NodeServer answers questions and orders of the leader and of the admin API of other nodes.
type NodeServer struct{ cfg NodeConfig }

// NewNodeServer makes a NodeServer.
func NewNodeServer(cfg NodeConfig) *NodeServer { return &NodeServer{cfg: cfg} }

// Register adds the service to a gRPC server with ServerOptions.
func (s *NodeServer) Register(to grpc.ServiceRegistrar) {
	unknown, view := s.cfg.Unknown, s.cfg.View
	register(to, nodeService, []grpc.MethodDesc{
		startRankCall.serve(unknown, func(ctx context.Context, m *msg.StartRank) (none struct{}, err error) {
			agent, err := s.checkOrder(ctx)
			if err != nil {
				return none, err
			}
			return none, agent.StartRank(ctx, m)
		}),
		stopRankCall.serve(unknown, func(ctx context.Context, m *msg.StopRank) (none struct{}, err error) {
			agent, err := s.checkOrder(ctx)
			if err != nil {
				return none, err
			}
			return none, agent.StopRank(ctx, m)
		}),
		statusCall.serve(unknown, func(ctx context.Context, _ *struct{}) (msg.NodeCounts, error) {
			return view.Statuses(ctx)
		}),
		engineCall.serve(unknown, func(ctx context.Context, q *msg.EngineCall) ([]client.RankAnswer, error) {
			if _, err := s.checkOrder(ctx); err != nil {
				return nil, err
			}
			return view.CallEngines(ctx, q)
		}),
		resetRouterCall.serve(unknown, func(ctx context.Context, app *string) (int, error) {
			return view.ResetRouter(ctx, *app)
		}),
	}, logsStream.serve(unknown, s.logs), pagesStream.serve(unknown, s.engineMetrics))
}

// engineMetrics sends each page as one message. A slow reader slows the questions to engines.
func (s *NodeServer) engineMetrics(to *pipe[msg.EnginePage, struct{}]) error {
	if _, err := to.Recv(); err != nil {
		return err
	}
	return s.cfg.View.EngineMetrics(to.Context(), to.Send)
}

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

// logs sends the lines that wait together as one message. A slow reader slows the reading of the log.
func (s *NodeServer) logs(to *pipe[msg.LogLines, msg.LogQuery]) error {
	q, err := to.Recv()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(to.Context())
	lines := make(chan msg.LogLine, maxBatch)
	ended := make(chan error, 1)
	go func() {
		defer close(lines)
		ended <- s.cfg.View.Logs(ctx, *q, func(l msg.LogLine) error {
			select {
			case lines <- l:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	}()
	err = sendLines(to, lines)
	cancel()
	if gone := <-ended; err == nil && to.Context().Err() == nil {
		err = gone
	}
	return err
}

// sendLines sends until lines is closed or the reader has left.
func sendLines(to *pipe[msg.LogLines, msg.LogQuery], lines <-chan msg.LogLine) error {
	for first := range lines {
		batch := batchOf(first, lines)
		if err := to.Send(&batch); err != nil {
			return err
		}
	}
	return nil
}

// batchOf is first and the lines that wait behind it, within the bounds of a message.
func batchOf(first msg.LogLine, lines <-chan msg.LogLine) msg.LogLines {
	batch, size := msg.LogLines{first}, len(first.Text)
	for len(batch) < maxBatch && size < maxBatchBytes {
		select {
		case l, ok := <-lines:
			if !ok {
				return batch
			}
			batch, size = append(batch, l), size+len(l.Text)
		default:
			return batch
		}
	}
	return batch
}
