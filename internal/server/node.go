package server

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/asynkron/protoactor-go/actor"
	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/access"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/cluster/peering"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/devices"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// readyTimeout bounds the first election and the barrier after it, which take 0.3 s.
const readyTimeout = 30 * time.Second

// Node is one running dpserve, alone or as a member of a cluster.
type Node struct {
	cfg         Config
	log         *slog.Logger
	metrics     *telemetry.Metrics
	nodeMetrics *telemetry.Node
	system      *actor.ActorSystem
	ident       cluster.Identity
	store       cluster.Store
	opened      openedStore      // store, for users that start before it is open
	consensus   *cluster.Cluster // store, on a node with role control; else nil
	upkeep      *cluster.Upkeep  // of voters and gossip key, on a node with role control; else nil
	peering     *peering.Peering // nil: this node stands alone
	services    *services        // on the node port; nil: this node stands alone
	conns       *noderpc.Conns
	leader      *noderpc.LeaderClient // client of the leader, on this or another node
	leading     cluster.Leading[*leaderActors]
	hub         *msg.Hub
	rankLinks   *noderpc.RankLinks  // to other nodes' ranks; nil: this node stands alone, or has no ingress
	groups      *noderpc.GroupLinks // to the ingresses of other nodes; nil as rankLinks
	probes      *http.Transport
	resources   state.Resources // of the flags; withDevices adds the devices
	devices     *devices.Keeper // nil: this node offers no devices
	node        *node.Node
	ingress     *ingress.Ingress          // nil without role ingress
	readyNode   atomic.Pointer[node.Node] // node, for readings of the devices, which begin before it exists
	// ingress, for lease renewals, which begin before it exists
	readyIngress  atomic.Pointer[ingress.Ingress]
	admin         *api.Server
	metricsServer *api.Server // nil without --metrics-bind

	ports      ports
	access     *access.Access
	adminToken access.AdminToken
	firstToken string
	search     search
	leaves     atomic.Bool // as leaveTransport notes it
	life       lifetime
}

// lifetime is when a node ends.
type lifetime struct {
	ctx   context.Context //nolint:containedctx // ends the drain of this process
	kill  context.CancelFunc
	loops sync.WaitGroup
	close func() error // once
	// stopping: a signal, a drain or the removal of the node ends its engines
	stopping atomic.Bool

	writers sync.WaitGroup // loops that write to the data dir, whose disk may hang

	restart     chan struct{} // closed: the process is to be replaced
	restartOnce sync.Once
}

// New builds a node. It opens the data dir, joins its cluster or waits until it leads its own, binds its
// ports, and restores the stored apps. Clients are served after Serve. Errors are *problem.Error; engines of
// an earlier process go on after an error.
func New(c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, err // Validate knows only words that slog knows
	}
	ctx, kill := context.WithCancel(context.Background())
	n := &Node{
		cfg: c, metrics: telemetry.New(), hub: msg.NewHub(), probes: c.probes(),
		life: lifetime{ctx: ctx, kill: kill, restart: make(chan struct{})},
	}
	n.search.n = n
	n.life.close = sync.OnceValue(n.closeAll)
	n.nodeMetrics = n.metrics.Node(c.NodeID)
	n.metrics.BuildInfo(c.Version)
	n.log = telemetry.NewLogger(c.LogWriter, c.LogFormat, level).With(slog.String("node", c.NodeID))
	built := make(chan struct{})
	go func() {
		select {
		case <-c.Stop:
			n.Kill()
		case <-built:
		}
	}()
	err := n.build()
	close(built)
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Node) build() error {
	n.system = inbox.NewSystem(n.log)
	files := access.Files{APIKeys: n.cfg.APIKeysFile, TLSCert: n.cfg.TLSCert, TLSKey: n.cfg.TLSKey}
	var err error
	if n.access, err = access.Open(files, n.metrics.Access(), n.log); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.life.ctx, readyTimeout)
	defer cancel()
	if n.cfg.Advertise != "" {
		if err := n.openPeering(ctx); err != nil {
			return err
		}
	} else if err := peering.RefuseStandalone(n.cfg.DataDir); err != nil {
		return err
	}
	if n.cfg.Roles == nil {
		n.cfg.Roles = AllRoles()
	}
	if n.resources, err = n.cfg.resources(); err != nil {
		return err
	}
	if n.devices, err = openDevices(ctx, n); err != nil {
		return err
	}
	n.conns = noderpc.NewConns(n.connsConfig())
	n.leader = noderpc.NewLeaderClient(noderpc.LeaderConfig{
		Self: n.cfg.NodeID, Conns: n.conns,
		Hint: n.opened.LeaderNode, Leading: n.currentLeader, Store: &n.opened, Log: n.log,
	})
	if err := n.openStore(ctx); err != nil {
		return err
	}
	if !n.cfg.AdminOpen {
		n.adminToken, err = access.OpenAdminToken(n.cfg.AdminTokenFile, n.cfg.DataDir)
		if err != nil {
			return err
		}
	}
	// every port of the node is bound before an engine is touched
	if err := n.bindPorts(ctx); err != nil {
		return err
	}
	t := n.timers()
	if err := n.buildWorker(t); err != nil {
		return err
	}
	if err := n.buildServers(t); err != nil {
		return err
	}
	return n.start(ctx)
}

// openPeering makes this node a member: as the first of a cluster, by joining, or as before.
func (n *Node) openPeering(ctx context.Context) error {
	c := &n.cfg
	p := peering.Config{
		NodeID: c.NodeID, Version: c.Version, Zone: c.Zone, DataDir: c.DataDir, Host: c.Advertise,
		NodePort: c.NodePort, GossipPort: c.GossipPort, Roles: c.Roles, DefaultRoles: AllRoles(),
		Store: &n.opened, Leader: func() peering.Certifier { return n.leader },
		Listen: c.listenEvents(), Dial: c.dialer(), WithGossip: c.Network == nil,
		Incarnation: randomUint64(), Gossip: c.timers().gossip, Refused: n.nodeMetrics.Refused, Log: n.log,
	}
	if c.Join != nil {
		p.Join = &peering.Join{Address: c.Join.Address, Token: c.Join.Token}
		p.Join.Present = func(
			ctx context.Context, self state.Node, key []byte,
		) (pki.Files, []state.Node, error) {
			joined, err := noderpc.Join(ctx, noderpc.JoinConfig{
				Address: c.Join.Address, Token: c.Join.Token, Node: self, Key: key, Dial: c.dialer(),
			})
			if err != nil {
				return pki.Files{}, nil, err
			}
			return joined.Files, joined.Seeds, nil
		}
	}
	var err error
	if n.peering, err = peering.Open(ctx, p); err != nil {
		return err
	}
	c.Roles, n.ident = n.peering.Roles(), n.peering.Identity()
	return nil
}

// connsConfig says where the other nodes are and how they are dialled.
func (n *Node) connsConfig() noderpc.ConnsConfig {
	if n.peering != nil {
		return noderpc.ConnsConfig{Dial: n.peering.Port.GRPC, Nodes: n.peering.Neighbours.All}
	}
	return noderpc.ConnsConfig{
		Dial: func(string, string) (*grpc.ClientConn, error) {
			return nil, errors.New("this node stands alone")
		},
		Nodes: func() map[string]*state.Node { return n.opened.State().Nodes },
	}
}

func (n *Node) hasRole(role state.Role) bool { return slices.Contains(n.cfg.Roles, string(role)) }

// selfRecord is this node's record for the other nodes.
func (n *Node) selfRecord() state.Node {
	out := state.Node{
		ID: n.cfg.NodeID, UID: n.ident.UID, Zone: n.cfg.Zone, Version: n.cfg.Version, Level: state.Level,
	}
	for _, r := range n.cfg.Roles {
		out.Roles = append(out.Roles, state.Role(r))
	}
	if n.peering != nil {
		out = n.peering.Record()
	}
	out.Resources = withDevices(n.resources, n.devices)
	return out
}

// warning is shown in this node's status; "" if there is none.
func (n *Node) warning() string {
	var out []string
	if err := n.diskFault(); err != nil {
		out = append(out, err.Error())
	}
	if text := n.search.note(); text != "" {
		out = append(out, text)
	}
	if n.devices != nil {
		if text := n.devices.Trouble(); text != "" {
			out = append(out, text)
		}
	}
	if text := n.access.Warning(time.Now()); text != "" {
		out = append(out, text)
	}
	if n.peering != nil {
		if text := n.peering.Certificates.Warning(time.Now()); text != "" {
			out = append(out, text)
		}
	}
	return strings.Join(out, "; ")
}

// onLeaseLoss says what ranks do without a lease. A node that stands alone serves until it ends.
func (n *Node) onLeaseLoss() node.LeaseLoss {
	if n.peering == nil {
		return node.Serve
	}
	return node.LeaseLoss(n.cfg.OnLeaseLoss)
}

// timers are those of --timers, with the cluster's lease_ttl.
func (n *Node) timers() *timers {
	t := n.cfg.timers()
	if ttl := clusterLeaseTTL(n.opened.State()); ttl > 0 {
		t.node.LeaseTTL, t.controller.LeaseTTL = ttl, ttl
	}
	return t
}

// clusterLeaseTTL is the lease duration of a cluster; 0 = the state does not say.
func clusterLeaseTTL(s *state.State) time.Duration {
	return time.Duration(s.LeaseTTL) * time.Millisecond
}

// checkLeaseTTL refuses a lease_ttl other than the cluster's. A leader with shorter leases would grant ranks
// that nodes still hold by a lease of the leader before it.
func (n *Node) checkLeaseTTL() error {
	own, ttl := n.cfg.Timers["lease_ttl"], clusterLeaseTTL(n.store.State())
	if n.peering == nil || own == 0 || ttl == 0 || own == ttl {
		return nil
	}
	return problem.New(problem.Conflict,
		"--timers lease_ttl=%s: the leases of this cluster last %s since it began", own, ttl).
		WithHint("leave lease_ttl out; for other leases begin a new cluster")
}

// checkRegrant refuses a lease_regrant by which a leader would grant ranks while a node that fences still
// ends their engines. Leases that are shorter than the default, as tests have them, need less time in
// proportion.
func (n *Node) checkRegrant() error {
	ttl := cmp.Or(clusterLeaseTTL(n.store.State()), n.cfg.Timers["lease_ttl"], state.LeaseTTL)
	grace := min(state.LeaseGrace, ttl/(state.LeaseTTL/state.LeaseGrace))
	regrant := n.cfg.Timers["lease_regrant"]
	if regrant == 0 || regrant >= ttl+grace {
		return nil
	}
	return problem.New(problem.InvalidArgument,
		"--timers lease_regrant=%s: the leases of this cluster last %s, and a node may need %s more to end "+
			"its engines", regrant, ttl, grace).
		WithHint("leave lease_regrant out, or make it %s or longer", ttl+grace)
}

// openedStore is a store for components that are made before it is open. It is empty until then.
type openedStore struct{ store atomic.Pointer[cluster.Store] }

func (o *openedStore) State() *state.State {
	if s := o.store.Load(); s != nil {
		return (*s).State()
	}
	return state.New()
}

func (o *openedStore) Changed() <-chan struct{} {
	if s := o.store.Load(); s != nil {
		return (*s).Changed()
	}
	return nil
}

// LeaderNode is the leader's UID, as far as this node knows.
func (o *openedStore) LeaderNode() (uid string, known bool) {
	if s := o.store.Load(); s != nil {
		return (*s).LeaderNode()
	}
	return "", false
}

// openStore opens this node's copy of the state and waits until it is complete.
func (n *Node) openStore(ctx context.Context) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	if n.hasRole(state.RoleControl) {
		cfg := cluster.Config{
			NodeID: n.cfg.NodeID, DataDir: n.cfg.DataDir, ClusterID: n.ident.Cluster, UID: n.ident.UID,
			Log:          n.log,
			ApplySeconds: n.metrics.RaftApply(n.cfg.NodeID), Forward: n.leader.Forward, Stores: n.cfg.Stores,
		}
		if n.peering != nil {
			n.peering.Consensus(&cfg)
			cfg.LeaseTTL = cmp.Or(n.cfg.Timers["lease_ttl"], state.LeaseTTL) // of a cluster that begins
		}
		c, err := cluster.Open(cfg) //nolint:contextcheck // it lives until it is closed
		if err != nil {
			return err
		}
		n.consensus, n.store = c, c
		n.upkeep = cluster.NewUpkeep(cluster.UpkeepConfig{
			Cluster: c, Renews: n.renewingNodes, Log: n.log,
			Ask: func(ctx context.Context, node string) error {
				_, err := n.conns.Node(node).Statuses(ctx)
				return err
			},
		})
	} else {
		w, err := cluster.NewWatcher(cluster.WatcherConfig{
			NodeID: n.cfg.NodeID, ClusterID: n.ident.Cluster, UID: n.ident.UID, DataDir: n.cfg.DataDir,
			Replace: n.cfg.Replace, Log: n.log,
			Watch: n.leader.Watch, Forward: n.leader.Forward, Resolve: n.peering.Neighbours.Resolve,
			Unknown: n.nodeMetrics.Unknown,
		})
		if err != nil {
			return err
		}
		n.store = w
	}
	n.opened.store.Store(&n.store)
	n.leading.Open(cluster.LeadingConfig[*leaderActors]{
		Store: n.store, Cluster: n.consensus, Start: n.startLeaderActors, Prepare: n.awaitController,
		Log: n.log,
	})
	// before the state is complete: a node whose certificate has expired gets no state without a new one
	if n.peering != nil {
		n.life.writers.Go(func() { n.peering.Certificates.Keep(n.life.ctx) })
		n.life.writers.Go(func() { n.peering.KeepGossipKey(n.life.ctx) })
		n.life.loops.Go(func() { n.peering.AwaitRefusal(ctx, giveUp) })
	} else { // a member's identity is known before
		n.ident = cluster.Identity{Cluster: n.store.ClusterID(), Node: n.cfg.NodeID, UID: n.store.UID()}
	}
	if err := n.search.await(ctx); err != nil {
		return err
	}
	if err := cmp.Or(n.checkLeaseTTL(), n.checkRegrant()); err != nil {
		return err
	}
	if n.peering == nil {
		return nil
	}
	return n.peering.SaveAuthority()
}

// buildWorker makes the node's supervisor. Every node has one, for its lease; only nodes with role worker get
// ranks.
func (n *Node) buildWorker(t *timers) error {
	factory := replicaFactory(n, t.replica)
	var err error
	n.node, err = node.New(node.Config{
		ID: n.cfg.NodeID, DataDir: n.cfg.DataDir, Replace: n.cfg.Replace, Executable: n.cfg.Executable,
		System:   n.system,
		Assigner: n.leader, Rand: randomUint64, Timers: t.node, Log: n.log,
		Launcher: n.cfg.Launcher, Transport: viaProbes(n),
		Checks:     node.Checks{BindTest: n.cfg.bindTest(), Devices: deviceChecks(n.devices)},
		NewReplica: func(spec msg.ReplicaSpec) (node.Replica, error) { return factory.New(spec) },
		Leader:     renewer{n}, Self: n.selfRecord, Trouble: n.warning, Store: n.store,
		OnLeaseLoss: n.onLeaseLoss(), Shims: n.shims(),
		Addresses: node.Addresses{EngineHost: n.cfg.engineHost(), Advertise: n.cfg.Advertise},
	})
	n.readyNode.Store(n.node)
	return err
}

// shims returns how engines outlive this process; nil = they end with it.
func (n *Node) shims() *node.ShimConfig {
	if !n.cfg.Shims {
		return nil
	}
	return &node.ShimConfig{
		Cluster: n.store.ClusterID(), Node: n.store.UID(), OrphanTimeout: n.cfg.OrphanTimeout,
		Sought: n.search.began,
	}
}

// openStream connects to the streams of another node's ranks, where that node was seen last.
func (n *Node) openStream(ctx context.Context, node state.Node) (net.Conn, error) {
	if seen := n.peering.Neighbours.Get(node.ID); seen != nil {
		node.Address = seen.Address
	}
	conn, err := n.peering.Port.Dial(ctx, nodeport.Ranks, node.Address, node.UID)
	if err != nil {
		return nil, err // not a nil *Conn in an interface
	}
	return conn, nil
}

// buildServers makes the servers for clients, operators and other nodes.
func (n *Node) buildServers(t *timers) error {
	if n.hasRole(state.RoleIngress) {
		files, ok := process.FileLimit(0)
		if !ok {
			files = math.MaxUint64
		}
		cfg := ingress.Config{
			Node: n.cfg.NodeID, Pseudonym: pseudonym(n), Version: n.cfg.Version, Store: n.store,
			Feed: n.hub, Metrics: n.metrics, Tracer: n.newTracer(), Log: n.log, Timers: t.ingress,
			Seed: randomUint64(), TLS: n.access.TLSConfig(), Keys: n.access.APIKeys(),
			Access: n.access.Metrics, Actors: n.system, Dial: n.cfg.dialer(), Serves: n.node.Serves(),
			Note: n.search.note, RecordTrace: n.cfg.RecordTrace,
			Limits: ingress.Limits{
				MaxBody: int64(n.cfg.MaxBody) << 20, MaxConns: maxConns(n.log, files, n.cfg.Slots),
			},
		}
		if n.cfg.RouterAPI {
			cfg.Steers = func(path string) http.Handler {
				if !api.IsWorkerPath(path) {
					return nil
				}
				return n.admin.WorkerHandler()
			}
		}
		var err error
		if n.peering != nil {
			remote := noderpc.NewDataClient(func(node string) (noderpc.DataTransport, error) {
				return n.peering.Transports.Data(node)
			})
			n.rankLinks = noderpc.NewRankLinks(noderpc.RankLinksConfig{
				Self: n.cfg.NodeID, Hub: n.hub, Store: n.store, Timers: t.stream, Log: n.log,
				Open: n.openStream, Heard: remote.Heard,
			})
			n.groups = noderpc.NewGroupLinks(noderpc.GroupLinksConfig{
				Conn: n.conns.Get, Peer: nodeport.PeerFromContext, Timers: t.stream, Log: n.log,
			})
			cfg.Groups, cfg.Remote = n.groups, remote
		}
		if n.ingress, err = ingress.New(cfg); err != nil {
			return err
		}
		if err := n.ingress.Attach(n.ports.http); err != nil {
			return err
		}
		n.readyIngress.Store(n.ingress)
		n.metrics.Ingress(n.cfg.NodeID, n.ingress.Usage)
	}
	b := &backend{n}
	metrics, engineMetrics := metricsHandler(n), b.engineMetrics()
	n.admin = api.NewServer(api.Config{
		Backend: b, Ranks: b, Engines: b, Nodes: b, Routers: newRouters(n),
		Metrics: metrics, EngineMetrics: engineMetrics,
		Forward:  n.leaderHandler,
		NoLeader: n.errNoLeader,
		Version:  client.BuildInfo{Version: n.cfg.Version, Node: n.cfg.NodeID},
		TLS:      n.access.TLSConfig(), Token: n.AdminToken(), TokenFile: n.AdminTokenFile(),
		Endpoint: n.endpoint, Log: n.log, Hosts: n.adminHosts(), Restarts: b,
		Ray: &api.Ray{Specs: b.specs},
	})
	if err := n.admin.Attach(n.ports.admin); err != nil {
		return err
	}
	if n.ports.metrics != nil {
		n.metricsServer = api.NewMetricsServer(metrics, engineMetrics, n.log)
		if err := n.metricsServer.Attach(n.ports.metrics); err != nil {
			return err
		}
	}
	if n.peering != nil {
		n.serveNodes()
	}
	return nil
}

// start starts the background loops and waits until the stored applications are shown.
func (n *Node) start(ctx context.Context) error {
	if err := n.leading.Adapt(ctx); err != nil {
		return err
	}
	n.life.writers.Go(func() { n.access.Follow(n.life.ctx) })
	n.life.loops.Go(func() { n.leading.Follow(n.life.ctx) })
	if n.devices != nil {
		n.life.loops.Go(func() { n.devices.Run(n.life.ctx) })
	}
	if n.peering == nil {
		return nil
	}
	n.life.writers.Go(func() { n.peering.WatchRemoval(n.life.ctx) })
	if n.consensus != nil {
		n.life.loops.Go(func() { n.upkeep.Run(n.life.ctx) })
	}
	n.awaitRegistered(ctx)
	if !n.peering.IsFounding() {
		return nil
	}
	t, err := (&backend{n}).newToken(ctx, client.TokenRequest{TTL: FirstTokenTTL, Uses: FirstTokenUses},
		n.cfg.NodeID+" at its first start")
	n.firstToken = t.Token
	return err
}

// registeredTimeout bounds how long a new node waits until the cluster knows its resources. The node's first
// renewal reports them.
const registeredTimeout = 5 * time.Second

// awaitRegistered waits until the cluster knows this node's resources: users often deploy right after `join`
// returns.
func (n *Node) awaitRegistered(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, registeredTimeout)
	defer cancel()
	for {
		changed := n.store.Changed() // Changed comes before State, so that no change in between is missed
		rec, offer := n.store.State().Nodes[n.cfg.NodeID], withDevices(n.resources, n.devices)
		if rec != nil && rec.Resources.Slots == offer.Slots && rec.Resources.PortLo == offer.PortLo &&
			slices.Equal(rec.Resources.Devices, offer.Devices) {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			// no warning when the node is stopped meanwhile
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				n.log.Warn("the cluster does not know yet what this node offers")
			}
			return
		}
	}
}

func (n *Node) adminHosts() []string {
	hosts := append([]string{n.cfg.NodeID}, n.cfg.AdminHosts...)
	if n.cfg.Advertise != "" {
		hosts = append(hosts, n.cfg.Advertise)
	}
	return hosts
}

// randomUint64 draws an incarnation or a seed.
func randomUint64() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // never fails since Go 1.24
	return binary.LittleEndian.Uint64(b[:])
}
