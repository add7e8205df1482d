package peering

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// seedsFile lists the other nodes at the time of the join. A data dir with this file belongs to a member that
// joined; without it the node founded its cluster.
const seedsFile = "seeds.json"

// removedFile marks the data dir of a node that the cluster has removed.
const removedFile = "removed"

// identify reads the identity of the data dir, or creates it.
func identify(dataDir, node string) (cluster.Identity, error) {
	if dataDir == "" {
		return cluster.Identity{Node: node, UID: strings.ToLower(rand.Text())}, nil
	}
	return cluster.Identify(dataDir, node)
}

// RefuseStandalone refuses to begin a cluster of one node on the data dir of a member of another cluster.
func RefuseStandalone(dataDir string) error {
	if dataDir == "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(pkiDir(dataDir), seedsFile)); err != nil {
		return nil //nolint:nilerr // the file does not exist: the node has not joined
	}
	return problem.New(problem.Conflict,
		"data dir %s belongs to a member of a cluster, and members need --advertise", dataDir).
		WithHint("add --advertise with this machine's IP")
}

// RefuseRemoved refuses the data dir of a node that was removed.
func RefuseRemoved(dataDir string) error {
	if _, err := os.Stat(filepath.Join(pkiDir(dataDir), removedFile)); dataDir == "" || err != nil {
		return nil //nolint:nilerr // the file does not exist
	}
	return problem.New(problem.PermissionDenied, "this node is no member of its cluster any more").
		WithHint("to come back, join with an empty --data-dir: `dpserve token` on a member makes the command")
}

// noteRemoval marks the data dir of a removed node, because the cluster does not tell a later process.
func (p *Peering) noteRemoval() {
	if p.dir == "" {
		return
	}
	if err := diskfile.Replace(filepath.Join(p.dir, removedFile), nil); err != nil {
		p.log.Warn("the removal cannot be noted in the data dir", slog.Any("err", err))
	}
}

// verifyIdentity refuses certificate files of another node, which happens when two data dirs are mixed.
func (p *Peering) verifyIdentity(id pki.Identity) error {
	if want := p.ident; id.UID != want.UID || want.Cluster != "" && id.Cluster != want.Cluster {
		return problem.New(problem.Conflict,
			"the certificate in %s is of node %s of cluster %s, the data dir of node %s of cluster %s",
			p.dir, id.Node, id.Cluster, want.Node, want.Cluster).
			WithHint("two data dirs were mixed: restore one from a backup, or join again with an empty one")
	}
	return nil
}

// checkRejoin handles a join with the data dir of a member. If the token is of the same cluster, the join's
// address is used to find a control node (Neighbours.FindAt).
func (p *Peering) checkRejoin() error {
	t, err := pki.ParseToken(p.cfg.Join.Token)
	if err != nil {
		return err
	}
	p.rejoin = p.cfg.Join.Address
	own, err := pki.Fingerprint(p.Certificates.files.Authority)
	if err == nil && own != t.Fingerprint {
		err = problem.New(problem.Conflict, "data dir %s belongs to another cluster than the token",
			p.cfg.DataDir).
			WithHint("start it with `dpserve start --advertise IP`, or join with an empty --data-dir")
	}
	return err
}

// RejoinAddress is the address of a join with a member's data dir; "" = there is none.
func (p *Peering) RejoinAddress() string { return p.rejoin }

// join makes this node a member: it presents the token and receives a certificate.
func (p *Peering) join(ctx context.Context) error {
	if p.ident.Cluster != "" {
		return problem.New(problem.Conflict, "data dir %s belongs to cluster %s already", p.cfg.DataDir,
			p.ident.Cluster).
			WithHint("start it with `dpserve start`, or join with an empty --data-dir")
	}
	var key []byte // the key is saved before it is sent: the token is bound to it, and the answer may be lost
	if p.dir != "" {
		var err error
		if key, err = pki.KeepKey(p.dir); err != nil {
			return err
		}
	}
	files, seeds, err := p.cfg.Join.Present(ctx, p.Record(), key)
	if err != nil {
		return err
	}
	p.Certificates.files, p.Neighbours.seeds, p.joined = files, seeds, true
	if p.dir == "" {
		return nil
	}
	// seeds come first: certificate files without them look like those of a founder
	if err := writeSeeds(p.dir, seeds); err != nil {
		return err
	}
	return pki.Save(p.dir, files)
}

// found begins a cluster: it makes the authority, this node's certificate and the gossip key.
func (p *Peering) found() error {
	if p.ident.Cluster == "" {
		p.ident.Cluster = strings.ToLower(rand.Text())
	}
	now := time.Now()
	authority, err := pki.NewAuthority(p.ident.Cluster, now)
	if err != nil {
		return err
	}
	var files pki.Files
	if files.Key, err = pki.NewKey(); err != nil {
		return err
	}
	csr, err := pki.NewCSR(files.Key)
	if err != nil {
		return err
	}
	id := pki.Identity{Cluster: p.ident.Cluster, Node: p.cfg.NodeID, UID: p.ident.UID, Roles: p.roles}
	if files.Cert, err = authority.Sign(csr, id, now, pki.DefaultLife); err != nil {
		return err
	}
	files.GossipKey = cluster.NewGossipKey()
	var key []byte
	files.Authority, key = authority.PEM()
	p.Certificates.files = files
	p.secrets = state.Secrets{Authority: files.Authority, AuthorityKey: key, GossipKey: files.GossipKey}
	p.founding = true
	return nil
}

// SaveAuthority writes what a restart of this node needs, once the cluster's state is complete.
func (p *Peering) SaveAuthority() error { return p.Certificates.saveAuthority(p.founding) }

// comeBack reads the nodes that were there at the join. A founder has no such file.
func (p *Peering) comeBack() error {
	data, err := os.ReadFile(filepath.Join(p.dir, seedsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, &p.Neighbours.seeds)
	}
	if err != nil {
		return problem.New(problem.Conflict, "%s in %s cannot be read: %w", seedsFile, p.dir, err).
			WithHint("restore the data dir from a backup, or join again with an empty one")
	}
	p.joined = true
	return nil
}

func writeSeeds(dir string, seeds []state.Node) error {
	data, err := json.Marshal(seeds)
	if err != nil {
		return err
	}
	// KeepKey has made the directory. A power cut must not leave the certificate without these.
	if err := diskfile.Replace(filepath.Join(dir, seedsFile), data); err != nil {
		return problem.New(problem.InvalidArgument, "%w", err).WithHint("free space in the --data-dir")
	}
	return nil
}
