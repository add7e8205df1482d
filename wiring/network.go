package wiring

import (
	"context"
	"net"
	"net/http"
	"strconv"

	"github.com/dpserve/dpserve/actors/ingress"
	"github.com/dpserve/dpserve/engine"
)

// Network is where a node listens and dials, in place of TCP: whole nodes run in one process on one of these. A dial to an
// address nobody listens at must fail as net's does (a *net.OpError of op "dial"). Safe for concurrent use.
type Network interface {
	Listen(addr string) (net.Listener, error)
	DialContext(ctx context.Context, network, addr string) (net.Conn, error)
}

// dialer is how the ingress reaches engines; nil = TCP.
func (c *Config) dialer() ingress.Dialer {
	if c.Network == nil {
		return nil
	}
	return c.Network.DialContext
}

// probes is the transport of questions to engines.
func (c *Config) probes() *http.Transport {
	t := engine.NewTransport()
	if c.Network != nil {
		t.DialContext = c.Network.DialContext
	}
	return t
}

// bindTest says whether an engine's port can be bound; nil = the node asks TCP.
func (c *Config) bindTest() func(port int) error {
	if c.Network == nil {
		return nil
	}
	return func(port int) error {
		l, err := c.Network.Listen(net.JoinHostPort(engine.Loopback, strconv.Itoa(port)))
		if err != nil {
			return err
		}
		return l.Close()
	}
}

// dialEvents is how DPServers reach event sockets that engines bind; nil = TCP.
func (c *Config) dialEvents() func(ctx context.Context, addr string) (net.Conn, error) {
	if c.Network == nil {
		return nil
	}
	return func(ctx context.Context, addr string) (net.Conn, error) {
		return c.Network.DialContext(ctx, "tcp", addr)
	}
}

// listenEvents is where DPServers bind event sockets that engines dial; nil = TCP.
func (c *Config) listenEvents() func(ctx context.Context, addr string) (net.Listener, error) {
	if c.Network == nil {
		return nil
	}
	return func(_ context.Context, addr string) (net.Listener, error) { return c.Network.Listen(addr) }
}

// listenHTTP binds the inference endpoint.
func (n *Node) listenHTTP(ctx context.Context, addr string) (net.Addr, error) {
	if n.cfg.Network == nil {
		return n.ingress.Listen(ctx, addr)
	}
	l, err := n.cfg.Network.Listen(addr)
	if err != nil {
		return nil, err
	}
	return l.Addr(), n.ingress.Attach(l)
}

// listenAdmin binds the admin API.
func (n *Node) listenAdmin(ctx context.Context, addr string) error {
	if n.cfg.Network == nil {
		return n.admin.Listen(ctx, addr)
	}
	l, err := n.cfg.Network.Listen(addr)
	if err != nil {
		return err
	}
	return n.admin.Attach(l)
}
