// Package nodeport is the one TLS port of a node. It makes the handshake, verifies the peer, and gives each
// connection to the listener of its ALPN. It refuses a peer that is not a member of the cluster before any
// byte of a protocol is read.
package nodeport

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/state"
)

// The protocols of the port, by their ALPN names.
const (
	Raft  = "dpserve-raft/1"  // consensus; peers have role control
	GRPC  = "dpserve-grpc/1"  // the services between members
	Data  = "dpserve-data/1"  // HTTP/2 requests for engines; peers have role ingress or control
	Admin = "dpserve-admin/1" // HTTP/2, the admin API of the leader for other nodes
	Join  = "dpserve-join/1"  // gRPC for newcomers, which have no certificate
	Renew = "dpserve-renew/1" // gRPC for members whose certificate has expired; the server has role control
)

// Limits and times of the port.
const (
	HandshakeTimeout = 5 * time.Second // from accept to the end of the greeting
	// connect, handshake and greeting, unless the caller's context ends earlier
	DialTimeout   = 3 * time.Second
	maxHandshakes = 256             // at once
	patience      = time.Second / 4 // of the oldest handshake while others wait for room
	backlog       = 128             // connections per protocol that wait for Accept
	logEvery      = time.Second     // per reason of refusal
)

// DialFunc connects; its shape is that of net.Dialer.DialContext.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Config configures a port. The fields say what their zero values mean.
type Config struct {
	// Credentials is called at each handshake, so a renewed certificate breaks no connection. It returns nil
	// before a join.
	Credentials func() *pki.Credentials
	// Revoked reports whether the node with this UID was removed from the cluster. Nil: none was.
	Revoked func(uid string) bool
	// Refused counts a refused connection. Nil: not counted.
	Refused func(reason Reason)
	// Bind and Connect are the network; nil is TCP.
	Bind    func(ctx context.Context, addr string) (net.Listener, error)
	Connect DialFunc
	// Log is where refusals are logged; nil is silent.
	Log *slog.Logger
	// HandshakeTimeout bounds a handshake; 0 is the constant of that name.
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

// mayServe reports whether a member may serve a protocol: only nodes with role control serve consensus and
// renewals.
func mayServe(alpn string, id pki.Identity) bool {
	return alpn != Raft && alpn != Renew || id.HasRole(string(state.RoleControl))
}

// mayUse reports whether a member may use a protocol.
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
