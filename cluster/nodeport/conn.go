package nodeport

import (
	"context"
	"crypto/tls"
	"net"

	"google.golang.org/grpc/peer"

	"github.com/dpserve/dpserve/cluster/pki"
)

// Conn is a connection after handshake and greeting. Peer is empty on the serving side of Join.
type Conn struct {
	*tls.Conn
	Peer pki.Identity
	ALPN string

	port *Port // nil for the connection of a newcomer
}

// Close ends the connection.
func (c *Conn) Close() error {
	if c.port != nil {
		c.port.untrack(c)
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

// PeerFromContext returns the sender of a gRPC call or an HTTP/2 request; false for a newcomer that joins.
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
