package cluster

import (
	"time"

	"github.com/hashicorp/raft"

	"github.com/dpserve/dpserve/internal/state"
)

// DecodeCopy reads the state of an Update.
var DecodeCopy = decodeCopy

// NoteLog records an answer of a node some time ago: its log ends at an index.
func (c *Cluster) NoteLog(uid string, index uint64, ago time.Duration) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.net.logs[raft.ServerID(uid)] = logEnd{index: index, at: time.Now().Add(-ago)}
}

// NodeID returns this node's name.
func (c *Cluster) NodeID() string { return c.ident.Node }

// NodeID returns this node's name.
func (w *Watcher) NodeID() string { return w.ident.Node }

// Snapshot writes a snapshot now and cuts the log, as raft does when a snapshot is due.
func (c *Cluster) Snapshot() error { return c.run.Load().raft.Snapshot().Error() }

// CommitIndex returns the index up to which the log is committed.
func (c *Cluster) CommitIndex() uint64 { return c.run.Load().raft.CommitIndex() }

// State returns the copied state.
func (c *stateCopy) State() *state.State { return c.state }

// SetTerm pretends that a Leading began in another term.
func (l *Leading[T]) SetTerm(term uint64) {
	old := l.held.Load()
	l.held.Store(&tenure[T]{term, old.parts})
}
