package nodeport

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rawconn"
	"github.com/dpserve/dpserve/internal/state"
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
			c.Peer, err = verifyServer(creds.Pool, cs.PeerCertificates[0]) // a server shows at least one
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &creds.Certificate, nil
		},
	})
	if p.isRemovedHere(c, creds, err) {
		p.cfg.RemovedHere(err)
	}
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

// isRemovedHere reports whether a refusal ends this node: a member says that its state holds this node as
// removed. Only a control node's word counts, or one stolen certificate of a worker could end every node that
// connects to it; and not the word of a node that is removed itself.
func (p *Port) isRemovedHere(c *Conn, creds *pki.Credentials, err error) bool {
	return errors.Is(err, ErrRemoved) && c.Peer.Cluster == creds.Identity.Cluster &&
		c.Peer.HasRole(string(state.RoleControl)) && !p.cfg.Revoked(c.Peer.UID)
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
	c.Conn = tls.Client(rawconn.Conn(raw), cfg)
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	err = c.HandshakeContext(ctx)
	var hello [1]byte
	if err == nil {
		c.ALPN = c.ConnectionState().NegotiatedProtocol
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
func verifyExpired(pool *x509.CertPool, leaf *x509.Certificate) (pki.Identity, error) {
	at := time.Now()
	if at.Before(leaf.NotBefore) {
		return pki.Identity{}, x509.CertificateInvalidError{
			Cert: leaf, Reason: x509.Expired, Detail: "it is not valid yet",
		}
	}
	if at.After(leaf.NotAfter) {
		at = leaf.NotAfter
	}
	return verify(pool, leaf, x509.ExtKeyUsageClientAuth, at)
}

// verifyServer checks a server's certificate against the authority and returns its identity.
func verifyServer(pool *x509.CertPool, leaf *x509.Certificate) (pki.Identity, error) {
	return verify(pool, leaf, x509.ExtKeyUsageServerAuth, time.Now())
}

func verify(
	pool *x509.CertPool, leaf *x509.Certificate, usage x509.ExtKeyUsage, at time.Time,
) (pki.Identity, error) {
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: pool, KeyUsages: []x509.ExtKeyUsage{usage}, CurrentTime: at,
	})
	if err != nil {
		return pki.Identity{}, err
	}
	return pki.IdentityOf(leaf)
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
	id, err := verifyServer(pool, chain[0])
	if err == nil && !id.HasRole(string(state.RoleControl)) {
		return id, ErrRole
	}
	return id, err
}

// Conn is a connection after handshake and greeting. Peer is empty on the serving side of Join.
type Conn struct {
	*tls.Conn
	Peer pki.Identity
	ALPN string

	port *Port // nil for the connection of a newcomer
}

// Close ends the connection. One of Ranks ends without TLS's closing message, because sending it could block,
// and a stream's last record says the same.
func (c *Conn) Close() error {
	if c.port != nil {
		c.port.untrack(c)
	}
	if c.ALPN == Ranks {
		return c.NetConn().Close()
	}
	return c.Conn.Close()
}

// abort closes the connection without TLS's closing message, because sending it could block.
func (c *Conn) abort() { _ = c.NetConn().Close() }

// PeerOf returns the peer of a connection of this package; false for a newcomer that joins.
func PeerOf(c net.Conn) (pki.Identity, bool) {
	conn, ok := c.(*Conn)
	if !ok {
		return pki.Identity{}, false
	}
	return conn.Peer, conn.Peer.UID != ""
}

type peerKey struct{}

// PeerFromContext returns the sender of a gRPC call or an HTTP request; false for a newcomer that joins.
func PeerFromContext(ctx context.Context) (pki.Identity, bool) {
	if id, ok := ctx.Value(peerKey{}).(pki.Identity); ok {
		return id, id.UID != ""
	}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(authInfo); ok {
			return info.peer, info.peer.UID != ""
		}
	}
	return pki.Identity{}, false
}

// Times of gRPC's checks of its peer, and of reconnecting.
const (
	grpcPing        = 10 * time.Second
	grpcPingTimeout = 3 * time.Second
	grpcBackoff     = 50 * time.Millisecond
	grpcBackoffMax  = time.Second
	grpcMaxMessage  = 64 << 20 // bytes; the whole state is sent in one message
	// grpcWindow is bytes per stream and per connection. A fixed one saves the pings that measure the
	// connection, about half of the cost of small messages.
	grpcWindow = 1 << 20
)

// ServerOptions are for grpc.NewServer over Listener(GRPC) or Listener(Join): the credentials, and the pings
// that clients may send.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(passThrough{}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime:             grpcPing / 2,
			PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: grpcPing, Timeout: grpcPingTimeout}),
		grpc.MaxRecvMsgSize(grpcMaxMessage),
		grpc.InitialWindowSize(grpcWindow),
		grpc.InitialConnWindowSize(grpcWindow),
	}
}

// GRPC makes a client of a node. It connects when it is used, reconnects when the connection breaks, and
// never uses a proxy. The caller closes it.
func (p *Port) GRPC(addr, uid string) (*grpc.ClientConn, error) { return p.newClient(GRPC, addr, uid) }

// RenewGRPC is GRPC for a node whose certificate has expired: the other node only signs the next certificate.
func (p *Port) RenewGRPC(addr, uid string) (*grpc.ClientConn, error) {
	return p.newClient(Renew, addr, uid)
}

func (p *Port) newClient(alpn, addr, uid string) (*grpc.ClientConn, error) {
	return newClient(addr,
		func(ctx context.Context) (net.Conn, error) { return p.Dial(ctx, alpn, addr, uid) })
}

// JoinGRPC makes a connected client of a control node for a newcomer: see DialJoin. The caller closes it.
func JoinGRPC(
	ctx context.Context, dial DialFunc, addr string, fingerprint [32]byte,
) (*grpc.ClientConn, error) {
	first, err := DialJoin(ctx, dial, addr, fingerprint)
	if err != nil {
		return nil, err
	}
	ready := make(chan net.Conn, 1)
	ready <- first
	cc, err := newClient(addr, func(ctx context.Context) (net.Conn, error) {
		select {
		case c := <-ready:
			return c, nil
		default:
			return DialJoin(ctx, dial, addr, fingerprint)
		}
	})
	if err != nil {
		_ = first.Close()
		return nil, err
	}
	cc.Connect()
	return cc, nil
}

func newClient(addr string, dial func(context.Context) (net.Conn, error)) (*grpc.ClientConn, error) {
	cc, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx) }),
		grpc.WithTransportCredentials(passThrough{}),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: grpcPing, Timeout: grpcPingTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: grpcBackoff, Multiplier: 1.6, Jitter: 0.2, MaxDelay: grpcBackoffMax,
			},
			MinConnectTimeout: DialTimeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(grpcMaxMessage)),
		grpc.WithInitialWindowSize(grpcWindow),
		grpc.WithInitialConnWindowSize(grpcWindow),
	)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "address %q of a node: %w", addr, err)
	}
	return cc, nil
}

// authInfo is what a gRPC call knows of its peer.
type authInfo struct {
	credentials.CommonAuthInfo
	peer pki.Identity
}

func (authInfo) AuthType() string { return "dpserve" }

// passThrough gives gRPC the peer of a connection of this package. It makes no handshake: the node port has
// made it.
type passThrough struct{}

func (passThrough) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo,
	error,
) {
	return peerInfo(c)
}

func (passThrough) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return peerInfo(c)
}

// peerInfo refuses a connection that did not come through the port, because it has no verified peer.
func peerInfo(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, ok := c.(*Conn)
	if !ok {
		return nil, nil, fmt.Errorf("a connection of type %T did not come through the node port", c)
	}
	common := credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}
	return c, authInfo{CommonAuthInfo: common, peer: conn.Peer}, nil
}

func (passThrough) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (passThrough) Clone() credentials.TransportCredentials { return passThrough{} }
func (passThrough) OverrideServerName(string) error         { return nil }

// Transport makes a transport to the data port of a node: see NewTransport.
func (p *Port) Transport(addr, uid string) *Transport {
	return NewTransport(func(ctx context.Context) (net.Conn, error) {
		c, err := p.Dial(ctx, Data, addr, uid)
		if err != nil {
			return nil, err // not a nil *Conn in an interface
		}
		return c, nil
	})
}

// AdminTransport sends requests to the admin API of a node.
func (p *Port) AdminTransport(addr, uid string) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := p.Dial(ctx, Admin, addr, uid)
			if err != nil {
				return nil, err
			}
			return plainConn{c}, nil
		},
		IdleConnTimeout: idleTimeout, DisableCompression: true,
	}
}
