package noderpc

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

const (
	joinLimit = 10 * time.Second // for the whole of a join
	maxSeeds  = 16               // addresses for a new node
)

// EnrollConfig is the configuration of an EnrollServer. All fields are required.
type EnrollConfig struct {
	Store    msg.Store // with its secrets: of a node with role control
	Proposer msg.Proposer
	Log      *slog.Logger
}

// EnrollServer answers strangers that have a join token. It runs on every node with role control, leader or
// not.
type EnrollServer struct {
	cfg   EnrollConfig
	wrong tokenLimiter
}

// NewEnrollServer makes an EnrollServer.
func NewEnrollServer(cfg EnrollConfig) *EnrollServer { return &EnrollServer{cfg: cfg} }

// Register adds the service to a gRPC server of its own, with EnrollOptions.
func (s *EnrollServer) Register(to grpc.ServiceRegistrar) {
	register(to, enrollService, []grpc.MethodDesc{joinCall.serve(nil, s.join)})
}

// join makes a node a member. The holder of the same key can repeat every step: the token records the node
// and the key it was used for.
func (s *EnrollServer) join(ctx context.Context, r *joinRequest) (none Joined, err error) {
	ctx, cancel := context.WithTimeout(ctx, joinLimit)
	defer cancel()
	n := &r.Node
	if err := s.checkNewcomer(n); err != nil {
		return none, stepError(stepMember, err)
	}
	log := s.cfg.Log.With("component", "remote", "peer", n.ID, "source", sourceOf(ctx))
	if n.Key, err = pki.KeySum(r.CSR); err != nil {
		return none, stepError(stepCertificate, err)
	}
	if err := s.useToken(ctx, r.Token, n); err != nil {
		log.Warn("join refused", "err", err)
		return none, stepError(stepToken, err)
	}
	cert, err := certify(s.cfg.Store.State(), n, r.CSR, time.Now())
	if err != nil {
		log.Warn("join refused", "err", err)
		return none, err // certify names its step
	}
	if _, err := s.cfg.Proposer.Propose(ctx, state.Command{PutNode: &state.PutNode{Node: *n}}); err != nil {
		log.Warn("join refused", "err", err)
		return none, stepError(stepMember, err)
	}
	log.Info("node joined", "roles", n.Roles, "address", n.Address)
	st := s.cfg.Store.State()
	return Joined{
		Cluster: st.Cluster, Seeds: seedsOf(st, n.ID),
		Files: pki.Files{
			Cert: cert.Certificate, Authority: cert.Authority, GossipKey: st.Secrets.GossipKey,
		},
	}, nil
}

// checkNewcomer refuses a record that can never be a member.
func (s *EnrollServer) checkNewcomer(n *state.Node) error {
	n.Lost, n.Reason, n.Draining, n.DrainBy = false, "", false, 0 // set by the leader alone
	return cmp.Or(msg.ValidateNode(n), checkNode(n))
}

// useToken uses the token for the node. A token that is missing in this node's copy of the state may be new,
// so the leader is asked, unless too many strangers caused such lookups.
func (s *EnrollServer) useToken(ctx context.Context, secret string, n *state.Node) error {
	hash, err := pki.HashSecret(secret)
	if err != nil {
		return problem.New(problem.Unauthenticated, "%w: it is malformed",
			state.ErrTokenUnknown).WithHint("copy the whole join command again")
	}
	if s.cfg.Store.State().Tokens[hash] == nil && !s.wrong.allow(sourceOf(ctx), time.Now()) {
		return problem.New(problem.Overloaded,
			"too many wrong tokens").WithHint("make a new one with `dpserve token` and try again in a minute")
	}
	_, err = s.cfg.Proposer.Propose(ctx, state.Command{UseToken: &state.UseToken{
		Hash: hash, UID: n.UID, Key: n.Key, Roles: n.Roles, Now: time.Now().UnixMilli(),
	}})
	return err
}

// seedsOf are the nodes that a new node contacts first: those with role control, then others, live ones only.
func seedsOf(st *state.State, newcomer string) []state.Node {
	var out []state.Node
	for _, control := range []bool{true, false} {
		for _, name := range slices.Sorted(maps.Keys(st.Nodes)) {
			n := st.Nodes[name]
			if name == newcomer || n.Lost || n.Address == "" || n.Has(state.RoleControl) != control {
				continue
			}
			out = append(out, state.Node{
				ID: name, UID: n.UID, Address: n.Address, Gossip: n.Gossip, Roles: n.Roles,
			})
		}
	}
	return out[:min(len(out), maxSeeds)]
}

// sourceOf is the address a stranger calls from, without its port.
func sourceOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return host
}

// Bounds of lookups of unknown tokens, each of which costs a round of consensus. A secret has 128 bits: the
// limits protect the log and the disks, not against guessing. They never delay a token that this node knows.
const (
	wrongWindow    = time.Minute
	wrongPerSource = 10
	wrongTotal     = 60
)

// tokenLimiter counts unknown tokens of the current window, by source. It never holds more than wrongTotal
// entries.
type tokenLimiter struct {
	mu      sync.Mutex
	since   time.Time
	total   int
	sources map[string]int
}

// allow says whether an unknown token may be looked up, and counts it.
func (w *tokenLimiter) allow(source string, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now.Sub(w.since) >= wrongWindow || now.Before(w.since) {
		w.since, w.total, w.sources = now, 0, map[string]int{}
	}
	if w.total >= wrongTotal || w.sources[source] >= wrongPerSource {
		return false
	}
	w.total++
	w.sources[source]++
	return true
}
