package access

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// expiryNotice is how long before its end a certificate is warned about.
const expiryNotice = 14 * 24 * time.Hour

// certificate is the pair of --tls-cert and --tls-key.
type certificate struct {
	pair    tls.Certificate
	expires time.Time
}

// parseCertificate reads the two files in the order of the flags.
func parseCertificate(texts [][]byte) (*certificate, error) {
	pair, err := tls.X509KeyPair(texts[0], texts[1])
	if err == nil && pair.Leaf == nil {
		pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0])
	}
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "%w", err).
			WithHint("want PEM files of a certificate, with its chain, and of its private key")
	}
	return &certificate{pair: pair, expires: pair.Leaf.NotAfter}, nil
}

// warning says that the certificate expires soon or has expired; "" if neither.
func (c *certificate) warning(now time.Time) string {
	switch left := c.expires.Sub(now); {
	case left <= 0:
		return fmt.Sprintf("the certificate of --tls-cert has expired at %s; replace the files, the node "+
			"reads them again", c.expires.UTC().Format(time.RFC3339))
	case left < expiryNotice:
		return fmt.Sprintf("the certificate of --tls-cert expires at %s; replace the files, the node reads "+
			"them again", c.expires.UTC().Format(time.RFC3339))
	}
	return ""
}

// expiryLog writes one line of the log when a certificate begins to need a new one, and one when it has
// expired.
type expiryLog struct {
	log  *slog.Logger
	last string // the warning of the last line
}

func (e *expiryLog) look(c *certificate, now time.Time) {
	if text := c.warning(now); text != e.last {
		if e.last = text; text != "" {
			e.log.Warn("the certificate for clients and operators needs a new one", slog.String("why", text))
		}
	}
}

// TLSConfig returns the TLS of the ports for clients and operators, nil without a certificate. Only new
// connections use a new certificate, so a change cuts none. HTTP/2 is not offered.
func (a *Access) TLSConfig() *tls.Config {
	if a.certificate == nil {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &a.certificate.current().pair, nil
		},
	}
}

// Scheme is that of the URLs of the ports for clients and operators.
func (a *Access) Scheme() string {
	if a.certificate == nil {
		return "http"
	}
	return "https"
}

// Warning says that the certificate expires soon or has expired; "" if neither, or without one.
func (a *Access) Warning(now time.Time) string {
	if a.certificate == nil {
		return ""
	}
	return a.certificate.current().warning(now)
}
