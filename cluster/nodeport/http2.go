package nodeport

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// HTTP/2 of the data port and of the admin API. Clients keep Go's windows, 1 GiB per connection and 4 MiB per
// stream: with smaller ones a few slow readers would stop every stream to a node.
const (
	maxStreams    = 10_000 // per connection; admission limits requests before this does
	uploadStream  = 1 << 20
	uploadConn    = 64 << 20
	http2Ping     = 5 * time.Second
	http2PingWait = 3 * time.Second
	headerTimeout = 5 * time.Second
)

// HTTP2Server serves HTTP/2 on one protocol of the port. PeerFromContext returns the peer of a request.
type HTTP2Server struct {
	server   *http.Server
	listener net.Listener
}

// ServeHTTP2 makes a server of a protocol. From now on the port accepts its connections; they wait for Serve.
func (p *Port) ServeHTTP2(alpn string, handler http.Handler) *HTTP2Server {
	return &HTTP2Server{
		listener: plainListener{p.Listener(alpn)},
		server: &http.Server{
			Handler:           handler,
			Protocols:         onlyHTTP2(),
			HTTP2:             serverHTTP2(),
			ConnContext:       withPeer,
			ReadHeaderTimeout: headerTimeout,
			ErrorLog:          slog.NewLogLogger(p.cfg.Log.Handler(), slog.LevelDebug),
		},
	}
}

func serverHTTP2() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:      maxStreams,
		MaxReceiveBufferPerStream: uploadStream,
		// more than net/http documents; TestUploadWindows checks it
		MaxReceiveBufferPerConnection: uploadConn,
		SendPingTimeout:               http2Ping,
		PingTimeout:                   http2PingWait,
	}
}

// onlyHTTP2 allows HTTP/2 without TLS: the connections are encrypted already, which net/http does not see.
func onlyHTTP2() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}

// plainListener hides from net/http that its connections are TLS: net/http would look for its own ALPN and
// give up.
type plainListener struct{ net.Listener }

func (l plainListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return plainConn{c}, nil
}

// plainConn has only the methods of net.Conn.
type plainConn struct{ net.Conn }

// withPeer puts the peer of a connection into the context of its requests.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	if plain, ok := c.(plainConn); ok {
		c = plain.Conn
	}
	id, _ := PeerOf(c)
	return context.WithValue(ctx, peerKey{}, id)
}

// Serve serves until Close or Shutdown and then returns nil.
func (s *HTTP2Server) Serve() error {
	err := s.server.Serve(s.listener)
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Shutdown accepts no more requests and waits for running ones.
func (s *HTTP2Server) Shutdown(ctx context.Context) error {
	_ = s.listener.Close()
	return s.server.Shutdown(ctx)
}

// Close ends everything at once.
func (s *HTTP2Server) Close() error {
	_ = s.listener.Close()
	return s.server.Close()
}
