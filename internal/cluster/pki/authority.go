package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
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
	key  crypto.Signer
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
	public, ok := cert.PublicKey.(*ecdsa.PublicKey)
	if !cert.IsCA || !ok || !public.Equal(key.Public()) {
		return nil, badPEM("authority", fmt.Errorf("certificate and key do not belong together"))
	}
	return &Authority{cert: cert, key: key}, nil
}

// Cluster returns the id of the cluster.
func (a *Authority) Cluster() string { return a.cert.Subject.CommonName }

// PEM returns the certificate, which is public, and the key, which only control nodes may have.
func (a *Authority) PEM() (certPEM, keyPEM []byte) {
	key, ok := a.key.(*ecdsa.PrivateKey)
	if !ok {
		return encodeCertificate(a.cert.Raw), nil
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return encodeCertificate(a.cert.Raw), nil
	}
	return encodeCertificate(a.cert.Raw), keyPEM
}

// Sign makes a certificate of an identity for the key of the request. It is valid from an hour before now
// until now + life, but no longer than the authority. Only the key of the request counts. Sign refuses a
// request that is not signed by its key, a key that is not ECDSA P-256, and an identity of another cluster.
func (a *Authority) Sign(csrDER []byte, id Identity, now time.Time, life time.Duration) (certPEM []byte,
	err error,
) {
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
