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
	// renewLook is the longest pause between two looks at the wall clock: timers stand still while a machine sleeps, certificates go on
	// to age.
	renewLook = time.Hour
	// renewRetry is the pause before a renewal of the certificate that failed is tried again; there is a third of its life for it.
	renewRetry = time.Minute
	// expiredRetry is the same once the certificate has expired: the node is cut off until it has another one.
	expiredRetry = 2 * time.Second
)

// certificateKeeper renews a node's certificate when two thirds of its life are over.
type certificateKeeper struct {
	held  func() *pki.Credentials
	renew func(ctx context.Context) error
	log   *slog.Logger
}

// run keeps the certificate until ctx ends. Connections that are open go on.
func (k certificateKeeper) run(ctx context.Context) {
	var warned time.Time
	for {
		now, pause := time.Now(), time.Duration(0)
		switch c := k.held(); {
		case now.Before(c.RenewAt()): // by the wall clock: a certificate has no monotonic time
			pause = min(c.RenewAt().Sub(now), renewLook)
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
				k.log.Warn("the node's certificate was not renewed, trying again", slog.Time("expires", c.NotAfter), slog.Any("err", err))
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
func (m *mesh) keepCertificate(ctx context.Context) {
	certificateKeeper{held: m.credentials.Load, renew: m.certify, log: m.n.log}.run(ctx)
}

// certify gets and keeps a new certificate for the same key. A node with role control signs for itself, others ask one of those.
func (m *mesh) certify(ctx context.Context) error {
	csr, err := m.request()
	if err != nil {
		return err
	}
	own, secrets := m.credentials.Load(), late{m.n}.State().Secrets
	var cert, authority []byte
	if own.Expired(time.Now()) && len(secrets.AuthorityKey) == 0 {
		cert, authority, err = m.n.leader.CertifyExpired(ctx, csr, m.port.RenewGRPC)
	} else {
		cert, authority, err = m.n.leader.Certify(ctx, own.Identity, csr)
	}
	if err != nil {
		return err
	}
	m.held.Lock()
	defer m.held.Unlock()
	next := m.files
	next.Cert, next.Authority = cert, authority
	if len(secrets.AuthorityKey) > 0 {
		next.AuthorityKey = secrets.AuthorityKey
	}
	return m.take(own, next)
}

// take keeps files with a renewed certificate, and shows it from now on, also where the disk does not take it: until the next start it is as
// good in memory. The caller has held, or runs alone.
func (m *mesh) take(own *pki.Credentials, next pki.Files) error {
	c, err := next.Credentials()
	if err != nil {
		return err
	}
	if now, was := c.Identity, own.Identity; now.Cluster != was.Cluster || now.Node != was.Node || now.UID != was.UID || !state.SameRoles(now.Roles, was.Roles) {
		return problem.New(problem.Conflict, "the new certificate is for node %s (%s) with roles %v, not for %s (%s) with %v",
			now.Node, now.UID, now.Roles, was.Node, was.UID, was.Roles).WithHint("remove the node, and join with an empty --data-dir and a new token")
	}
	if err := m.save(next); err != nil {
		m.n.log.Warn("the renewed certificate could not be kept for the next start", slog.Any("err", err))
		m.files = next
	}
	m.credentials.Store(c)
	m.n.log.Info("the node's certificate was renewed", slog.Time("expires", c.NotAfter))
	return nil
}

// signOwn renews the certificate of a control node that starts, if it is time, before the node talks to any other: after a while in which
// all were off no certificate is good, and no node could ask another one.
func (m *mesh) signOwn(c *pki.Credentials) error {
	now := time.Now()
	if len(m.files.AuthorityKey) == 0 || now.Before(c.RenewAt()) {
		return nil
	}
	next, err := m.files.Renewed(now)
	if err != nil {
		return err
	}
	return m.take(c, next)
}

// save keeps files, here and in the data dir. The caller has held, or runs alone.
func (m *mesh) save(files pki.Files) error {
	if m.dir != "" {
		if err := pki.Save(m.dir, files); err != nil {
			return err
		}
	}
	m.files = files
	return nil
}

// keySum is the hash of this node's public key, by which its record is bound to it; "" for a node that stands alone.
func (m *mesh) keySum() (string, error) {
	if m == nil {
		return "", nil
	}
	csr, err := m.request()
	if err != nil {
		return "", err
	}
	return pki.KeySum(csr)
}

// request asks for a certificate on this node's key.
func (m *mesh) request() ([]byte, error) {
	m.held.Lock()
	key := m.files.Key
	m.held.Unlock()
	return pki.NewCSR(key)
}
