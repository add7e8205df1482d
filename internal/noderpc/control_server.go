package noderpc

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	dpservev1 "github.com/dpserve/dpserve/internal/proto/dpserve/v1"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	// bounds one command of another node, whatever the limit of its caller
	proposalLimit = 5 * time.Second
	awaitHold     = 4 * time.Second // after that an Await without an address is answered
)

// PeerOf is the identity of a call's peer, by its certificate.
type PeerOf func(ctx context.Context) (pki.Identity, bool)

// Hint is the UID of the node that leads, as far as this node knows.
type Hint func() (uid string, known bool)

// nodeName is the name of the node that leads, "" if it is not known.
func (h Hint) nodeName(nodes map[string]*state.Node) string {
	uid, known := h()
	if !known {
		return ""
	}
	return nameOf(nodes, uid)
}

// nameOf is the name of the node with a UID, "" if there is none.
func nameOf(nodes map[string]*state.Node, uid string) string {
	for name, n := range nodes {
		if n.UID == uid {
			return name
		}
	}
	return ""
}

// Leading returns the components that run on the leader alone: ok only while this node leads and both run.
type Leading func() (leader msg.Leader, assigner msg.Assigner, ok bool)

// ControlConfig is the configuration of a ControlServer. All fields are required.
type ControlConfig struct {
	Leading Leading
	Hint    Hint
	Store   msg.Store
	// Propose puts a command through consensus if this node leads, and never forwards it:
	// cluster.Cluster.ProposeHere.
	Propose func(ctx context.Context, c state.Command) (state.Result, error)
	// Follow sends the state to a node that keeps a copy: after each change, and nil data as a heartbeat.
	Follow  func(ctx context.Context, from uint64, send func(data []byte, index uint64) error) error
	Peer    PeerOf
	Version string
	Unknown func(what string) // counts events that this version does not understand
}

// ControlServer answers the other nodes on a node with role control. A node that does not lead refuses
// questions to the leader, with the leader's name.
type ControlServer struct {
	dpservev1.UnimplementedControlServer
	cfg ControlConfig
}

var _ dpservev1.ControlServer = (*ControlServer)(nil)

// NewControlServer makes a ControlServer; register it at a grpc.Server with ServerOptions.
func NewControlServer(cfg ControlConfig) *ControlServer { return &ControlServer{cfg: cfg} }

// leaderParts returns the components of the leader, or the refusal that names the leader.
func (s *ControlServer) leaderParts() (msg.Leader, msg.Assigner, error) {
	leader, assigner, ok := s.cfg.Leading()
	if !ok {
		return nil, nil, s.notLeader()
	}
	return leader, assigner, nil
}

func (s *ControlServer) notLeader() error {
	return refuseNotLeader(s.cfg.Hint.nodeName(s.cfg.Store.State().Nodes))
}

// Renew implements dpservev1.ControlServer.
func (s *ControlServer) Renew(ctx context.Context, r *dpservev1.RenewRequest) (*dpservev1.RenewReply, error) {
	leader, _, err := s.leaderParts()
	if err != nil {
		return nil, err
	}
	report, unknown, err := decodeReport(r)
	if err != nil {
		return nil, err
	}
	if err := s.checkReporter(ctx, &report.Node); err != nil {
		return nil, err
	}
	for range unknown {
		s.cfg.Unknown("unit_event")
	}
	lease, err := leader.Renew(ctx, report)
	if err != nil {
		return nil, err
	}
	lease.Acked = acknowledged(lease.Acked, report.Events, r.GetEvents())
	return encodeLease(lease), nil
}

// checkReporter refuses a report about another node than the caller, and a report of a version that is too
// old.
func (s *ControlServer) checkReporter(ctx context.Context, n *state.Node) error {
	peer, ok := s.cfg.Peer(ctx)
	if !ok || peer.UID != n.UID || peer.Node != n.ID {
		return problem.New(problem.PermissionDenied, "node %s (%s) may not renew the lease of node %s (%s)",
			peer.Node, peer.UID, n.ID, n.UID).
			WithHint("each data dir belongs to one node; join again with an empty --data-dir")
	}
	if err := checkRolesFixed(peer, n); err != nil {
		return err
	}
	n.Key = "" // the join has set it
	return checkVersion(n.Version, s.cfg.Version)
}

// checkRolesFixed refuses roles that differ from those of the certificate: they are fixed when a node joins.
func checkRolesFixed(peer pki.Identity, n *state.Node) error {
	roles := state.ConvertRoles[string](n.Roles)
	if state.SameRoles(peer.Roles, roles) {
		return nil
	}
	return problem.New(problem.PermissionDenied, "node %s: %w: its certificate is for roles %v, not %v", n.ID,
		state.ErrRolesFixed, peer.Roles, roles).
		WithHint("start it without --roles; for other roles let it leave (`dpserve leave`) " +
			"and join again with an empty --data-dir")
}

// acknowledged counts events that this version left out as taken, once all events before them are: no leader
// of this version would ever take them.
func acknowledged(taken uint64, kept []msg.UnitEvent, sent []*dpservev1.UnitEvent) uint64 {
	next := uint64(0) // the first event that the leader has not taken
	for i := range kept {
		if kept[i].Number > taken {
			next = kept[i].Number
			break
		}
	}
	for _, e := range sent {
		if n := e.GetNumber(); n > taken && (next == 0 || n < next) {
			taken = n
		}
	}
	return taken
}

// Certify implements dpservev1.ControlServer: any control node signs, for the calling node and with its
// record in the state.
func (s *ControlServer) Certify(
	ctx context.Context, r *dpservev1.CertifyRequest,
) (*dpservev1.CertifyReply, error) {
	peer, _ := s.cfg.Peer(ctx)
	cert, authority, err := certifyMember(s.cfg.Store.State(), peer, r.GetCsr(), time.Now())
	return &dpservev1.CertifyReply{Certificate: cert, Authority: authority}, err
}

// certifyMember signs the next certificate of a node that shows its current one.
func certifyMember(
	st *state.State, peer pki.Identity, csr []byte, now time.Time,
) (cert, authority []byte, err error) {
	n := st.Nodes[peer.Node]
	if n == nil || n.UID != peer.UID {
		return nil, nil, problem.New(problem.PermissionDenied, "certificate: node %s (%s) is not a member",
			peer.Node, peer.UID).
			WithHint("join it again with an empty --data-dir")
	}
	if err := checkRolesFixed(peer, n); err != nil {
		return nil, nil, err
	}
	return certify(st, n, csr, now)
}

// certify signs a node's certificate request with the authority in the state. The key must be the one in the
// node's record.
func certify(st *state.State, n *state.Node, csr []byte, now time.Time) (cert, authority []byte, err error) {
	if len(st.Secrets.AuthorityKey) == 0 {
		return nil, nil, problem.New(problem.Unavailable,
			"certificate: this cluster has no certificate authority").
			WithHint("start its first node with --advertise IP")
	}
	a, err := pki.LoadAuthority(st.Secrets.Authority, st.Secrets.AuthorityKey)
	if err != nil {
		return nil, nil, problem.New(problem.Internal, "certificate: %w", err)
	}
	key, err := pki.KeySum(csr)
	if err != nil {
		return nil, nil, problem.New(problem.CodeOf(err), "certificate: %w", err)
	}
	if n.Key != "" && n.Key != key {
		return nil, nil, problem.New(problem.PermissionDenied,
			"certificate: node %s has joined with another key", n.ID).
			WithHint("if its pki folder is lost, remove the node " +
				"and join with an empty --data-dir and a new token")
	}
	id := pki.Identity{
		Cluster: st.Cluster, Node: n.ID, UID: n.UID, Roles: state.ConvertRoles[string](n.Roles),
	}
	cert, err = a.Sign(csr, id, now, pki.DefaultLife)
	if err != nil {
		return nil, nil, problem.New(problem.CodeOf(err), "certificate: %w", err)
	}
	authority, _ = a.PEM()
	return cert, authority, nil
}

// ForwardApply implements dpservev1.ControlServer: it proposes a command of a node that does not lead, and
// does not forward it again.
func (s *ControlServer) ForwardApply(
	ctx context.Context, r *dpservev1.ApplyRequest,
) (*dpservev1.ApplyReply, error) {
	c, err := state.DecodeCommand(r.GetCommand())
	if err != nil {
		return nil, err
	}
	if err := s.checkForward(ctx, c); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, proposalLimit)
	defer cancel()
	result, err := s.cfg.Propose(ctx, *c)
	if errors.Is(err, cluster.ErrNotLeader) {
		err = s.notLeader()
	}
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(result)
	if err != nil {
		return nil, problem.New(problem.Internal, "encode a result: %w", err)
	}
	return &dpservev1.ApplyReply{Result: data}, nil
}

// checkForward refuses commands that another node may not propose. Only nodes with role control may decide
// about members.
func (s *ControlServer) checkForward(ctx context.Context, c *state.Command) error {
	peer, _ := s.cfg.Peer(ctx)
	switch {
	case c.Init != nil && hasSecrets(c.Init) || c.RotateGossipKey != nil:
		return problem.New(problem.PermissionDenied,
			"only the leader itself names its cluster and changes its gossip key")
	case c.PutNode != nil && c.PutNode.AnyRoles:
		return problem.New(problem.PermissionDenied, "%w", state.ErrRolesFixed)
	case (c.PutNode != nil || c.PutToken != nil || c.UseToken != nil || c.RevokeToken != nil) &&
		!peer.HasRole(string(state.RoleControl)):
		return problem.New(problem.PermissionDenied,
			"node %s has not role control: it makes no members and no tokens", peer.Node)
	}
	return nil
}

// hasSecrets tells the Init that creates a cluster, which only its first node proposes, from an Init with the
// name alone, by which a follower learns how current its copy must be.
func hasSecrets(i *state.Init) bool {
	return len(i.Secret)+len(i.Authority)+len(i.AuthorityKey)+len(i.GossipKey) > 0 || i.LeaseTTL != 0
}

// Watch implements dpservev1.ControlServer.
func (s *ControlServer) Watch(r *dpservev1.WatchRequest, stream dpservev1.Control_WatchServer) error {
	err := s.cfg.Follow(stream.Context(), r.GetIndex(), func(data []byte, index uint64) error {
		return stream.Send(&dpservev1.WatchUpdate{State: data, Index: index})
	})
	if stream.Context().Err() != nil {
		return nil //nolint:nilerr // the reader has left and gets no answer
	}
	return toStatus(err)
}

// Assign implements dpservev1.ControlServer.
func (s *ControlServer) Assign(
	ctx context.Context, r *dpservev1.AssignRequest,
) (*dpservev1.AssignReply, error) {
	_, a, err := s.leaderParts()
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(checkName(r.GetApp(), "app"),
		checkName(r.GetReplicaId(), "replica_id")); err != nil {
		return nil, err
	}
	out, err := a.Assign(ctx, r.GetApp(), int(r.GetGroup()), r.GetReplicaId())
	if err != nil {
		return nil, s.mapDeposed(a, err)
	}
	return &dpservev1.AssignReply{Rank: toInt32(out.Rank), Epoch: out.Epoch, DpSize: toInt32(out.DPSize)}, nil
}

// Publish implements dpservev1.ControlServer.
func (s *ControlServer) Publish(
	_ context.Context, r *dpservev1.PublishRequest,
) (*dpservev1.PublishReply, error) {
	_, a, err := s.leaderParts()
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(checkName(r.GetUnit(), "unit"), checkName(r.GetAddr(), "addr")); err != nil {
		return nil, err
	}
	a.Publish(msg.Publish{
		Unit: r.GetUnit(), Epoch: r.GetEpoch(), Rank: int(r.GetRank()), Addr: r.GetAddr(),
		Port: int(r.GetPort()), Settings: cleanText(r.GetSettings(), maxReason),
	})
	return &dpservev1.PublishReply{}, nil
}

// Await implements dpservev1.ControlServer. It lasts until rank 0 has published, awaitHold is over (no
// address: the caller asks again), the caller leaves, or this node does not lead any more.
func (s *ControlServer) Await(ctx context.Context, r *dpservev1.AwaitRequest) (*dpservev1.AwaitReply, error) {
	_, a, err := s.leaderParts()
	if err != nil {
		return nil, err
	}
	if err := checkName(r.GetUnit(), "unit"); err != nil {
		return nil, err
	}
	hold, cancel := context.WithTimeout(ctx, awaitHold)
	defer cancel()
	said, err := a.Await(hold, r.GetUnit(), r.GetEpoch(), int(r.GetRank()))
	if err == nil {
		return &dpservev1.AwaitReply{
			Addr: said.Addr, Port: toInt32(said.Port), Settings: said.Settings,
		}, nil
	}
	err = s.mapDeposed(a, err)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return &dpservev1.AwaitReply{}, nil
	}
	return nil, err
}

// mapDeposed turns the error of an assigner that was closed meanwhile into the refusal of a node that does
// not lead, so that the caller asks the next leader.
func (s *ControlServer) mapDeposed(asked msg.Assigner, err error) error {
	_, now, refused := s.leaderParts()
	switch {
	case refused != nil:
		return refused
	case now != asked:
		return problem.New(problem.Unavailable, "the leader changed: %w", cluster.ErrNotLeader)
	default:
		return err
	}
}

// RenewConfig is the configuration of a RenewServer. All fields are required.
type RenewConfig struct {
	Store msg.Store // with its secrets: of a node with role control
	// Confirm returns nil if this node leads and a majority confirms it: cluster.Cluster.Confirm.
	Confirm func(ctx context.Context) error
	Hint    Hint
	Peer    PeerOf
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
func NewRenewServer(cfg RenewConfig) *RenewServer { return &RenewServer{cfg: cfg} }

// Certify implements dpservev1.ControlServer.
func (s *RenewServer) Certify(
	ctx context.Context, r *dpservev1.CertifyRequest,
) (*dpservev1.CertifyReply, error) {
	ctx, cancel := context.WithTimeout(ctx, certifyLimit)
	defer cancel()
	peer, ok := s.cfg.Peer(ctx)
	if !ok {
		return nil, problem.New(problem.Unauthenticated, "certificate: the caller shows none")
	}
	log := s.cfg.Log.With("room", "remote", "peer", peer.Node, "source", sourceOf(ctx))
	if err := s.cfg.Confirm(ctx); err != nil {
		log.Info("the expired certificate of a node was not renewed: this node does not lead", "err", err)
		return nil, refuseNotLeader(s.cfg.Hint.nodeName(s.cfg.Store.State().Nodes))
	}
	cert, authority, err := certifyMember(s.cfg.Store.State(), peer, r.GetCsr(), time.Now())
	if err != nil {
		log.Warn("the expired certificate of a node was not renewed", "err", err)
		return nil, err
	}
	log.Info("the expired certificate of a node was renewed")
	return &dpservev1.CertifyReply{Certificate: cert, Authority: authority}, nil
}
