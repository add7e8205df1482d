package pki

import (
	"crypto/tls"
	"crypto/x509"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Credentials are the certificate that a node shows and the authority that it trusts. They never change: a
// renewal makes new ones.
type Credentials struct {
	Certificate tls.Certificate // leaf, then the authority, which a newcomer compares with its token
	Pool        *x509.CertPool  // the authority
	Identity    Identity
	NotAfter    time.Time

	notBefore time.Time
}

// NewCredentials reads PEM. It refuses parts that do not belong together. It does not check whether the
// certificate is valid now.
func NewCredentials(authorityPEM, certPEM, keyPEM []byte) (*Credentials, error) {
	ca, err := parseCertificate(authorityPEM)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, badPEM("certificate with its key", err)
	}
	id, err := IdentityOf(pair.Leaf)
	if err != nil {
		return nil, err
	}
	if err := pair.Leaf.CheckSignatureFrom(ca); err != nil || id.Cluster != ca.Subject.CommonName {
		return nil, problem.New(problem.Conflict,
			"the node's certificate was not signed by the authority beside it").
			WithHint("restore the data dir from a backup, or join again with an empty one")
	}
	pair.Certificate = [][]byte{pair.Leaf.Raw, ca.Raw}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return &Credentials{Certificate: pair, Pool: pool, Identity: id, NotAfter: pair.Leaf.NotAfter,
		notBefore: pair.Leaf.NotBefore}, nil
}

// Expired reports whether the certificate has expired, so that no other node accepts it.
func (c *Credentials) Expired(now time.Time) bool { return now.After(c.NotAfter) }

// RenewAt returns the time when two thirds of the certificate's life are over.
func (c *Credentials) RenewAt() time.Time {
	signed := c.notBefore.Add(backdate)
	return signed.Add(c.NotAfter.Sub(signed) * 2 / 3)
}
