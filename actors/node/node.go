// Package node is the supervisor of one machine: it starts the engines of the ranks granted to it, watches
// them, takes a unit out of routing at its first failure, ends engines with everything they started, and
// reports. See DESIGN.md.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/inbox"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/process"
	"github.com/dpserve/dpserve/internal/state"
)

// mailboxBound is the number of unread commands a node accepts: far more than units in one grant, far less
// than a controller that repeats itself every 2 s could send in a minute.
const mailboxBound = 1024

// Node is a running supervisor. It implements msg.NodeAgent.
type Node struct {
	cfg      Config
	box      *inbox.Inbox
	logs     *logStore
	launcher Launcher
	shims    *shims // the launcher, unless a test has another one
	own      *http.Transport
	timers   Timers
	log      *slog.Logger

	leaseKeeper *leaseKeeper
	halt        context.CancelFunc // ends leaseKeeper and enforceLease, after the units
	aside       sync.WaitGroup     // both

	ending
	taken takenPorts
	found []*unit // of an earlier process; not changed after New

	mu    sync.Mutex // of what follows, and of the units' fields that say so; never held while anything waits
	core  *Core
	units map[string]*unit // of the Core's units; readers copy
	left  []string         // units whose engines did not end, with their processes
	stuck error            // why nothing waits for units any more: a disk that hangs holds them
}

// ending is how a node ends: with its engines, or without them.
type ending struct {
	hard       chan struct{} // closed: end engines at once
	hardOnce   sync.Once
	detached   chan struct{} // closed: end and leave the engines running
	detachOnce sync.Once
	running    sync.WaitGroup // units; Add only under mu, while the Core takes starts, or in a unit
	closeParts func() error   // once: ends what the units have used
}

var _ msg.NodeAgent = (*Node)(nil)

// New reads the data dir of an earlier process of this node, finds its engines, and takes commands. The
// engines are adopted or ended when the leader has answered.
func New(cfg Config) (*Node, error) {
	n := &Node{
		cfg: cfg, timers: cfg.Timers.withDefaults(), log: cfg.Log, units: map[string]*unit{},
		ending: ending{hard: make(chan struct{}), detached: make(chan struct{})},
	}
	n.closeParts = sync.OnceValue(n.endParts)
	if err := n.defaults(); err != nil {
		return nil, err
	}
	seen, err := loadEpochs(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if n.launcher == nil {
		n.shims, err = openShims(&n.cfg, &n.timers)
		if err != nil {
			return nil, problem.New(problem.Internal, "%w", err).
				WithHint("the folder must be readable for this user")
		}
		n.launcher = n.shims
	}
	units, rest := groupFound(n.launcher.Found())
	n.core = NewCore(time.Now(), CoreConfig{
		Node: cfg.ID, Incarnation: draw(cfg.Rand), AfterStop: takeStopMark(cfg.DataDir), Epochs: seen,
		Found:       newestOrders(units),
		OnLeaseLoss: cfg.OnLeaseLoss, LeaseTTL: n.timers.LeaseTTL, LeaseRenew: n.timers.LeaseRenew,
		Sought: cfg.Shims.sought(),
	})
	n.leaseKeeper = newLeaseKeeper(n)
	n.logs = newLogStore(logDir(cfg.DataDir), n.log)
	n.box, err = inbox.Spawn(cfg.System, "node/"+cfg.ID, mailboxBound,
		func() inbox.Receiver { return supervisor{n} })
	if err != nil {
		n.closeResources()
		return nil, err
	}
	openFound(n, units, rest)
	n.watch()
	return n, nil
}

// watch starts leaseKeeper, enforceLease and the log sweep.
func (n *Node) watch() {
	ctx, cancel := context.WithCancel(context.Background())
	n.halt = cancel
	n.aside.Go(func() { n.leaseKeeper.run(ctx) })
	n.aside.Go(func() { n.enforceLease(ctx) })
	if n.logs.dir != "" { // ends with ctx, or after a disk that hangs
		go n.logs.sweep(ctx, n.cfg.Store.State)
	}
}

func (n *Node) defaults() error {
	if n.cfg.Executable == "" {
		path, err := process.Path()
		if err != nil {
			return problem.New(problem.Internal,
				"cannot find this program, which is also the simulated engine: %w", err)
		}
		n.cfg.Executable = path
	}
	if n.cfg.Transport == nil {
		n.own = engine.NewTransport()
		n.cfg.Transport = n.own
	}
	if n.cfg.EngineHost == "" {
		n.cfg.EngineHost = engine.Loopback
	}
	if n.cfg.Replace == nil {
		n.cfg.Replace = diskfile.Replace
	}
	n.launcher = n.cfg.Launcher
	return nil
}

// trouble is the warning for this node's status, "" = none. It names the shims in the data dir that this node
// leaves alone.
func (n *Node) trouble() string {
	var out []string
	if n.cfg.Trouble != nil {
		if text := n.cfg.Trouble(); text != "" {
			out = append(out, text)
		}
	}
	if n.shims != nil {
		out = append(out, n.shims.foreign...)
	}
	return strings.Join(out, "; ")
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
	// the order shows that a leader exists: the lease is asked for before the order is refused for want of it
	n.leaseKeeper.ask(ctx, func() bool { return n.leaseKeeper.mayLaunch() == nil })
	n.leaseKeeper.catchUp(ctx)
	return n.command(ctx, func(reply chan error) any { return startRank{m, reply} })
}

// StopRank implements msg.NodeAgent. The end is reported as Gone, also for a unit that this node does not
// have.
func (n *Node) StopRank(ctx context.Context, m *msg.StopRank) error {
	if taken, err := n.stopSeen(m); taken {
		return err
	}
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
// error names the processes that did not end (problem.Internal). For a disk that hangs it waits
// diskfile.Grace more, and once more after the units; the error wraps diskfile.ErrHangs then. Idempotent.
// After Detach it only waits.
func (n *Node) Close(ctx context.Context, grace time.Duration) error {
	n.mu.Lock()
	n.core.Leave() // no unit is added any more
	n.core.StopAll(time.Now(), grace)
	n.mu.Unlock()
	n.leaseKeeper.ring()
	for _, u := range n.list() {
		u.interrupt(errStopAsked)
	}
	stopHard := context.AfterFunc(ctx, n.killAll)
	defer stopHard()
	err := n.awaitUnits(grace + n.timers.KillGrace + n.timers.VerifyNamed)
	return errors.Join(err, n.closeParts(), n.leftBehind())
}

// awaitUnits waits until every unit has ended, which each one bounds by itself: the last bound is limit, or
// 2 × KillGrace after killAll. It gives up on those that a call of the disk holds, which are not reported
// gone.
func (n *Node) awaitUnits(limit time.Duration) error {
	n.mu.Lock()
	stuck := n.stuck
	n.mu.Unlock()
	if stuck != nil {
		return stuck
	}
	ended := make(chan struct{})
	go func() {
		n.running.Wait()
		close(ended)
	}()
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
	case <-n.hard:
		late.Reset(min(limit, 2*n.timers.KillGrace))
		select {
		case <-ended:
		case <-late.C:
		}
	}
	err := diskfile.Await(n.cfg.DataDir, diskfile.Grace, func() error { <-ended; return nil })
	n.mu.Lock()
	n.stuck = err
	n.mu.Unlock()
	return err
}

// endParts ends what the units have used. It waits at most diskfile.Grace for the supervisor's and its own
// calls of the disk.
func (n *Node) endParts() error {
	n.box.Halt()
	err := diskfile.Await(n.cfg.DataDir, diskfile.Grace, func() error {
		<-n.box.Stopped()
		n.markStop()
		n.halt()
		n.aside.Wait()
		return nil
	})
	n.halt()
	n.closeResources()
	return err
}

// errDetached ends the start of a unit whose engines the next process of the node adopts.
var errDetached = errors.New("dpserve starts again on this node")

// Detach ends the node and leaves its engines running, for the node's next process. It asks the leader to
// keep the grants for grace, refuses starts, takes the ranks out of routing, waits at most wait until their
// requests have ended, and cuts the rest. Close follows.
func (n *Node) Detach(ctx context.Context, grace, wait time.Duration) {
	n.mu.Lock()
	n.core.Restart(grace)
	n.mu.Unlock()
	n.Renew(ctx) // an answer, or none within renewPatience
	n.awaitRequests(ctx, wait)
	n.detachOnce.Do(func() { close(n.detached) })
	for _, u := range n.list() {
		u.interrupt(errDetached)
	}
	// each wait of a unit ends with detached, or is bounded
	err := errors.Join(n.awaitUnits(n.timers.KillGrace+n.timers.VerifyNamed), n.closeParts())
	if err != nil {
		n.log.Warn("the node did not let go of everything", slog.String("err", err.Error()))
	}
}

// awaitRequests closes the ranks for new requests and waits for the open ones.
func (n *Node) awaitRequests(ctx context.Context, wait time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var drained []<-chan struct{}
	for _, u := range n.list() {
		n.mu.Lock()
		ranks, phase := u.ranks, u.life.Phase
		n.mu.Unlock()
		if phase != state.Ready {
			continue
		}
		for _, r := range ranks {
			r.replica.Drain(msg.CauseRestarting)
			drained = append(drained, r.replica.Drained())
		}
	}
	for _, d := range drained {
		select {
		case <-d:
		case <-ctx.Done():
			return
		}
	}
}

// markStop writes the stop mark. Without it the next process does not know of this end.
func (n *Node) markStop() {
	if err := n.cfg.save(stopFile, true); err != nil {
		n.log.Warn("cannot record that this process was asked to end", slog.String("err", err.Error()))
	}
}

func (n *Node) killAll() { n.hardOnce.Do(func() { close(n.hard) }) }

func (n *Node) closeResources() {
	if n.shims != nil {
		n.shims.close()
	}
	if n.own != nil {
		n.own.CloseIdleConnections()
	}
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
	return slices.Collect(maps.Values(n.units))
}

// UnitOf returns the unit of this node whose engine a process belongs to; "" if there is none.
func (n *Node) UnitOf(pid int) string { return unitOf(pid, engineUnits(n), process.ReadStat) }

// enforceLease ends what this node may no longer run: units that the cluster has released or granted anew,
// and with on_lease_loss fence all units when the lease is over. It ends with ctx, which outlives the units.
func (n *Node) enforceLease(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		// Changed comes before State, so that no change in between is missed
		changed := n.cfg.Store.Changed()
		timer.Reset(n.check(n.cfg.Store.State()))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			return
		}
	}
}

// check ends what the Core finds, and returns the longest time until the next check.
func (n *Node) check(s *state.State) time.Duration {
	n.mu.Lock()
	n.leaseKeeper.countSuspension()
	cut, next := n.core.Check(time.Now(), s)
	n.leaseKeeper.publish()
	ended := cutUnits(n, cut)
	maps.DeleteFunc(n.units, func(name string, _ *unit) bool { return !n.core.Has(name) })
	for _, u := range n.found {
		if u.life.IsFound() {
			u.nudge()
		}
	}
	n.mu.Unlock()
	for _, u := range ended {
		u.interrupt(errStopAsked)
	}
	return next
}

// CutAll fences every rank and ends its engine at once, because the cluster has removed this node and may
// have granted its ranks elsewhere. Close follows.
func (n *Node) CutAll() {
	n.mu.Lock()
	n.core.Leave() // no unit is added any more
	cut := cutUnits(n, n.core.CutAll(time.Now()))
	n.mu.Unlock()
	for _, u := range cut {
		u.interrupt(errStopAsked)
	}
}

func (n *Node) isStopping() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.core.Stopping()
}

// Renew asks the leader now and returns when the renewal has ended. It reports whether the leader has
// prolonged the lease. A new leader learns the units of its own node before it answers status requests.
func (n *Node) Renew(ctx context.Context) bool {
	return n.leaseKeeper.ask(ctx, func() bool { return false })
}

// Process names this process of the node.
func (n *Node) Process() string { return fmt.Sprintf("%016x", n.core.cfg.Incarnation) }

// Admits reports whether this node's ranks may admit requests now: not after a freeze until the leader has
// answered once, and with on_lease_loss fence not without a lease. It is cheap, because every request asks.
func (n *Node) Admits() bool { return n.leaseKeeper.admits() }

// Serves returns a function that reports whether a relay of this node may pass on the next bytes; nil =
// always. With on_lease_loss fence it is Admits.
func (n *Node) Serves() func() bool {
	if n.cfg.OnLeaseLoss != Fence {
		return nil
	}
	return n.leaseKeeper.admits
}

// LeaseLeft is the remaining time of the lease; 0 without one.
func (n *Node) LeaseLeft() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.core.LeaseLeft(time.Now())
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
)

// supervisor is the node's actor. It carries out the orders that the Core takes; each unit runs by itself.
// Its only disk access is to record an epoch, because an acknowledged start must not be forgotten. A panic
// loses no unit: they belong to Node.
type supervisor struct{ *Node }

// Receive implements inbox.Receiver.
func (s supervisor) Receive(m any) {
	switch m := m.(type) {
	case startRank:
		m.reply <- s.start(m.m)
	case stopRank:
		m.reply <- s.stop(m.m)
	}
}

// start begins a unit, if the Core allows it. An older incarnation ends first.
func (s supervisor) start(m *msg.StartRank) error {
	now := s.cfg.Store.State()
	s.mu.Lock()
	epochs, err := s.core.MayStart(time.Now(), now, m)
	s.mu.Unlock()
	s.leaseKeeper.ring()
	if err != nil || epochs == nil {
		return err
	}
	if err := s.record(m.Unit, m.Epoch, epochs); err != nil {
		return err
	}
	s.mu.Lock()
	if err := s.core.refuseWhileEnding(m); err != nil { // its end has begun meanwhile
		s.mu.Unlock()
		return err
	}
	before := s.units[m.Unit]
	u := newUnit(s.Node, s.core.Start(time.Now(), m, epochs), before)
	s.units[m.Unit] = u
	s.running.Go(u.run)
	s.mu.Unlock()
	s.leaseKeeper.ring()
	if before != nil {
		before.interrupt(errStopAsked)
	}
	return nil
}

// record writes the epochs of an order to disk.
func (s supervisor) record(unit string, epoch uint64, epochs map[string]uint64) error {
	if err := s.cfg.save(epochsFile, epochs); err != nil {
		return problem.New(problem.Internal, "unit %s: cannot record epoch %d: %w", unit, epoch, err).
			WithHint("free space in the data dir")
	}
	return nil
}

// stop asks a unit to end.
func (s supervisor) stop(m *msg.StopRank) error {
	s.mu.Lock()
	epochs, err := s.core.MayStop(m)
	s.mu.Unlock()
	if err == nil && epochs != nil {
		err = s.record(m.Unit, m.Epoch, epochs)
	}
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.core.Stop(time.Now(), m, epochs)
	s.mu.Unlock()
	s.wakeStopped(m.Unit)
	return nil
}

// stopSeen asks a unit to end if nothing has to be written for that, beside the actor, which may wait for a
// disk that hangs. An order that comes after a start of its epoch finds that epoch unseen until then.
func (n *Node) stopSeen(m *msg.StopRank) (taken bool, err error) {
	if closed(n.box.Stopped()) {
		return false, nil
	}
	n.mu.Lock()
	epochs, err := n.core.MayStop(m)
	if err == nil && epochs == nil {
		n.core.Stop(time.Now(), m, nil)
	}
	n.mu.Unlock()
	if err != nil || epochs != nil {
		return err != nil, err
	}
	n.wakeStopped(m.Unit)
	return true, nil
}

// wakeStopped has a unit, and the next renewal, see an order to stop.
func (n *Node) wakeStopped(unit string) {
	n.mu.Lock()
	u := n.units[unit]
	n.mu.Unlock()
	n.leaseKeeper.ring()
	if u != nil {
		u.interrupt(errStopAsked)
	}
}
