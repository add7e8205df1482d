package server

import (
	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// access decides who may connect as a client or an operator.
type access struct {
	metrics    *telemetry.Access
	adminToken string                     // "": the admin API is open
	keys       *watchedFiles[apikeys.Set] // nil: the endpoint has no keys

	tls      *watchedFiles[certificate] // nil: no TLS for clients and operators
	warnedOf string                     // the last line about the end of the certificate
}

// openAccess reads the files of keys and certificates. It binds nothing.
func (n *Node) openAccess() error {
	a := &n.access
	a.metrics = n.metrics.Access()
	if err := n.openTLS(); err != nil {
		return err
	}
	if n.cfg.APIKeysFile == "" {
		return nil
	}
	a.keys = &watchedFiles[apikeys.Set]{
		what: "--api-keys", paths: []string{n.cfg.APIKeysFile}, log: n.log,
		parse:  func(texts [][]byte) (*apikeys.Set, error) { return apikeys.Parse(texts[0]) },
		report: func(failed bool) { a.metrics.FileFailed(telemetry.FileKeys, failed) },
		use: func(before, now *apikeys.Set) {
			if before != nil {
				a.metrics.Replaced(before.Names(), now.Names())
			}
		},
	}
	return a.keys.open()
}

// followAccess keeps what openAccess read up to date.
func (n *Node) followAccess() {
	if k := n.access.keys; k != nil {
		n.life.writers.Go(func() { k.follow(n.life.ctx) })
	}
	if t := n.access.tls; t != nil {
		n.life.writers.Go(func() { t.follow(n.life.ctx) })
	}
}

// apiKeys returns the keys in use, for the ingress; nil: the endpoint has none.
func (a *access) apiKeys() func() *apikeys.Set {
	if a.keys == nil {
		return nil
	}
	return a.keys.current
}
