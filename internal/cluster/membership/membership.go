// Package membership finds the nodes of a cluster and suspects silent ones (hashicorp/memberlist). It decides
// nothing: the state says which nodes are members, the leases say which ones serve.
package membership

import (
	"cmp"
	"context"
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// Defaults and bounds. A silent node is suspected after at most two probes. It is dead after the suspicion
// time: between SuspicionMult · log(N+1) · Probe, at least SuspicionMult · Probe = 0.9 s, and suspicionMax
// times that, by how many nodes confirm it.
const (
	Probe        = 300 * time.Millisecond // between probes
	ProbeTimeout = 150 * time.Millisecond // of a direct probe
	Rejoin       = 10 * time.Second       // between attempts to reach seeds that are not alive

	suspicionMult = 3
	suspicionMax  = 2

	gossipEvery    = 100 * time.Millisecond
	pushPull       = 15 * time.Second       // between exchanges of the whole view with one other node
	streamTimeout  = 2 * time.Second        // of a push and pull, or a probe over TCP
	leaveTimeout   = 500 * time.Millisecond // of each of the two messages of a leave
	aloneRejoin    = time.Second            // instead of Rejoin while no other node is alive
	seedsPerRound  = 3                      // while another node is alive
	resolveTimeout = 2 * time.Second
)

// KeySize is the length of a gossip key in bytes.
const KeySize = 32

// Timers are the times that --timers and tests may change. Zero values are the constants of this package.
type Timers struct {
	Probe, ProbeTimeout, Rejoin time.Duration
}

// Config names this node and says how it reaches others.
type Config struct {
	Node        string
	Incarnation uint64 // random per process, so that a node that restarts is a new member at any address
	Meta        Meta
	Bind        string // IP:PORT, for UDP and TCP; port 0 picks a free one
	Advertise   string // HOST or HOST:PORT that others use; "" or no port: as bound
	Key         []byte // KeySize bytes: DeriveKey
	// Seeds returns the gossip addresses (HOST:PORT) of nodes that should exist. It is called before each
	// attempt.
	Seeds func() []string
	// Revoked reports whether the node with this UID was removed. Nil: none was. It must not block.
	Revoked func(uid string) bool
	// Refused counts refused messages. Nil: not counted. It must not block.
	Refused func(reason Reason)
	Timers  Timers
	Network Network
	Log     *slog.Logger // nil is silent
}

// DeriveKey makes the gossip key from the cluster's secret.
func DeriveKey(secret []byte, cluster string) ([]byte, error) {
	key, err := hkdf.Key(sha256.New, secret, []byte(cluster), "dpserve gossip 1", KeySize)
	if err != nil {
		return nil, fmt.Errorf("derive the gossip key: %w", err)
	}
	return key, nil
}

func (c Config) withDefaults() Config {
	if c.Seeds == nil {
		c.Seeds = func() []string { return nil }
	}
	if c.Revoked == nil {
		c.Revoked = func(string) bool { return false }
	}
	if c.Refused == nil {
		c.Refused = func(Reason) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.Timers.Probe = cmp.Or(c.Timers.Probe, Probe)
	c.Timers.ProbeTimeout = cmp.Or(c.Timers.ProbeTimeout, ProbeTimeout)
	c.Timers.Rejoin = cmp.Or(c.Timers.Rejoin, Rejoin)
	c.Network = c.Network.withDefaults()
	return c
}

// check refuses a configuration that would fail later with a less clear error.
func (c Config) check() error {
	if len(c.Key) != KeySize {
		return problem.New(problem.InvalidArgument, "a gossip key has %d bytes, this one has %d", KeySize,
			len(c.Key))
	}
	if c.Node == "" || c.Meta.UID == "" || c.Meta.Cluster == "" {
		return problem.New(problem.InvalidArgument, "a member needs a node name, a UID and a cluster")
	}
	return nil
}

// name returns the node's name in memberlist.
func (c Config) name() string { return c.Node + "#" + strconv.FormatUint(c.Incarnation, 16) }

// splitName is the inverse of name.
func splitName(name string) (node string, incarnation uint64, err error) {
	i := strings.LastIndexByte(name, '#')
	if i <= 0 {
		return "", 0, fmt.Errorf("member %q has no incarnation", name)
	}
	incarnation, err = strconv.ParseUint(name[i+1:], 16, 64)
	if err != nil {
		return "", 0, fmt.Errorf("member %q has no incarnation: %w", name, err)
	}
	return name[:i], incarnation, nil
}

// advertised returns the IP and port that others use; port 0 is the bound one.
func (c Config) advertised(ctx context.Context) (net.IP, int, error) {
	host, port := c.Advertise, 0
	if h, p, err := net.SplitHostPort(c.Advertise); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return nil, 0, problem.New(problem.InvalidArgument,
				"advertised gossip address %q has no valid port", c.Advertise)
		}
		host, port = h, int(n)
	}
	if host == "" {
		return nil, port, nil
	}
	ip, err := resolve(ctx, host)
	if err != nil {
		return nil, 0, problem.New(problem.InvalidArgument, "advertised address %q: %w", c.Advertise, err).
			WithHint("use an IP address that the other nodes reach")
	}
	return ip, port, nil
}

// resolve returns an IP address of a host.
func resolve(ctx context.Context, host string) (net.IP, error) {
	if ip := net.ParseIP(host); ip != nil {
		return ip, nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	ips, err := net.DefaultResolver.LookupIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	return ips[0], nil
}
