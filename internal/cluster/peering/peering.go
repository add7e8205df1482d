// Package peering makes a node a member of a cluster: it founds one, joins one, or comes back to its own. It
// keeps the node's certificate and the gossip key, knows where the other nodes are, and owns the node port.
// What is served on that port is not its concern.
package peering

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/membership"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// Store is the cluster's state. It may be empty at first: a node peers before its copy of the state is open.
type Store interface {
	State() *state.State
	Changed() <-chan struct{}
}

// Config says who the node is and how it reaches others.
type Config struct {
	NodeID, Version, Zone string
	DataDir               string // "" = nothing survives a restart
	Host                  string // IP or host for other nodes
	NodePort, GossipPort  int    // at Host; 0 = any
	// Roles are those asked for; nil = those of the join, or DefaultRoles for a node that is new.
	Roles, DefaultRoles []string
	Join                *Join // nil = a cluster of its own, or that of the data dir

	Store  Store
	Leader func() Certifier // asked for certificates, only after Open

	// Listen and Dial replace TCP; nil = TCP.
	Listen      func(ctx context.Context, addr string) (net.Listener, error)
	Dial        nodeport.DialFunc
	WithGossip  bool   // false: the network carries no packets
	Incarnation uint64 // random per process
	Gossip      membership.Timers
	Refused     func(reason string) // counts refused connections and messages
	Log         *slog.Logger
}

// Join is how a node joins a cluster.
type Join struct {
	Address string // of the node port of a member
	Token   string
	// Present presents the token. The answer may be lost: it is repeated with the same key.
	Present func(ctx context.Context, self state.Node, key []byte) (pki.Files, []state.Node, error)
}

// Peering is this node as a member of a cluster. Safe for concurrent use after Open.
type Peering struct {
	Certificates *Certificates
	Neighbours   *Neighbours
	Port         *nodeport.Port
	Transports   *Transports

	cfg      Config
	log      *slog.Logger
	ident    cluster.Identity
	roles    []string
	address  string          // HOST:PORT of the node port
	dir      string          // of certificate files; "" = in memory
	joined   bool            // false: it founded the cluster, now or in an earlier process
	rejoin   string          // address of a join with a member's data dir; "" = none
	founding bool            // it founds the cluster in this process
	secrets  state.Secrets   // of a founding node
	removed  chan struct{}   // closed when the cluster has removed this node
	refused  context.Context //nolint:containedctx // ended by a control node that refuses this one
	refuse   context.CancelCauseFunc
	keys     chan []byte // gossip keys that KeepGossipKey takes; one place
	loops    sync.WaitGroup
}

// Open makes the node a member: by the files of its data dir, by joining, or as the first node of a new
// cluster. It binds the node port before any other node learns of this one. Errors are *problem.Error.
func Open(ctx context.Context, cfg Config) (*Peering, error) {
	p := &Peering{
		cfg: cfg, log: cfg.Log, roles: cfg.Roles, dir: pkiDir(cfg.DataDir), removed: make(chan struct{}),
		keys: make(chan []byte, 1),
	}
	p.refused, p.refuse = context.WithCancelCause(context.Background())
	var err error
	if p.ident, err = identify(cfg.DataDir, cfg.NodeID); err != nil {
		return nil, err
	}
	if err := RefuseRemoved(cfg.DataDir); err != nil {
		return nil, err
	}
	p.Certificates = &Certificates{
		dir: p.dir, write: pki.Save, log: cfg.Log, store: cfg.Store, leader: cfg.Leader,
	}
	p.Neighbours = &Neighbours{
		self: p.ident.UID, store: cfg.Store, log: cfg.Log, address: hostPort(cfg.Host, cfg.GossipPort),
	}
	if err := p.listen(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	if err := p.enter(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// listen binds the node port and begins to accept. Nothing is served on it yet.
func (p *Peering) listen(ctx context.Context) error {
	p.Port = nodeport.New(nodeport.Config{
		Credentials: p.Certificates.credentials.Load, Revoked: p.isRevoked, Bind: p.cfg.Listen,
		Connect: p.cfg.Dial, Log: p.log.With(slog.String("component", "nodeport")),
		RemovedHere: p.refuse,
		Refused:     func(r nodeport.Reason) { p.cfg.Refused(string(r)) },
	})
	if err := p.Port.Listen(ctx, hostPort(p.cfg.Host, p.cfg.NodePort)); err != nil {
		return err
	}
	p.address, p.Certificates.port = hostPort(p.cfg.Host, p.cfg.NodePort), p.Port
	if bound, ok := p.Port.Addr().(*net.TCPAddr); ok { // NodePort 0
		p.address = hostPort(p.cfg.Host, bound.Port)
	}
	p.Transports = newTransports(p.Port, p.Neighbours.Get)
	p.loops.Go(func() { //nolint:contextcheck // the port lives until it is closed
		if err := p.Port.Serve(); err != nil {
			p.log.Error("the node port is gone", slog.Any("err", err))
		}
	})
	return nil
}

// enter finds the node's certificate, or gets one, and starts the gossip.
func (p *Peering) enter(ctx context.Context) error {
	files, err := loadFiles(p.dir)
	if errors.Is(err, fs.ErrNotExist) && p.roles == nil {
		p.roles = p.cfg.DefaultRoles
	}
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil:
		p.Certificates.files = files
		if err = p.comeBack(); err == nil && p.cfg.Join != nil {
			err = p.checkRejoin()
		}
	case p.cfg.Join != nil:
		err = p.join(ctx)
	default:
		err = p.found()
	}
	if err != nil {
		return err
	}
	c, err := p.Certificates.files.Credentials()
	if err != nil {
		return err
	}
	if err := errors.Join(p.verifyIdentity(c.Identity), p.takeRoles(c.Identity.Roles)); err != nil {
		return err
	}
	p.ident.Cluster = c.Identity.Cluster
	if err := p.Certificates.begin(c); err != nil {
		return err
	}
	return p.startGossip(ctx)
}

// startGossip starts the gossip, which finds nodes that have moved and suspects silent nodes. A network
// without packets works without it, by the state's addresses and the leases.
func (p *Peering) startGossip(ctx context.Context) error {
	if !p.cfg.WithGossip {
		return nil
	}
	key, err := membership.DeriveKey(p.Certificates.files.GossipKey, p.ident.Cluster)
	if err != nil {
		return err
	}
	g, err := membership.Start(ctx, membership.Config{
		Self: membership.Member{
			Cluster: p.ident.Cluster, UID: p.ident.UID, Node: p.cfg.NodeID, Address: p.address,
		},
		Incarnation: p.cfg.Incarnation, Host: p.cfg.Host, Port: p.cfg.GossipPort, Key: key,
		Seeds: p.Neighbours.gossipSeeds, Revoked: p.isRevoked,
		Refused: func(r membership.Reason) { p.cfg.Refused("gossip_" + string(r)) },
		Timers:  p.cfg.Gossip, Log: p.log.With(slog.String("component", "membership")),
	})
	if err != nil {
		return err
	}
	p.Neighbours.gossip, p.Neighbours.address = g, g.Address()
	return nil
}

// WatchRemoval ends the connections of nodes that the cluster has removed, until ctx ends or this node is
// removed: its own copy of the state says so, or another control node does. A node that was cut off while it
// was removed gets no state any more, only that refusal.
func (p *Peering) WatchRemoval(ctx context.Context) {
	var delayed sync.WaitGroup
	defer delayed.Wait()
	for seen := ""; ; {
		changed := p.cfg.Store.Changed()
		// Removed is bounded, so compare its last entry, not its length
		if gone := p.cfg.Store.State().Removed; len(gone) > 0 && gone[len(gone)-1] != seen {
			seen = gone[len(gone)-1]
			delayed.Go(func() { p.disconnect(ctx, gone) })
		}
		if p.isRevoked(p.ident.UID) || p.Refusal() != nil {
			p.log.Info("this node is no member of its cluster any more")
			close(p.removed)
			p.noteRemoval() // after it: the disk may hang
			return
		}
		select {
		case <-changed:
		case <-p.refused.Done():
		case <-ctx.Done():
			return
		}
	}
}

// disconnect ends the connections with removed nodes after cluster.DisconnectDelay, so that a node that asked
// to leave still gets the answer.
func (p *Peering) disconnect(ctx context.Context, uids []string) {
	if pause.For(ctx, cluster.DisconnectDelay) != nil {
		return
	}
	for _, uid := range uids {
		p.Port.Disconnect(uid)
	}
}

// Removed is closed when the cluster has removed this node.
func (p *Peering) Removed() <-chan struct{} { return p.removed }

// Refusal is the error of the first control node that refused this node as removed; nil before that.
func (p *Peering) Refusal() error { return context.Cause(p.refused) }

// AwaitRefusal calls giveUp with Refusal once there is one, until ctx ends.
func (p *Peering) AwaitRefusal(ctx context.Context, giveUp context.CancelCauseFunc) {
	select {
	case <-p.refused.Done():
		giveUp(p.Refusal())
	case <-ctx.Done():
	}
}

// isRevoked reports whether the cluster has removed a node.
func (p *Peering) isRevoked(uid string) bool {
	return slices.Contains(p.cfg.Store.State().Removed, uid)
}

// Identity names this node and its cluster.
func (p *Peering) Identity() cluster.Identity { return p.ident }

// Roles are the roles of this node's certificate.
func (p *Peering) Roles() []string { return p.roles }

// Address is HOST:PORT of the node port.
func (p *Peering) Address() string { return p.address }

// IsFounding reports whether this process founds the cluster.
func (p *Peering) IsFounding() bool { return p.founding }

// Record is this node's record for the other nodes, without what it offers.
func (p *Peering) Record() state.Node {
	return state.Node{
		ID: p.cfg.NodeID, UID: p.ident.UID, Zone: p.cfg.Zone, Version: p.cfg.Version, Level: state.Level,
		Advertise: p.cfg.Host, Address: p.address, Gossip: p.Neighbours.address,
		GossipSum: state.GossipKeySum(p.Certificates.current().GossipKey),
		Roles:     state.ConvertRoles[state.Role](p.roles),
	}
}

// Consensus sets what consensus needs to reach the other control nodes.
func (p *Peering) Consensus(cfg *cluster.Config) {
	cfg.Layer = raftLayer{p.Port, p.Port.Listener(nodeport.Raft)}
	cfg.Member, cfg.Resolve = p.joined, p.Neighbours.Resolve
	if p.founding {
		cfg.Secrets = func() state.Secrets { return p.secrets }
	}
}

// NewToken makes a join token with the limits of a record, which it fills in. The cluster stores only its
// hash.
func (p *Peering) NewToken(ctx context.Context, store cluster.Store, ttl time.Duration, rec *state.Token,
) (token string, err error) {
	t, err := pki.NewToken(p.cfg.Store.State().Secrets.Authority)
	if err != nil {
		return "", err
	}
	now := time.Now()
	rec.Hash, rec.Made, rec.Expires = t.Hash(), now.UnixMilli(), now.Add(ttl).UnixMilli()
	_, err = store.Propose(ctx, state.Command{PutToken: rec})
	return t.String(), err
}

// OfferGossipKey hands a gossip key to KeepGossipKey and does not wait: whoever renews the lease must not
// wait for the disk. While another key waits there, this one is dropped. The leader sends its key with each
// renewal until the node reports it.
func (p *Peering) OfferGossipKey(key []byte) {
	select {
	case p.keys <- key:
	default:
	}
}

// KeepGossipKey takes the keys of OfferGossipKey, until ctx ends: it speaks with the key and saves it in the
// data dir.
func (p *Peering) KeepGossipKey(ctx context.Context) {
	for {
		select {
		case secret := <-p.keys:
			err := p.Certificates.takeGossipKey(secret, func() error {
				key, err := membership.DeriveKey(secret, p.ident.Cluster)
				if err != nil || p.Neighbours.gossip == nil {
					return err
				}
				return p.Neighbours.gossip.SetKey(key)
			})
			if err != nil {
				p.log.Warn("the gossip's new key cannot be taken, trying again", slog.Any("err", err))
			}
		case <-ctx.Done():
			return
		}
	}
}

// Close ends the gossip, the connections and the node port, and waits.
func (p *Peering) Close() error {
	var errs []error
	if p.Neighbours.gossip != nil {
		errs = append(errs, p.Neighbours.gossip.Close())
	}
	if p.Transports != nil {
		p.Transports.close()
	}
	errs = append(errs, p.Port.Close())
	p.loops.Wait()
	return errors.Join(errs...)
}

// raftLayer is raft's transport between nodes.
type raftLayer struct {
	port *nodeport.Port
	net.Listener
}

var _ cluster.Layer = raftLayer{}

// Dial implements cluster.Layer. It connects only to the node with this UID.
func (l raftLayer) Dial(uid, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c, err := l.port.Dial(ctx, nodeport.Raft, address, uid)
	if err != nil {
		return nil, err // not a nil *Conn in an interface
	}
	return c, nil
}

// takeRoles takes the roles that the node joined with. Its certificate names them and the other nodes trust
// only that.
func (p *Peering) takeRoles(joined []string) error {
	if p.roles == nil {
		p.roles = joined
	}
	if state.SameRoles(p.roles, joined) {
		return nil
	}
	return problem.New(problem.Conflict, "this node has joined with roles %s, not %s",
		strings.Join(joined, ","), strings.Join(p.roles, ",")).
		WithHint("leave --roles out; for other roles let it leave (`dpserve leave`) and join again with " +
			"an empty --data-dir")
}

// pkiDir is the directory of a node's certificate; "" in memory.
func pkiDir(dataDir string) string {
	if dataDir == "" {
		return ""
	}
	return filepath.Join(dataDir, "pki")
}

func hostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }
