package wiring

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
)

// renewRetry is the pause before a renewal of the certificate that failed is tried again; there is a third of its life for it.
const renewRetry = time.Minute

// renew gets the next certificate at two thirds of this one's life, until ctx ends. Connections that are open go on.
func (m *mesh) renew(ctx context.Context) {
	for {
		wait := max(time.Until(m.credentials.Load().RenewAt()), 0)
		for {
			t := time.NewTimer(wait)
			select {
			case <-t.C:
			case <-ctx.Done():
				t.Stop()
				return
			}
			if err := m.certify(ctx); err == nil {
				break
			} else if ctx.Err() == nil {
				m.n.log.Warn("the node's certificate was not renewed, trying again", slog.Time("expires", m.credentials.Load().NotAfter), slog.Any("err", err))
			}
			wait = renewRetry
		}
	}
}

// certify gets and keeps a new certificate for the same key.
func (m *mesh) certify(ctx context.Context) error {
	csr, err := pki.NewCSR(m.files.Key)
	if err != nil {
		return err
	}
	cert, authority, err := m.n.leader.Certify(ctx, csr)
	if err != nil {
		return err
	}
	m.held.Lock()
	defer m.held.Unlock()
	next := m.files
	next.Cert, next.Authority = cert, authority
	c, err := next.Credentials()
	if err != nil {
		return err
	}
	if err := m.save(next); err != nil {
		return err
	}
	m.credentials.Store(c)
	m.n.log.Info("the node's certificate was renewed", slog.Time("expires", c.NotAfter))
	return nil
}

// save keeps files, here and in the data dir. The caller has held.
func (m *mesh) save(files pki.Files) error {
	if m.dir != "" {
		if err := pki.Save(m.dir, files); err != nil {
			return err
		}
	}
	m.files = files
	return nil
}
