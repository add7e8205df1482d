// Package access holds the files that say who may talk to a node: the API keys of clients, the certificate of
// the ports for clients and operators, and the admin token. The first two are read again while the node runs.
package access

import (
	"context"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/internal/apikeys"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// lookEvery is the interval at which the files are read again.
const lookEvery = time.Second

// Files names the files of a node; "" = the node has none.
type Files struct {
	APIKeys string // --api-keys
	TLSCert string // --tls-cert
	TLSKey  string // --tls-key
}

// Access is what the files hold. Its methods may be called from any goroutine, Follow once.
type Access struct {
	Metrics *telemetry.Access // given to Open

	keys        *watched[apikeys.Set] // nil: the endpoint has no keys
	certificate *watched[certificate] // nil: no TLS for clients and operators
	expiry      expiryLog
}

// Open reads the files. Errors are *problem.Error and name the flag.
func Open(f Files, metrics *telemetry.Access, log *slog.Logger) (*Access, error) {
	a := &Access{Metrics: metrics, expiry: expiryLog{log: log}}
	if f.TLSCert != "" {
		a.certificate = &watched[certificate]{
			what: "--tls-cert, --tls-key", paths: []string{f.TLSCert, f.TLSKey}, log: log,
			parse:  parseCertificate,
			report: func(failed bool) { metrics.FileFailed(telemetry.FileTLS, failed) },
			use:    func(_, now *certificate) { metrics.CertificateExpires(now.expires.Unix()) },
		}
		if err := a.certificate.open(); err != nil {
			return nil, err
		}
		a.expiry.look(a.certificate.current(), time.Now())
	}
	if f.APIKeys != "" {
		a.keys = &watched[apikeys.Set]{
			what: "--api-keys", paths: []string{f.APIKeys}, log: log,
			parse:  func(texts [][]byte) (*apikeys.Set, error) { return apikeys.Parse(texts[0]) },
			report: func(failed bool) { metrics.FileFailed(telemetry.FileKeys, failed) },
			use: func(before, now *apikeys.Set) {
				if before != nil {
					metrics.Replaced(before.Names(), now.Names())
				}
			},
		}
		if err := a.keys.open(); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// Follow uses changes of the files until ctx ends.
func (a *Access) Follow(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			a.look(time.Now())
		case <-ctx.Done():
			return
		}
	}
}

func (a *Access) look(now time.Time) {
	if a.keys != nil {
		a.keys.look()
	}
	if a.certificate != nil {
		a.certificate.look()
		a.expiry.look(a.certificate.current(), now)
	}
}

// APIKeys returns the reader of the keys in use; nil: the endpoint has none.
func (a *Access) APIKeys() func() *apikeys.Set {
	if a.keys == nil {
		return nil
	}
	return a.keys.current
}
