package nodeport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
)

// Reasons of Dial, wrapped in a problem.Error that names the address.
var (
	ErrExpired      = errors.New("certificate has expired or is not valid yet")
	ErrOtherCluster = errors.New("belongs to another cluster")
	ErrRemoved      = errors.New("was removed from the cluster")
	ErrRole         = errors.New("is not for nodes of this role")
	ErrNotServed    = errors.New("is not served there")
	ErrNotTLS       = errors.New("does not speak TLS 1.3")
	ErrCertificate  = errors.New("certificate was not accepted")
	ErrOverloaded   = errors.New("takes no more connections")
)

// WrongPeerError means that another node answered than the one that Dial was asked for.
type WrongPeerError struct {
	Addr string
	Want string // UID
	Got  pki.Identity
}

func (e *WrongPeerError) Error() string {
	return fmt.Sprintf("%s is node %s (uid %s), not the node with uid %s", e.Addr, e.Got.Node, e.Got.UID,
		e.Want)
}

func wrongPeerError(addr, want string, got pki.Identity) error {
	return problem.New(problem.Conflict, "%w", &WrongPeerError{Addr: addr, Want: want, Got: got}).
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
		return problem.New(problem.Unavailable, "%s: the protocol %w", addr, ErrNotServed).
			WithHint("has that node the role for it, and the same dpserve version?")
	case "protocol version not supported":
		return noTLSError(addr)
	case "bad certificate", "certificate required", "unknown certificate", "unsupported certificate":
		return badCertificateError(addr)
	}
	return problem.New(problem.Unavailable, "%s broke off the handshake: %s", addr, alert)
}
