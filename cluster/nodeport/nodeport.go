// Package nodeport is the one TLS port of a node: it shakes hands, says who is there, and hands each connection to whom it asked
// for by ALPN. Whoever is not a member of the cluster is refused before a byte of a protocol is read.
package nodeport

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/state"
)

// The protocols of the port, as ALPN names them.
const (
	Raft  = "dpserve-raft/1"  // consensus; peers have role control
	GRPC  = "dpserve-grpc/1"  // the services between members
	Data  = "dpserve-data/1"  // HTTP/2 requests for engines; peers have role ingress or control
	Admin = "dpserve-admin/1" // HTTP/2, the admin API of the leader for other nodes
	Join  = "dpserve-join/1"  // gRPC for newcomers, without a certificate
	Renew = "dpserve-renew/1" // gRPC for members whose certificate has expired; peers that are dialed have role control
)

// Limits and times of the port.
const (
	HandshakeTimeout = 5 * time.Second // from accept to the end of the greeting
	DialTimeout      = 3 * time.Second // connect, handshake and greeting, if the caller's context allows no less
	maxHandshakes    = 256             // at once
	patience         = time.Second / 4 // with the oldest handshake, while others wait for its place
	backlog          = 128             // connections per protocol that nobody accepted yet
	logEvery         = time.Second     // per reason of refusal
)

// DialFunc connects; its shape is that of net.Dialer.DialContext.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Config says what a port needs. Zero values mean what the fields say.
type Config struct {
	// Credentials are asked for at each handshake, so a renewed certificate drops no connection. Nil as long as there are none.
	Credentials func() *pki.Credentials
	// Revoked says that the node with this UID was removed from the cluster. Nil: none was.
	Revoked func(uid string) bool
	// Refused counts a connection that was turned away. Nil: nobody counts.
	Refused func(reason Reason)
	// Bind and Connect are the network; nil is TCP.
	Bind    func(ctx context.Context, addr string) (net.Listener, error)
	Connect DialFunc
	// Log; nil is silent.
	Log *slog.Logger
	// HandshakeTimeout; 0 is the constant of that name.
	HandshakeTimeout time.Duration
}

func (c Config) withDefaults() Config {
	if c.Revoked == nil {
		c.Revoked = func(string) bool { return false }
	}
	if c.Refused == nil {
		c.Refused = func(Reason) {}
	}
	if c.Bind == nil {
		c.Bind = func(ctx context.Context, addr string) (net.Listener, error) {
			return (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		}
	}
	if c.Connect == nil {
		c.Connect = (&net.Dialer{}).DialContext
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.HandshakeTimeout == 0 {
		c.HandshakeTimeout = HandshakeTimeout
	}
	return c
}

// mayServe says that a member may be asked by a protocol: consensus and certificates are for nodes with role control alone.
func mayServe(alpn string, id pki.Identity) bool {
	return alpn != Raft && alpn != Renew || id.HasRole(string(state.RoleControl))
}

// mayUse says that a member may speak a protocol.
func mayUse(alpn string, id pki.Identity) bool {
	switch alpn {
	case Raft:
		return id.HasRole(string(state.RoleControl))
	case Data:
		return id.HasRole(string(state.RoleIngress), string(state.RoleControl))
	default:
		return true
	}
}
