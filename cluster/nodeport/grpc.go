package nodeport

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
)

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

// TransportCredentials give gRPC the peer of a connection of this package. The connection is encrypted
// already, so they make no handshake.
func TransportCredentials() credentials.TransportCredentials { return passThrough{} }

// ServerOptions are for grpc.NewServer over Listener(GRPC) or Listener(Join): the credentials, and the pings
// that clients may send.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(TransportCredentials()),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: grpcPing / 2,
			PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: grpcPing, Timeout: grpcPingTimeout}),
		grpc.MaxRecvMsgSize(grpcMaxMessage),
		grpc.InitialWindowSize(grpcWindow),
		grpc.InitialConnWindowSize(grpcWindow),
	}
}

// GRPC makes a client of a node. It connects when it is used, reconnects when the connection breaks, and
// never uses a proxy. The caller closes it.
func (p *Port) GRPC(addr, uid string) (*grpc.ClientConn, error) {
	return newClient(addr, func(ctx context.Context) (net.Conn,
		error) {
		return p.Dial(ctx, GRPC, addr, uid)
	})
}

// RenewGRPC is GRPC for a node whose certificate has expired: the other node only signs the next certificate.
func (p *Port) RenewGRPC(addr, uid string) (*grpc.ClientConn, error) {
	return newClient(addr, func(ctx context.Context) (net.Conn,
		error) {
		return p.Dial(ctx, Renew, addr, uid)
	})
}

// JoinGRPC makes a connected client of a control node for a newcomer: see DialJoin. The caller closes it.
func JoinGRPC(ctx context.Context, dial DialFunc, addr string, fingerprint [32]byte) (*grpc.ClientConn,
	error) {
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
		grpc.WithTransportCredentials(TransportCredentials()),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: grpcPing, Timeout: grpcPingTimeout}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: grpcBackoff, Multiplier: 1.6, Jitter: 0.2,
				MaxDelay: grpcBackoffMax},
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

// passThrough makes no handshake: the node port has made it.
type passThrough struct{}

func (passThrough) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo,
	error) {
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
