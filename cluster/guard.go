package cluster

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

const (
	// diskLimit is how long one call of the disk may take. A leader whose disk hangs leads for that long, and the others need up to
	// twice their heartbeat time-out and an election on top: together less than 5 s. Raising it keeps a slow disk in consensus, and
	// a hung leader in office.
	diskLimit = 1500 * time.Millisecond
	// diskLooks is into how many parts diskLimit is cut. A process that was frozen loses one part, not the whole limit: after the
	// thaw the disk has the other parts to answer.
	diskLooks = 8
)

// errDiskHangs is the fault of a disk that does not answer.
var errDiskHangs = fmt.Errorf("a call has not returned for %s", diskLimit)

// guard stands between raft and its log. After the first write that fails, or that does not return within diskLimit, nothing is
// written any more: raft-wal cannot go on behind a failed write (what it holds in memory and what is in the file have parted), and
// raft itself would panic where it cannot keep its term. Raft writes in its main loop, so a write that hangs is left to a goroutine
// of its own and raft is told that it failed. The one who watches failed ends this run of raft, calls release, waits for settled,
// and begins another over a log that is read anew.
type guard struct {
	logStore
	book  *addressBook // takes up every entry that is written
	hooks guardHooks

	failed   chan struct{} // closed at the first write that fails
	released chan struct{} // closed when raft has been told to stop
	once     sync.Once
	calls    sync.WaitGroup // those that have not returned; raft makes at most one in its main loop and one for a snapshot

	mu  sync.Mutex
	err error // of the first failure
}

// guardHooks are what a guard tells. They may not block.
type guardHooks struct {
	uid    string       // this node's
	alone  *atomic.Bool // kept true while this node is the only voter of the log on disk
	wrote  func()       // told of every write that succeeded
	failed func(error)  // told of the first failure, before raft is
}

func newGuard(log logStore, book *addressBook, hooks guardHooks) *guard {
	return &guard{logStore: log, book: book, hooks: hooks, failed: make(chan struct{}), released: make(chan struct{})}
}

// do is one write.
func (g *guard) do(write func() error) error {
	if err := g.bound(write); err != nil {
		return g.fail(err)
	}
	g.hooks.wrote()
	return nil
}

// bound makes one call of the disk and waits for it, at most diskLimit. A call that hangs fails the guard and goes on alone: what it
// uses must not be used again.
func (g *guard) bound(call func() error) error {
	if err := g.failure(); err != nil {
		return err
	}
	var err error
	returned := make(chan struct{})
	g.calls.Go(func() {
		err = call()
		close(returned)
	})
	if !inTime(returned) {
		return g.fail(errDiskHangs)
	}
	return err
}

// inTime waits until a call has returned, at most diskLimit. What has returned by the last look was in time, however late the look is.
func inTime(returned <-chan struct{}) bool {
	look := time.NewTicker(diskLimit / diskLooks)
	defer look.Stop()
	for range diskLooks {
		select {
		case <-returned:
			return true
		case <-look.C:
		}
	}
	select {
	case <-returned:
		return true
	default:
		return false
	}
}

// settled waits until no call of the disk is under way. Raft must have ended before.
func (g *guard) settled() { g.calls.Wait() }

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
		g.hooks.failed(g.err)
		close(g.failed)
	}
	return g.err
}

// end refuses every further write for another reason than a disk: votes too, from this moment on.
func (g *guard) end(why error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = why
		close(g.failed)
	}
}

// release lets go what waits in SetUint64. Raft must have been told to stop before.
func (g *guard) release() { g.once.Do(func() { close(g.released) }) }

// StoreLog appends one entry.
func (g *guard) StoreLog(l *raft.Log) error { return g.StoreLogs([]*raft.Log{l}) }

// StoreLogs appends entries. When it fails raft refuses what it was to append, and stops leading.
func (g *guard) StoreLogs(logs []*raft.Log) error {
	alone := g.hooks.alone.Load()
	for _, l := range logs {
		g.book.read(l)
		if l.Type == raft.LogConfiguration {
			alone = isOnlyVoter(raft.DecodeConfiguration(l.Data), g.hooks.uid)
			if !alone {
				g.hooks.alone.Store(false) // whether it comes to the disk or not
			}
		}
	}
	err := g.do(func() error { return g.logStore.StoreLogs(logs) })
	if err == nil {
		g.hooks.alone.Store(alone)
	}
	return err
}

// GetLog reads one entry. Raft panics without an entry that it has committed, so a read that hangs is not given up, only the run is:
// raft ends when the read has returned.
func (g *guard) GetLog(index uint64, l *raft.Log) error {
	late := time.AfterFunc(diskLimit, func() { _ = g.fail(errDiskHangs) })
	defer late.Stop()
	return g.logStore.GetLog(index, l)
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

// guardedSnapshots are snapshots whose writes end the run when they hang. A write that is refused ends the snapshot only: the log
// has room of its own, and raft tries again later.
type guardedSnapshots struct {
	raft.SnapshotStore
	guard *guard
}

// Create begins a snapshot.
func (s *guardedSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, conf raft.Configuration, confIndex uint64, t raft.Transport,
) (raft.SnapshotSink, error) {
	made := make(chan raft.SnapshotSink, 1)
	err := s.guard.bound(func() error {
		sink, err := s.SnapshotStore.Create(version, index, term, conf, confIndex, t)
		made <- sink
		return err
	})
	if err != nil {
		return nil, err
	}
	return &guardedSink{SnapshotSink: <-made, guard: s.guard}, nil
}

// guardedSink is a snapshot that is being written.
type guardedSink struct {
	raft.SnapshotSink
	guard *guard
}

// Write writes all of p.
func (s *guardedSink) Write(p []byte) (int, error) {
	err := s.guard.bound(func() error {
		n, err := s.SnapshotSink.Write(p)
		if err == nil && n < len(p) {
			err = io.ErrShortWrite
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close makes the snapshot durable.
func (s *guardedSink) Close() error { return s.guard.bound(s.SnapshotSink.Close) }

// Cancel removes what was written.
func (s *guardedSink) Cancel() error { return s.guard.bound(s.SnapshotSink.Cancel) }
