package cluster

import (
	"context"

	"github.com/dpserve/dpserve/state"
)

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

	ClusterID() string
	NodeID() string
	UID() string
	Close() error
}

var (
	_ Store = (*Cluster)(nil)
	_ Store = (*Watcher)(nil)
)
