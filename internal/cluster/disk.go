package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"

	"github.com/dpserve/dpserve/internal/problem"
)

// raftDir is the directory of the log and the snapshots inside the data dir.
const raftDir = "raft"

// dirMode gives only the owner access: specs may name private models.
const dirMode = 0o700

// keyDiskTest is what tryWrite writes to the stable store, beside raft's keys.
const keyDiskTest = "DiskTest"

// keyCurrentTerm is raft's name of the term in the stable store; see undoUnfinishedStart.
const keyCurrentTerm = "CurrentTerm"

// LogStore is raft's store of its entries, its term and its votes.
type LogStore interface {
	raft.LogStore
	raft.StableStore
}

// disk is raft's storage: files in a data dir that this process has locked, or memory.
type disk struct {
	log     LogStore
	snaps   raft.SnapshotStore
	closers []io.Closer // in order of opening
}

func openFiles(cfg Config) (*disk, error) {
	dir := filepath.Join(cfg.DataDir, raftDir)
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, fmt.Errorf("make raft dir: %w", err)
	}
	d := &disk{}
	if err := d.openRaft(cfg, dir); err != nil {
		return nil, cmp.Or(err, d.Close())
	}
	return d, nil
}

// openRaft opens log and snapshots. We close the log's meta store ourselves: raft-wal's Close leaves it open,
// and a second open of the same file in one process would wait forever.
func (d *disk) openRaft(cfg Config, dir string) error {
	logger := newRaftLog(cfg.Log, func(string) string { return "" }, never) // disks log no node names
	meta := &metadb.BoltMetaDB{}
	d.closers = append(d.closers, meta)
	w, err := wal.Open(dir, wal.WithSegmentSize(cfg.SegmentSize), wal.WithLogger(logger),
		wal.WithMetaStore(meta))
	if err != nil {
		return diskError("open the log", err)
	}
	d.closers = append(d.closers, w)
	d.log = w
	if cfg.Stores != nil {
		d.log = cfg.Stores(w)
	}
	return d.openSnapshots(dir, logger)
}

func (d *disk) openSnapshots(dir string, logger hclog.Logger) error {
	snaps, err := raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, logger)
	if err != nil {
		return diskError("open the snapshots", err)
	}
	d.snaps = snaps
	return nil
}

func diskError(what string, err error) error {
	return problem.New(problem.Internal, "%s: %w", what, err).
		WithHint("free disk space or restore the data dir from a backup; an empty --data-dir starts a new " +
			"cluster")
}

// bootstrap makes this node the only voter of an empty log.
func (d *disk) bootstrap(rc *raft.Config, t raft.Transport) error {
	if err := d.undoUnfinishedStart(); err != nil {
		return diskError("repair an unfinished first start", err)
	}
	voters := raft.Configuration{Servers: []raft.Server{{ID: rc.LocalID, Address: t.LocalAddr()}}}
	err := raft.BootstrapCluster(rc, d.log, d.log, d.snaps, t, voters)
	// ErrCantBootstrap: the log has entries already, and raft goes on from them.
	if err != nil && !errors.Is(err, raft.ErrCantBootstrap) {
		return diskError("bootstrap", err)
	}
	return nil
}

// undoUnfinishedStart undoes a first start that died inside raft.BootstrapCluster, between its write of the
// term and its write of the voters. Such a log has no voter and would never elect a leader. Nothing was
// acknowledged yet.
func (d *disk) undoUnfinishedStart() error {
	term, err := d.log.GetUint64([]byte(keyCurrentTerm))
	if err != nil || term != 1 {
		// In-memory stores answer "not found" on an empty store; BootstrapCluster reports real faults.
		return nil //nolint:nilerr // see above
	}
	last, err := d.log.LastIndex()
	if err != nil || last > 0 {
		return err
	}
	snaps, err := d.snaps.List()
	if err != nil || len(snaps) > 0 {
		return err
	}
	return d.log.SetUint64([]byte(keyCurrentTerm), 0)
}

// Close closes in reverse order.
func (d *disk) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i].Close())
	}
	d.closers = nil
	return errors.Join(errs...)
}

const (
	// diskLimit is how long one call of the disk may take. A leader whose disk hangs leads for that long, and
	// then the others need up to twice their heartbeat time-out and an election: together less than 5 s. A
	// higher limit keeps a slow disk in consensus longer, and also a leader whose disk hangs.
	diskLimit = 1500 * time.Millisecond
	// diskLooks is the number of parts of diskLimit. A process that was suspended loses one part instead of
	// the whole limit: afterwards the disk has the other parts to answer.
	diskLooks = 8
)

// errDiskHangs is the fault of a disk that does not answer.
var errDiskHangs = fmt.Errorf("a call has not returned for %s", diskLimit)

// guard is between raft and its log. After the first write that fails, or that does not return within
// diskLimit, it refuses all writes: raft-wal cannot go on after a failed write (its memory and its file
// differ then), and raft would panic if it could not store its term. Raft writes in its main loop, so the
// guard writes in a separate goroutine and tells raft that a hanging write failed. superviseRuns watches
// failed: it ends this run of raft, calls release and awaitCalls, and begins another run over a log that is
// read again.
type guard struct {
	LogStore
	book  *addressBook // reads every entry that is written
	hooks guardHooks

	failed   chan struct{} // closed at the first write that fails
	released chan struct{} // closed when raft has been told to stop
	once     sync.Once
	// calls that have not returned: at most one of raft's main loop and one of a snapshot
	calls sync.WaitGroup

	mu  sync.Mutex
	err error // of the first failure
}

// guardHooks are callbacks of a guard. They must not block.
type guardHooks struct {
	uid    string       // this node's
	alone  *atomic.Bool // the guard sets it: this node is the only voter of the log on disk
	wrote  func()       // called after every successful write
	failed func(error)  // called at the first failure, before raft gets it
}

func newGuard(log LogStore, book *addressBook, hooks guardHooks) *guard {
	return &guard{
		LogStore: log, book: book, hooks: hooks, failed: make(chan struct{}), released: make(chan struct{}),
	}
}

func (g *guard) callWrite(write func() error) error {
	if err := g.callDisk(write); err != nil {
		return g.recordFailure(err)
	}
	g.hooks.wrote()
	return nil
}

// tryWrite writes before raft starts again after a failure. A raft that cannot keep its vote still promises
// it: an isolated node would raise its term with each election that it loses then, and after the heal every
// leader would be deposed until the terms meet.
func (g *guard) tryWrite() error {
	return g.callDisk(func() error { return g.LogStore.SetUint64([]byte(keyDiskTest), 1) })
}

// callDisk makes one call of the disk and waits for it, at most diskLimit. A call that hangs fails the guard
// and goes on alone, so the caller must not use its arguments again.
func (g *guard) callDisk(call func() error) error {
	if err := g.failure(); err != nil {
		return err
	}
	var err error
	returned := make(chan struct{})
	g.calls.Go(func() {
		err = call()
		close(returned)
	})
	if !returnsInTime(returned) {
		return g.recordFailure(errDiskHangs)
	}
	return err
}

// returnsInTime waits until a call has returned, at most diskLimit. If the call has returned by the last
// check, it was in time, however late that check is.
func returnsInTime(returned <-chan struct{}) bool {
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

// awaitCalls waits until no call of the disk is under way. Raft must have ended before.
func (g *guard) awaitCalls() { g.calls.Wait() }

// failure returns the first failure, nil before one.
func (g *guard) failure() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.err
}

func (g *guard) recordFailure(err error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = fmt.Errorf("%w: %w", ErrDisk, err)
		g.hooks.failed(g.err)
		close(g.failed)
	}
	return g.err
}

// refuseWrites refuses every further write, also of votes, for a reason other than the disk.
func (g *guard) refuseWrites(why error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err == nil {
		g.err = why
		close(g.failed)
	}
}

// release ends the waiting in SetUint64. Raft must have been told to stop before.
func (g *guard) release() { g.once.Do(func() { close(g.released) }) }

func (g *guard) StoreLog(l *raft.Log) error { return g.StoreLogs([]*raft.Log{l}) }

// StoreLogs appends entries. If it fails, raft refuses the entries and stops leading.
func (g *guard) StoreLogs(logs []*raft.Log) error {
	alone := g.hooks.alone.Load()
	for _, l := range logs {
		g.book.readEntry(l)
		if l.Type == raft.LogConfiguration {
			alone = isOnlyVoter(raft.DecodeConfiguration(l.Data), g.hooks.uid)
			if !alone {
				g.hooks.alone.Store(false) // even if the entry does not reach the disk
			}
		}
	}
	err := g.callWrite(func() error { return g.LogStore.StoreLogs(logs) })
	if err == nil {
		g.hooks.alone.Store(alone)
	}
	return err
}

// GetLog reads one entry. Raft panics if it cannot read an entry that it has committed, so the guard does not
// give up a read that hangs. It gives up only the run: raft ends when the read has returned. The first part
// of the limit passes without a goroutine.
func (g *guard) GetLog(index uint64, l *raft.Log) error {
	returned := make(chan struct{})
	defer close(returned)
	slow := time.AfterFunc(diskLimit/diskLooks, func() {
		if !returnsInTime(returned) {
			_ = g.recordFailure(errDiskHangs)
		}
	})
	defer slow.Stop()
	return g.LogStore.GetLog(index, l)
}

// DeleteRange cuts the log: at its start after a snapshot, at its end where a leader has other entries.
func (g *guard) DeleteRange(from, to uint64) error {
	return g.callWrite(func() error { return g.LogStore.DeleteRange(from, to) })
}

// Set stores a vote. If it fails, raft does not vote.
func (g *guard) Set(key, value []byte) error {
	return g.callWrite(func() error { return g.LogStore.Set(key, value) })
}

// SetUint64 stores a term. Raft panics if that fails, so after a failure SetUint64 blocks until raft is told
// to stop, then returns nil. That is safe although the term is not on disk: a stopping raft neither votes nor
// leads, and every other write of this run is refused. A term that is on disk already needs no write.
func (g *guard) SetUint64(key []byte, value uint64) error {
	if old, err := g.GetUint64(key); err == nil && old == value {
		return nil
	}
	err := g.callWrite(func() error { return g.LogStore.SetUint64(key, value) })
	if err == nil || string(key) != keyCurrentTerm {
		return err
	}
	<-g.released
	return nil
}

// IsMonotonic returns the answer of raft-wal: its log has no holes.
func (g *guard) IsMonotonic() bool {
	m, ok := g.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// guardedSnapshots are snapshots whose hanging writes end the run. A refused write ends only the snapshot:
// the log has reserved space, and raft tries the snapshot again later.
type guardedSnapshots struct {
	raft.SnapshotStore
	guard *guard
}

func (s *guardedSnapshots) Create(
	version raft.SnapshotVersion, index, term uint64, conf raft.Configuration, confIndex uint64,
	t raft.Transport,
) (raft.SnapshotSink, error) {
	made := make(chan raft.SnapshotSink, 1)
	err := s.guard.callDisk(func() error {
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

func (s *guardedSink) Write(p []byte) (int, error) {
	err := s.guard.callDisk(func() error {
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

func (s *guardedSink) Close() error  { return s.guard.callDisk(s.SnapshotSink.Close) }
func (s *guardedSink) Cancel() error { return s.guard.callDisk(s.SnapshotSink.Cancel) }
