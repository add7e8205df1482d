// Package cluster is consensus: it puts commands into hashicorp/raft, applies what was committed to the replicated state
// and keeps both in a data dir that belongs to one cluster, one node and one process. A node votes, stands by without a vote, or
// only follows (Watcher).
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

// proposeTimeout bounds the wait for a leader of a Propose whose context has no earlier deadline, and each step of becoming
// ready.
const proposeTimeout = 5 * time.Second

const (
	// closeGrace is how long Close waits for proposals in flight before it stops raft under them.
	closeGrace = 2 * time.Second
	// diskGrace is how long Close waits for raft and the disk after that: twice as long as raft waits for a node that does not answer.
	diskGrace = 2 * transportTimeout
)

// maxProposals bounds proposals in flight; each holds a goroutine until raft answers.
const maxProposals = 256

// Cluster is this node's share of consensus: the local copy of the state and the way to change it, msg.Store and
// msg.Proposer for the actors. Safe for concurrent use.
type Cluster struct {
	cfg   Config
	log   *slog.Logger
	ident identity
	home  io.Closer // the data dir, held over all runs; nil in memory
	fsm   *fsm
	net   *network // nil: alone
	book  addressBook
	run   atomic.Pointer[run]

	confirms confirms

	memory *disk       // without a data dir: of all runs; keep's own after Open
	alone  atomic.Bool // this node is the only voter of the log on disk
	holds  atomic.Bool // see Holds
	leader atomic.Bool // elected, and everything before the election is applied
	slots  chan struct{}
	done   chan struct{} // closed by end: Close was called, or a fault that no wait can heal
	loops  sync.WaitGroup
	once   sync.Once
	closed error

	stopped error // of the last run; keep's own until loops has ended

	mu        sync.Mutex
	stopping  bool
	why       error          // set before done is closed
	fault     error          // the disk refuses writes; nil once it takes one
	faulty    atomic.Bool    // fault != nil
	proposals sync.WaitGroup // Add only under mu while !closing
	ready     chan struct{}  // closed while leader and initialized; replaced when leadership goes
	turn      chan struct{}  // closed and replaced when leadership changes, here or elsewhere
}

// Config says where the cluster lives. The zero value is a cluster in memory.
type Config struct {
	NodeID       string              // "" = the data dir's, or a new one
	ClusterID    string              // "" = the data dir's, or a new one
	UID          string              // "" = the data dir's, or a new one
	DataDir      string              // "" = in memory: nothing survives Close
	SegmentSize  int                 // bytes preallocated per log file; 0 = DefaultSegmentSize
	Log          *slog.Logger        // nil = silent; raft's own talk comes at debug, its errors at error
	ApplySeconds func(time.Duration) // told how long each proposal took, refused ones too; nil = nobody

	// Layer connects control nodes; nil = this node is alone. Close closes it.
	Layer Layer
	// Resolve finds a node's HOST:PORT by its UID, before State().Nodes does; nil = those only.
	Resolve func(uid string) (address string, ok bool)
	// Member: the node has joined a cluster, whose leader will make it a voter or a standby. ClusterID is that cluster's.
	Member bool
	// Forward puts a command to the leader for a node that does not lead: it calls ProposeHere there. nil = refuse instead.
	Forward func(ctx context.Context, leader state.Node, c state.Command) (state.Result, error)
	// Secrets makes what a cluster is given at its first start, or when it has none yet; nil = none.
	Secrets func() state.Secrets
	// LeaseTTL is how long leases last in a cluster that begins with Secrets.
	LeaseTTL time.Duration
	// Timers are raft's; zero = DefaultTimers.
	Timers Timers

	// Stores stands between raft and its log, at every opening; nil = nothing does.
	Stores func(LogStore) LogStore
}

// DefaultSegmentSize is what one log file preallocates. raft-wal's own 64 MiB suit databases; here a day's log is a few
// hundred KiB (TRAPS 10).
const DefaultSegmentSize = 1 << 20

// withDefaults fills in what is zero.
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

// Open takes the data dir, brings the state back and starts the election. It returns before there is a leader: see Ready.
// Errors are *problem.Error: Conflict if the data dir is another cluster's, of a newer format, or in use.
func Open(cfg Config) (*Cluster, error) {
	cfg = cfg.withDefaults()
	home, ident, err := openHome(cfg)
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		cfg: cfg, log: cfg.Log, ident: ident, home: home, fsm: newFSM(), slots: make(chan struct{}, maxProposals),
		ready: make(chan struct{}), turn: make(chan struct{}), done: make(chan struct{}),
	}
	if err := c.start(); err != nil {
		return nil, errors.Join(err, c.shut())
	}
	return c, nil
}

// start begins the first run and the loops around it.
func (c *Cluster) start() error {
	if c.cfg.Layer != nil {
		c.net = newNetwork(c.cfg, c.ident.UID, c.addresses, c.nameOf)
	}
	r, err := c.newRun()
	if err != nil {
		return err
	}
	c.run.Store(r)
	c.loops.Go(func() { c.watch(r) })
	c.loops.Go(c.keep)
	return nil
}

// NodeID is this node's name.
func (c *Cluster) NodeID() string { return c.ident.Node }

// UID is what this node is known by in consensus: drawn with its data dir.
func (c *Cluster) UID() string { return c.ident.UID }

// ClusterID is the cluster's name, made at its first start.
func (c *Cluster) ClusterID() string { return c.ident.Cluster }

// State is the newest applied state. It is immutable and shared: read it, never change it.
func (c *Cluster) State() *state.State { return c.fsm.State() }

// Changed is closed at the next change of State. Take it before State, or a change in between goes unseen.
func (c *Cluster) Changed() <-chan struct{} { return c.fsm.Changed() }

// end fails everything that waits; the first reason stands.
func (c *Cluster) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.why == nil {
		c.why = why
		close(c.done)
	}
}

// ended is why nothing goes on, nil while it does.
func (c *Cluster) ended() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why
}

// Close ends proposals (in-flight ones get closeGrace), stops raft and gives the data dir free. Idempotent; waits.
func (c *Cluster) Close() error {
	c.once.Do(func() { c.closed = c.close() })
	return c.closed
}

func (c *Cluster) close() error {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	c.settle()
	c.leader.Store(false)
	c.end(errClosed())
	c.holds.Store(false)
	done := make(chan struct{})
	go func() { c.loops.Wait(); close(done) }() // keep stops the run
	select {
	case <-done:
		return c.shut()
	case <-time.After(diskGrace):
		return c.abandon(done)
	}
}

// abandon is the end over a disk that hangs: it leaves the data dir to what still writes there. The dir stays taken until that has
// returned, or the process has ended.
func (c *Cluster) abandon(done <-chan struct{}) error {
	if c.net != nil {
		c.net.stop()
	}
	go func() {
		<-done
		if err := c.shut(); err != nil {
			c.log.Warn("closed late, with an error", "room", "cluster", "err", err)
		}
	}()
	return problem.New(problem.Unavailable, "close data dir %s: %w", c.cfg.DataDir, fmt.Errorf("%w: %w", ErrDisk, errDiskHangs)).
		WithHint("the disk does not answer: look at it before you start dpserve there again")
}

// shut closes what outlives the runs.
func (c *Cluster) shut() error {
	var errs []error
	if c.net != nil {
		c.net.shut()
	}
	c.confirms.loops.Wait() // at most transportTimeout, as for raft's own messages
	if c.home != nil {
		errs = append(errs, c.home.Close())
	}
	return errors.Join(append(errs, c.stopped)...)
}

// settle waits for proposals in flight, at most closeGrace: raft may drop a queued one without an answer when it stops.
func (c *Cluster) settle() {
	done := make(chan struct{})
	go func() { c.proposals.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(closeGrace):
		c.log.Warn("closing with proposals in flight", "room", "cluster", "cause", "disk too slow")
	}
}

// Snapshot writes a snapshot now and cuts the log behind it; raft does the same by itself when one is due.
func (c *Cluster) Snapshot() error {
	if err := c.run.Load().raft.Snapshot().Error(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}
