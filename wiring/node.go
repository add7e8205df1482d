package wiring

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
	"github.com/dpserve/dpserve/actors/remote"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/cluster/nodeport"
	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
	"github.com/dpserve/dpserve/steptime"
	"github.com/dpserve/dpserve/telemetry"
)

const (
	// readyTimeout bounds the first election and the barrier behind it; they take 0.3 s.
	readyTimeout = 30 * time.Second
	// afterDrain is what requests still get after the engines' grace: time to write their error events.
	afterDrain = 2 * time.Second
)

// Node is one running dpserve, alone or as a member of a cluster.
type Node struct {
	cfg       Config
	log       *slog.Logger
	metrics   *telemetry.Metrics
	here      *telemetry.Node
	system    *actor.ActorSystem
	ident     cluster.Identity
	store     cluster.Store
	opened    atomic.Pointer[cluster.Store] // store, for those who run before it is there
	consensus *cluster.Cluster              // store, on a node with role control; else nil
	mesh      *mesh                         // nil: this node is alone
	conns     *remote.Conns
	leader    *remote.LeaderClient // the leader, wherever it is
	leads     atomic.Pointer[leading]
	voting    sync.Mutex // one change of the voters at a time
	leaving   leaving    // under voting
	hub       *dpserver.Hub
	probes    *http.Transport
	offer     state.Offer
	node      *node.Node
	ingress   *ingress.Ingress                // nil without role ingress
	serving   atomic.Pointer[ingress.Ingress] // ingress, for renewals, which begin before it is there
	admin     *api.Server
	numbers   *api.Server // /metrics alone; nil without --metrics-bind

	httpAddr   string
	firstToken string
	left       atomic.Bool
	out        chan struct{} // closed when it has left
	kill       context.CancelFunc
	killed     context.Context //nolint:containedctx // ends the drain of this process, not of one call
	loops      sync.WaitGroup
	once       sync.Once
	closeErr   error
}

// New builds a node: it opens the data dir, joins its cluster or waits until it leads its own, and brings back the apps that were
// there. Clients are served from Listen on. Errors are *problem.Error.
func New(c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, problem.New(problem.InvalidArgument, "--log-level %q: want debug, info, warn or error", c.LogLevel)
	}
	n := &Node{cfg: c, metrics: telemetry.New(), hub: dpserver.NewHub(), probes: c.probes(), out: make(chan struct{})}
	n.here = n.metrics.Node(c.NodeID)
	n.metrics.BuildInfo(c.Version)
	n.log = telemetry.NewLogger(c.LogWriter, c.LogFormat, level).With(slog.String("node", c.NodeID))
	n.killed, n.kill = context.WithCancel(context.Background())
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
	ctx, cancel := context.WithTimeout(n.killed, readyTimeout)
	defer cancel()
	if n.cfg.Advertise != "" {
		if err := n.enter(ctx); err != nil {
			return err
		}
	} else if err := n.alone(); err != nil {
		return err
	}
	if n.cfg.Roles == nil {
		n.cfg.Roles = AllRoles()
	}
	if n.offer, err = n.cfg.offer(); err != nil {
		return err
	}
	n.conns = remote.NewConns(remote.ConnsConfig{Dial: n.mesh.dial, Nodes: n.reachable})
	n.leader = remote.NewLeaderClient(remote.LeaderConfig{Self: n.cfg.NodeID, Conns: n.conns, Hint: n.leaderUID, Leading: n.leadingNow, Store: late{n}, Log: n.log})
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
	return n.begin(ctx)
}

// openStore opens this node's copy of the state and waits until it is whole.
func (n *Node) openStore(ctx context.Context) error {
	ctx, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	if n.has(state.RoleControl) {
		cfg := cluster.Config{
			NodeID: n.cfg.NodeID, DataDir: n.cfg.DataDir, ClusterID: n.ident.Cluster, UID: n.ident.UID, Log: n.log,
			ApplySeconds: n.metrics.RaftApply(n.cfg.NodeID), Forward: n.leader.Forward, Stores: n.cfg.Stores,
		}
		if n.mesh != nil {
			cfg.Layer, cfg.Member, cfg.Resolve = raftLayer{n.mesh.port, n.mesh.port.Listener(nodeport.Raft), giveUp}, n.mesh.member, n.mesh.resolve
			if n.mesh.founding {
				cfg.Secrets, cfg.LeaseTTL = func() state.Secrets { return n.mesh.secrets }, n.cfg.leaseTTL()
			}
		}
		c, err := cluster.Open(cfg) //nolint:contextcheck // it lives until it is closed
		if err != nil {
			return err
		}
		n.consensus, n.store = c, c
	} else {
		w, err := cluster.NewWatcher(cluster.WatcherConfig{
			NodeID: n.cfg.NodeID, ClusterID: n.ident.Cluster, UID: n.ident.UID, DataDir: n.cfg.DataDir, Log: n.log,
			Watch: n.leader.Watch, Forward: n.leader.Forward, Resolve: n.mesh.resolve, Unknown: n.here.Unknown,
		})
		if err != nil {
			return err
		}
		n.store = w
	}
	n.opened.Store(&n.store)
	if n.mesh != nil { // before the state is whole: a node whose certificate has expired gets none without another one
		n.loops.Go(func() { n.mesh.keepCertificate(n.killed) })
		if n.mesh.rejoin != "" {
			n.loops.Go(func() { n.mesh.meet(ctx) })
		}
	}
	if n.mesh == nil { // else it was known before
		n.ident = cluster.Identity{Cluster: n.store.ClusterID(), Node: n.cfg.NodeID, UID: n.store.UID()}
	}
	if err := n.store.Ready(ctx); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, nodeport.ErrRemoved) {
			return cause
		}
		return err
	}
	if err := n.sameLease(); err != nil {
		return err
	}
	return n.mesh.keep()
}

// buildWorker makes the node's supervisor: every node has one, for its lease; ranks come to those with role worker.
func (n *Node) buildWorker(t *timers) error {
	factory := &dpserver.Factory{
		System: n.system, Hub: n.hub, Assigner: n.leader, NewEngine: dpserver.NewClient(n.probes), PrefillTime: prefillTime, Timers: t.replica, Log: n.log,
		Secret: func() []byte { return n.store.State().Secret }, App: newPresent(n.store).app, Address: n.cfg.Advertise,
		Lease:   func() bool { return n.node.Admits() },
		Replays: kvevents.NewReplays(), DialEvents: n.cfg.dialEvents(), ListenEvents: n.cfg.listenEvents(),
	}
	var err error
	n.node, err = node.New(node.Config{
		ID: n.cfg.NodeID, DataDir: n.cfg.DataDir, PortLo: n.offer.PortLo, PortHi: n.offer.PortHi, Slots: n.offer.Slots, Devices: n.offer.Devices,
		Labels: n.offer.Labels, Executable: n.cfg.Executable, System: n.system, Assigner: n.leader, Rand: random, Timers: t.node, Log: n.log,
		Launcher: n.cfg.Launcher, Transport: n.probes, BindTest: n.cfg.bindTest(),
		NewReplica: func(spec msg.ReplicaSpec) (node.Replica, error) { return factory.New(spec) },
		Leader:     keyed{n}, Self: n.self, Trouble: n.trouble, Store: n.store, OnLeaseLoss: n.onLeaseLoss(), EngineHost: n.cfg.engineHost(), Advertise: n.cfg.Advertise,
	})
	return err
}

// buildServers makes what clients and operators speak to, and what other nodes do.
func (n *Node) buildServers(t *timers) error {
	if n.has(state.RoleIngress) {
		cfg := ingress.Config{
			Node: n.cfg.NodeID, Version: n.cfg.Version, Store: n.store, Feed: n.hub, Metrics: n.metrics, Log: n.log, Timers: t.ingress, Seed: random(),
			Dial: n.cfg.dialer(), Serves: n.node.Serves(), Limits: ingress.Limits{MaxBody: int64(n.cfg.MaxBody) << 20},
		}
		var err error
		if n.mesh != nil {
			if cfg.Feed, err = n.mesh.follow(n.hub, t.stream); err != nil {
				return err
			}
			cfg.Remote = remote.NewDataClient(n.mesh.toData)
		}
		if n.ingress, err = ingress.New(cfg); err != nil {
			return err
		}
		n.serving.Store(n.ingress)
		n.metrics.Ingress(n.cfg.NodeID, n.ingress.Usage)
	}
	b := &backend{n}
	metrics := n.scrape()
	n.admin = api.NewServer(api.Config{
		Backend: b, Ranks: b, Nodes: b, Routers: routersOf(n), Metrics: metrics, Forward: n.forward, NoLeader: n.noLeader,
		Version: api.BuildInfo{Version: n.cfg.Version, Node: n.cfg.NodeID}, Log: n.log, Hosts: n.adminHosts(),
	})
	if n.cfg.MetricsBind != "" {
		n.numbers = api.NewMetricsServer(metrics, n.log)
	}
	if n.mesh != nil {
		return n.mesh.serve()
	}
	return nil
}

// begin starts what goes on by itself, and waits until the applications that were there are shown.
func (n *Node) begin(ctx context.Context) error {
	if err := n.adaptLeadership(ctx); err != nil {
		return err
	}
	n.loops.Go(func() { n.followLeadership(n.killed) })
	n.loops.Go(func() { n.watchOut(n.killed) })
	if n.mesh == nil {
		return nil
	}
	if n.consensus != nil {
		n.loops.Go(func() { n.keepOrder(n.killed) })
	}
	if n.mesh.gossip != nil {
		n.loops.Go(func() { n.mesh.keepMeta(n.killed) })
	}
	n.known(ctx)
	return n.firstJoin(ctx)
}

// adminHosts are the names by which the admin port answers.
func (n *Node) adminHosts() []string {
	hosts := append([]string{n.cfg.NodeID}, n.cfg.AdminHosts...)
	if n.cfg.Advertise != "" {
		hosts = append(hosts, n.cfg.Advertise)
	}
	return hosts
}

// Listen binds the ports of clients and operators. A taken one is problem.Unavailable, or another port if the node is Ephemeral.
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
	if n.numbers != nil {
		if err := n.bind(n.cfg.MetricsBind, "--metrics-bind", n.listenMetrics); err != nil {
			return err
		}
	}
	return n.bind(n.cfg.AdminBind, "--admin-bind", n.listenAdmin)
}

func (n *Node) bind(addr, flag string, listen func(ctx context.Context, addr string) error) error {
	err := listen(n.killed, addr)
	if n.cfg.Ephemeral && errors.Is(err, syscall.EADDRINUSE) {
		err = listen(n.killed, "127.0.0.1:0")
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return problem.New(problem.Unavailable, "%s %s is taken: %w", flag, addr, err).WithHint("stop what listens there, or choose another port with %s", flag)
	}
	if err != nil {
		return problem.New(problem.InvalidArgument, "%s %s: %w", flag, addr, err)
	}
	return nil
}

// Serve answers until ctx ends, or the node has left its cluster; then it drains and returns when every engine is gone. Kill ends the
// drain.
func (n *Node) Serve(ctx context.Context) error {
	failed := make(chan error, 3) // every server
	if n.ingress != nil {
		go func() { failed <- n.ingress.Serve() }()
	}
	if n.numbers != nil {
		go func() { failed <- n.numbers.Serve() }()
	}
	go func() { failed <- n.admin.Serve() }()
	var err error
	select {
	case <-ctx.Done():
	case <-n.out:
	case err = <-failed:
	}
	return errors.Join(err, n.drain()) //nolint:contextcheck // a drain outlives the context that asks for it
}

// drain turns readiness off, gives each app's streams its grace, ends the engines, then the servers.
func (n *Node) drain() error {
	if n.ingress != nil {
		n.ingress.Drain()
	}
	n.handOver()
	var err error
	if n.mesh == nil { // nobody else: what ends now is not to be started again
		err = n.stepDown()
	}
	err = errors.Join(err, n.node.Close(n.killed, n.longestGrace()))
	ctx, cancel := context.WithTimeout(n.killed, afterDrain)
	defer cancel()
	if n.ingress != nil {
		if cerr := n.ingress.Close(ctx); cerr != nil && !errors.Is(cerr, context.Canceled) && !errors.Is(cerr, context.DeadlineExceeded) {
			err = errors.Join(err, cerr)
		}
	}
	return errors.Join(err, n.closeMetrics(), n.admin.Close())
}

// closeMetrics ends the port of /metrics alone, if there is one.
func (n *Node) closeMetrics() error {
	if n.numbers == nil {
		return nil
	}
	return n.numbers.Close()
}

// Kill ends a drain: engines are killed, streams are cut.
func (n *Node) Kill() { n.kill() }

// Close ends everything that is left and waits. Idempotent.
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
		errs = append(errs, n.node.Close(n.killed, 0))
	}
	if n.ingress != nil {
		if err := n.ingress.Close(n.killed); err != nil && !errors.Is(err, context.Canceled) {
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
	n.mesh.unfollow() // while its connections are there, or each of its streams would warn of a break
	if n.conns != nil {
		errs = append(errs, n.conns.Close())
	}
	if n.store != nil {
		errs = append(errs, n.store.Close())
	}
	errs = append(errs, n.mesh.close())
	n.probes.CloseIdleConnections()
	if n.system != nil {
		n.system.Shutdown()
	}
	return errors.Join(errs...)
}

// HTTPAddr is where clients connect, after Listen.
func (n *Node) HTTPAddr() string { return n.httpAddr }

// AdminAddr is where the admin API listens, after Listen.
func (n *Node) AdminAddr() string {
	if a := n.admin.Addr(); a != nil {
		return a.String()
	}
	return ""
}

// MetricsAddr is where /metrics alone is served, after Listen; empty without --metrics-bind.
func (n *Node) MetricsAddr() string {
	if n.numbers == nil || n.numbers.Addr() == nil {
		return ""
	}
	return n.numbers.Addr().String()
}

// Feed is the streams of all ranks as this node's ingress follows them, for another one beside it; without role ingress those of this
// node's own ranks.
func (n *Node) Feed() msg.Feed {
	if n.mesh != nil && n.mesh.feed != nil {
		return n.mesh.feed
	}
	return n.hub
}

// Store is the cluster's state, for an ingress beside the node's own.
func (n *Node) Store() msg.Store { return n.store }

// Totals are requests ended, tokens generated and requests in flight at this node's ingress.
func (n *Node) Totals() (requests, tokens uint64, inflight int) {
	if n.ingress == nil {
		return 0, 0, 0
	}
	return n.ingress.Totals()
}

// prefillTime is what the reference machine takes for a prompt alone: it stretches the stall timeout, so only its order counts.
func prefillTime(tokens int) time.Duration {
	ms := steptime.Reference().Step(tokens, 0, 0, steptime.Pairs(tokens, 0))
	return time.Duration(ms * float64(time.Millisecond))
}

// random draws an incarnation or a seed.
func random() uint64 {
	var b [8]byte
	_, _ = crand.Read(b[:]) // never fails since Go 1.24
	return binary.LittleEndian.Uint64(b[:])
}
