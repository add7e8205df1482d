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

// Dial connects to the port at addr for a protocol. uid says whose it must be; "" is any member. It returns when the other side
// has taken the connection, or has refused it: the error says why, for people, and wraps one of the errors of this package.
func (p *Port) Dial(ctx context.Context, alpn, addr, uid string) (*Conn, error) {
	creds := p.cfg.Credentials()
	if creds == nil {
		return nil, errNoCredentials
	}
	ctx, cancel := context.WithTimeout(ctx, DialTimeout)
	defer cancel()
	if !p.hold(&cancel, cancel) {
		return nil, unreachable(addr, net.ErrClosed)
	}
	defer p.drop(&cancel)
	c := &Conn{ALPN: alpn, port: p}
	err := c.open(ctx, p.cfg.Connect, addr, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{alpn},
		InsecureSkipVerify: true, //nolint:gosec // nodes are known by cluster and UID, not by host name: VerifyConnection
		VerifyConnection: func(cs tls.ConnectionState) (err error) {
			c.Peer, err = verifyServer(creds.Pool, cs.PeerCertificates)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &creds.Certificate, nil },
	})
	if err == nil {
		err = p.expect(c, creds, addr, uid)
	}
	if err == nil && !p.hold(c, c.abort) {
		err = unreachable(addr, net.ErrClosed)
	}
	if err != nil {
		c.discard()
		return nil, err
	}
	return c, nil
}

// expect compares whom we found with whom we looked for.
func (p *Port) expect(c *Conn, creds *pki.Credentials, addr, uid string) error {
	switch {
	case c.Peer.Cluster != creds.Identity.Cluster:
		return otherCluster(addr)
	case p.cfg.Revoked(c.Peer.UID):
		return peerRemoved(addr, c.Peer)
	case uid != "" && c.Peer.UID != uid:
		return wrongPeer(addr, uid, c.Peer)
	case !mayServe(c.ALPN, c.Peer):
		return notControl(addr, c.Peer, c.ALPN)
	}
	return nil
}

// DialJoin connects a newcomer, which has no certificate, to a control node of the cluster whose authority has this fingerprint.
// dial nil is TCP.
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
		InsecureSkipVerify: true, //nolint:gosec // the authority is known by its fingerprint: VerifyConnection
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

// open connects, shakes hands and reads the greeting.
func (c *Conn) open(ctx context.Context, dial DialFunc, addr string, cfg *tls.Config) error {
	raw, err := dial(ctx, "tcp", addr)
	if err != nil {
		return unreachable(addr, err)
	}
	c.Conn = tls.Client(raw, cfg)
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	err = c.HandshakeContext(ctx)
	var hello [1]byte
	if err == nil {
		_, err = c.Read(hello[:])
	}
	if !stop() {
		return unreachable(addr, ctx.Err())
	}
	if err != nil {
		return explain(addr, err)
	}
	return refused(addr, c.ALPN, hello[0])
}

// discard ends what open began.
func (c *Conn) discard() {
	if c.Conn != nil {
		c.abort()
	}
}

// verifyExpired checks a caller's certificate as of a time when it was valid: what it says is true but for its age. That the caller has
// its key the handshake has shown.
func verifyExpired(pool *x509.CertPool, chain []*x509.Certificate) (pki.Identity, error) {
	leaf := chain[0]
	at := time.Now()
	if at.Before(leaf.NotBefore) {
		return pki.Identity{}, x509.CertificateInvalidError{Cert: leaf, Reason: x509.Expired, Detail: "it is not valid yet"}
	}
	if at.After(leaf.NotAfter) {
		at = leaf.NotAfter
	}
	_, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, CurrentTime: at})
	if err != nil {
		return pki.Identity{}, err
	}
	return pki.IdentityOf(leaf)
}

// verifyServer checks a server's certificate against the authority and says whose it is.
func verifyServer(pool *x509.CertPool, chain []*x509.Certificate) (pki.Identity, error) {
	if len(chain) == 0 {
		return pki.Identity{}, errors.New("no certificate")
	}
	_, err := chain[0].Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, CurrentTime: time.Now()})
	if err != nil {
		return pki.Identity{}, err
	}
	return pki.IdentityOf(chain[0])
}

// verifyJoin checks that a control node of the token's cluster answers: nobody else may see the token.
func verifyJoin(chain []*x509.Certificate, fingerprint [32]byte) (pki.Identity, error) {
	i := slices.IndexFunc(chain, func(c *x509.Certificate) bool { return sha256.Sum256(c.Raw) == fingerprint })
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
