package nodeport

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/state"
)

// Dial connects to the port at addr for a protocol. uid is the UID that the peer must have; "" allows any
// member. Dial returns when the other side has accepted or refused the connection. The error says why, for
// people, and wraps one of the errors of this package.
func (p *Port) Dial(ctx context.Context, alpn, addr, uid string) (*Conn, error) {
	creds := p.cfg.Credentials()
	if creds == nil {
		return nil, errNoCredentials
	}
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	if !p.track(&cancel, cancel) {
		return nil, unreachableError(addr, net.ErrClosed)
	}
	defer p.untrack(&cancel)
	c := &Conn{ALPN: alpn, port: p}
	err := c.open(ctx, p.cfg.Connect, addr, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{alpn},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection checks cluster and UID
		VerifyConnection: func(cs tls.ConnectionState) (err error) {
			c.Peer, err = verifyServer(creds.Pool, cs.PeerCertificates)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate,
			error) {
			return &creds.Certificate, nil
		},
	})
	if err == nil {
		err = p.checkPeer(c, creds, addr, uid)
	}
	if err == nil && !p.track(c, c.abort) {
		err = unreachableError(addr, net.ErrClosed)
	}
	if err != nil {
		c.discard()
		return nil, err
	}
	return c, nil
}

// checkPeer compares the peer with the one that Dial was asked for.
func (p *Port) checkPeer(c *Conn, creds *pki.Credentials, addr, uid string) error {
	switch {
	case c.Peer.Cluster != creds.Identity.Cluster:
		return otherClusterError(addr)
	case p.cfg.Revoked(c.Peer.UID):
		return peerRemovedError(addr, c.Peer)
	case uid != "" && c.Peer.UID != uid:
		return wrongPeerError(addr, uid, c.Peer)
	case !mayServe(c.ALPN, c.Peer):
		return notControlError(addr, c.Peer, c.ALPN)
	}
	return nil
}

// DialJoin connects a newcomer without a certificate to a control node of the cluster whose authority has
// this fingerprint. dial nil means TCP.
func DialJoin(ctx context.Context, dial DialFunc, addr string, fingerprint [32]byte) (net.Conn, error) {
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	c := &Conn{ALPN: Join}
	err := c.open(ctx, dial, addr, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{Join},
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection checks the authority's fingerprint
		VerifyConnection: func(cs tls.ConnectionState) (err error) {
			c.Peer, err = verifyJoin(cs.PeerCertificates, fingerprint)
			return err
		},
	})
	if err != nil {
		c.discard()
		return nil, err
	}
	return c, nil
}

// open connects, makes the TLS handshake and reads the greeting.
func (c *Conn) open(ctx context.Context, dial DialFunc, addr string, cfg *tls.Config) error {
	raw, err := dial(ctx, "tcp", addr)
	if err != nil {
		return unreachableError(addr, err)
	}
	c.Conn = tls.Client(raw, cfg)
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	err = c.HandshakeContext(ctx)
	var hello [1]byte
	if err == nil {
		_, err = c.Read(hello[:])
	}
	if !stop() {
		return unreachableError(addr, ctx.Err())
	}
	if err != nil {
		return explain(addr, err)
	}
	return greetingError(addr, c.ALPN, hello[0])
}

// discard closes a connection that open has begun.
func (c *Conn) discard() {
	if c.Conn != nil {
		c.abort()
	}
}

// verifyExpired checks a caller's certificate at a time when it was valid: apart from its age it must be
// correct. The handshake has shown that the caller has its key.
func verifyExpired(pool *x509.CertPool, chain []*x509.Certificate) (pki.Identity, error) {
	leaf := chain[0]
	at := time.Now()
	if at.Before(leaf.NotBefore) {
		return pki.Identity{}, x509.CertificateInvalidError{Cert: leaf, Reason: x509.Expired,
			Detail: "it is not valid yet"}
	}
	if at.After(leaf.NotAfter) {
		at = leaf.NotAfter
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: pool,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, CurrentTime: at})
	if err != nil {
		return pki.Identity{}, err
	}
	return pki.IdentityOf(leaf)
}

// verifyServer checks a server's certificate against the authority and returns its identity.
func verifyServer(pool *x509.CertPool, chain []*x509.Certificate) (pki.Identity, error) {
	if len(chain) == 0 {
		return pki.Identity{}, errors.New("no certificate")
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: pool,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, CurrentTime: time.Now()})
	if err != nil {
		return pki.Identity{}, err
	}
	return pki.IdentityOf(chain[0])
}

// verifyJoin checks that a control node of the token's cluster answers: no other node may see the token.
func verifyJoin(chain []*x509.Certificate, fingerprint [32]byte) (pki.Identity, error) {
	i := slices.IndexFunc(chain,
		func(c *x509.Certificate) bool { return sha256.Sum256(c.Raw) == fingerprint })
	if i < 0 {
		return pki.Identity{}, x509.UnknownAuthorityError{}
	}
	pool := x509.NewCertPool()
	pool.AddCert(chain[i])
	id, err := verifyServer(pool, chain)
	if err == nil && !id.HasRole(string(state.RoleControl)) {
		return id, ErrRole
	}
	return id, err
}
