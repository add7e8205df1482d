package server

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/engine/kvevents"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/steptime"
	"github.com/dpserve/dpserve/internal/telemetry"
)

const (
	// readyTimeout bounds the first election and the barrier after it, which take 0.3 s.
	readyTimeout = 30 * time.Second
	// afterDrain is the time that requests get after the engines' grace, to write their error events.
	afterDrain = 2 * time.Second
)

// Node is one running dpserve, alone or as a member of a cluster.
type Node struct {
	cfg         Config
	log         *slog.Logger
	metrics     *telemetry.Metrics
	nodeMetrics *telemetry.Node
	system      *actor.ActorSystem
	ident       cluster.Identity
	store       cluster.Store
	openedStore atomic.Pointer[cluster.Store] // store, for users that start before it is open
	consensus   *cluster.Cluster              // store, on a node with role control; else nil
	peering     *peering                      // nil: this node stands alone
	conns       *noderpc.Conns
	leader      *noderpc.LeaderClient // client of the leader, on this or another node
	leading     atomic.Pointer[leaderActors]
	upkeep      *cluster.Upkeep // of voters and gossip key, on a node with role control; else nil
	hub         *dpserver.Hub
	probes      *http.Transport
	offer       state.Offer
	node        *node.Node
	ingress     *ingress.Ingress // nil without role ingress
	// ingress, for lease renewals, which begin before it exists
	readyIngress  atomic.Pointer[ingress.Ingress]
	admin         *api.Server
	metricsServer *api.Server // nil without --metrics-bind

	httpAddr           string
	firstToken         string
	hasLeft            atomic.Bool
	removedFromCluster chan struct{} // closed when the cluster has removed this node
	kill               context.CancelFunc
	runCtx             context.Context //nolint:containedctx // ends the drain of this process
	loops              sync.WaitGroup
	once               sync.Once
	closeErr           error
}

// New builds a node. It opens the data dir, joins its cluster or waits until it leads its own, and restores
// the stored apps. Clients are served after Listen and Serve. Errors are *problem.Error.
func New(c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, problem.New(problem.InvalidArgument, "--log-level %q: want debug, info, warn or error",
			c.LogLevel)
	}
	n := &Node{
		cfg: c, metrics: telemetry.New(), hub: dpserver.NewHub(), probes: c.probes(),
		removedFromCluster: make(chan struct{}),
	}
	n.nodeMetrics = n.metrics.Node(c.NodeID)
	n.metrics.BuildInfo(c.Version)
	n.log = telemetry.NewLogger(c.LogWriter, c.LogFormat, level).With(slog.String("node", c.NodeID))
	n.runCtx, n.kill = context.WithCancel(context.Background())
	built := make(chan struct{})
	go func() {
		select {
		case <-c.Stop:
			n.kill()
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
	var err error
	ctx, cancel := context.WithTimeout(n.runCtx, readyTimeout)
	defer cancel()
	if n.cfg.Advertise != "" {
		if err := n.bootstrap(ctx); err != nil {
			return err
		}
	} else if err := n.refuseStandalone(); err != nil {
		return err
	}
	if n.cfg.Roles == nil {
		n.cfg.Roles = AllRoles()
	}
	if n.offer, err = n.cfg.offer(); err != nil {
		return err
	}
	n.conns = noderpc.NewConns(noderpc.ConnsConfig{Dial: n.peering.dial, Nodes: n.peersAtLastAddress})
	n.leader = noderpc.NewLeaderClient(noderpc.LeaderConfig{
		Self: n.cfg.NodeID, Conns: n.conns,
		Hint: n.leaderUID, Leading: n.currentLeader, Store: deferredStore{n}, Log: n.log,
	})
	if err := n.openStore(ctx); err != nil {
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
			cfg.Layer, cfg.Member, cfg.Resolve = raftLayer{
				n.peering.port,
				n.peering.port.Listener(nodeport.Raft), giveUp,
			}, n.peering.member, n.peering.resolveAddress
			if n.peering.founding {
				cfg.Secrets, cfg.LeaseTTL = func() state.Secrets { return n.peering.secrets },
					n.cfg.leaseTTL()
			}
		}
		c, err := cluster.Open(cfg) //nolint:contextcheck // it lives until it is closed
		if err != nil {
			return err
		}
		n.consensus, n.store = c, c
		n.upkeep = cluster.NewUpkeep(cluster.UpkeepConfig{
			Cluster: c, Renews: n.renewingNodes, Ask: n.askNode, Log: n.log,
		})
	} else {
		w, err := cluster.NewWatcher(cluster.WatcherConfig{
			NodeID: n.cfg.NodeID, ClusterID: n.ident.Cluster, UID: n.ident.UID, DataDir: n.cfg.DataDir,
			Log:   n.log,
			Watch: n.leader.Watch, Forward: n.leader.Forward, Resolve: n.peering.resolveAddress,
			Unknown: n.nodeMetrics.Unknown,
		})
		if err != nil {
			return err
		}
		n.store = w
	}
	n.openedStore.Store(&n.store)
	// before the state is complete: a node whose certificate has expired gets no state without a new one
	if n.peering != nil {
		n.loops.Go(func() { n.peering.keepCertificate(n.runCtx) })
		if n.peering.rejoinAddress != "" {
			n.loops.Go(func() { n.peering.identifyRejoinPeer(ctx) })
		}
	}
	if n.peering == nil { // a member's identity is known before
		n.ident = cluster.Identity{Cluster: n.store.ClusterID(), Node: n.cfg.NodeID, UID: n.store.UID()}
	}
	if err := n.store.Ready(ctx); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, nodeport.ErrRemoved) {
			return cause
		}
		return err
	}
	if err := n.checkLeaseTTL(); err != nil {
		return err
	}
	return n.peering.saveFounderFiles()
}

// buildWorker makes the node's supervisor. Every node has one, for its lease; only nodes with role worker get
// ranks.
func (n *Node) buildWorker(t *timers) error {
	factory := &dpserver.Factory{
		System: n.system, Hub: n.hub, Assigner: n.leader, NewEngine: dpserver.NewClient(n.probes),
		PrefillTime: prefillTime, Timers: t.replica, Log: n.log,
		Secret: func() []byte { return n.store.State().Secret }, App: newSpecCache(n.store).spec,
		Address: n.cfg.Advertise,
		Lease:   func() bool { return n.node.Admits() },
		Replays: kvevents.NewReplays(), DialEvents: n.cfg.dialEvents(), ListenEvents: n.cfg.listenEvents(),
	}
	var err error
	n.node, err = node.New(node.Config{
		ID: n.cfg.NodeID, DataDir: n.cfg.DataDir, PortLo: n.offer.PortLo, PortHi: n.offer.PortHi,
		Slots: n.offer.Slots, Devices: n.offer.Devices,
		Labels: n.offer.Labels, Executable: n.cfg.Executable, System: n.system, Assigner: n.leader,
		Rand: randomUint64, Timers: t.node, Log: n.log,
		Launcher: n.cfg.Launcher, Transport: n.probes, BindTest: n.cfg.bindTest(),
		NewReplica: func(spec msg.ReplicaSpec) (node.Replica, error) { return factory.New(spec) },
		Leader:     keyringLeader{n}, Self: n.selfRecord, Trouble: n.warning, Store: n.store,
		OnLeaseLoss: n.onLeaseLoss(), EngineHost: n.cfg.engineHost(), Advertise: n.cfg.Advertise,
	})
	return err
}

// buildServers makes the servers for clients, operators and other nodes.
func (n *Node) buildServers(t *timers) error {
	if n.hasRole(state.RoleIngress) {
		cfg := ingress.Config{
			Node: n.cfg.NodeID, Version: n.cfg.Version, Store: n.store, Feed: n.hub, Metrics: n.metrics,
			Log: n.log, Timers: t.ingress, Seed: randomUint64(),
			Dial: n.cfg.dialer(), Serves: n.node.Serves(),
			Limits: ingress.Limits{MaxBody: int64(n.cfg.MaxBody) << 20},
		}
		var err error
		if n.peering != nil {
			if cfg.Feed, err = n.peering.openFeed(n.hub, t.stream); err != nil {
				return err
			}
			cfg.Remote = noderpc.NewDataClient(n.peering.dataTransport)
		}
		if n.ingress, err = ingress.New(cfg); err != nil {
			return err
		}
		n.readyIngress.Store(n.ingress)
		n.metrics.Ingress(n.cfg.NodeID, n.ingress.Usage)
	}
	b := &backend{n}
	metrics := n.metricsHandler()
	n.admin = api.NewServer(api.Config{
		Backend: b, Ranks: b, Nodes: b, Routers: newRouters(n), Metrics: metrics, Forward: n.leaderHandler,
		NoLeader: n.errNoLeader,
		Version:  api.BuildInfo{Version: n.cfg.Version, Node: n.cfg.NodeID}, Log: n.log,
		Hosts: n.adminHosts(),
	})
	if n.cfg.MetricsBind != "" {
		n.metricsServer = api.NewMetricsServer(metrics, n.log)
	}
	if n.peering != nil {
		return n.peering.serve()
	}
	return nil
}

// start starts the background loops and waits until the stored applications are shown.
func (n *Node) start(ctx context.Context) error {
	if err := n.adaptLeadership(ctx); err != nil {
		return err
	}
	n.loops.Go(func() { n.followLeadership(n.runCtx) })
	n.loops.Go(func() { n.watchRemoval(n.runCtx) })
	if n.peering == nil {
		return nil
	}
	if n.consensus != nil {
		n.loops.Go(func() { n.upkeep.Run(n.runCtx) })
		n.loops.Go(func() { n.probeNextVersion(n.runCtx) })
	}
	if n.peering.gossip != nil {
		n.loops.Go(func() { n.peering.updateGossipMeta(n.runCtx) })
	}
	n.awaitRegistered(ctx)
	return n.createFirstToken(ctx)
}

// adminHosts returns the host names that the admin port accepts.
func (n *Node) adminHosts() []string {
	hosts := append([]string{n.cfg.NodeID}, n.cfg.AdminHosts...)
	if n.cfg.Advertise != "" {
		hosts = append(hosts, n.cfg.Advertise)
	}
	return hosts
}

// Listen binds the ports of clients and operators. A taken port is problem.Unavailable; an Ephemeral node
// takes another one.
func (n *Node) Listen() error {
	if n.ingress != nil {
		if err := n.bind(n.cfg.HTTPBind, "--http-bind", func(ctx context.Context, addr string) error {
			a, err := n.listenHTTP(ctx, addr)
			if err == nil {
				n.httpAddr = a.String()
			}
			return err
		}); err != nil {
			return err
		}
	}
	if n.metricsServer != nil {
		if err := n.bind(n.cfg.MetricsBind, "--metrics-bind", n.listenMetrics); err != nil {
			return err
		}
	}
	return n.bind(n.cfg.AdminBind, "--admin-bind", n.listenAdmin)
}

func (n *Node) bind(addr, flag string, listen func(ctx context.Context, addr string) error) error {
	err := listen(n.runCtx, addr)
	if n.cfg.Ephemeral && errors.Is(err, syscall.EADDRINUSE) {
		err = listen(n.runCtx, "127.0.0.1:0")
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return problem.New(problem.Unavailable, "%s %s is taken: %w", flag, addr, err).
			WithHint("stop what listens there, or choose another port with %s", flag)
	}
	if err != nil {
		return problem.New(problem.InvalidArgument, "%s %s: %w", flag, addr, err)
	}
	return nil
}

// Serve answers until ctx ends or the cluster removes the node. Then it drains and returns when every engine
// is gone. Kill ends the drain.
func (n *Node) Serve(ctx context.Context) error {
	failed := make(chan error, 3) // one slot for each server
	if n.ingress != nil {
		go func() { failed <- n.ingress.Serve() }()
	}
	if n.metricsServer != nil {
		go func() { failed <- n.metricsServer.Serve() }()
	}
	go func() { failed <- n.admin.Serve() }()
	var err error
	select {
	case <-ctx.Done():
	case <-n.removedFromCluster:
	case err = <-failed:
	}
	return errors.Join(err, n.drain()) //nolint:contextcheck // a drain outlives the context that asks for it
}

// drain turns readiness off, lets each app's streams end within its grace, then ends the engines and the
// servers.
func (n *Node) drain() error {
	if n.ingress != nil {
		n.ingress.Drain()
	}
	n.handOverLeadership()
	var err error
	if n.peering == nil { // no other leader exists: the controller must not start the ended ranks again
		err = n.stepDown()
	}
	err = errors.Join(err, n.node.Close(n.runCtx, n.longestGrace()))
	ctx, cancel := context.WithTimeout(n.runCtx, afterDrain)
	defer cancel()
	if n.ingress != nil {
		if cerr := n.ingress.Close(ctx); cerr != nil && !errors.Is(cerr, context.Canceled) &&
			!errors.Is(cerr, context.DeadlineExceeded) {
			err = errors.Join(err, cerr)
		}
	}
	return errors.Join(err, n.closeMetrics(), n.admin.Close())
}

// closeMetrics ends the server of --metrics-bind, if there is one.
func (n *Node) closeMetrics() error {
	if n.metricsServer == nil {
		return nil
	}
	return n.metricsServer.Close()
}

// Kill ends a drain: it kills the engines and cuts the streams.
func (n *Node) Kill() { n.kill() }

// Close ends everything that still runs and waits. Idempotent.
func (n *Node) Close() error {
	n.once.Do(func() {
		n.kill()
		n.closeErr = n.close()
	})
	return n.closeErr
}

func (n *Node) close() error {
	n.loops.Wait()
	errs := []error{n.stepDown()}
	if n.node != nil {
		errs = append(errs, n.node.Close(n.runCtx, 0))
	}
	if n.ingress != nil {
		if err := n.ingress.Close(n.runCtx); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, n.closeMetrics())
	if n.admin != nil {
		errs = append(errs, n.admin.Close())
	}
	if n.leader != nil {
		errs = append(errs, n.leader.Close())
	}
	n.peering.closeFeed() // before its connections close, or each stream would warn of a break
	if n.conns != nil {
		errs = append(errs, n.conns.Close())
	}
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	errs = append(errs, n.peering.close())
	n.probes.CloseIdleConnections()
	if n.system != nil {
		n.system.Shutdown()
	}
	return errors.Join(errs...)
}

// HTTPAddr is the address for clients, after Listen.
func (n *Node) HTTPAddr() string { return n.httpAddr }

// AdminAddr is the address of the admin API, after Listen.
func (n *Node) AdminAddr() string {
	if a := n.admin.Addr(); a != nil {
		return a.String()
	}
	return ""
}

// MetricsAddr is the address of --metrics-bind, after Listen; empty without that flag.
func (n *Node) MetricsAddr() string {
	if n.metricsServer == nil || n.metricsServer.Addr() == nil {
		return ""
	}
	return n.metricsServer.Addr().String()
}

// Feed returns the streams of all ranks that this node's ingress follows, for a second ingress beside it.
// Without role ingress it returns those of the node's own ranks.
func (n *Node) Feed() msg.Feed {
	if n.peering != nil && n.peering.feed != nil {
		return n.peering.feed
	}
	return n.hub
}

// Store is the cluster's state, for an ingress beside the node's own.
func (n *Node) Store() msg.Store { return n.store }

// Totals returns the requests ended, tokens generated and requests in flight at this node's ingress.
func (n *Node) Totals() (requests, tokens uint64, inflight int) {
	if n.ingress == nil {
		return 0, 0, 0
	}
	return n.ingress.Totals()
}

// prefillTime is the reference machine's time for a prompt without other load. It stretches the stall
// timeout, so only its order of magnitude counts.
func prefillTime(tokens int) time.Duration {
	ms := steptime.Reference().Step(tokens, 0, 0, steptime.Pairs(tokens, 0))
	return time.Duration(ms * float64(time.Millisecond))
}

// randomUint64 draws an incarnation or a seed.
func randomUint64() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // never fails since Go 1.24
	return binary.LittleEndian.Uint64(b[:])
}
