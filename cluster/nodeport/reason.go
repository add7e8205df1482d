package nodeport

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

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
		return byte(i) //nolint:gosec // the list is short
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
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
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
	attrs := []any{slog.String("reason", string(reason)), slog.String("from", from.String()),
		slog.Int("others", c.left[reason])}
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
	}
	c.log.Log(context.Background(), level, "node port refused a connection", attrs...)
}
