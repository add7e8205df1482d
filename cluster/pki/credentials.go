package pki

import (
	"crypto/tls"
	"crypto/x509"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Credentials are what a node shows and what it trusts. They are never changed; a renewal makes new ones.
type Credentials struct {
	Certificate tls.Certificate // leaf, then the authority: a newcomer compares that with its token
	Pool        *x509.CertPool  // the authority
	Identity    Identity
	NotAfter    time.Time

	notBefore time.Time
}

// NewCredentials reads PEM. Refused is what does not belong together; whether it is valid now is for who uses it.
func NewCredentials(authorityPEM, certPEM, keyPEM []byte) (*Credentials, error) {
	ca, err := parseCertificate(authorityPEM)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, broken("certificate with its key", err)
	}
	id, err := IdentityOf(pair.Leaf)
	if err != nil {
		return nil, err
	}
	if err := pair.Leaf.CheckSignatureFrom(ca); err != nil || id.Cluster != ca.Subject.CommonName {
		return nil, problem.New(problem.Conflict, "the node's certificate was not signed by the authority beside it").
			WithHint("restore the data dir from a backup, or join again with an empty one")
	}
	pair.Certificate = [][]byte{pair.Leaf.Raw, ca.Raw}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return &Credentials{Certificate: pair, Pool: pool, Identity: id, NotAfter: pair.Leaf.NotAfter, notBefore: pair.Leaf.NotBefore}, nil
}

// Expired says that no other node takes the certificate any more.
func (c *Credentials) Expired(now time.Time) bool { return now.After(c.NotAfter) }

// RenewAt is when two thirds of the life are over.
func (c *Credentials) RenewAt() time.Time {
	signed := c.notBefore.Add(backdate)
	return signed.Add(c.NotAfter.Sub(signed) * 2 / 3)
}
