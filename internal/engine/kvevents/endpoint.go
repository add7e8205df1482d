package kvevents

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/problem"
)

// Endpoints are the sockets of one rank: exactly one of Connect and Bind, and where replays are asked. All
// are tcp://HOST:PORT.
type Endpoints struct {
	Connect string // the engine binds its publisher here
	Bind    string // the engine dials its publisher to here; host * = the node address, loopback without one
	Replay  string // the engine's ROUTER; "" = none
}

// Hosts lists the hosts that event sockets may use beside loopback. Events steer routing, so they are
// accepted from declared engines only (test/acceptance.md, SP12).
type Hosts struct {
	Node  string   // this node's advertised address: where Bind may listen; "" = loopback only
	Peers []string // hosts or addresses of declared engines
}

const schemeTCP = "tcp://"

// hostPort splits tcp://HOST:PORT.
func hostPort(endpoint string) (host, port string, err error) {
	rest, ok := strings.CutPrefix(endpoint, schemeTCP)
	if ok {
		host, port, err = net.SplitHostPort(rest)
	}
	if n, bad := strconv.ParseUint(port, 10, 16); !ok || err != nil || bad != nil || n > 65535 {
		return "", "", problem.New(problem.InvalidArgument, "event endpoint %q is not tcp://HOST:PORT",
			endpoint).
			WithHint("other transports of engines are not supported; write the TCP form")
	}
	return host, port, nil
}

// isLoopback reports that host is this machine's loopback.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

func isWildcard(host string) bool {
	if host == "*" || host == "" {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsUnspecified()
}

// peer reports whether sockets may connect to host.
func (h Hosts) peer(host string) bool {
	if isLoopback(host) || h.Node != "" && sameHost(host, h.Node) {
		return true
	}
	for _, p := range h.Peers {
		if sameHost(host, p) {
			return true
		}
	}
	return false
}

func sameHost(a, b string) bool {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX == nil && errY == nil {
		return x.Unmap() == y.Unmap()
	}
	return strings.EqualFold(a, b)
}

// dialAddr is HOST:PORT of an endpoint that is to be dialled.
func (h Hosts) dialAddr(endpoint string) (string, error) {
	host, port, err := hostPort(endpoint)
	if err != nil {
		return "", err
	}
	if isWildcard(host) || !h.peer(host) || port == "0" {
		return "", problem.New(problem.InvalidArgument,
			"event endpoint %s is neither loopback nor a declared engine's address", endpoint).
			WithHint("name the host that the rank's url names")
	}
	return net.JoinHostPort(host, port), nil
}

// listenAddr is HOST:PORT of an endpoint that is to be bound.
func (h Hosts) listenAddr(endpoint string) (string, error) {
	host, port, err := hostPort(endpoint)
	if err != nil {
		return "", err
	}
	if host == "*" {
		if host = h.Node; host == "" {
			host = "127.0.0.1"
		}
	}
	if isWildcard(host) || !isLoopback(host) && !sameHost(host, h.Node) {
		return "", problem.New(problem.InvalidArgument,
			"event endpoint %s would listen beyond loopback and the node's address", endpoint).
			WithHint("bind tcp://127.0.0.1:PORT, or the node's advertised address for engines on other " +
				"machines")
	}
	return net.JoinHostPort(host, port), nil
}

// accepts reports whether a peer that dialled may publish here. Names are not resolved: an engine that dials
// from another host must be declared by address.
func (h Hosts) accepts(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return true // a transport inside this process
	}
	return h.peer(tcp.IP.String())
}

// Check reports the first fault of e.
func (e Endpoints) Check(h Hosts) error {
	_, err := e.resolve(h)
	return err
}

// addresses are Endpoints as host:port.
type addresses struct{ connect, bind, replay string }

func (e Endpoints) resolve(h Hosts) (a addresses, err error) {
	if (e.Connect == "") == (e.Bind == "") {
		return a, problem.New(problem.InvalidArgument,
			"event endpoints of a rank: want exactly one of connect and bind")
	}
	if e.Connect != "" {
		a.connect, err = h.dialAddr(e.Connect)
	} else {
		a.bind, err = h.listenAddr(e.Bind)
	}
	if err == nil && e.Replay != "" {
		a.replay, err = h.dialAddr(e.Replay)
	}
	if err != nil {
		return addresses{}, fmt.Errorf("event endpoints: %w", err)
	}
	return a, nil
}
