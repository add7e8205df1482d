package cluster

import (
	"fmt"
	"sync"

	"github.com/hashicorp/raft"
)

// guard stands between raft and its log. After the first write that fails nothing is written any more: raft-wal cannot go on
// behind a failed write (what it holds in memory and what is in the file have parted), and raft itself would panic where it
// cannot keep its term. The one who watches failed ends this run of raft, calls release, and begins another over a log that is
// read anew.
type guard struct {
	logStore
	book  *addressBook // takes up every entry that is written
	wrote func()       // told of every write that succeeded

	failed   chan struct{} // closed at the first write that fails
	released chan struct{} // closed when raft has been told to stop
	once     sync.Once

	mu  sync.Mutex
	err error // of the first failure
}

func newGuard(log logStore, book *addressBook, wrote func()) *guard {
	return &guard{logStore: log, book: book, wrote: wrote, failed: make(chan struct{}), released: make(chan struct{})}
}

// do is one write.
func (g *guard) do(write func() error) error {
	if err := g.failure(); err != nil {
		return err
	}
	if err := write(); err != nil {
		return g.fail(err)
	}
	g.wrote()
	return nil
}

// failure is what failed, nil while all is well.
func (g *guard) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

func (g *guard) fail(err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = fmt.Errorf("%w: %w", ErrDisk, err)
		close(g.failed)
	}
	return g.err
}

// release lets go what waits in SetUint64. Raft must have been told to stop before.
func (g *guard) release() { g.once.Do(func() { close(g.released) }) }

// StoreLog appends one entry.
func (g *guard) StoreLog(l *raft.Log) error { return g.StoreLogs([]*raft.Log{l}) }

// StoreLogs appends entries. When it fails raft refuses what it was to append, and stops leading.
func (g *guard) StoreLogs(logs []*raft.Log) error {
	for _, l := range logs {
		g.book.read(l)
	}
	return g.do(func() error { return g.logStore.StoreLogs(logs) })
}

// DeleteRange cuts the log, in front after a snapshot and behind where a leader has other entries.
func (g *guard) DeleteRange(from, to uint64) error {
	return g.do(func() error { return g.logStore.DeleteRange(from, to) })
}

// Set keeps a vote. When it fails raft does not vote.
func (g *guard) Set(key, value []byte) error {
	return g.do(func() error { return g.logStore.Set(key, value) })
}

// SetUint64 keeps a term. Raft panics when that fails, so it does not fail: it waits until raft has been told to stop, and then
// says yes. That yes is no danger, although the term is not on disk: a raft that stops votes for nobody and leads nobody, and
// every other write of this run is refused. What is on disk already needs no write.
func (g *guard) SetUint64(key []byte, value uint64) error {
	if old, err := g.GetUint64(key); err == nil && old == value {
		return nil
	}
	err := g.do(func() error { return g.logStore.SetUint64(key, value) })
	if err == nil || string(key) != keyCurrentTerm {
		return err
	}
	<-g.released
	return nil
}

// IsMonotonic hands through what raft-wal says of itself: it can have no holes.
func (g *guard) IsMonotonic() bool {
	m, ok := g.logStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}
