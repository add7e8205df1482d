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

// errNoCredentials is the error of a node that has not joined yet.
var errNoCredentials = problem.New(problem.Unavailable, "this node has no certificate yet").
	WithHint("wait until it has joined")

// handshake is a connection whose peer is not verified yet.
type handshake struct {
	raw     net.Conn
	began   time.Time
	place   *list.Element // in Port.shaking
	evicted atomic.Bool   // it was ended to make room
	creds   *pki.Credentials
}

func (h *handshake) abort() { _ = h.raw.Close() }

// startHandshake makes a handshake in a goroutine, so that a slow peer delays no other connection.
func (p *Port) startHandshake(raw net.Conn) {
	p.makeRoom()
	h := &handshake{raw: raw, began: time.Now()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		h.abort()
		return
	}
	h.place = p.shaking.PushBack(h)
	p.wg.Go(func() { p.runHandshake(h) })
}

// makeRoom waits while too many handshakes are under way, until one ends or the oldest one has used its time;
// then the oldest one is ended. So a flood of half-open connections delays members, which need milliseconds,
// but does not keep them out. Other connections wait in the kernel.
func (p *Port) makeRoom() {
	for {
		left := p.timeUntilRoom()
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

// timeUntilRoom returns how long the oldest handshake may still take, 0 if there is room.
func (p *Port) timeUntilRoom() time.Duration {
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

func (p *Port) runHandshake(h *handshake) {
	_ = h.raw.SetDeadline(time.Now().Add(p.cfg.HandshakeTimeout))
	secure := tls.Server(h.raw, p.serverConfig(h))
	err := secure.HandshakeContext(context.Background()) // bounded by the deadline
	if err != nil {
		p.refuse(h, p.failureReason(h, err), err)
		return
	}
	c := &Conn{Conn: secure, ALPN: secure.ConnectionState().NegotiatedProtocol, port: p}
	reason, err := p.authorize(h, c)
	if reason == welcome {
		reason, err = p.accept(h, c)
	} else {
		_, _ = c.Write([]byte{greeting(reason)})
	}
	if reason != welcome {
		p.refuse(h, reason, err)
	}
}

// failureReason returns why a handshake failed.
func (p *Port) failureReason(h *handshake, err error) Reason {
	if h.evicted.Load() {
		return Overload
	}
	return reasonOf(err)
}

// authorize decides about a peer whose certificate was verified.
func (p *Port) authorize(h *handshake, c *Conn) (Reason, error) {
	l := p.listenerOf(c.ALPN)
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

// accept sends the greeting to the peer and gives the connection to its listener.
func (p *Port) accept(h *handshake, c *Conn) (Reason, error) {
	if _, err := c.Write([]byte{greeting(welcome)}); err != nil {
		return p.failureReason(h, err), err
	}
	_ = c.SetDeadline(time.Time{})
	l := p.listenerOf(c.ALPN)
	if l == nil || !p.track(c, c.abort) {
		return BadALPN, nil
	}
	p.endHandshake(h) // from here on an eviction would end a member's connection
	if !l.enqueue(c) {
		p.untrack(c)
		return Overload, nil
	}
	return welcome, nil
}

// refuse closes a connection, and counts and logs the refusal.
func (p *Port) refuse(h *handshake, reason Reason, err error) {
	h.abort()
	p.endHandshake(h)
	if p.isClosed() {
		return
	}
	p.cfg.Refused(reason)
	p.refusalLog.logRefusal(reason, h.raw.RemoteAddr(), err)
}

func (p *Port) endHandshake(h *handshake) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shaking.Remove(h.place) // no effect if it was removed before
	p.signalRoom()
}

// signalRoom wakes makeRoom.
func (p *Port) signalRoom() {
	select {
	case p.room <- struct{}{}:
	default:
	}
}

func (p *Port) listenerOf(alpn string) *listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.listeners[alpn]
}

// serverConfig demands what the offered protocol needs. Sessions are not resumed, so that every connection
// shows a certificate that is valid now.
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
		NextProtos:             []string{p.firstServed(offered)},
	}
	if cfg.NextProtos[0] == "" { // no client offers this name, so TLS refuses with its own alert
		cfg.NextProtos[0] = "dpserve"
	}
	switch cfg.NextProtos[0] {
	case Join:
	case Renew: // the handshake proves the key; authorize checks the certificate, which may have expired
		cfg.ClientAuth = tls.RequireAnyClientCert
	default:
		cfg.ClientAuth, cfg.ClientCAs = tls.RequireAndVerifyClientCert, creds.Pool
	}
	return cfg
}
