package server

import (
	"bytes"
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
	"github.com/dpserve/dpserve/internal/noderpc"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// seedsFile lists the other nodes at the time of the join. A data dir with this file belongs to a member that
// joined; without it the node founded its cluster.
const seedsFile = "seeds.json"

// removedFile marks the data dir of a node that the cluster has removed.
const removedFile = "removed"

// bootstrap makes the node's peering: from the files of its data dir, by joining, or as the first node of a
// new cluster. It binds the node port before any other node learns of this one.
func (n *Node) bootstrap(ctx context.Context) error {
	m := &peering{
		n: n, dir: pkiDir(n.cfg.DataDir),
		gossipAddress: hostPort(n.cfg.Advertise, n.cfg.GossipPort),
	}
	n.peering = m
	id, err := n.identify()
	if err != nil {
		return err
	}
	n.ident = id
	if err := m.refuseRemoved(); err != nil {
		return err
	}
	if err := m.listen(ctx); err != nil {
		return err
	}
	if m.files, err = m.load(); errors.Is(err, fs.ErrNotExist) && n.cfg.Roles == nil {
		n.cfg.Roles = AllRoles()
	}
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil:
		if err = m.readSeeds(); err == nil {
			err = m.checkRejoin()
		}
	case n.cfg.Join != nil:
		err = m.join(ctx)
	default:
		err = m.initCluster()
	}
	if err != nil {
		return err
	}
	c, err := m.files.Credentials()
	if err != nil {
		return err
	}
	if err := errors.Join(m.verifyIdentity(c.Identity),
		n.cfg.applyJoinedRoles(c.Identity.Roles)); err != nil {
		return err
	}
	n.ident.Cluster = c.Identity.Cluster
	m.credentials.Store(c)
	if err := m.signOwn(c); err != nil {
		return err
	}
	m.keyring = [][]byte{m.files.GossipKey}
	return m.startGossip(ctx)
}

// identify reads the identity of the data dir, or creates it.
func (n *Node) identify() (cluster.Identity, error) {
	if n.cfg.DataDir == "" {
		return cluster.Identity{Node: n.cfg.NodeID, UID: strings.ToLower(rand.Text())}, nil
	}
	if err := os.MkdirAll(n.cfg.DataDir, 0o700); err != nil {
		return cluster.Identity{}, problem.New(problem.InvalidArgument, "make data dir: %w", err).
			WithHint("choose a --data-dir that you may write to")
	}
	return cluster.Identify(n.cfg.DataDir, n.cfg.NodeID)
}

func (m *peering) load() (pki.Files, error) {
	if m.dir == "" {
		return pki.Files{}, fs.ErrNotExist
	}
	return pki.Load(m.dir)
}

// noteRemoval marks the data dir of a removed node, because the cluster does not tell a later process.
func (m *peering) noteRemoval() {
	if m == nil || m.dir == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(m.dir, removedFile), nil, 0o600); err != nil {
		m.n.log.Warn("the removal cannot be noted in the data dir", slog.Any("err", err))
	}
}

// refuseRemoved refuses the data dir of a node that was removed.
func (m *peering) refuseRemoved() error {
	if _, err := os.Stat(filepath.Join(m.dir, removedFile)); m.dir == "" || err != nil {
		return nil //nolint:nilerr // the file does not exist
	}
	return problem.New(problem.PermissionDenied, "this node was removed from its cluster").
		WithHint("to come back, join with an empty --data-dir: `dpserve token` on a member makes the command")
}

// checkRejoin handles a join with the data dir of a member. If the token is of the same cluster, the join's
// address is used to find a control node (identifyRejoinPeer).
func (m *peering) checkRejoin() error {
	if m.n.cfg.Join == nil {
		return nil
	}
	t, err := pki.ParseToken(m.n.cfg.Join.Token)
	if err != nil {
		return err
	}
	m.rejoinAddress = m.n.cfg.Join.Address
	own, err := pki.Fingerprint(m.files.Authority)
	if err == nil && own != t.Fingerprint {
		err = problem.New(problem.Conflict, "data dir %s belongs to another cluster than the token",
			m.n.cfg.DataDir).
			WithHint("start it with `dpserve start --advertise IP`, or join with an empty --data-dir")
	}
	return err
}

// refuseStandalone refuses to begin a cluster on the data dir of a member of another cluster.
func (n *Node) refuseStandalone() error {
	if n.cfg.DataDir == "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(pkiDir(n.cfg.DataDir), seedsFile)); err != nil {
		return nil //nolint:nilerr // the file does not exist: the node has not joined
	}
	return problem.New(problem.Conflict,
		"data dir %s belongs to a member of a cluster, and members need --advertise", n.cfg.DataDir).
		WithHint("add --advertise with this machine's IP")
}

// verifyIdentity refuses certificate files of another node, which happens when two data dirs are mixed.
func (m *peering) verifyIdentity(id pki.Identity) error {
	if want := m.n.ident; id.UID != want.UID || want.Cluster != "" && id.Cluster != want.Cluster {
		return problem.New(problem.Conflict,
			"the certificate in %s is of node %s of cluster %s, the data dir of node %s of cluster %s",
			m.dir, id.Node, id.Cluster, want.Node, want.Cluster).
			WithHint("two data dirs were mixed: restore one from a backup, or join again with an empty one")
	}
	return nil
}

// join makes this node a member: it presents the token and receives a certificate.
func (m *peering) join(ctx context.Context) error {
	n := m.n
	if n.ident.Cluster != "" {
		return problem.New(problem.Conflict, "data dir %s belongs to cluster %s already", n.cfg.DataDir,
			n.ident.Cluster).
			WithHint("start it with `dpserve start`, or join with an empty --data-dir")
	}
	var key []byte // the key is saved before it is sent: the token is bound to it, and the answer may be lost
	if m.dir != "" {
		var err error
		if key, err = pki.KeepKey(m.dir); err != nil {
			return err
		}
	}
	joined, err := noderpc.Join(ctx, noderpc.JoinConfig{
		Address: n.cfg.Join.Address, Token: n.cfg.Join.Token,
		Node: n.nodeRecord(m), Key: key, Dial: n.cfg.joinDialer(),
	})
	if err != nil {
		return err
	}
	m.files, m.seeds, m.member = joined.Files, joined.Seeds, true
	if m.dir == "" {
		return nil
	}
	// seeds come first: certificate files without them look like those of a founder
	if err := m.writeSeeds(); err != nil {
		return err
	}
	return pki.Save(m.dir, m.files)
}

// initCluster begins a cluster: it makes the authority, this node's certificate and the gossip key.
func (m *peering) initCluster() error {
	n := m.n
	if n.ident.Cluster == "" {
		n.ident.Cluster = strings.ToLower(rand.Text())
	}
	now := time.Now()
	authority, err := pki.NewAuthority(n.ident.Cluster, now)
	if err != nil {
		return err
	}
	if m.files.Key, err = pki.NewKey(); err != nil {
		return err
	}
	csr, err := pki.NewCSR(m.files.Key)
	if err != nil {
		return err
	}
	id := pki.Identity{Cluster: n.ident.Cluster, Node: n.cfg.NodeID, UID: n.ident.UID, Roles: n.cfg.Roles}
	if m.files.Cert, err = authority.Sign(csr, id, now, pki.DefaultLife); err != nil {
		return err
	}
	m.files.GossipKey = cluster.NewGossipKey()
	var key []byte
	m.files.Authority, key = authority.PEM()
	m.secrets = state.Secrets{Authority: m.files.Authority, AuthorityKey: key, GossipKey: m.files.GossipKey}
	m.founding = true
	return nil
}

// saveFounderFiles writes the files of a founder. It runs after the cluster's state holds the authority: a
// crash before that would leave a certificate without an authority behind it. Other control nodes store the
// authority's key beside their own, for signOwn.
func (m *peering) saveFounderFiles() error {
	if m == nil || m.dir == "" {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	secrets := m.n.store.State().Secrets
	next := m.files
	next.AuthorityKey = secrets.AuthorityKey
	if !m.founding {
		if len(secrets.AuthorityKey) == 0 || bytes.Equal(m.files.AuthorityKey, secrets.AuthorityKey) {
			return nil
		}
		if err := m.save(next); err != nil {
			m.n.log.Warn("the authority's key could not be kept, trying again at the next renewal",
				slog.Any("err", err))
		}
		return nil
	}
	if string(secrets.Authority) != string(m.files.Authority) {
		return problem.New(problem.Conflict, "the certificates of this node's cluster are gone from %s",
			m.dir).
			WithHint("restore that folder from a backup; otherwise this node has to be removed and to " +
				"join again with an empty --data-dir")
	}
	return m.save(next)
}

func (m *peering) writeSeeds() error {
	data, err := json.Marshal(m.seeds)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return problem.New(problem.InvalidArgument, "make %s: %w", m.dir, err).
			WithHint("choose a --data-dir that you may write to")
	}
	if err := os.WriteFile(filepath.Join(m.dir, seedsFile), data, 0o600); err != nil {
		return problem.New(problem.InvalidArgument, "write %s: %w", seedsFile, err).
			WithHint("free space in the --data-dir")
	}
	return nil
}

// readSeeds reads the nodes that were there at the join. A founder has no such file.
func (m *peering) readSeeds() error {
	data, err := os.ReadFile(filepath.Join(m.dir, seedsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, &m.seeds)
	}
	if err != nil {
		return problem.New(problem.Conflict, "%s in %s cannot be read: %w", seedsFile, m.dir, err).
			WithHint("restore the data dir from a backup, or join again with an empty one")
	}
	m.member = true
	return nil
}

const (
	// maxRenewPause is the longest pause between two checks of the wall clock. Timers stand still while a
	// machine sleeps, but certificates continue to age.
	maxRenewPause = time.Hour
	// renewRetry is the pause before a failed renewal of the certificate is repeated. A third of the
	// certificate's life is left for it.
	renewRetry = time.Minute
	// expiredRetry is the pause after the certificate has expired. The node is cut off until it has a new
	// one.
	expiredRetry = 2 * time.Second
)

// certificateKeeper renews a node's certificate after two thirds of its life.
type certificateKeeper struct {
	current func() *pki.Credentials
	renew   func(ctx context.Context) error
	log     *slog.Logger
}

// run renews the certificate until ctx ends. Open connections continue.
func (k certificateKeeper) run(ctx context.Context) {
	var warned time.Time
	for {
		now, pause := time.Now(), time.Duration(0)
		switch c := k.current(); {
		case now.Before(c.RenewAt()): // RenewAt is wall-clock time: a certificate has no monotonic time
			pause = min(c.RenewAt().Sub(now), maxRenewPause)
		default:
			err := k.renew(ctx)
			if err == nil {
				continue
			}
			pause = renewRetry
			if c.Expired(now) {
				pause = expiredRetry
			}
			if ctx.Err() == nil && time.Since(warned) >= renewRetry {
				warned = time.Now()
				k.log.Warn("the node's certificate was not renewed, trying again",
					slog.Time("expires", c.NotAfter), slog.Any("err", err))
			}
		}
		t := time.NewTimer(max(pause, time.Millisecond))
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// keepCertificate renews the node's certificate until ctx ends.
func (m *peering) keepCertificate(ctx context.Context) {
	certificateKeeper{current: m.credentials.Load, renew: m.renewCertificate, log: m.n.log}.run(ctx)
}

// renewCertificate gets and saves a new certificate for the same key. A node with role control signs for
// itself; other nodes ask a control node.
func (m *peering) renewCertificate(ctx context.Context) error {
	csr, err := m.newCSR()
	if err != nil {
		return err
	}
	own, secrets := m.credentials.Load(), deferredStore{m.n}.State().Secrets
	var cert, authority []byte
	if own.Expired(time.Now()) && len(secrets.AuthorityKey) == 0 {
		cert, authority, err = m.n.leader.CertifyExpired(ctx, csr, m.port.RenewGRPC)
	} else {
		cert, authority, err = m.n.leader.Certify(ctx, own.Identity, csr)
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.files
	next.Cert, next.Authority = cert, authority
	if len(secrets.AuthorityKey) > 0 {
		next.AuthorityKey = secrets.AuthorityKey
	}
	return m.useCertificate(own, next)
}

// useCertificate saves files with a renewed certificate and presents it from now on. If the disk refuses the
// write, the certificate is used from memory until the next start. The caller holds mu or is the only
// goroutine.
func (m *peering) useCertificate(own *pki.Credentials, next pki.Files) error {
	c, err := next.Credentials()
	if err != nil {
		return err
	}
	if now, was := c.Identity, own.Identity; now.Cluster != was.Cluster || now.Node != was.Node ||
		now.UID != was.UID || !state.SameRoles(now.Roles, was.Roles) {
		return problem.New(problem.Conflict,
			"the new certificate is for node %s (%s) with roles %v, not for %s (%s) with %v",
			now.Node, now.UID, now.Roles, was.Node, was.UID, was.Roles).
			WithHint("remove the node, and join with an empty --data-dir and a new token")
	}
	if err := m.save(next); err != nil {
		m.n.log.Warn("the renewed certificate could not be kept for the next start", slog.Any("err", err))
		m.files = next
	}
	m.credentials.Store(c)
	m.n.log.Info("the node's certificate was renewed", slog.Time("expires", c.NotAfter))
	return nil
}

// signOwn renews a due certificate of a starting control node before it talks to any other node. After a long
// time with all nodes off every certificate is expired, and no node could ask another one.
func (m *peering) signOwn(c *pki.Credentials) error {
	now := time.Now()
	if len(m.files.AuthorityKey) == 0 || now.Before(c.RenewAt()) {
		return nil
	}
	next, err := m.files.Renewed(now)
	if err != nil {
		return err
	}
	return m.useCertificate(c, next)
}

// save keeps files in memory and in the data dir. The caller holds mu or is the only goroutine.
func (m *peering) save(files pki.Files) error {
	if m.dir != "" {
		if err := pki.Save(m.dir, files); err != nil {
			return err
		}
	}
	m.files = files
	return nil
}

// publicKeySum is the hash of this node's public key, which binds the node's record to the key; "" for a node
// that stands alone.
func (m *peering) publicKeySum() (string, error) {
	if m == nil {
		return "", nil
	}
	csr, err := m.newCSR()
	if err != nil {
		return "", err
	}
	return pki.KeySum(csr)
}

// newCSR makes a certificate request for this node's key.
func (m *peering) newCSR() ([]byte, error) {
	m.mu.Lock()
	key := m.files.Key
	m.mu.Unlock()
	return pki.NewCSR(key)
}
