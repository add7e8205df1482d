// Package cluster runs consensus. It puts commands into hashicorp/raft, applies committed commands to the
// replicated state, and keeps both in a data dir that belongs to one cluster, one node and one process. A
// node is a voter, a standby without a vote, or a follower that takes no part in consensus (Watcher).
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// proposeTimeout bounds how long Propose waits for a leader if its context has no earlier deadline. It also
// bounds each step of becoming ready.
const proposeTimeout = 5 * time.Second

const (
	// closeGrace is how long Close waits for proposals in flight before it stops raft.
	closeGrace = 2 * time.Second
	// diskGrace is how long Close then waits for raft and the disk: twice raft's wait for a node that does
	// not answer.
	diskGrace = 2 * transportTimeout
)

// maxProposals bounds the proposals in flight. Each one has a goroutine until raft answers.
const maxProposals = 256

// Cluster is this node's part of consensus: the local copy of the state and the way to change it. Actors know
// it as msg.Store and msg.Proposer. It is safe for concurrent use.
type Cluster struct {
	cfg   Config
	log   *slog.Logger
	ident identity
	home  io.Closer // the lock of the data dir, held over all runs; nil in memory
	fsm   *fsm
	net   *network // nil = this node is alone
	book  addressBook
	run   atomic.Pointer[run]

	memory    *disk // without a data dir: the disk of all runs; only newRun uses it
	slots     chan struct{}
	proposals sync.WaitGroup // Add only under mu while !stopping

	confirmRounds confirmRounds

	mu     sync.Mutex  // guards fault, and what leadership and ending say so of
	fault  error       // the disk refuses writes; nil after the next successful write
	faulty atomic.Bool // fault != nil
	leadership
	ending
}

// leadership is whether this node leads.
type leadership struct {
	alone         atomic.Bool   // this node is the only voter of the log on disk
	holds         atomic.Bool   // see Holds
	leader        atomic.Bool   // elected, and everything before the election is applied
	leaderChanged chan struct{} // under mu; closed and replaced at each change, here or on another node
}

// ending is how a Cluster ends.
type ending struct {
	done     chan struct{} // closed by end: at Close, or at a fault that waiting cannot repair
	why      error         // under mu; set before done is closed
	stopping bool          // under mu
	loops    sync.WaitGroup
	stopped  error // of the last run; only superviseRuns writes it before all loops have ended
	once     sync.Once
	closed   error
}

// Open locks the data dir, restores the state and starts the election. It returns before there is a leader:
// see Ready. Errors are *problem.Error: Conflict if the data dir is another cluster's, of a newer format, or
// in use.
func Open(cfg Config) (*Cluster, error) {
	cfg = cfg.withDefaults()
	home, ident, err := openDataDir(cfg)
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		cfg: cfg, log: cfg.Log, ident: ident, home: home, fsm: newFSM(),
		slots:      make(chan struct{}, maxProposals),
		leadership: leadership{leaderChanged: make(chan struct{})},
		ending:     ending{done: make(chan struct{})},
	}
	c.book.resolve, c.book.state = cfg.Resolve, c.fsm.State
	c.fsm.restored = c.book.readState
	if err := c.start(); err != nil {
		return nil, errors.Join(err, c.closeShared())
	}
	return c, nil
}

// start begins the first run of raft and the goroutines around it.
func (c *Cluster) start() error {
	if c.cfg.Layer != nil {
		c.net = newNetwork(c.cfg, c.ident.UID, c.book.addresses, c.book.nameOf)
	}
	r, err := c.newRun()
	if err != nil {
		return err
	}
	c.run.Store(r)
	c.loops.Go(func() { c.watchLeadership(r) })
	c.loops.Go(c.superviseRuns)
	if c.cfg.Layer != nil && c.cfg.DataDir != "" {
		keep := keeper{
			dataDir: c.cfg.DataDir, replace: diskfile.Replace, log: c.log, changed: c.Changed, done: c.done,
			newest: func() *stateCopy { return &stateCopy{state: c.State()} },
		}
		c.loops.Go(func() { keep.run(0) })
	}
	return nil
}

// Recall shows readers the state that an earlier process of this node had applied last, unless this one has
// applied as much already; false: there is none. It is for a node that finds no leader: raft applies nothing
// behind its snapshot then. What raft applies later replaces that state once it is as new.
func (c *Cluster) Recall() bool {
	last, err := loadState(c.cfg.DataDir, c.ident.Cluster)
	if err != nil {
		c.log.Warn("the state of the last time cannot be read", "component", "cluster", "err", err)
		return false
	}
	return c.fsm.recall(last.state)
}

// UID returns the id of this node in consensus. It is made together with the data dir.
func (c *Cluster) UID() string { return c.ident.UID }

// ClusterID returns the cluster's name, which is made at its first start.
func (c *Cluster) ClusterID() string { return c.ident.Cluster }

// State returns the newest applied state. It is immutable and shared: callers must not change it.
func (c *Cluster) State() *state.State { return c.fsm.State() }

// Changed is closed at the next change of State. Take it before State, or a change in between goes unnoticed.
func (c *Cluster) Changed() <-chan struct{} { return c.fsm.Changed() }

// end makes everything that waits fail. The first reason stays.
func (c *Cluster) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil {
		c.why = why
		close(c.done)
	}
}

// endError returns the reason of end, nil before it.
func (c *Cluster) endError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

// Close ends proposals (those in flight get closeGrace), stops raft and unlocks the data dir. It is
// idempotent and waits, at most diskGrace for a disk that hangs: then the data dir stays locked until the
// call of the disk has returned, or the process has ended, because the call may still write there.
func (c *Cluster) Close() error {
	c.once.Do(func() { c.closed = c.close() })
	return c.closed
}

func (c *Cluster) close() error {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.awaitProposals()
	c.leader.Store(false)
	c.end(errClosed())
	c.holds.Store(false)
	err := diskfile.Await(c.cfg.DataDir, diskGrace, func() error {
		c.loops.Wait() // superviseRuns stops the run
		return c.closeShared()
	})
	if errors.Is(err, diskfile.ErrHangs) && c.net != nil {
		c.net.closeConnections()
	}
	return err
}

// closeShared closes what all runs share.
func (c *Cluster) closeShared() error {
	var errs []error
	if c.net != nil {
		c.net.closeAll()
	}
	c.confirmRounds.loops.Wait() // at most transportTimeout, like any message of raft
	if c.home != nil {
		errs = append(errs, c.home.Close())
	}
	return errors.Join(append(errs, c.stopped)...)
}

// awaitProposals waits at most closeGrace for proposals in flight: a raft that stops may drop a queued one
// without an answer.
func (c *Cluster) awaitProposals() {
	done := make(chan struct{})
	go func() { c.proposals.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(closeGrace):
		c.log.Warn("closing with proposals in flight", "component", "cluster", "cause", "disk too slow")
	}
}

// faultPause is the pause before raft is started again after a failed write, and between further attempts.
const faultPause = time.Second

// ErrDisk is in every error of a disk that refuses writes or does not answer. The data was not acknowledged.
var ErrDisk = errors.New("the disk of the data dir refuses writes")

// ErrUnreadable is in every error of a log entry or snapshot that this version cannot read. This node has
// left consensus until it is started with a version that can read it.
var ErrUnreadable = errors.New("this node has left consensus")

// unreadableError names what cannot be read and what to do. The list of nodes shows messages without hints,
// so the message itself says it too.
func unreadableError(what string, err error) error {
	if !errors.Is(err, state.ErrNewer) {
		err = fmt.Errorf("it is damaged, or a newer version of dpserve wrote it: %w", err)
	}
	return problem.New(problem.Unavailable, "%w",
		fmt.Errorf("%w, upgrade its dpserve: %s cannot be read: %w", ErrUnreadable, what, err)).
		WithHint("start a newer version of dpserve on this node's data dir: it goes on from its log; until " +
			"then it serves with the state it has")
}

// Fault returns why this node takes no part in consensus, nil while it does. The error is a *problem.Error.
// It wraps ErrDisk while the disk of the data dir refuses writes; the node recovers by itself. It wraps
// ErrUnreadable if the log has entries that this version cannot read; that lasts until another version is
// started. While there is a fault this node neither leads nor votes.
func (c *Cluster) Fault() error {
	if !c.faulty.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fault == nil {
		return nil
	}
	if errors.Is(c.fault, ErrUnreadable) {
		return c.fault
	}
	return c.diskProblem(c.fault)
}

func (c *Cluster) diskProblem(err error) error {
	if errors.Is(err, errDiskHangs) {
		return problem.New(problem.Unavailable, "data dir %s: %w", c.cfg.DataDir, err).
			WithHint("look at the disk of the data dir, it is broken or very slow: dpserve goes on by " +
				"itself when it answers; " +
				"look at the state before you repeat the command")
	}
	return problem.New(problem.Unavailable, "data dir %s: %w", c.cfg.DataDir, err).
		WithHint("free disk space or make the data dir writable: dpserve goes on by itself; look at the " +
			"state before you repeat the command")
}

func (c *Cluster) setFault(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fault = err
	c.faulty.Store(err != nil)
}

// onDiskFailure handles the first failure of a run. The guard calls it before it tells raft, so that a reader
// who sees that raft does not lead any more also sees the fault.
func (c *Cluster) onDiskFailure(err error) {
	c.setFault(err)
	if c.leader.Load() && c.alone.Load() && c.endError() == nil {
		c.holds.Store(true)
	}
}

// Holds reports that this node led when its disk failed, and that no other node can lead meanwhile: this node
// is the only voter, so every possible majority needs its vote, and without a disk it does not vote. Its
// decisions stay valid and leases may be prolonged, but nothing can be proposed. Holds ends when raft leads
// again, or when the log on disk turns out to have other voters.
func (c *Cluster) Holds() bool { return c.holds.Load() }

// readLog reads addresses and voters from the log on disk, before raft starts over it.
func (c *Cluster) readLog(d *disk) error {
	members, index, err := c.book.readAll(d.log)
	if err != nil {
		return err
	}
	snaps, err := d.snaps.List()
	if err != nil {
		return err
	}
	if len(snaps) > 0 && snaps[0].ConfigurationIndex > index {
		members = snaps[0].Configuration
	}
	if c.alone.Store(isOnlyVoter(members, c.ident.UID)); !c.alone.Load() && c.holds.Swap(false) {
		c.wakeLeadership()
	}
	return nil
}

// onDiskWrite handles every successful write.
func (c *Cluster) onDiskWrite() {
	if c.faulty.Load() && errors.Is(c.Fault(), ErrDisk) {
		c.log.Info("the disk of the data dir takes writes again", "component", "cluster")
		c.setFault(nil)
	}
}

// superviseRuns ends a run whose disk refused a write, begins the next one, and ends the last one at Close.
func (c *Cluster) superviseRuns() {
	for c.awaitRunEnd(c.run.Load()) {
		next := c.startNextRun()
		if next == nil {
			return
		}
		c.run.Store(next)
		c.loops.Go(func() { c.watchLeadership(next) })
	}
}

// awaitRunEnd waits for the end of a run and stops it. It returns true if the disk failed: then another run
// should begin. It returns false for an unreadable log, because the next run could not read it either.
func (c *Cluster) awaitRunEnd(r *run) bool {
	select {
	case <-c.done:
		c.stopped = r.stop(ErrClosed)
		return false
	case <-r.guard.failed:
	}
	err, why := r.guard.failure(), ErrDisk
	again := !errors.Is(err, ErrUnreadable)
	if again {
		c.log.Error("the disk refuses writes or does not answer: this node leaves consensus until it takes "+
			"them again", "component", "cluster", "err", err)
	} else {
		why = ErrUnreadable
		c.log.Error("this node leaves consensus until a newer version of dpserve runs on it",
			"component", "cluster", "err", err)
	}
	if err := r.stop(why); err != nil {
		c.log.Warn("stopped with an error", "component", "cluster", "err", err)
	}
	return again
}

// startNextRun begins a run over the log, which it reads again; nil after Close.
func (c *Cluster) startNextRun() *run {
	for {
		select {
		case <-time.After(faultPause):
		case <-c.done:
			return nil
		}
		r, err := c.newRun()
		if err == nil {
			return r
		}
		if errors.Is(err, ErrUnreadable) {
			c.setFault(err)
			c.holds.Store(false)
			c.wakeLeadership()
			if c.net != nil {
				c.net.rejectMessages(ErrUnreadable)
			}
			return nil
		}
		if !errors.Is(err, ErrDisk) {
			err = fmt.Errorf("%w: %w", ErrDisk, err)
		}
		c.setFault(err)
		c.log.Debug("consensus cannot start again yet", "component", "cluster", "err", err)
	}
}

// newRun opens the disk and starts raft over it. An empty log gets this node as its only voter, unless the
// node is a member of a cluster, which will send its own log.
func (c *Cluster) newRun() (_ *run, err error) {
	d, err := c.openDisk()
	if err != nil {
		return nil, err
	}
	g := newGuard(d.log, &c.book, guardHooks{
		uid: c.ident.UID, alone: &c.alone, wrote: c.onDiskWrite, failed: c.onDiskFailure,
	})
	if c.faulty.Load() {
		if err := g.tryWrite(); err != nil {
			g.awaitCalls()
			return nil, errors.Join(err, d.Close())
		}
	}
	r := &run{disk: d, guard: g, net: c.net, seen: make(chan raft.Observation, 1), over: make(chan struct{})}
	if err := r.start(c); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return r, nil
}

// openDisk opens log and snapshots; the data dir is locked. In memory they outlive the run, as files do: a
// node that forgot its votes might vote twice.
func (c *Cluster) openDisk() (*disk, error) {
	if c.cfg.DataDir != "" {
		return openFiles(c.cfg)
	}
	if c.memory == nil {
		c.memory = &disk{log: raft.NewInmemStore(), snaps: raft.NewInmemSnapshotStore()}
		if c.cfg.Stores != nil {
			c.memory.log = c.cfg.Stores(c.memory.log)
		}
	}
	return c.memory, nil
}

// NameOf returns the name of a member of consensus, also of one that the state does not have any more. It is
// the UID if the name is not known.
func (c *Cluster) NameOf(uid string) string { return cmp.Or(c.book.nameOf(uid), uid) }

// Member is a node that takes part in consensus.
type Member struct {
	UID   string
	Voter bool // false: a standby, which has the log and no vote
}

// Members returns the nodes that take part in consensus by this node's log. The last change may not be
// committed yet.
func (c *Cluster) Members() []Member {
	return toMembers(c.run.Load().raft.GetConfiguration().Configuration())
}

func toMembers(servers raft.Configuration) []Member {
	all := make([]Member, len(servers.Servers))
	for i, s := range servers.Servers {
		all[i] = Member{UID: string(s.ID), Voter: s.Suffrage == raft.Voter}
	}
	return all
}

// findMember reports whether a node takes part, and whether it votes.
func (c *Cluster) findMember(uid string) (votes, in bool) {
	all := c.Members()
	i := slices.IndexFunc(all, func(m Member) bool { return m.UID == uid })
	return i >= 0 && all[i].Voter, i >= 0
}

// closeBehind is how many entries a node may lack to get a vote: raft sends as many in one message. The
// cluster makes no progress while a voter that the majority needs lacks entries.
const closeBehind = 64

// IsCloseBehind reports whether a node answers this leader's raft and lacks at most closeBehind committed
// entries.
func (c *Cluster) IsCloseBehind(uid string) bool {
	if uid == c.ident.UID {
		return true
	}
	if c.net == nil {
		return false
	}
	last, ok := c.net.logOf(uid)
	return ok && last+closeBehind >= c.run.Load().raft.CommitIndex()
}

// AddStandby sends the log to a node without giving it a vote. It changes nothing for a node that takes part
// already. AddStandby, Promote, Demote and Remove work on the leader only (ErrNotLeader elsewhere), return
// when the change is committed, and may be repeated.
func (c *Cluster) AddStandby(ctx context.Context, uid string) error {
	_, in := c.findMember(uid)
	return c.changeMembers(ctx, in, func(r *raft.Raft) raft.IndexFuture {
		return r.AddNonvoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Promote gives a node a vote. From then on its vote counts for the majority: promote only a standby that
// IsCloseBehind, or the cluster makes no progress until the node has caught up.
func (c *Cluster) Promote(ctx context.Context, uid string) error {
	votes, _ := c.findMember(uid)
	return c.changeMembers(ctx, votes, func(r *raft.Raft) raft.IndexFuture {
		return r.AddVoter(raft.ServerID(uid), raft.ServerAddress(uid), 0, proposeTimeout)
	})
}

// Demote takes a node's vote and makes it a standby. A leader that demotes itself stops leading. It is
// refused for the last voter.
func (c *Cluster) Demote(ctx context.Context, uid string) error {
	votes, _ := c.findMember(uid)
	return c.changeMembers(ctx, !votes, func(r *raft.Raft) raft.IndexFuture {
		return r.DemoteVoter(raft.ServerID(uid), 0, proposeTimeout)
	})
}

// Remove takes a node out of consensus. It is refused for the last voter.
func (c *Cluster) Remove(ctx context.Context, uid string) error {
	_, in := c.findMember(uid)
	return c.changeMembers(ctx, !in, func(r *raft.Raft) raft.IndexFuture {
		return r.RemoveServer(raft.ServerID(uid), 0, proposeTimeout)
	})
}

// changeMembers makes one change of the members. If this node's log has it already, the change is committed
// with a Barrier after it.
func (c *Cluster) changeMembers(
	ctx context.Context, isMade bool, call func(*raft.Raft) raft.IndexFuture,
) error {
	if isMade {
		return c.Barrier(ctx)
	}
	return c.submit(ctx, func() applyResult {
		err := call(c.run.Load().raft).Error()
		if err != nil {
			err = c.changeError(err)
		}
		return applyResult{err: err}
	}).err
}

// changeError is proposeError plus the refusals of raft's own rules.
func (c *Cluster) changeError(err error) error {
	known := c.proposeError(err)
	if problem.CodeOf(known) != problem.Internal {
		return known
	}
	return problem.New(problem.Conflict, "change the voters: %w", err).
		WithHint("a cluster needs a voter: make another node one first")
}
