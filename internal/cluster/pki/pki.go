// Package pki is the certificate authority of a cluster. It names nodes, signs their certificates, and makes
// the token that a newcomer needs. It does no IO except for the files of a data dir, and reads no clock.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// DefaultLife is how long a node's certificate is valid, and AuthorityLife how long the authority is.
const (
	DefaultLife   = 30 * 24 * time.Hour
	AuthorityLife = 10 * 365 * 24 * time.Hour
)

// backdate makes a certificate valid on a machine whose clock is behind the signer's.
const backdate = time.Hour

// PEM block types.
const (
	pemCertificate = "CERTIFICATE"
	pemKey         = "PRIVATE KEY"
)

// NewKey makes a private key (ECDSA P-256, PKCS #8, PEM).
func NewKey() (keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("draw a key: %w", err)
	}
	return encodeKey(key)
}

// NewCSR makes a certificate request (PKCS #10, DER). It names no identity, because the authority decides it.
func NewCSR(keyPEM []byte) (der []byte, err error) {
	key, err := parseKey(keyPEM)
	if err != nil {
		return nil, err
	}
	der, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate request: %w", err)
	}
	return der, nil
}

// Fingerprint returns the SHA-256 of an authority's certificate.
func Fingerprint(authorityPEM []byte) ([32]byte, error) {
	cert, err := parseCertificate(authorityPEM)
	if err != nil {
		return [32]byte{}, err
	}
	return sha256.Sum256(cert.Raw), nil
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), nil
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: pemCertificate, Bytes: der})
}

func parseKey(keyPEM []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(keyPEM)
	if block == nil || block.Type != pemKey {
		return nil, badPEM("key", errors.New("no PEM block \""+pemKey+"\""))
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, badPEM("key", err)
	}
	signer, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, badPEM("key", errors.New("not an ECDSA key"))
	}
	return signer, nil
}

func parseCertificate(certPEM []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(certPEM)
	if block == nil || block.Type != pemCertificate {
		return nil, badPEM("certificate", errors.New("no PEM block \""+pemCertificate+"\""))
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, badPEM("certificate", err)
	}
	return cert, nil
}

// badPEM is the error of a damaged key or certificate.
func badPEM(what string, err error) error {
	return problem.New(problem.InvalidArgument, "this is no %s of a cluster: %w", what, err).
		WithHint("restore the data dir from a backup, or join again with an empty one")
}
