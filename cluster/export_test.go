package cluster

import (
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/state"
)

// WithStores lets a test stand between raft and its disk.
func (cfg Config) WithStores(wrap func(LogStore) LogStore) Config {
	cfg.Stores = wrap
	return cfg
}

// DecodeUpdate reads what Follow sends.
var DecodeUpdate = decodeUpdate

// NoteLog is an answer that a node gave to this leader some time ago: its log ends at an index.
func (c *Cluster) NoteLog(uid string, index uint64, ago time.Duration) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.net.logs[raft.ServerID(uid)] = logEnd{index: index, at: time.Now().Add(-ago)}
}

// CommitIndex is how far the log is committed, configurations included.
func (c *Cluster) CommitIndex() uint64 { return c.run.Load().raft.CommitIndex() }

// State is the state that was read.
func (c *stateCopy) State() *state.State { return c.state }
