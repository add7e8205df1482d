package nodeport

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
)

// errNoCredentials is the answer of a node that has not joined yet.
var errNoCredentials = problem.New(problem.Unavailable, "this node has no certificate yet").WithHint("wait until it has joined")

// handshake is a connection that is nobody's yet.
type handshake struct {
	raw     net.Conn
	began   time.Time
	place   *list.Element // in Port.shaking
	evicted atomic.Bool   // to make room
	creds   *pki.Credentials
}

func (h *handshake) abort() { _ = h.raw.Close() }

// begin starts a handshake in a goroutine of its own, so that a slow one holds up nobody (TRAPS 12).
func (p *Port) begin(raw net.Conn) {
	p.makeRoom()
	h := &handshake{raw: raw, began: time.Now()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		h.abort()
		return
	}
	h.place = p.shaking.PushBack(h)
	p.wg.Go(func() { p.shake(h) })
}

// makeRoom waits where too many handshakes are under way, until one ends or the oldest has had its time: that one goes. So a flood
// of half-open connections delays members, who need milliseconds, and does not keep them out; the rest waits in the kernel.
func (p *Port) makeRoom() {
	for {
		left := p.roomIn()
		if left <= 0 {
			return
		}
		timer := time.NewTimer(left)
		select {
		case <-p.room:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// roomIn is how long the oldest handshake still has, 0 if there is room.
func (p *Port) roomIn() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.shaking.Len() < maxHandshakes {
		return 0
	}
	oldest := p.shaking.Front().Value.(*handshake) //nolint:errcheck // nothing else is in the list
	if left := patience - time.Since(oldest.began); left > 0 {
		return left
	}
	p.shaking.Remove(oldest.place)
	oldest.evicted.Store(true)
	oldest.abort()
	return 0
}

func (p *Port) shake(h *handshake) {
	_ = h.raw.SetDeadline(time.Now().Add(p.cfg.HandshakeTimeout))
	secure := tls.Server(h.raw, p.serverConfig(h))
	err := secure.HandshakeContext(context.Background()) // bounded by the deadline
	if err != nil {
		p.refuse(h, p.because(h, err), err)
		return
	}
	c := &Conn{Conn: secure, ALPN: secure.ConnectionState().NegotiatedProtocol, port: p}
	reason, err := p.judge(h, c)
	if reason == welcome {
		reason, err = p.welcome(h, c)
	} else {
		_, _ = c.Write([]byte{greeting(reason)})
	}
	if reason != welcome {
		p.refuse(h, reason, err)
	}
}

// because is why a handshake failed.
func (p *Port) because(h *handshake, err error) Reason {
	if h.evicted.Load() {
		return Overload
	}
	return reasonOf(err)
}

// judge decides about a peer whose certificate was verified.
func (p *Port) judge(h *handshake, c *Conn) (Reason, error) {
	l := p.listening(c.ALPN)
	if l == nil {
		return BadALPN, nil
	}
	if c.ALPN != Join {
		var err error
		chain := c.ConnectionState().PeerCertificates
		if c.ALPN == Renew {
			c.Peer, err = verifyExpired(h.creds.Pool, chain)
		} else {
			c.Peer, err = pki.IdentityOf(chain[0])
		}
		if err != nil {
			return reasonOfCertificate(err), err
		}
		switch {
		case c.Peer.Cluster != h.creds.Identity.Cluster:
			return BadCluster, nil
		case p.cfg.Revoked(c.Peer.UID):
			return Revoked, nil
		case !mayUse(c.ALPN, c.Peer):
			return BadRole, nil
		}
	}
	if !l.hasRoom() {
		return Overload, nil
	}
	return welcome, nil
}

// welcome greets the peer and hands the connection over.
func (p *Port) welcome(h *handshake, c *Conn) (Reason, error) {
	if _, err := c.Write([]byte{greeting(welcome)}); err != nil {
		return p.because(h, err), err
	}
	_ = c.SetDeadline(time.Time{})
	l := p.listening(c.ALPN)
	if l == nil || !p.hold(c, c.abort) {
		return BadALPN, nil
	}
	p.leave(h) // an eviction from here on would hit a member
	if !l.give(c) {
		p.drop(c)
		return Overload, nil
	}
	return welcome, nil
}

// refuse ends a connection, counted and told.
func (p *Port) refuse(h *handshake, reason Reason, err error) {
	h.abort()
	p.leave(h)
	if p.isClosed() {
		return
	}
	p.cfg.Refused(reason)
	p.complaints.about(reason, h.raw.RemoteAddr(), err)
}

func (p *Port) leave(h *handshake) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shaking.Remove(h.place) // no-op if it was evicted or has left
	p.roomMade()
}

// roomMade wakes makeRoom.
func (p *Port) roomMade() {
	select {
	case p.room <- struct{}{}:
	default:
	}
}

func (p *Port) listening(alpn string) *listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.listeners[alpn]
}

// serverConfig asks for what the offered protocol needs. Sessions are not resumed: each connection shows a certificate that is
// valid now.
func (p *Port) serverConfig(h *handshake) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			h.creds = p.cfg.Credentials()
			if h.creds == nil {
				return nil, errNoCredentials
			}
			return p.configFor(hello.SupportedProtos, h.creds), nil
		},
	}
}

func (p *Port) configFor(offered []string, creds *pki.Credentials) *tls.Config {
	cfg := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true,
		Certificates:           []tls.Certificate{creds.Certificate},
		NextProtos:             []string{p.served(offered)},
	}
	if cfg.NextProtos[0] == "" { // a name that nobody has, so that the refusal is the alert that TLS has for it
		cfg.NextProtos[0] = "dpserve"
	}
	switch cfg.NextProtos[0] {
	case Join:
	case Renew: // the handshake proves the key; judge looks at the certificate, whose time may be over
		cfg.ClientAuth = tls.RequireAnyClientCert
	default:
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, creds.Pool
	}
	return cfg
}
