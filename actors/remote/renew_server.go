package remote

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/proto/dpserve/v1"
)

// RenewConfig is the configuration of a RenewServer. All but Now are required.
type RenewConfig struct {
	Store msg.Store // with its secrets: of a node with role control
	// Confirm returns nil if this node leads and a majority confirms it: cluster.Cluster.Confirm.
	Confirm func(ctx context.Context) error
	Hint    Hint
	Peer    PeerOf
	Now     func() time.Time // nil = the clock
	Log     *slog.Logger
}

// RenewServer signs the next certificate of members whose current one has expired, and serves no other method
// of the Control service. Its callers come by nodeport.Renew, which has checked their certificate except for
// its age. The age is not bounded: the leader's state decides whether the node is still a member. The copy of
// another node does not suffice, as it may lack a removal.
type RenewServer struct {
	dpservev1.UnimplementedControlServer
	cfg RenewConfig
}

var _ dpservev1.ControlServer = (*RenewServer)(nil)

// NewRenewServer makes a RenewServer; register it at a grpc.Server of its own with EnrollOptions.
func NewRenewServer(cfg RenewConfig) *RenewServer {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &RenewServer{cfg: cfg}
}

// Certify implements dpservev1.ControlServer.
func (s *RenewServer) Certify(ctx context.Context, r *dpservev1.CertifyRequest) (*dpservev1.CertifyReply,
	error) {
	ctx, cancel := context.WithTimeout(ctx, certifyLimit)
	defer cancel()
	peer, ok := s.cfg.Peer(ctx)
	if !ok {
		return nil, toStatus(problem.New(problem.Unauthenticated, "certificate: the caller shows none"))
	}
	log := s.cfg.Log.With("room", "remote", "peer", peer.Node, "source", sourceOf(ctx))
	if err := s.cfg.Confirm(ctx); err != nil {
		log.Info("the expired certificate of a node was not renewed: this node does not lead", "err", err)
		return nil, toStatus(refuseNotLeader(s.cfg.Hint.nodeName(s.cfg.Store.State().Nodes)))
	}
	cert, authority, err := certifyMember(s.cfg.Store.State(), peer, r.GetCsr(), s.cfg.Now())
	if err != nil {
		log.Warn("the expired certificate of a node was not renewed", "err", err)
		return nil, toStatus(err)
	}
	log.Info("the expired certificate of a node was renewed")
	return &dpservev1.CertifyReply{Certificate: cert, Authority: authority}, nil
}
