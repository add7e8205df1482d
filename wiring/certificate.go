package wiring

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/state"
)

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
