package cluster

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/internal/state"
)

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

// Timers are raft's. A follower without a message of its leader for Heartbeat to twice as long starts an
// election, and repeats it after Election. A leader without answers of a majority for Lease stops leading.
type Timers struct {
	Heartbeat time.Duration
	Election  time.Duration
	Lease     time.Duration // at most Heartbeat
}

// DefaultTimers returns the timers of a node with a node port, or without.
func DefaultTimers(port bool) Timers {
	if port { // with shorter ones three voters on two busy cores change the leader without need
		return Timers{Heartbeat: time.Second, Election: time.Second, Lease: 500 * time.Millisecond}
	}
	// They bound how long a suspended leader still takes itself for one. A single voter cannot lose an
	// election against another node, so short timers cost nothing.
	return Timers{
		Heartbeat: 200 * time.Millisecond, Election: 200 * time.Millisecond, Lease: 100 * time.Millisecond,
	}
}

// Store is a node's copy of the state and the way to change it, whether the node takes part in consensus
// (Cluster) or follows (Watcher). Actors know it as msg.Store and msg.Proposer.
type Store interface {
	State() *state.State
	Changed() <-chan struct{}
	Propose(ctx context.Context, c state.Command) (state.Result, error)

	Ready(ctx context.Context) error
	Leader() bool // this node leads and is ready; never for a Watcher
	LeaderNode() (uid string, known bool)
	Leadership() <-chan struct{}

	// Recall makes State the one of the last process, if this one has none yet: for a node without a leader.
	Recall() bool

	ClusterID() string
	UID() string
	Close() error
}

var (
	_ Store = (*Cluster)(nil)
	_ Store = (*Watcher)(nil)
)
