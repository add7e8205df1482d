package cluster

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// identityFile says whose data dir this is; it is written before anything else and never changed.
const identityFile = "cluster.json"

// formatVersion is raised when an older dpserve could no longer read the data dir.
const formatVersion = 1

// fileMode keeps files to their owner.
const fileMode = 0o600

// identity is the content of identityFile.
type identity struct {
	Format  int    `json:"format"`
	Cluster string `json:"cluster"`
	Node    string `json:"node"`
}

// newIdentity fills in what the config leaves open.
func newIdentity(cfg Config) identity {
	id := identity{Format: formatVersion, Cluster: cfg.ClusterID, Node: cfg.NodeID}
	if id.Cluster == "" {
		id.Cluster = strings.ToLower(rand.Text())
	}
	if id.Node == "" {
		id.Node = "node-" + strings.ToLower(rand.Text()[:6])
	}
	return id
}

// loadIdentity reads the data dir's identity, or makes it; one that is not ours is refused with the reason.
func loadIdentity(cfg Config) (identity, error) {
	path := filepath.Join(cfg.DataDir, identityFile)
	data, err := os.ReadFile(path) //nolint:gosec // the operator's own data dir
	if errors.Is(err, fs.ErrNotExist) {
		return createIdentity(cfg, path)
	}
	if err != nil {
		return identity{}, problem.New(problem.InvalidArgument, "read %s: %w", identityFile, err).WithHint("choose a --data-dir that you may read")
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return id, problem.New(problem.Conflict, "%s in %s cannot be read: %w", identityFile, cfg.DataDir, err).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	}
	return id, id.check(cfg)
}

// check compares the data dir's identity with what the config asks for.
func (id identity) check(cfg Config) error {
	switch {
	case id.Format > formatVersion:
		return problem.New(problem.Conflict, "data dir %s has format %d, this dpserve knows up to %d", cfg.DataDir, id.Format, formatVersion).
			WithHint("use the newer dpserve that wrote it, or choose an empty --data-dir")
	case id.Format < 1 || id.Cluster == "" || id.Node == "":
		return problem.New(problem.Conflict, "%s in %s lacks format, cluster or node", identityFile, cfg.DataDir).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	case cfg.ClusterID != "" && cfg.ClusterID != id.Cluster:
		return problem.New(problem.Conflict, "data dir %s belongs to cluster %s, not %s", cfg.DataDir, id.Cluster, cfg.ClusterID).
			WithHint("choose another --data-dir, or an empty one to start anew")
	case cfg.NodeID != "" && cfg.NodeID != id.Node:
		return problem.New(problem.Conflict, "data dir %s belongs to node %s, not %s", cfg.DataDir, id.Node, cfg.NodeID).
			WithHint("leave --node-id out, or choose another --data-dir")
	}
	return nil
}

// createIdentity makes and stores an identity. A log without one is the remainder of something else and is not taken over.
func createIdentity(cfg Config, path string) (identity, error) {
	if _, err := os.Stat(filepath.Join(cfg.DataDir, raftDir)); err == nil {
		return identity{}, problem.New(problem.Conflict, "data dir %s has a log but no %s", cfg.DataDir, identityFile).
			WithHint("restore the data dir from a backup, or choose an empty --data-dir")
	}
	id := newIdentity(cfg)
	data, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return id, fmt.Errorf("encode %s: %w", identityFile, err)
	}
	return id, writeFile(path, append(bytes.TrimSpace(data), '\n'))
}

// writeFile writes a file that is whole or absent after a crash: new file, fsync, rename, fsync of the directory.
func writeFile(path string, data []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, fileMode) //nolint:gosec // the operator's own data dir
	if err != nil {
		return fmt.Errorf("create %s: %w", filepath.Base(path), err)
	}
	_, err = f.Write(data)
	if err = firstError(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("put %s in place: %w", filepath.Base(path), err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir) //nolint:gosec // the operator's own data dir
	if err != nil {
		return fmt.Errorf("open data dir: %w", err)
	}
	if err := firstError(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("sync data dir: %w", err)
	}
	return nil
}
