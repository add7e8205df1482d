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

// LogStore is where raft keeps its entries, its term and its votes.
type LogStore interface {
	raft.LogStore
	raft.StableStore
}

type logStore = LogStore

// disk is what raft writes to: files in a data dir that this process has taken, or memory.
type disk struct {
	log     logStore
	snaps   raft.SnapshotStore
	closers []io.Closer // in order of opening
}

// openHome takes the data dir and reads whose it is; without one the identity is new and there is nothing to close.
func openHome(cfg Config) (io.Closer, identity, error) {
	if cfg.DataDir == "" {
		return nil, newIdentity(cfg, clusterName(cfg)), nil
	}
	lock, err := takeDir(cfg.DataDir)
	if err != nil {
		return nil, identity{}, err
	}
	ident, err := loadIdentity(cfg)
	if err != nil {
		return nil, ident, firstError(err, lock.Close())
	}
	return lock, ident, nil
}

// openDisk opens log and snapshots. The data dir is held. In memory they outlive the run as files do: a node that forgot its votes
// might vote twice.
func (c *Cluster) openDisk() (*disk, error) {
	if c.cfg.DataDir != "" {
		return openFiles(c.cfg)
	}
	if c.memory == nil {
		c.memory = &disk{log: raft.NewInmemStore(), snaps: raft.NewInmemSnapshotStore()}
		if c.cfg.Stores != nil {
			c.memory.log = c.cfg.Stores(c.memory.log)
		}
	}
	return c.memory, nil
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

// openRaft opens log and snapshots. The log's meta store is ours to close: raft-wal's Close leaves it open, and a second
// open of the same file in one process would wait for ever.
func (d *disk) openRaft(cfg Config, dir string) error {
	logger := newRaftLog(cfg.Log, func(string) string { return "" }, never) // disks speak of no nodes
	meta := &metadb.BoltMetaDB{}
	d.closers = append(d.closers, meta)
	w, err := wal.Open(dir, wal.WithSegmentSize(cfg.SegmentSize), wal.WithLogger(logger), wal.WithMetaStore(meta))
	if err != nil {
		return broken("open the log", err)
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
func (d *disk) bootstrap(rc *raft.Config, t raft.Transport) error {
	if err := d.unfinished(); err != nil {
		return broken("repair an unfinished first start", err)
	}
	voters := raft.Configuration{Servers: []raft.Server{{ID: rc.LocalID, Address: t.LocalAddr()}}}
	err := raft.BootstrapCluster(rc, d.log, d.log, d.snaps, t, voters)
	if err != nil && !errors.Is(err, raft.ErrCantBootstrap) { // ErrCantBootstrap: there is a past, raft goes on from it
		return broken("bootstrap", err)
	}
	return nil
}

// unfinished undoes a first start that died inside raft.BootstrapCluster, between its write of the term and of the voters:
// such a log has no voter and would never elect anybody. Nothing can have been acknowledged yet.
func (d *disk) unfinished() error {
	term, err := d.log.GetUint64([]byte(keyCurrentTerm))
	if err != nil || term != 1 {
		return nil //nolint:nilerr // in-memory stores answer "not found" on an empty store; real faults come up in BootstrapCluster
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
