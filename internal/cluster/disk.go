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

// raftDir is the directory of the log and the snapshots inside the data dir.
const raftDir = "raft"

// dirMode gives only the owner access: specs may name private models.
const dirMode = 0o700

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
		return nil, firstError(err, d.Close())
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
