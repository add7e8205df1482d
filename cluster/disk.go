package cluster

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/metadb"

	"github.com/dpserve/dpserve/internal/problem"
)

// raftDir is where the log and the snapshots are, inside the data dir.
const raftDir = "raft"

// dirMode keeps the data dir to its owner: specs may name private models.
const dirMode = 0o700

// keyCurrentTerm is raft's own name for the term in the stable store; see unfinished.
const keyCurrentTerm = "CurrentTerm"

// disk is what raft writes to: files under a lock, or memory.
type disk struct {
	logs    raft.LogStore
	stable  raft.StableStore
	snaps   raft.SnapshotStore
	closers []io.Closer // in order of opening
}

// openDisk takes the data dir (lock, identity, log, snapshots) or makes one in memory.
func openDisk(cfg Config) (_ *disk, ident identity, err error) {
	if cfg.DataDir == "" {
		mem := raft.NewInmemStore()
		return &disk{logs: mem, stable: mem, snaps: raft.NewInmemSnapshotStore()}, newIdentity(cfg), nil
	}
	d := &disk{}
	defer func() {
		if err != nil {
			err = firstError(err, d.Close())
		}
	}()
	dir := filepath.Join(cfg.DataDir, raftDir)
	if err = os.MkdirAll(cfg.DataDir, dirMode); err != nil {
		return nil, ident, problem.New(problem.InvalidArgument, "make data dir: %w", err).WithHint("choose a --data-dir that you may write to")
	}
	if err = d.lock(cfg.DataDir); err != nil {
		return nil, ident, err
	}
	if ident, err = loadIdentity(cfg); err != nil {
		return nil, ident, err
	}
	if err = os.MkdirAll(dir, dirMode); err != nil {
		return nil, ident, fmt.Errorf("make raft dir: %w", err)
	}
	return d, ident, d.openRaft(cfg, dir)
}

func (d *disk) lock(dir string) error {
	l, err := lockDir(dir)
	if err != nil {
		return err
	}
	d.closers = append(d.closers, l)
	return nil
}

// openRaft opens log and snapshots. The log's meta store is ours to close: raft-wal's Close leaves it open, and a second
// open of the same file in one process would wait for ever.
func (d *disk) openRaft(cfg Config, dir string) error {
	logger := newRaftLog(cfg.Log)
	meta := &metadb.BoltMetaDB{}
	d.closers = append(d.closers, meta)
	w, err := wal.Open(dir, wal.WithSegmentSize(cfg.SegmentSize), wal.WithLogger(logger), wal.WithMetaStore(meta))
	if err != nil {
		return broken("open the log", err)
	}
	d.closers = append(d.closers, w)
	d.logs, d.stable = w, w
	return d.openSnapshots(dir, logger)
}

func (d *disk) openSnapshots(dir string, logger hclog.Logger) error {
	snaps, err := raft.NewFileSnapshotStoreWithLogger(dir, snapshotsKept, logger)
	if err != nil {
		return broken("open the snapshots", err)
	}
	d.snaps = snaps
	return nil
}

func broken(what string, err error) error {
	return problem.New(problem.Internal, "%s: %w", what, err).
		WithHint("free disk space or restore the data dir from a backup; an empty --data-dir starts a new cluster")
}

// bootstrap makes this node the only voter of an empty log.
func (d *disk) bootstrap(rc *raft.Config, self raft.ServerAddress, t raft.Transport) error {
	if err := d.unfinished(); err != nil {
		return broken("repair an unfinished first start", err)
	}
	voters := raft.Configuration{Servers: []raft.Server{{ID: rc.LocalID, Address: self}}}
	err := raft.BootstrapCluster(rc, d.logs, d.stable, d.snaps, t, voters)
	if err != nil && !errors.Is(err, raft.ErrCantBootstrap) { // ErrCantBootstrap: there is a past, raft goes on from it
		return broken("bootstrap", err)
	}
	return nil
}

// unfinished undoes a first start that died inside raft.BootstrapCluster, between its write of the term and of the voters:
// such a log has no voter and would never elect anybody. Nothing can have been acknowledged yet.
func (d *disk) unfinished() error {
	term, err := d.stable.GetUint64([]byte(keyCurrentTerm))
	if err != nil || term != 1 {
		return nil //nolint:nilerr // in-memory stores answer "not found" on an empty store; real faults come up in BootstrapCluster
	}
	last, err := d.logs.LastIndex()
	if err != nil || last > 0 {
		return err
	}
	snaps, err := d.snaps.List()
	if err != nil || len(snaps) > 0 {
		return err
	}
	return d.stable.SetUint64([]byte(keyCurrentTerm), 0)
}

// Close closes in reverse order; the lock goes last.
func (d *disk) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i].Close())
	}
	d.closers = nil
	return errors.Join(errs...)
}
