package cluster

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// identityFile names the owner of the data dir. It is written first. Later only an empty cluster may be
// filled in.
const identityFile = "cluster.json"

// formatVersion grows when older versions of dpserve can no longer read the data dir.
const formatVersion = 1

// fileMode gives only the owner access.
const fileMode = 0o600

// Identity names the owner of a data dir. The UID is made with the data dir: a node that lost its data dir is
// a different node, whatever its name is.
type Identity struct {
	Cluster string `json:"cluster"` // "" = none yet: the node has a name in order to join a cluster
	Node    string `json:"node"`
	// missing in older data dirs: there it is the node's name, as in raft
	UID string `json:"uid,omitempty"`
}

// identity is the content of identityFile.
type identity struct {
	Format int `json:"format"`
	Identity
}

// Identify reads a data dir's identity, or makes one that belongs to no cluster yet. A node joins under it,
// so it stays the same until the node has joined. node "" = the data dir's name, or a new one. It refuses a
// data dir that is in use, or that belongs to another node.
func Identify(dataDir, node string) (_ Identity, err error) {
	cfg := Config{DataDir: dataDir, NodeID: node}
	lock, err := takeDataDir(dataDir)
	if err != nil {
		return Identity{}, err
	}
	defer func() { err = cmp.Or(err, lock.Close()) }()
	id, err := readIdentity(cfg)
	if errors.Is(err, fs.ErrNotExist) {
		id, err = createIdentity(cfg, "")
	}
	return id.Identity, err
}

// newIdentity makes the names that the config does not give.
func newIdentity(cfg Config, cluster string) identity {
	id := identity{formatVersion, Identity{Cluster: cluster, Node: cfg.NodeID, UID: cfg.UID}}
	if id.Node == "" {
		id.Node = "node-" + randomName()[:6]
	}
	if id.UID == "" {
		id.UID = randomName()
	}
	return id
}

// clusterName returns the name of the cluster that the node joined, or a new one.
func clusterName(cfg Config) string {
	if cfg.ClusterID != "" {
		return cfg.ClusterID
	}
	return randomName()
}

func randomName() string { return strings.ToLower(rand.Text()) }

// loadIdentity reads the data dir's identity or makes it. It refuses an identity that differs from the
// config.
func loadIdentity(cfg Config) (identity, error) {
	id, err := readIdentity(cfg)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return createIdentity(cfg, clusterName(cfg))
	case err == nil && id.Cluster == "":
		id.Cluster = clusterName(cfg)
		return id, id.write(cfg.DataDir)
	default:
		return id, err
	}
}

// readIdentity reads identityFile; fs.ErrNotExist if there is none.
func readIdentity(cfg Config) (identity, error) {
	data, err := os.ReadFile(filepath.Join(cfg.DataDir, identityFile))
	if errors.Is(err, fs.ErrNotExist) {
		return identity{}, err
	}
	if err != nil {
		return identity{}, problem.New(problem.InvalidArgument, "read %s: %w", identityFile, err).
			WithHint("choose a --data-dir that you may read")
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return id, problem.New(problem.Conflict, "%s in %s cannot be read: %w", identityFile, cfg.DataDir,
			err).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	}
	return id, id.checkConfig(cfg)
}

// checkConfig compares the data dir's identity with the config. A node without a cluster has not joined yet.
func (id identity) checkConfig(cfg Config) error {
	switch {
	case id.Format > formatVersion:
		return problem.New(problem.Conflict, "data dir %s has format %d, this dpserve knows up to %d",
			cfg.DataDir, id.Format, formatVersion).
			WithHint("use the newer dpserve that wrote it, or choose an empty --data-dir")
	case id.Format < 1 || id.Node == "" || id.UID == "":
		return problem.New(problem.Conflict, "%s in %s lacks format, node or UID", identityFile,
			cfg.DataDir).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	case cfg.ClusterID != "" && id.Cluster != "" && cfg.ClusterID != id.Cluster:
		return problem.New(problem.Conflict, "data dir %s belongs to cluster %s, not %s", cfg.DataDir,
			id.Cluster, cfg.ClusterID).
			WithHint("choose another --data-dir, or an empty one to start anew")
	case cfg.NodeID != "" && cfg.NodeID != id.Node, cfg.UID != "" && cfg.UID != id.UID:
		return problem.New(problem.Conflict, "data dir %s belongs to node %s, not %s", cfg.DataDir, id.Node,
			cfg.NodeID).
			WithHint("leave --node-id out, or choose another --data-dir")
	}
	return nil
}

// createIdentity makes and stores an identity. It refuses a log without an identity: that is part of another
// data dir.
func createIdentity(cfg Config, cluster string) (identity, error) {
	if _, err := os.Stat(filepath.Join(cfg.DataDir, raftDir)); err == nil {
		return identity{}, problem.New(problem.Conflict, "data dir %s has a log but no %s", cfg.DataDir,
			identityFile).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	}
	id := newIdentity(cfg, cluster)
	return id, id.write(cfg.DataDir)
}

func (id identity) write(dataDir string) error {
	data, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", identityFile, err)
	}
	return diskfile.Replace(filepath.Join(dataDir, identityFile), append(bytes.TrimSpace(data), '\n'))
}

// lockFile is locked by the process that uses the data dir. The kernel unlocks it when the process ends, in
// any way.
const lockFile = "lock"

// takeDataDir makes the data dir if there is none and locks it for this process. Closing the result unlocks
// it. A data dir that other users could change is refused.
func takeDataDir(dir string) (io.Closer, error) {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, problem.New(problem.InvalidArgument, "make data dir: %w", err).
			WithHint("choose a --data-dir that you may write to")
	}
	if err := diskfile.CheckPrivate(dir); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, lockFile)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, fileMode) //nolint:gosec // the data dir
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "open lock: %w", err).
			WithHint("choose a --data-dir that you may write to")
	}
	err = lock(f)
	if err == nil {
		return f, nil
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = problem.New(problem.Conflict, "data dir %s is in use by another dpserve", dir).
			WithHint("stop the other one, or choose another --data-dir")
	} else {
		err = fmt.Errorf("lock data dir: %w", err)
	}
	return nil, cmp.Or(err, f.Close())
}

// lockWait is how long a lock may outlive its process: until its last forked child has executed another
// program.
const lockWait = 500 * time.Millisecond

func lock(f *os.File) error {
	for end := time.Now().Add(lockWait); ; time.Sleep(lockWait / 50) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}

// openDataDir locks the data dir and reads its identity. Without a data dir the identity is new and there is
// no lock.
func openDataDir(cfg Config) (io.Closer, identity, error) {
	if cfg.DataDir == "" {
		return nil, newIdentity(cfg, clusterName(cfg)), nil
	}
	lock, err := takeDataDir(cfg.DataDir)
	if err != nil {
		return nil, identity{}, err
	}
	ident, err := loadIdentity(cfg)
	if err != nil {
		return nil, ident, cmp.Or(err, lock.Close())
	}
	return lock, ident, nil
}

// CheckDataDir reports whether this version can read a data dir, as far as its files tell: its format and its
// snapshots. It changes and locks nothing, so a dpserve may run there. The entries of the log belong to that
// process, which knows their level (state.State.Level). Errors are *problem.Error.
func CheckDataDir(dir string) error {
	if _, err := readIdentity(Config{DataDir: dir}); errors.Is(err, fs.ErrNotExist) {
		return problem.New(problem.NotFound, "%s is no data dir: it has no %s", dir, identityFile).
			WithHint("name the folder of --data-dir")
	} else if err != nil {
		return err
	}
	snapshots, err := filepath.Glob(filepath.Join(dir, raftDir, "snapshots", "*", "state.bin"))
	if err != nil {
		return err
	}
	for _, path := range snapshots {
		if strings.HasSuffix(filepath.Dir(path), ".tmp") {
			continue // it is being written
		}
		data, err := os.ReadFile(path) //nolint:gosec // a file of the data dir
		if errors.Is(err, fs.ErrNotExist) {
			continue // a newer snapshot has replaced it
		}
		if err == nil {
			_, err = state.Decode(data)
		}
		if err != nil {
			return fmt.Errorf("snapshot %s: %w", filepath.Base(filepath.Dir(path)), err)
		}
	}
	return nil
}
