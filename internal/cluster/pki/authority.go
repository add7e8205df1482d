// Package pki is the certificate authority of a cluster. It names nodes, signs their certificates, and makes
// the token that a newcomer needs. It does no IO except for the files of a data dir, and reads no clock.
package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// maxCSR bounds a certificate request, in bytes.
const maxCSR = 16 << 10

// Authority signs the certificates of one cluster's nodes. It is safe for concurrent use.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes the authority of a new cluster.
func NewAuthority(cluster string, now time.Time) (*Authority, error) {
	if cluster == "" || len(cluster) > maxPart {
		return nil, problem.New(problem.InvalidArgument, "a cluster id has 1 to %d bytes, this one has %d",
			maxPart, len(cluster))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("draw the authority's key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"dpserve"}, CommonName: cluster},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(AuthorityLife),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the authority's certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read the authority's certificate: %w", err)
	}
	return &Authority{cert: cert, key: key}, nil
}

// LoadAuthority reads the results of Authority.PEM.
func LoadAuthority(certPEM, keyPEM []byte) (*Authority, error) {
	cert, err := parseCertificate(certPEM)
	if err != nil {
		return nil, err
	}
	key, err := parseKey(keyPEM)
	if err != nil {
		return nil, err
	}
	if !cert.IsCA || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, badPEM("authority", errors.New("certificate and key do not belong together"))
	}
	return &Authority{cert: cert, key: key}, nil
}

// Cluster returns the id of the cluster.
func (a *Authority) Cluster() string { return a.cert.Subject.CommonName }

// PEM returns the certificate, which is public, and the key, which only control nodes may have.
func (a *Authority) PEM() (certPEM, keyPEM []byte) {
	keyPEM, _ = encodeKey(a.key) // a P-256 key can always be encoded
	return encodeCertificate(a.cert.Raw), keyPEM
}

// Sign makes a certificate of an identity for the key of the request. It is valid from an hour before now
// until now + life, but no longer than the authority. Only the key of the request counts. Sign refuses a
// request that is not signed by its key, a key that is not ECDSA P-256, and an identity of another cluster.
func (a *Authority) Sign(
	csrDER []byte, id Identity, now time.Time, life time.Duration,
) (certPEM []byte, err error) {
	public, err := requestKey(csrDER)
	if err != nil {
		return nil, err
	}
	if err := a.checkIdentity(id, life); err != nil {
		return nil, err
	}
	end := now.Add(life)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	template := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"dpserve"}},
		URIs:                  []*url.URL{id.uri()},
		NotBefore:             now.Add(-backdate),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, public, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	return encodeCertificate(der), nil
}

func (a *Authority) checkIdentity(id Identity, life time.Duration) error {
	switch {
	case id.Cluster != a.Cluster():
		return problem.New(problem.InvalidArgument,
			"the authority of cluster %s signs nothing for cluster %s", a.Cluster(), id.Cluster)
	case life <= 0:
		return problem.New(problem.InvalidArgument, "a certificate needs a life above 0, not %s", life)
	}
	return id.check()
}

// KeySum returns the SHA-256, in hex, of the public key of a certificate request. It refuses the same
// requests as Sign.
func KeySum(csrDER []byte) (string, error) {
	public, err := requestKey(csrDER)
	if err != nil {
		return "", err
	}
	der, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return "", fmt.Errorf("encode a public key: %w", err)
	}
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:]), nil
}

// requestKey checks a request and returns its key.
func requestKey(der []byte) (*ecdsa.PublicKey, error) {
	if len(der) > maxCSR {
		return nil, problem.New(problem.InvalidArgument,
			"the certificate request has %d bytes, allowed are %d", len(der), maxCSR)
	}
	request, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "the certificate request cannot be read: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, problem.New(problem.InvalidArgument,
			"the certificate request is not signed by its key: %w", err)
	}
	key, ok := request.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, problem.New(problem.InvalidArgument,
			"the key of the certificate request is not ECDSA P-256")
	}
	return key, nil
}

// serial makes a random serial number of 128 bits.
func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[0] &= 0x7f           // positive
	return new(big.Int).SetBytes(b[:])
}

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

func parseKey(keyPEM []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(keyPEM)
	if block == nil || block.Type != pemKey {
		return nil, badPEM("key", errors.New("no PEM block \""+pemKey+"\""))
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, badPEM("key", err)
	}
	own, ok := key.(*ecdsa.PrivateKey)
	if !ok {
		return nil, badPEM("key", errors.New("not an ECDSA key"))
	}
	return own, nil
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
