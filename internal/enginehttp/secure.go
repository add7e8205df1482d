package enginehttp

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"syscall"
	"time"
)

// Dialer opens a connection.
type Dialer = func(ctx context.Context, network, addr string) (net.Conn, error)

// Secure is a Dialer that speaks TLS over the connections of dial. conf is that of every peer, which shows a
// certificate for the host of its address, unless conf has a ServerName. A handshake that fails, or takes
// longer than patience, is a failed dial: the peer has got nothing.
func Secure(dial Dialer, conf *tls.Config, patience time.Duration) Dialer {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		n, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		own := conf.Clone()
		if own.ServerName == "" {
			own.ServerName, _, _ = net.SplitHostPort(addr)
		}
		own.NextProtos = []string{"http/1.1"}
		// without sessions the peer sends no tickets, which would look like bytes that nobody asked for
		own.ClientSessionCache = nil
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		c := &secureConn{tls.Client(n, own)}
		if err := c.HandshakeContext(ctx); err != nil {
			_ = c.Close()
			return nil, &net.OpError{Op: "dial", Net: network, Err: err}
		}
		return c, nil
	}
}

// secureConn is a connection under TLS whose socket can be looked into.
type secureConn struct{ *tls.Conn }

// Close ends the connection without TLS's closing message, because sending it could block.
func (c *secureConn) Close() error { return c.NetConn().Close() }

// SyscallConn implements syscall.Conn.
func (c *secureConn) SyscallConn() (syscall.RawConn, error) {
	if s, ok := c.NetConn().(syscall.Conn); ok {
		return s.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// isQuiet reports that nothing of what was read off the socket is left: a read that may not wait finds
// nothing.
func (c *secureConn) isQuiet() bool {
	_ = c.SetReadDeadline(time.Unix(1, 0))
	defer func() { _ = c.SetReadDeadline(time.Time{}) }()
	_, err := c.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}
