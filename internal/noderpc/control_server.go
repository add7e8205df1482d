package noderpc

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
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
	// Follow sends the state to a node that keeps a copy: cluster.Cluster.Follow.
	Follow  func(ctx context.Context, from uint64, send func(*cluster.Update) error) error
	Peer    PeerOf
	Unknown func(what string) // counts what this version does not understand
}

// The calls of the Control service, which nodes with role control serve. A node that does not lead refuses
// what only the leader can answer, with the leader's name.
const (
	controlService = "dpserve.v1.Control"

	// renewCall prolongs a node's lease and carries what the node has to say.
	renewCall   = call[msg.NodeReport, msg.Lease]("/" + controlService + "/Renew")
	assignCall  = call[msg.Assign, msg.AssignReply]("/" + controlService + "/Assign")
	publishCall = call[msg.Publish, struct{}]("/" + controlService + "/Publish")
	awaitCall   = call[msg.Await, msg.AwaitReply]("/" + controlService + "/Await")
	proposeCall = call[state.Command, state.Result]("/" + controlService + "/Propose")
	// certifyCall signs a node's next certificate: a certificate request (PKCS #10, DER).
	certifyCall = call[[]byte, certificate]("/" + controlService + "/Certify")
	// watchStream is the copy of the state for nodes that are not part of consensus, from an index on.
	watchStream = stream[uint64, cluster.Update]("/" + controlService + "/Watch")
)

// certificate is a node's certificate and the authority's, as PEM.
type certificate struct{ Certificate, Authority []byte }

// ControlServer answers the other nodes on a node with role control. A node that does not lead refuses
// questions to the leader, with the leader's name.
type ControlServer struct{ cfg ControlConfig }

// NewControlServer makes a ControlServer.
func NewControlServer(cfg ControlConfig) *ControlServer { return &ControlServer{cfg: cfg} }

// Register adds the service to a gRPC server with ServerOptions.
func (s *ControlServer) Register(to grpc.ServiceRegistrar) {
	unknown := s.cfg.Unknown
	register(to, controlService, []grpc.MethodDesc{
		renewCall.serve(unknown, s.renew), assignCall.serve(unknown, s.assign),
		publishCall.serve(unknown, s.publish), awaitCall.serve(unknown, s.await),
		proposeCall.serve(unknown, s.propose), certifyCall.serve(unknown, s.certify),
	}, watchStream.serve(unknown, s.watch))
}

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

func (s *ControlServer) renew(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
	leader, _, err := s.leaderParts()
	if err != nil {
		return msg.Lease{}, err
	}
	if err := s.checkReporter(ctx, &r.Node); err != nil {
		return msg.Lease{}, err
	}
	for range r.PassOverUnknown() {
		s.cfg.Unknown("unit_event")
	}
	return leader.Renew(ctx, r)
}

// checkReporter refuses a report about another node than the caller.
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
	return nil
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

// certify signs for the calling node and with its record in the state. Any control node does.
func (s *ControlServer) certify(ctx context.Context, csr *[]byte) (certificate, error) {
	peer, _ := s.cfg.Peer(ctx)
	return certifyMember(s.cfg.Store.State(), peer, *csr, time.Now())
}

// certifyMember signs the next certificate of a node that shows its current one.
func certifyMember(
	st *state.State, peer pki.Identity, csr []byte, now time.Time,
) (none certificate, err error) {
	n := st.Nodes[peer.Node]
	if n == nil || n.UID != peer.UID {
		return none, problem.New(problem.PermissionDenied, "certificate: node %s (%s) is not a member",
			peer.Node, peer.UID).
			WithHint("join it again with an empty --data-dir")
	}
	if err := checkRolesFixed(peer, n); err != nil {
		return none, err
	}
	return certify(st, n, csr, now)
}

// certify signs a node's certificate request with the authority in the state. The key must be the one in the
// node's record.
func certify(st *state.State, n *state.Node, csr []byte, now time.Time) (none certificate, err error) {
	if len(st.Secrets.AuthorityKey) == 0 {
		return none, problem.New(problem.Unavailable,
			"certificate: this cluster has no certificate authority").
			WithHint("start its first node with --advertise IP")
	}
	a, err := pki.LoadAuthority(st.Secrets.Authority, st.Secrets.AuthorityKey)
	if err != nil {
		return none, problem.New(problem.Internal, "certificate: %w", err)
	}
	key, err := pki.KeySum(csr)
	if err != nil {
		return none, problem.New(problem.CodeOf(err), "certificate: %w", err)
	}
	if n.Key != "" && n.Key != key {
		return none, problem.New(problem.PermissionDenied,
			"certificate: node %s has joined with another key", n.ID).
			WithHint("if its pki folder is lost, remove the node " +
				"and join with an empty --data-dir and a new token")
	}
	id := pki.Identity{
		Cluster: st.Cluster, Node: n.ID, UID: n.UID, Roles: state.ConvertRoles[string](n.Roles),
	}
	cert, err := a.Sign(csr, id, now, pki.DefaultLife)
	if err != nil {
		return none, problem.New(problem.CodeOf(err), "certificate: %w", err)
	}
	authority, _ := a.PEM()
	return certificate{cert, authority}, nil
}

// propose proposes a command of a node that does not lead, and does not forward it again.
func (s *ControlServer) propose(ctx context.Context, c *state.Command) (state.Result, error) {
	if err := s.checkForward(ctx, c); err != nil {
		return state.Result{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, proposalLimit)
	defer cancel()
	result, err := s.cfg.Propose(ctx, *c)
	if errors.Is(err, cluster.ErrNotLeader) {
		err = s.notLeader()
	}
	return result, err
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

func (s *ControlServer) watch(to *pipe[cluster.Update, uint64]) error {
	from, err := to.Recv()
	if err != nil {
		return err
	}
	err = s.cfg.Follow(to.Context(), *from, to.Send)
	if to.Context().Err() != nil {
		return nil //nolint:nilerr // the reader has left and gets no answer
	}
	return err
}

func (s *ControlServer) assign(ctx context.Context, m *msg.Assign) (msg.AssignReply, error) {
	_, a, err := s.leaderParts()
	if err != nil {
		return msg.AssignReply{}, err
	}
	reply, err := a.Assign(ctx, m.App, m.Group, m.ReplicaID)
	if err != nil {
		err = s.mapDeposed(a, err)
	}
	return reply, err
}

func (s *ControlServer) publish(_ context.Context, p *msg.Publish) (none struct{}, err error) {
	_, a, err := s.leaderParts()
	if err == nil {
		a.Publish(*p)
	}
	return none, err
}

// await lasts until rank 0 has published, awaitHold is over (no address: the caller asks again), the caller
// leaves, or this node does not lead any more.
func (s *ControlServer) await(ctx context.Context, m *msg.Await) (msg.AwaitReply, error) {
	_, a, err := s.leaderParts()
	if err != nil {
		return msg.AwaitReply{}, err
	}
	hold, cancel := context.WithTimeout(ctx, awaitHold)
	defer cancel()
	reply, err := a.Await(hold, m.Unit, m.Epoch, m.Rank)
	if err == nil {
		return reply, nil
	}
	err = s.mapDeposed(a, err)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return msg.AwaitReply{}, nil
	}
	return msg.AwaitReply{}, err
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
type RenewServer struct{ cfg RenewConfig }

// NewRenewServer makes a RenewServer.
func NewRenewServer(cfg RenewConfig) *RenewServer { return &RenewServer{cfg: cfg} }

// Register adds the one call to a gRPC server of its own, with EnrollOptions.
func (s *RenewServer) Register(to grpc.ServiceRegistrar) {
	register(to, controlService, []grpc.MethodDesc{certifyCall.serve(nil, s.certify)})
}

func (s *RenewServer) certify(ctx context.Context, csr *[]byte) (none certificate, err error) {
	ctx, cancel := context.WithTimeout(ctx, certifyLimit)
	defer cancel()
	peer, ok := s.cfg.Peer(ctx)
	if !ok {
		return none, problem.New(problem.Unauthenticated, "certificate: the caller shows none")
	}
	log := s.cfg.Log.With("component", "remote", "peer", peer.Node, "source", sourceOf(ctx))
	if err := s.cfg.Confirm(ctx); err != nil {
		log.Info("the expired certificate of a node was not renewed: this node does not lead", "err", err)
		return none, refuseNotLeader(s.cfg.Hint.nodeName(s.cfg.Store.State().Nodes))
	}
	next, err := certifyMember(s.cfg.Store.State(), peer, *csr, time.Now())
	if err != nil {
		log.Warn("the expired certificate of a node was not renewed", "err", err)
		return none, err
	}
	log.Info("the expired certificate of a node was renewed")
	return next, nil
}
