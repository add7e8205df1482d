// Package cluster runs consensus. It puts commands into hashicorp/raft, applies committed commands to the
// replicated state, and keeps both in a data dir that belongs to one cluster, one node and one process. A
// node is a voter, a standby without a vote, or a follower that takes no part in consensus (Watcher).
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
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

	confirmRounds confirmRounds

	memory *disk       // without a data dir: the disk of all runs; only newRun uses it
	alone  atomic.Bool // this node is the only voter of the log on disk
	holds  atomic.Bool // see Holds
	leader atomic.Bool // elected, and everything before the election is applied
	slots  chan struct{}
	done   chan struct{} // closed by end: at Close, or at a fault that waiting cannot repair
	loops  sync.WaitGroup
	once   sync.Once
	closed error

	stopped error // of the last run; only superviseRuns writes it before all loops have ended

	mu        sync.Mutex
	stopping  bool
	why       error          // set before done is closed
	fault     error          // the disk refuses writes; nil after the next successful write
	faulty    atomic.Bool    // fault != nil
	proposals sync.WaitGroup // Add only under mu while !closing
	ready     chan struct{}  // closed while this node leads and is ready; replaced when it stops leading
	turn      chan struct{}  // closed and replaced when the leader changes, here or on another node
}

// Config configures a Cluster. The zero value is a cluster in memory.
type Config struct {
	NodeID      string       // "" = the data dir's, or a new one
	ClusterID   string       // "" = the data dir's, or a new one
	UID         string       // "" = the data dir's, or a new one
	DataDir     string       // "" = in memory: nothing survives Close
	SegmentSize int          // bytes preallocated per log file; 0 = DefaultSegmentSize
	Log         *slog.Logger // nil = silent; raft logs its errors at error, all else at debug
	// gets the duration of each proposal, also of refused ones; nil = not measured
	ApplySeconds func(time.Duration)

	// Layer connects control nodes; nil = this node is alone. Close closes it.
	Layer Layer
	// Resolve returns a node's HOST:PORT by its UID. It comes before State().Nodes; nil = only State().Nodes.
	Resolve func(uid string) (address string, ok bool)
	// Member: the node has joined a cluster. Its leader will make the node a voter or a standby. ClusterID is
	// required.
	Member bool
	// Forward sends a command to the leader, which calls ProposeHere. nil = a node that does not lead refuses
	// commands.
	Forward func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)
	// Secrets makes the secrets of a cluster that has none, for example at its first start; nil = none.
	Secrets func() state.Secrets
	// LeaseTTL is how long leases last in a cluster that starts with Secrets.
	LeaseTTL time.Duration
	// Timers are raft's; zero = DefaultTimers.
	Timers Timers

	// Stores wraps raft's log each time it is opened; nil = no wrapper.
	Stores func(LogStore) LogStore
}

// DefaultSegmentSize is the preallocated size of one log file. The default of raft-wal, 64 MiB, suits
// databases; here the log of a day has a few hundred KiB.
const DefaultSegmentSize = 1 << 20

// withDefaults replaces zero fields by the defaults.
func (cfg Config) withDefaults() Config {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.ApplySeconds == nil {
		cfg.ApplySeconds = func(time.Duration) {}
	}
	if cfg.SegmentSize == 0 {
		cfg.SegmentSize = DefaultSegmentSize
	}
	if cfg.Timers == (Timers{}) {
		cfg.Timers = DefaultTimers(cfg.Layer != nil)
	}
	return cfg
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
		slots: make(chan struct{}, maxProposals),
		ready: make(chan struct{}), turn: make(chan struct{}), done: make(chan struct{}),
	}
	if err := c.start(); err != nil {
		return nil, errors.Join(err, c.closeShared())
	}
	return c, nil
}

// start begins the first run of raft and the goroutines around it.
func (c *Cluster) start() error {
	if c.cfg.Layer != nil {
		c.net = newNetwork(c.cfg, c.ident.UID, c.addresses, c.nameOf)
	}
	r, err := c.newRun()
	if err != nil {
		return err
	}
	c.run.Store(r)
	c.loops.Go(func() { c.watchLeadership(r) })
	c.loops.Go(c.superviseRuns)
	return nil
}

// NodeID returns this node's name.
func (c *Cluster) NodeID() string { return c.ident.Node }

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
// idempotent and waits.
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
	done := make(chan struct{})
	go func() { c.loops.Wait(); close(done) }() // superviseRuns stops the run
	select {
	case <-done:
		return c.closeShared()
	case <-time.After(diskGrace):
		return c.abandonDisk(done)
	}
}

// abandonDisk ends Close while a call of the disk hangs. The data dir stays locked until that call has
// returned, or the process has ended, because the call may still write there.
func (c *Cluster) abandonDisk(done <-chan struct{}) error {
	if c.net != nil {
		c.net.closeConnections()
	}
	go func() {
		<-done
		if err := c.closeShared(); err != nil {
			c.log.Warn("closed late, with an error", "room", "cluster", "err", err)
		}
	}()
	return problem.New(problem.Unavailable, "close data dir %s: %w", c.cfg.DataDir,
		fmt.Errorf("%w: %w", ErrDisk, errDiskHangs)).
		WithHint("the disk does not answer: look at it before you start dpserve there again")
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
		c.log.Warn("closing with proposals in flight", "room", "cluster", "cause", "disk too slow")
	}
}

// Snapshot writes a snapshot now and cuts the log. Raft does the same on its own when a snapshot is due.
func (c *Cluster) Snapshot() error {
	if err := c.run.Load().raft.Snapshot().Error(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}
