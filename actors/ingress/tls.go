package ingress

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync/atomic"
)

// withTLS returns a connection of a client under TLS; without a config it returns c. The first Read makes the
// handshake, in the goroutine of the connection, so that a slow client stops no other. net/http does not see
// the TLS: it serves HTTP/1.1, which is the only protocol that config offers.
func withTLS(c net.Conn, config *tls.Config) net.Conn {
	if config == nil {
		return c
	}
	return &tlsConn{Conn: tls.Server(c, config), below: c}
}

// tlsConn is the TLS of a clientConn.
type tlsConn struct {
	*tls.Conn

	below net.Conn
	reset atomic.Bool // Close sends no close_notify
}

// plainRequest is the answer to a client that speaks HTTP without TLS.
const plainRequest = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n" +
	"this port wants TLS: use https://\n"

// Read implements net.Conn.
func (c *tlsConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if wrong, ok := errors.AsType[tls.RecordHeaderError](err); ok && wrong.Conn != nil {
		_, _ = io.WriteString(c.below, plainRequest) // fails if the client has left
		return 0, err
	}
	return n, err
}

// SetLinger asks for a TCP reset at Close. After a close_notify the client would take a cut answer for whole.
func (c *tlsConn) SetLinger(sec int) error {
	c.reset.Store(true)
	if l, ok := c.below.(interface{ SetLinger(sec int) error }); ok {
		return l.SetLinger(sec)
	}
	return nil
}

// Close implements net.Conn.
func (c *tlsConn) Close() error {
	if c.reset.Load() {
		return c.below.Close()
	}
	return c.Conn.Close()
}
