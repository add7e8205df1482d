package wiring

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/controller"
	"github.com/dpserve/dpserve/actors/dpserver"
	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/actors/node"
	"github.com/dpserve/dpserve/actors/rankassigner"
	"github.com/dpserve/dpserve/api"
	"github.com/dpserve/dpserve/cluster"
	"github.com/dpserve/dpserve/engine/kvevents"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/steptime"
	"github.com/dpserve/dpserve/telemetry"
)

const (
	// readyTimeout bounds the first election and the barrier behind it; they take 0.3 s.
	readyTimeout = 30 * time.Second
	// afterDrain is what requests still get after the engines' grace: time to write their error events.
	afterDrain = 2 * time.Second
)

// Node is one running dpserve: all three roles on one machine.
type Node struct {
	cfg     Config
	log     *slog.Logger
	metrics *telemetry.Metrics
	system  *actor.ActorSystem
	cluster *cluster.Cluster
	hub     *dpserver.Hub
	probes  *http.Transport
	node    *node.Node
	assign  *rankassigner.Assigner
	control *controller.Controller
	ingress *ingress.Ingress
	admin   *api.Server

	httpAddr string
	kill     context.CancelFunc
	killed   context.Context //nolint:containedctx // ends the drain of this process, not of one call
	once     sync.Once
	closeErr error
}

// New builds a node: it opens the data dir, waits until this node leads its cluster, and brings back the apps that were there.
// Nothing listens before Listen. Errors are *problem.Error.
func New(c Config) (*Node, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		return nil, problem.New(problem.InvalidArgument, "--log-level %q: want debug, info, warn or error", c.LogLevel)
	}
	n := &Node{cfg: c, metrics: telemetry.New(), hub: dpserver.NewHub(), probes: c.probes()}
	n.log = telemetry.NewLogger(c.LogWriter, c.LogFormat, level).With(slog.String("node", c.NodeID))
	n.killed, n.kill = context.WithCancel(context.Background())
	if err := n.build(); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Node) build() error {
	t := n.cfg.timers()
	n.system = inbox.NewSystem(n.log)
	var err error
	if n.cluster, err = cluster.Open(cluster.Config{NodeID: n.cfg.NodeID, DataDir: n.cfg.DataDir, Log: n.log, ApplySeconds: n.metrics.RaftApply(n.cfg.NodeID)}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(n.killed, readyTimeout)
	defer cancel()
	if err := n.cluster.Ready(ctx); err != nil {
		return err
	}
	n.assign = rankassigner.New(rankassigner.Config{Store: n.cluster, Proposer: n.cluster, Timers: t.assigner, Log: n.log})
	if err := n.assign.Start(n.system); err != nil {
		return err
	}
	if err := n.buildWorker(t); err != nil {
		return err
	}
	if n.ingress, err = ingress.New(ingress.Config{
		Node: n.cfg.NodeID, Version: n.cfg.Version, Store: n.cluster, Feed: n.hub, Metrics: n.metrics, Log: n.log, Timers: t.ingress, Seed: random(),
		Dial: n.cfg.dialer(),
	}); err != nil {
		return err
	}
	n.admin = api.NewServer(api.Config{Backend: &backend{n}, Ranks: &backend{n}, Routers: &routers{n}, Metrics: n.scrape(), Version: api.BuildInfo{Version: n.cfg.Version}, Log: n.log})
	if err := n.control.Start(n.system); err != nil {
		return err
	}
	return n.shown(ctx)
}

// shown waits until the controller shows the apps that were there before a restart: who asks for one is not told that there is
// none.
func (n *Node) shown(ctx context.Context) error {
	for {
		next := n.control.Watch() // before Status, or a change in between goes unseen
		if len(n.control.Status()) >= len(n.cluster.State().Apps) {
			return nil
		}
		select {
		case <-next:
		case <-ctx.Done():
			return problem.New(problem.Timeout, "the controller has not taken up the applications of the data dir: %w", context.Cause(ctx))
		}
	}
}

// buildWorker makes the node's supervisor and the controller, which know each other.
func (n *Node) buildWorker(t *timers) error {
	lo, hi, err := parsePortRange(n.cfg.PortRange)
	if err != nil {
		return err
	}
	devices, err := ParseGPUs(n.cfg.GPUs)
	if err != nil {
		return err
	}
	n.control = controller.New(controller.Config{
		Store: n.cluster, Proposer: n.cluster, Granter: n.assign, Metrics: n.metrics, Timers: t.controller, Log: n.log,
		Nodes: func() []placement.Node {
			return []placement.Node{{ID: n.cfg.NodeID, Slots: n.cfg.Slots, Devices: devices, Labels: n.cfg.Labels, Ports: placement.Ports{Lo: lo, Hi: hi}}}
		},
		Agent: func(id string) (msg.NodeAgent, bool) { return n.node, id == n.cfg.NodeID && n.node != nil },
	})
	factory := &dpserver.Factory{
		System: n.system, Hub: n.hub, Assigner: n.assign, NewEngine: dpserver.NewClient(n.probes), PrefillTime: prefillTime, Timers: t.replica, Log: n.log,
		Secret: func() []byte { return n.cluster.State().Secret }, App: newPresent(n.cluster).app,
		Replays: kvevents.NewReplays(), DialEvents: n.cfg.dialEvents(), ListenEvents: n.cfg.listenEvents(),
	}
	n.node, err = node.New(node.Config{
		ID: n.cfg.NodeID, DataDir: n.cfg.DataDir, PortLo: lo, PortHi: hi, Slots: n.cfg.Slots, Devices: devices, Labels: n.cfg.Labels,
		Executable: n.cfg.Executable, System: n.system, Assigner: n.assign, Reporter: n.control, Rand: random, Timers: t.node, Log: n.log,
		Launcher: n.cfg.Launcher, Transport: n.probes, BindTest: n.cfg.bindTest(),
		NewReplica: func(spec msg.ReplicaSpec) (node.Replica, error) { return factory.New(spec) },
	})
	return err
}

// Listen binds both ports. A taken one is problem.Unavailable, or another port if the node is Ephemeral.
func (n *Node) Listen() error {
	if err := n.bind(n.cfg.HTTPBind, "--http-bind", func(ctx context.Context, addr string) error {
		a, err := n.listenHTTP(ctx, addr)
		if err == nil {
			n.httpAddr = a.String()
		}
		return err
	}); err != nil {
		return err
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

// Serve answers until ctx ends; then it drains and returns when every engine is gone. Kill ends the drain.
func (n *Node) Serve(ctx context.Context) error {
	failed := make(chan error, 2) // both servers
	go func() { failed <- n.ingress.Serve() }()
	go func() { failed <- n.admin.Serve() }()
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	return errors.Join(err, n.drain()) //nolint:contextcheck // a drain outlives the context that asks for it
}

// drain turns readiness off, gives each app's streams its grace, ends the engines, then the servers.
func (n *Node) drain() error {
	n.ingress.Drain()
	err := n.control.Close() // first: what ends now is not to be started again
	err = errors.Join(err, n.node.Close(n.killed, n.longestGrace()))
	ctx, cancel := context.WithTimeout(n.killed, afterDrain)
	defer cancel()
	if cerr := n.ingress.Close(ctx); cerr != nil && !errors.Is(cerr, context.Canceled) && !errors.Is(cerr, context.DeadlineExceeded) {
		err = errors.Join(err, cerr)
	}
	return errors.Join(err, n.admin.Close())
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
	var errs []error
	if n.control != nil {
		errs = append(errs, n.control.Close())
	}
	if n.node != nil {
		errs = append(errs, n.node.Close(n.killed, 0))
	}
	if n.ingress != nil {
		if err := n.ingress.Close(n.killed); err != nil && !errors.Is(err, context.Canceled) {
			errs = append(errs, err)
		}
	}
	if n.admin != nil {
		errs = append(errs, n.admin.Close())
	}
	if n.assign != nil {
		errs = append(errs, n.assign.Close())
	}
	if n.cluster != nil {
		errs = append(errs, n.cluster.Close())
	}
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

// Feed is the streams of this node's ranks, for an ingress beside the node's own.
func (n *Node) Feed() msg.Feed { return n.hub }

// Store is the cluster's state, for an ingress beside the node's own.
func (n *Node) Store() msg.Store { return n.cluster }

// Totals are requests ended, tokens generated and requests in flight at this node's ingress.
func (n *Node) Totals() (requests, tokens uint64, inflight int) { return n.ingress.Totals() }

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
