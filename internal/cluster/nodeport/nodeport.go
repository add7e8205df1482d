// Package nodeport is the one TLS port of a node. It makes the handshake, verifies the peer, and gives each
// connection to the listener of its ALPN. It refuses a peer that is not a member of the cluster before any
// byte of a protocol is read.
//
// After the TLS 1.3 handshake the server sends a greeting of one byte, because in TLS 1.3 a client has
// finished before the server has looked at its certificate: without it a refusal would come in the middle of
// something. ALPN says what is asked for and so which role is needed: join needs no certificate, renew one of
// a member whose time may be over, raft role control, data role ingress or control, ranks role ingress. Nodes
// are known by the UID in their certificate, never by host name. Sessions are not resumed, so every new
// connection shows a certificate that is valid now. At most 256 handshakes run at once; half-open ones delay
// a member and cannot keep it out.
package nodeport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// The protocols of the port, by their ALPN names.
const (
	Raft = "dpserve-raft/1" // consensus; peers have role control
	GRPC = "dpserve-grpc/1" // the services between members
	Data = "dpserve-data/1" // HTTP/1.1 requests for engines; peers have role ingress or control
	// the records of the node's ranks, and what is posted to them; peers have role ingress
	Ranks = "dpserve-ranks/1"

	Admin = "dpserve-admin/1" // HTTP/1.1, the admin API of the leader for other nodes
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
	// RemovedHere is told that a control node of this cluster, whose certificate was verified and which is
	// not removed itself, has refused this node as removed. It must not block. Nil: nobody is told.
	RemovedHere func(err error)
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
	if c.RemovedHere == nil {
		c.RemovedHere = func(error) {}
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
	case Ranks:
		return id.HasRole(string(state.RoleIngress))
	default:
		return true
	}
}

// Reason says why a connection was refused: a closed list.
type Reason string

// The reasons.
const (
	BadTLS         Reason = "tls"         // no TLS, another protocol, or an older version of TLS
	BadALPN        Reason = "alpn"        // a protocol that is not served here
	BadCertificate Reason = "certificate" // none, or one that names no node
	BadCluster     Reason = "cluster"     // signed by another authority
	Expired        Reason = "expired"     // or not valid yet
	Revoked        Reason = "revoked"     // removed from the cluster
	BadRole        Reason = "role"        // the protocol is not for nodes of this role
	TooSlow        Reason = "timeout"     // the handshake took too long
	CallerLeft     Reason = "left"        // the caller closed the connection before the greeting
	Overload       Reason = "overload"    // too many handshakes, or too many connections wait for Accept
)

// greetings are the first byte on every connection after the handshake: the index of the answer. In TLS 1.3 a
// client learns of a refusal only when it reads, so this byte comes before any protocol. It also says what no
// TLS alert can.
var greetings = []Reason{welcome, BadALPN, BadCertificate, BadCluster, Revoked, BadRole, Overload}

// welcome is the greeting of an accepted connection.
const welcome Reason = ""

// greeting returns the byte of an answer. Reasons that end the handshake itself, such as Expired, have none.
func greeting(r Reason) byte {
	if i := slices.Index(greetings, r); i >= 0 {
		return byte(i)
	}
	return greeting(BadCertificate)
}

// reasonOf returns the reason behind an error of a server's handshake.
func reasonOf(err error) Reason {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var remote *net.OpError
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return TooSlow
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE):
		return CallerLeft
	case errors.As(err, &unknown):
		return BadCluster
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return Expired
	case errors.As(err, &invalid), errors.Is(err, errNoCredentials),
		strings.Contains(err.Error(), "didn't provide a certificate"):
		return BadCertificate
	case errors.As(err, &remote) && remote.Op == "remote error":
		return BadCertificate // the client refused our certificate
	case strings.Contains(err.Error(), "unsupported application protocols"):
		return BadALPN
	}
	return BadTLS
}

// reasonOfCertificate returns why a certificate was refused after the handshake.
func reasonOfCertificate(err error) Reason {
	if _, isUnknown := errors.AsType[x509.UnknownAuthorityError](err); isUnknown {
		return BadCluster
	}
	return BadCertificate
}

// refusalLog logs refusals, at most one per reason and logEvery.
type refusalLog struct {
	log  *slog.Logger
	mu   sync.Mutex
	last map[Reason]time.Time
	left map[Reason]int // refusals since the last line
}

func (c *refusalLog) logRefusal(reason Reason, from net.Addr, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if last, ok := c.last[reason]; ok && now.Sub(last) < logEvery {
		c.left[reason]++
		return
	}
	attrs := []any{
		slog.String("reason", string(reason)), slog.String("from", from.String()),
		slog.Int("others", c.left[reason]),
	}
	if err != nil {
		attrs = append(attrs, slog.String("err", err.Error()))
	}
	c.last[reason], c.left[reason] = now, 0
	level := slog.LevelWarn
	switch {
	case errors.Is(err, errNoCredentials):
		// this node is joining and has no certificate yet; a slow join fails with its own error
		level = slog.LevelDebug
	case reason == BadALPN:
		// a member asks for a protocol that this node does not serve yet: it is starting
		level = slog.LevelInfo
	case reason == CallerLeft:
		// a node that is stopping or has waited long enough, or a health check of TCP
		level = slog.LevelInfo
	}
	c.log.Log(context.Background(), level, "node port refused a connection", attrs...)
}

// Reasons of Dial, wrapped in a problem.Error that names the address.
var (
	ErrExpired      = errors.New("certificate has expired or is not valid yet")
	ErrOtherCluster = errors.New("belongs to another cluster")
	ErrWrongPeer    = errors.New("not the node")
	ErrRemoved      = errors.New("was removed from the cluster")
	ErrRole         = errors.New("is not for nodes of this role")
	ErrNotServed    = errors.New("is not served there")
	ErrNotTLS       = errors.New("does not speak TLS 1.3")
	ErrCertificate  = errors.New("certificate was not accepted")
	ErrOverloaded   = errors.New("takes no more connections")
)

func wrongPeerError(addr, want string, got pki.Identity) error {
	return problem.New(problem.Conflict, "%s is node %s (uid %s), %w with uid %s", addr, got.Node, got.UID,
		ErrWrongPeer, want).
		WithHint("two nodes use one address, or a node was set up anew: look at `dpserve nodes`")
}

func otherClusterError(addr string) error {
	return problem.New(problem.PermissionDenied, "%s %w", addr, ErrOtherCluster).
		WithHint("check the address, and whose token or data dir this is")
}

func peerRemovedError(addr string, peer pki.Identity) error {
	return problem.New(problem.PermissionDenied, "node %s at %s %w", peer.Node, addr, ErrRemoved).
		WithHint("stop dpserve on that machine")
}

func notControlError(addr string, peer pki.Identity, alpn string) error {
	return problem.New(problem.PermissionDenied,
		"node %s at %s has not role control in its certificate: %s %w", peer.Node, addr, alpn, ErrRole).
		WithHint("remove that node and let it join again with an empty --data-dir")
}

func expiredError(whose string) error {
	return problem.New(problem.Unauthenticated, "%s %w", whose, ErrExpired).
		WithHint("check the clocks of both machines")
}

// unreachableError is the error of a connection that failed. errors.Is finds the cause (refused, context).
func unreachableError(addr string, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return problem.New(problem.Timeout, "%s does not answer: %w", addr, err).
			WithHint("is the machine up, and its node port open?")
	}
	return problem.New(problem.Unavailable, "%s cannot be reached: %w", addr, err)
}

// greetingError turns the greeting into an error; nil if the server accepts the connection.
func greetingError(addr, alpn string, hello byte) error {
	if int(hello) >= len(greetings) {
		return problem.New(problem.Unavailable,
			"%s refused this node for a reason that this version does not know", addr)
	}
	switch greetings[hello] {
	case welcome:
		return nil
	case Revoked:
		return problem.New(problem.PermissionDenied, "%s says that this node %w", addr, ErrRemoved).
			WithHint("to come back it joins anew: an empty --data-dir and a new token")
	case BadRole:
		return problem.New(problem.PermissionDenied, "%s says that %s %w", addr, alpn, ErrRole)
	case BadALPN:
		return notServedError(addr, alpn)
	case BadCluster:
		return otherClusterError(addr)
	case Overload:
		return problem.New(problem.Overloaded, "%s %w", addr, ErrOverloaded)
	default:
		return badCertificateError(addr)
	}
}

func notServedError(addr, alpn string) error {
	return problem.New(problem.Unavailable, "%s: %s %w", addr, alpn, ErrNotServed).
		WithHint("has that node the role for it, and the same dpserve version?")
}

func badCertificateError(addr string) error {
	return problem.New(problem.Unauthenticated, "%s says that this node's %w", addr, ErrCertificate)
}

// explain turns the error of a handshake into one for people. TLS alerts have no exported type, only their
// text.
func explain(addr string, err error) error {
	var unknown x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var header tls.RecordHeaderError
	var op *net.OpError
	switch {
	case errors.As(err, &unknown):
		return otherClusterError(addr)
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return expiredError(addr + ": its")
	case errors.Is(err, ErrRole):
		return problem.New(problem.PermissionDenied, "joining at %s %w: it has not role control", addr, err).
			WithHint("join at a control node")
	case errors.As(err, &header), strings.Contains(err.Error(), "unsupported protocol version"):
		return noTLSError(addr)
	case errors.As(err, &op) && op.Op == "remote error":
		return explainAlert(addr, op.Err.Error())
	}
	return problem.New(problem.Unavailable, "%s broke off the handshake: %w", addr, err)
}

func noTLSError(addr string) error {
	return problem.New(problem.Unavailable, "%s %w", addr, ErrNotTLS).
		WithHint("is that the node port (7947) of a dpserve of this version?")
}

func explainAlert(addr, alert string) error {
	switch strings.TrimPrefix(alert, "tls: ") {
	case "expired certificate":
		return expiredError(addr + " says that this node's")
	case "unknown certificate authority":
		return otherClusterError(addr)
	case "no application protocol":
		return notServedError(addr, "the protocol")
	case "protocol version not supported":
		return noTLSError(addr)
	case "bad certificate", "certificate required", "unknown certificate", "unsupported certificate":
		return badCertificateError(addr)
	}
	return problem.New(problem.Unavailable, "%s broke off the handshake: %s", addr, alert)
}
