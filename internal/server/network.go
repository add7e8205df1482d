package server

import (
	"context"
	"crypto/sha256"
	"net"
	"net/http"
	"strconv"

	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/internal/cluster/nodeport"
	"github.com/dpserve/dpserve/internal/engine"
)

// Network replaces TCP for a node, so that whole nodes run in one process. A dial to an address without a
// listener must fail as net's does (a *net.OpError of op "dial"). Safe for concurrent use.
type Network interface {
	Listen(addr string) (net.Listener, error)
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// dialer returns the ingress's dialer for engines; nil = TCP.
func (c *Config) dialer() ingress.Dialer {
	if c.Network == nil {
		return nil
	}
	return c.Network.DialContext
}

// probes returns the transport for health probes of engines.
func (c *Config) probes() *http.Transport {
	t := engine.NewTransport()
	if c.Network != nil {
		t.DialContext = c.Network.DialContext
	}
	return t
}

// bindTest reports whether an engine's port can be bound; nil = the node asks TCP.
func (c *Config) bindTest() func(port int) error {
	if c.Network == nil {
		return nil
	}
	return func(port int) error {
		l, err := c.Network.Listen(net.JoinHostPort(c.engineHost(), strconv.Itoa(port)))
		if err != nil {
			return err
		}
		return l.Close()
	}
}

// dialEvents returns the dialer for event sockets that engines bind; nil = TCP.
func (c *Config) dialEvents() func(ctx context.Context, addr string) (net.Conn, error) {
	if c.Network == nil {
		return nil
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return c.Network.DialContext(ctx, "tcp", addr)
	}
}

// listenEvents returns the listener of the node port and of event sockets that engines dial; nil = TCP.
func (c *Config) listenEvents() func(ctx context.Context, addr string) (net.Listener, error) {
	if c.Network == nil {
		return nil
	}
	return func(_ context.Context, addr string) (net.Listener, error) { return c.Network.Listen(addr) }
}

// connect returns the dialer of the node port; nil = TCP.
func (c *Config) connect() nodeport.DialFunc {
	if c.Network == nil {
		return nil
	}
	return c.Network.DialContext
}

// joinDialer returns the dialer of a node that joins; nil = TCP.
func (c *Config) joinDialer() func(ctx context.Context, address string,
	fingerprint [sha256.Size]byte) (*grpc.ClientConn, error) {
	if c.Network == nil {
		return nil
	}
	return func(ctx context.Context, address string, fingerprint [sha256.Size]byte) (*grpc.ClientConn,
		error,
	) {
		return nodeport.JoinGRPC(ctx, c.Network.DialContext, address, fingerprint)
	}
}

// engineHost is the address where engines listen: loopback, or the advertised address if that is a loopback
// address too, so that several nodes on one machine do not share ports.
func (c *Config) engineHost() string {
	if ip := net.ParseIP(c.Advertise); ip != nil && ip.IsLoopback() {
		return c.Advertise
	}
	return engine.Loopback
}
