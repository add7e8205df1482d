// Package cluster is consensus: it puts commands into hashicorp/raft, applies what was committed to the replicated state
// and keeps both in a data dir that belongs to one cluster and one process. In this version a node is a single voter; the
// log, the snapshots and the commands are already those of a cluster with more voters.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

// Timers of a single voter (CONTRACTS 7). They bound how long a leader that stalls keeps believing; there is nobody to lose
// an election against, so short ones cost nothing.
const (
	heartbeatTimeout = 200 * time.Millisecond
	electionTimeout  = 200 * time.Millisecond
	leaderLease      = 100 * time.Millisecond
)

// Bounds of the log. State is a few KiB per app, so a snapshot is cheap and a short log keeps restarts and disks small.
const (
	snapshotInterval  = 30 * time.Second // how often raft looks whether a snapshot is due
	snapshotThreshold = 1024             // log entries that make one due
	trailingLogs      = 256              // entries kept behind a snapshot
	snapshotsKept     = 2
)

// proposeTimeout bounds a Propose whose context has no earlier deadline, and each step of becoming ready.
const proposeTimeout = 5 * time.Second

// closeGrace is how long Close waits for proposals in flight before it stops raft under them.
const closeGrace = 2 * time.Second

// maxProposals bounds proposals in flight; each holds a goroutine until raft answers.
const maxProposals = 256

// Cluster is this node's share of consensus: the local copy of the state and the way to change it, msg.Store and
// msg.Proposer for the actors. Safe for concurrent use.
type Cluster struct {
	log   *slog.Logger
	apply func(time.Duration)
	ident identity
	fsm   *fsm
	raft  *raft.Raft
	disk  *disk

	leader atomic.Bool // elected, and everything before the election is applied
	slots  chan struct{}
	done   chan struct{} // closed by end: Close was called, or a fault that no wait can heal
	loops  sync.WaitGroup
	once   sync.Once
	closed error

	mu        sync.Mutex
	closing   bool
	why       error          // set before done is closed
	proposals sync.WaitGroup // Add only under mu while !closing
	ready     chan struct{}  // closed while leader and initialized; replaced when leadership goes
}

// Config says where the cluster lives. The zero value is a cluster in memory.
type Config struct {
	NodeID       string              // "" = the data dir's, or a new one
	ClusterID    string              // "" = the data dir's, or a new one
	DataDir      string              // "" = in memory: nothing survives Close
	SegmentSize  int                 // bytes preallocated per log file; 0 = DefaultSegmentSize
	Log          *slog.Logger        // nil = silent; raft's own talk comes at debug, its errors at error
	ApplySeconds func(time.Duration) // told how long each proposal took, refused ones too; nil = nobody
}

// DefaultSegmentSize is what one log file preallocates. raft-wal's own 64 MiB suit databases; here a day's log is a few
// hundred KiB (TRAPS 10).
const DefaultSegmentSize = 1 << 20

// Open takes the data dir, brings the state back and starts the election. It returns before there is a leader: see Ready.
// Errors are *problem.Error: Conflict if the data dir is another cluster's, of a newer format, or in use.
func Open(cfg Config) (*Cluster, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.ApplySeconds == nil {
		cfg.ApplySeconds = func(time.Duration) {}
	}
	if cfg.SegmentSize == 0 {
		cfg.SegmentSize = DefaultSegmentSize
	}
	d, ident, err := openDisk(cfg)
	if err != nil {
		return nil, err
	}
	c := newCluster(cfg, d, ident)
	if err := c.start(cfg); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return c, nil
}

func newCluster(cfg Config, d *disk, ident identity) *Cluster {
	return &Cluster{
		log: cfg.Log, apply: cfg.ApplySeconds, ident: ident, fsm: newFSM(), disk: d,
		slots: make(chan struct{}, maxProposals), ready: make(chan struct{}), done: make(chan struct{}),
	}
}

// start bootstraps an empty log with this node as its only voter, and runs raft.
func (c *Cluster) start(cfg Config) error {
	rc := raftConfig(c.ident.Node, cfg.Log)
	addr, transport := raft.NewInmemTransport(raft.ServerAddress(c.ident.Node))
	if err := c.disk.bootstrap(rc, addr, transport); err != nil {
		return err
	}
	r, err := raft.NewRaft(rc, c.fsm, c.disk.logs, c.disk.stable, c.disk.snaps, transport)
	if err != nil {
		return fmt.Errorf("start raft: %w", err)
	}
	c.raft = r
	c.loops.Go(func() { c.watch(r.LeaderCh()) })
	c.loops.Go(func() { c.electNow(addr, transport) })
	return nil
}

func raftConfig(node string, log *slog.Logger) *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(node)
	rc.HeartbeatTimeout = heartbeatTimeout
	rc.ElectionTimeout = electionTimeout
	rc.LeaderLeaseTimeout = leaderLease
	rc.SnapshotInterval = snapshotInterval
	rc.SnapshotThreshold = snapshotThreshold
	rc.TrailingLogs = trailingLogs
	rc.NoLegacyTelemetry = true
	rc.Logger = newRaftLog(log)
	return rc
}

// electNow spares the only voter the heartbeat time-out (200 to 400 ms of every start) after which a follower suspects a
// leader that cannot exist: it sends itself the message by which a leader hands over. If that fails, the time-out elects.
func (c *Cluster) electNow(self raft.ServerAddress, t *raft.InmemTransport) {
	t.Connect(self, t)
	defer t.Disconnect(self)
	req := &raft.TimeoutNowRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}}
	if err := t.TimeoutNow(raft.ServerID(c.ident.Node), self, req, &raft.TimeoutNowResponse{}); err != nil {
		c.log.Debug("early election skipped", "room", "cluster", "err", err)
	}
}

// NodeID is this node's name.
func (c *Cluster) NodeID() string { return c.ident.Node }

// ClusterID is the cluster's name, made at its first start.
func (c *Cluster) ClusterID() string { return c.ident.Cluster }

// State is the newest applied state. It is immutable and shared: read it, never change it.
func (c *Cluster) State() *state.State { return c.fsm.State() }

// Changed is closed at the next change of State. Take it before State, or a change in between goes unseen.
func (c *Cluster) Changed() <-chan struct{} { return c.fsm.Changed() }

// Leader says whether this node leads and has applied all that was committed before it did.
func (c *Cluster) Leader() bool { return c.leader.Load() }

// Ready waits until this node leads, has applied all that was committed before (Barrier) and the cluster has its name. Until
// then State may be older than what was acknowledged before a restart: grant nothing from it (TRAPS 10).
func (c *Cluster) Ready(ctx context.Context) error {
	if err := c.ended(); err != nil {
		return err
	}
	select {
	case <-c.readiness():
		return nil
	case <-ctx.Done():
		return problem.New(problem.Timeout, "wait for a leader: %w", context.Cause(ctx)).
			WithHint("the disk of the data dir may be full or very slow; look for raft errors in the log")
	case <-c.done:
		return c.ended()
	}
}

func (c *Cluster) readiness() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready
}

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
	c.closing = true
	c.mu.Unlock()
	c.settle()
	c.leader.Store(false)
	c.end(errClosed())
	err := c.raft.Shutdown().Error()
	c.loops.Wait()
	return errors.Join(err, c.disk.Close())
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
	if err := c.raft.Snapshot().Error(); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}
