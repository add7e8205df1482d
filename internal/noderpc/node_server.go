package noderpc

import (
	"context"
	"encoding/json"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

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
		return nil, toStatus(err)
	}
	m, err := decodeStartRank(r)
	if err != nil {
		return nil, toStatus(err)
	}
	if err := agent.StartRank(ctx, m); err != nil {
		return nil, toStatus(err)
	}
	return &dpservev1.StartRankReply{}, nil
}

// StopRank implements dpservev1.NodeServer.
func (s *NodeServer) StopRank(
	ctx context.Context, r *dpservev1.StopRankRequest,
) (*dpservev1.StopRankReply, error) {
	agent, err := s.checkOrder(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	m, err := decodeStopRank(r)
	if err != nil {
		return nil, toStatus(err)
	}
	if err := agent.StopRank(ctx, m); err != nil {
		return nil, toStatus(err)
	}
	return &dpservev1.StopRankReply{}, nil
}

// Status implements dpservev1.NodeServer.
func (s *NodeServer) Status(ctx context.Context, _ *dpservev1.StatusRequest) (*dpservev1.StatusReply, error) {
	counts, err := s.cfg.View.Statuses(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	var reply dpservev1.StatusReply
	if reply.Ranks, err = json.Marshal(counts.Ranks); err == nil {
		reply.Queued, err = json.Marshal(counts.Queued)
	}
	if err == nil && len(counts.Pairs) > 0 {
		reply.Pairs, err = json.Marshal(counts.Pairs)
	}
	if err != nil {
		return nil, toStatus(problem.New(problem.Internal, "encode the ranks' status: %w", err))
	}
	return &reply, nil
}

// ResetRouter implements dpservev1.NodeServer.
func (s *NodeServer) ResetRouter(
	ctx context.Context, r *dpservev1.ResetRouterRequest,
) (*dpservev1.ResetRouterReply, error) {
	if err := checkName(r.GetApp(), "app"); err != nil {
		return nil, toStatus(err)
	}
	n, err := s.cfg.View.ResetRouter(ctx, r.GetApp())
	if err != nil {
		return nil, toStatus(err)
	}
	return &dpservev1.ResetRouterReply{Ranks: toInt32(n)}, nil
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
