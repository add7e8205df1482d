package pki

import (
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// scheme is that of the URI that names a node in its certificate: dpserve:///CLUSTER/NODE?role=..&uid=..
// The cluster is not the URI's host, because x509 refuses most ids as host names. So the host stays empty.
const scheme = "dpserve"

// maxPart bounds each part of an identity, in bytes.
const maxPart = 256

// maxRoles bounds how many roles one identity has.
const maxRoles = 8

// Identity names the node of a certificate.
type Identity struct {
	Cluster string
	Node    string
	UID     string
	Roles   []string
}

// HasRole reports whether the node has one of the roles.
func (id Identity) HasRole(roles ...string) bool {
	return slices.ContainsFunc(roles, func(r string) bool { return slices.Contains(id.Roles, r) })
}

// IdentityOf reads the identity of a certificate. It does not verify the certificate.
func IdentityOf(cert *x509.Certificate) (Identity, error) {
	if cert == nil || len(cert.URIs) != 1 {
		return Identity{}, problem.New(problem.Unauthenticated, "the certificate names no node")
	}
	return identityOfURI(cert.URIs[0])
}

func identityOfURI(u *url.URL) (Identity, error) {
	strange := problem.New(problem.Unauthenticated, "the certificate names no node")
	cluster, node, ok := strings.Cut(strings.TrimPrefix(u.EscapedPath(), "/"), "/")
	if u.Scheme != scheme || u.Host != "" || !ok {
		return Identity{}, strange
	}
	var id Identity
	var err [3]error
	var query url.Values
	id.Cluster, err[0] = url.PathUnescape(cluster)
	id.Node, err[1] = url.PathUnescape(node)
	query, err[2] = url.ParseQuery(u.RawQuery)
	if err != [3]error{} || strings.Contains(node, "/") {
		return Identity{}, strange
	}
	id.UID, id.Roles = query.Get("uid"), query["role"]
	if id.check() != nil {
		return Identity{}, strange
	}
	return id, nil
}

// uri is the inverse of identityOfURI.
func (id Identity) uri() *url.URL {
	path := "/" + url.PathEscape(id.Cluster) + "/" + url.PathEscape(id.Node)
	return &url.URL{
		Scheme: scheme, Path: "/" + id.Cluster + "/" + id.Node, RawPath: path,
		RawQuery: url.Values{"uid": {id.UID}, "role": id.Roles}.Encode(),
	}
}

// check refuses an identity that is out of bounds or could not be read back.
func (id Identity) check() error {
	for _, part := range []struct{ name, value string }{
		{"cluster", id.Cluster},
		{"node", id.Node},
		{"uid", id.UID},
	} {
		if part.value == "" || len(part.value) > maxPart {
			return problem.New(problem.InvalidArgument, "%s of an identity has %d bytes, allowed are 1 to %d",
				part.name, len(part.value), maxPart)
		}
	}
	if len(id.Roles) > maxRoles {
		return problem.New(problem.InvalidArgument, "an identity has %d roles, allowed are %d", len(id.Roles),
			maxRoles)
	}
	for _, r := range id.Roles {
		if r == "" || len(r) > maxPart {
			return problem.New(problem.InvalidArgument,
				"a role of an identity has %d bytes, allowed are 1 to %d", len(r), maxPart)
		}
	}
	return nil
}

// Credentials are the certificate that a node shows and the authority that it trusts. They never change: a
// renewal makes new ones.
type Credentials struct {
	Certificate tls.Certificate // leaf, then the authority, which a newcomer compares with its token
	Pool        *x509.CertPool  // the authority
	Identity    Identity
	NotBefore   time.Time
	NotAfter    time.Time
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
			"the node's certificate was not signed by the authority next to it").
			WithHint("restore the data dir from a backup, or join again with an empty one")
	}
	pair.Certificate = [][]byte{pair.Leaf.Raw, ca.Raw}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return &Credentials{
		Certificate: pair, Pool: pool, Identity: id,
		NotBefore: pair.Leaf.NotBefore, NotAfter: pair.Leaf.NotAfter,
	}, nil
}

// Expired reports whether the certificate has expired, so that no other node accepts it.
func (c *Credentials) Expired(now time.Time) bool { return now.After(c.NotAfter) }

// NotYetValid reports whether the certificate is of a time to come, so that no other node accepts it: the
// clock of its signer was ahead.
func (c *Credentials) NotYetValid(now time.Time) bool { return now.Before(c.NotBefore) }

// RenewAt returns the time when two thirds of the certificate's life are over.
func (c *Credentials) RenewAt() time.Time {
	signed := c.NotBefore.Add(backdate)
	return signed.Add(c.NotAfter.Sub(signed) * 2 / 3)
}
