// Package node is the supervisor of one machine: it starts the engines of the ranks granted to it, watches
// them, takes a unit out of routing at its first failure, ends engines with everything they started, and
// reports. See DESIGN.md.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/asynkron/protoactor-go/actor"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// mailboxBound is the number of unread commands a node accepts: far more than units in one grant, far less
// than a controller that repeats itself every 2 s could send in a minute.
const mailboxBound = 1024

// Replica is one rank's DPServer as its node uses it.
type Replica interface {
	Assign(ctx context.Context) error             // assign_rank: the RankAssigner confirms the grant
	Ready(ctx context.Context, f msg.Facts) error // opens admission and begins to watch the engine
	Fence(cause string) <-chan struct{}           // stops admission at once; closed when every sink knows
	Drain(cause string)                           // stops admission, running requests continue
	Drained() <-chan struct{}                     // closed when a Drain found no request left
	Stop(ctx context.Context) error               // ends the stream and the actor
	Status() client.RankStatus                    // the rank's status
}

// Config is the configuration of a node.
type Config struct {
	ID         string
	DataDir    string // epochs, process groups, engine logs; "" = nothing survives
	PortLo     int    // range of the engines' ports
	PortHi     int
	Slots      int
	Devices    []int
	Labels     map[string]string
	Executable string   // starts simulated engines; "" = this program
	Environ    []string // environment for engines; nil = this process's
	System     *actor.ActorSystem
	NewReplica func(spec msg.ReplicaSpec) (Replica, error)
	Assigner   msg.Assigner
	Reporter   msg.Reporter         // receives events if there is no Leader
	Launcher   Launcher             // nil = processes
	Transport  http.RoundTripper    // for probes of starting engines; nil = a new one
	BindTest   func(port int) error // nil = bind the given address
	Rand       func() uint64        // draws incarnations
	Timers     Timers
	Log        *slog.Logger

	Leader      msg.Leader        // grants the lease and takes the events; nil = no lease is needed
	Self        func() state.Node // this node's record; nil = ID, Advertise and the resources above
	Trouble     func() string     // warning for this node's status, "" = none; may be nil
	Store       msg.Store         // shows which units are superseded; nil = unknown
	OnLeaseLoss LeaseLoss         // "" = Serve
	EngineHost  string            // address of this machine where engines listen; "" = engine.Loopback
	Advertise   string            // address of rank 0 of a lockstep unit for other nodes; "" = none
}

// Node is a running supervisor. It implements msg.NodeAgent.
type Node struct {
	cfg       Config
	box       *inbox.Inbox
	logs      *logStore
	launcher  Launcher
	processes *processes // nil with a Launcher from Config
	own       *http.Transport
	timers    Timers
	log       *slog.Logger

	leaseKeeper *leaseKeeper       // nil without a Leader
	halt        context.CancelFunc // ends leaseKeeper and enforceLease, after the units
	aside       sync.WaitGroup     // both

	closing  atomic.Bool   // nothing starts any more
	hard     chan struct{} // closed: end engines at once
	hardOnce sync.Once
	running  sync.WaitGroup // units

	mu    sync.Mutex
	units map[string]*unit // the newest of each name; readers copy
	left  []string         // units whose engines did not end, with their processes

	reportMu sync.Mutex
	reports  uint64
}

var _ msg.NodeAgent = (*Node)(nil)

// New reads the data dir of an earlier process of this node, ends its leftovers, and takes commands.
func New(cfg Config) (*Node, error) {
	n := &Node{
		cfg: cfg, timers: cfg.Timers.withDefaults(), log: cfg.Log, units: map[string]*unit{},
		hard: make(chan struct{}),
	}
	if err := n.defaults(); err != nil {
		return nil, err
	}
	seen, err := loadEpochs(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if afterStop := takeStopMark(cfg.DataDir); n.leaseKeeper != nil {
		n.leaseKeeper.afterStop = afterStop
	}
	n.logs = newLogStore(logDir(cfg.DataDir), n.log)
	if n.launcher == nil {
		if err := n.openProcesses(); err != nil {
			return nil, err
		}
	}
	n.box, err = inbox.Spawn(cfg.System, "node/"+cfg.ID, mailboxBound,
		func() inbox.Receiver { return &supervisor{Node: n, epochs: seen} })
	if err != nil {
		n.closeResources()
		return nil, err
	}
	n.watch()
	return n, nil
}

// watch starts leaseKeeper, enforceLease and the log sweep.
func (n *Node) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	n.halt = cancel
	if n.leaseKeeper != nil {
		n.aside.Go(func() { n.leaseKeeper.run(ctx) })
	}
	if n.cfg.Store != nil && n.logs.dir != "" {
		go n.sweepLogs(ctx) // ends with ctx, or after a disk that hangs
	}
	if n.leaseKeeper != nil || n.cfg.Store != nil {
		n.aside.Go(func() { n.enforceLease(ctx) })
	}
}

func (n *Node) defaults() error {
	if n.cfg.Executable == "" {
		path, err := os.Executable()
		if err != nil {
			return problem.New(problem.Internal,
				"cannot find this program, which is also the simulated engine: %w", err)
		}
		n.cfg.Executable = path
	}
	if n.cfg.Environ == nil {
		n.cfg.Environ = os.Environ()
	}
	if n.cfg.Transport == nil {
		n.own = engine.NewTransport()
		n.cfg.Transport = n.own
	}
	if n.cfg.EngineHost == "" {
		n.cfg.EngineHost = engine.Loopback
	}
	if n.cfg.Self == nil {
		n.cfg.Self = n.self
	}
	n.launcher = n.cfg.Launcher
	if n.cfg.Leader != nil {
		n.leaseKeeper = newLeaseKeeper(&n.cfg, &n.timers)
		n.cfg.Reporter = n.leaseKeeper
	}
	return nil
}

func (n *Node) self() state.Node {
	c := &n.cfg
	return state.Node{
		ID: c.ID, Advertise: c.Advertise, Roles: []state.Role{state.RoleWorker},
		Offer: state.Offer{
			Slots: c.Slots, Devices: c.Devices, Labels: c.Labels, PortLo: c.PortLo, PortHi: c.PortHi,
		},
	}
}

func (n *Node) openProcesses() error {
	l := newProcessTable(n.cfg.DataDir, fmt.Sprintf("%016x", n.cfg.Rand()), n.log)
	if err := l.sweep(); err != nil {
		return problem.New(problem.Internal, "%w", err).
			WithHint("end left-over engines by hand and remove the file")
	}
	n.processes = newProcesses(l)
	n.launcher = n.processes
	return nil
}

func logDir(dataDir string) string {
	if dataDir == "" {
		return ""
	}
	return dataDir + "/" + logsDir
}

// StartRank implements msg.NodeAgent. A nil error means that the start was accepted; events report its
// progress. Errors: ErrStaleEpoch (problem.Conflict), problem.Unavailable without a lease, problem.Internal,
// or the mailbox's.
func (n *Node) StartRank(ctx context.Context, m *msg.StartRank) error {
	if n.leaseKeeper != nil {
		n.leaseKeeper.ensure(ctx)
		n.leaseKeeper.catchUp(ctx)
	}
	return n.command(ctx, func(reply chan error) any { return startRank{m, reply} })
}

// StopRank implements msg.NodeAgent. The end is reported as Gone, also for a unit that this node does not
// have.
func (n *Node) StopRank(ctx context.Context, m *msg.StopRank) error {
	return n.command(ctx, func(reply chan error) any { return stopRank{m, reply} })
}

func (n *Node) command(ctx context.Context, message func(reply chan error) any) error {
	reply := make(chan error, 1)
	if err := n.box.TrySend(message(reply)); err != nil {
		return problem.New(problem.Overloaded, "node %s: %w", n.cfg.ID, err)
	}
	select {
	case err := <-reply:
		return err
	case <-n.box.Stopped():
		return problem.New(problem.Unavailable, "node %s: %w", n.cfg.ID, errClosed)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close drains every unit for at most grace and its app's graceful_shutdown_timeout_s, ends all engines and
// waits until no process is left. Meanwhile the node accepts StopRank, refuses StartRank
// (msg.ErrNodeStopping), and reports that it stops. When ctx is done earlier, engines are killed at once.
// Close always returns: after the grace, KillGrace and VerifyNamed, or 2 × KillGrace after ctx is done, the
// error names the processes that did not end (problem.Internal). Idempotent.
func (n *Node) Close(ctx context.Context, grace time.Duration) error {
	n.closing.Store(true)
	asked := closeAllUnits{grace, make(chan struct{})}
	n.box.Send(asked)
	if n.leaseKeeper != nil {
		n.leaseKeeper.close()
	}
	done := make(chan struct{})
	go func() {
		select { // no unit is added any more
		case <-asked.done:
		case <-n.box.Stopped():
		}
		n.running.Wait()
		close(done)
	}()
	stopHard := context.AfterFunc(ctx, n.killAll)
	defer stopHard()
	<-done // bounded by grace, KillGrace and VerifyNamed
	n.box.Halt()
	<-n.box.Stopped()
	n.markStop()
	n.halt()
	n.aside.Wait()
	n.closeResources()
	return n.leftBehind()
}

// markStop writes the stop mark. It waits at most KillGrace for a disk that hangs; without the mark the next
// process does not know of this end.
func (n *Node) markStop() {
	written := make(chan error, 1)
	go func() { written <- leaveStopMark(n.cfg.DataDir) }()
	over := time.NewTimer(n.timers.KillGrace)
	defer over.Stop()
	select {
	case err := <-written:
		if err != nil {
			n.log.Warn("cannot note that this process was told to end", slog.String("err", err.Error()))
		}
	case <-over.C:
	}
}

func (n *Node) killAll() { n.hardOnce.Do(func() { close(n.hard) }) }

func (n *Node) closeResources() {
	if n.processes != nil {
		n.processes.close()
	}
	if n.own != nil {
		n.own.CloseIdleConnections()
	}
	n.logs.close()
}

// leave notes a unit's processes that did not end.
func (n *Node) leave(what string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.left = append(n.left, what)
}

func (n *Node) leftBehind() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.left) == 0 {
		return nil
	}
	slices.Sort(n.left)
	return problem.New(problem.Internal, "engines were killed and did not end: %s",
		strings.Join(n.left, "; ")).WithDetails(n.left...).
		WithHint("a process in state D of ps hangs in the kernel or a driver: look at dmesg; its devices " +
			"are free again after it, or a reboot")
}

// list copies the units.
func (n *Node) list() []*unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]*unit, 0, len(n.units))
	for _, u := range n.units {
		out = append(out, u)
	}
	return out
}

// report numbers an event and passes it on, one at a time, so that numbers and order agree.
func (n *Node) report(e msg.UnitEvent) {
	n.reportMu.Lock()
	defer n.reportMu.Unlock()
	n.number(e)
}

// reportAgain repeats the last event of a unit. It holds the lock of report, so that no newer event overtakes
// it.
func (n *Node) reportAgain(u *unit) {
	n.reportMu.Lock()
	defer n.reportMu.Unlock()
	u.mu.Lock()
	e := u.last
	u.mu.Unlock()
	if e.Kind != "" {
		n.number(e)
	}
}

func (n *Node) number(e msg.UnitEvent) {
	n.reports++
	e.Node, e.Number, e.At = n.cfg.ID, n.reports, time.Now()
	n.cfg.Reporter.Report(e)
}

// RankStatuses returns the status of every rank of this node, by unit.
func (n *Node) RankStatuses() map[string][]client.RankStatus {
	out := map[string][]client.RankStatus{}
	for _, u := range n.list() {
		if u.currentPhase() != state.Gone {
			out[u.m.Unit] = u.statuses()
		}
	}
	return out
}

// Messages of the node's actor.
type (
	startRank struct {
		m     *msg.StartRank
		reply chan error // one slot
	}
	stopRank struct {
		m     *msg.StopRank
		reply chan error // one slot
	}
	closeAllUnits struct {
		grace time.Duration
		done  chan struct{} // closed when every unit was asked
	}
)

// supervisor is the node's actor. It decides which units exist; each unit runs by itself. Its only disk
// access is to record an epoch, because an acknowledged start must not be forgotten. A panic loses no unit:
// they belong to Node.
type supervisor struct {
	*Node
	epochs *epochs
}

// Receive implements inbox.Receiver.
func (s *supervisor) Receive(m any) {
	switch m := m.(type) {
	case startRank:
		m.reply <- s.start(m.m)
	case stopRank:
		m.reply <- s.stop(m.m)
	case closeAllUnits:
		defer close(m.done)
		for _, u := range s.list() {
			u.askStop(min(m.grace, app.Seconds(u.m.App.GracefulShutdownTimeout)), "node is stopping")
		}
	}
}

// start accepts a unit, unless it exists already, is older than an epoch that this node or its copy of the
// state has seen, or is not covered by the lease. An older incarnation is ended first, at once: two owners of
// a rank must never overlap.
func (s *supervisor) start(m *msg.StartRank) error {
	before := s.unit(m.Unit)
	if before != nil && before.m.Epoch == m.Epoch && s.epochs.seen[m.Unit] == m.Epoch {
		before.repeat()
		return nil
	}
	if s.closing.Load() {
		return problem.New(problem.Unavailable, "unit %s: node %s: %w", m.Unit, s.cfg.ID, msg.ErrNodeStopping)
	}
	if err := s.mayBegin(m); err != nil {
		return err
	}
	u := newUnit(s.Node, m, before)
	if before != nil {
		before.askStop(0, "a newer epoch was granted")
	}
	s.mu.Lock()
	s.units[m.Unit] = u
	s.mu.Unlock()
	s.running.Go(u.run)
	return nil
}

// mayBegin checks a start, and records its epoch if the start is allowed.
func (s *supervisor) mayBegin(m *msg.StartRank) error {
	if s.cfg.Store != nil {
		if now := s.cfg.Store.State(); superseded(now, m.Unit, m.Epoch) {
			return problem.New(problem.Conflict,
				"unit %s: %w: epoch %d was asked for, the cluster has released it (it is at %d)", m.Unit,
				ErrStaleEpoch, m.Epoch, now.LastEpoch(m.Unit))
		} else if s.epochs.isBehind(now) {
			return problem.New(problem.Unavailable,
				"unit %s: this node's copy of the state is older than before it was started", m.Unit).
				WithHint("wait until the node has the present state")
		}
	}
	if err := s.mayStart(); err != nil {
		return err
	}
	if s.cfg.Store != nil {
		s.epochs.prune(s.cfg.Store.State(),
			func(unit string) bool { return unit == m.Unit || s.unit(unit) != nil })
	}
	return s.epochs.begin(m.Unit, m.Epoch)
}

// stop asks a unit to end. A unit that is not here is reported as gone, because the controller may have
// missed its end. A unit that already ends repeats its last event, or the controller would repeat the order.
func (s *supervisor) stop(m *msg.StopRank) error {
	if err := s.epochs.admit(m.Unit, m.Epoch); err != nil {
		return err
	}
	u := s.unit(m.Unit)
	if u == nil || u.m.Epoch < m.Epoch {
		s.report(msg.UnitEvent{
			Unit: m.Unit, Epoch: m.Epoch, Kind: msg.UnitGone, Rank: -1, Reason: m.Reason,
			Asked: true,
		})
	}
	if u == nil {
		return nil
	}
	ends := u.isEnding()
	if !u.askStop(m.Grace, m.Reason) || ends {
		u.repeat()
	}
	return nil
}
