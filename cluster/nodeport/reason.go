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

// Reason is why a connection was refused: a closed list.
type Reason string

// The reasons.
const (
	BadTLS         Reason = "tls"         // junk, another protocol, an older version of TLS
	BadALPN        Reason = "alpn"        // a protocol that is not served here
	BadCertificate Reason = "certificate" // none, or one that stands for no node
	BadCluster     Reason = "cluster"     // signed by another authority
	Expired        Reason = "expired"     // or not valid yet
	Revoked        Reason = "revoked"     // removed from the cluster
	BadRole        Reason = "role"        // the protocol is not for nodes of this role
	TooSlow        Reason = "timeout"     // handshake
	Overload       Reason = "overload"    // too many handshakes, or nobody accepts
)

// greetings are the first byte on every connection, after the handshake: the index of the answer. It spares the client of TLS 1.3
// from learning of its refusal in the middle of something, and tells what no alert of TLS can.
var greetings = []Reason{welcome, BadALPN, BadCertificate, BadCluster, Revoked, BadRole, Overload}

// welcome is no reason to refuse.
const welcome Reason = ""

// greeting is the byte for an answer. Expired and the others that end the handshake itself have none.
func greeting(r Reason) byte {
	if i := slices.Index(greetings, r); i >= 0 {
		return byte(i) //nolint:gosec // the list is short
	}
	return greeting(BadCertificate)
}

// reasonOf sorts the error of a server's handshake.
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
	case errors.As(err, &invalid), errors.Is(err, errNoCredentials), strings.Contains(err.Error(), "didn't provide a certificate"):
		return BadCertificate
	case errors.As(err, &remote) && remote.Op == "remote error":
		return BadCertificate // the client did not like ours
	case strings.Contains(err.Error(), "unsupported application protocols"):
		return BadALPN
	}
	return BadTLS
}

// reasonOfCertificate is why a certificate was refused after the handshake.
func reasonOfCertificate(err error) Reason {
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		return BadCluster
	}
	return BadCertificate
}

// complaints logs refusals, at most one per reason and logEvery.
type complaints struct {
	log  *slog.Logger
	mu   sync.Mutex
	last map[Reason]time.Time
	left map[Reason]int // not logged since
}

func (c *complaints) about(reason Reason, from net.Addr, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if last, ok := c.last[reason]; ok && now.Sub(last) < logEvery {
		c.left[reason]++
		return
	}
	attrs := []any{slog.String("reason", string(reason)), slog.String("from", from.String()), slog.Int("others", c.left[reason])}
	if err != nil {
		attrs = append(attrs, slog.String("err", err.Error()))
	}
	c.last[reason], c.left[reason] = now, 0
	level := slog.LevelWarn
	switch {
	case errors.Is(err, errNoCredentials):
		level = slog.LevelDebug // this node is joining and has no certificate yet; a join that takes long fails
	case reason == BadALPN:
		level = slog.LevelInfo // a member asks for what this node does not serve yet: it is starting
	}
	c.log.Log(context.Background(), level, "node port refused a connection", attrs...)
}
