package ingress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// newServer sets every bound. No WriteTimeout: it would cut long streams.
func (in *Ingress) newServer() *http.Server {
	return &http.Server{
		Handler:           in.handler,
		ReadHeaderTimeout: in.timers.ReadHeader,
		IdleTimeout:       in.timers.Idle,
		MaxHeaderBytes:    in.limits.MaxHeaderBytes,
		BaseContext:       in.baseContext,
		ConnContext:       withConn,
		ErrorLog:          slog.NewLogLogger(in.log.Handler(), slog.LevelDebug),
		Protocols:         protocols(),
		ConnState:         trackConn,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerStream: streamWindow,
			MaxReceiveBufferPerConnection: connWindow,
			// A stream's write deadline cannot end a blocked write of its connection. These limits find a
			// client that does not read, or whose machine is gone.
			WriteByteTimeout: in.timers.SlowReader, SendPingTimeout: pingAfter, PingTimeout: pingAfter,
		},
	}
}

// Bounds of HTTP/2.
const (
	maxStreams = 250 // per connection
	// bytes of upload: with 64 KiB and 50 ms of round trip an upload would run at 1.3 MB/s
	streamWindow = 1 << 20
	connWindow   = 4 << 20 // bytes

	pingAfter = 15 * time.Second // of silence on a connection; the answer has the same time
)

// protocols are HTTP/1.1, and HTTP/2 without TLS for clients that know (h2c with prior knowledge).
func protocols() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}

// Listen binds addr (HOST:PORT; port 0 takes a free one) and gives the address bound.
func (in *Ingress) Listen(ctx context.Context, addr string) (net.Addr, error) {
	inner, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for inference requests on %s: %w", addr, err)
	}
	return inner.Addr(), in.Attach(inner)
}

// Attach takes a listener that is already bound. The ingress closes it.
func (in *Ingress) Attach(inner net.Listener) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.listener != nil {
		return errors.Join(errors.New("the ingress listens already"), inner.Close())
	}
	in.listener = in.newClientConns(inner)
	return nil
}

// Serve answers requests until Close; call Listen before. It returns nil after Close.
func (in *Ingress) Serve() error {
	in.mu.Lock()
	l := in.listener
	in.mu.Unlock()
	if l == nil {
		return errors.New("the ingress does not listen: call Listen first")
	}
	err := in.server.Serve(l)
	if closed := errors.Is(err, net.ErrClosed) && in.draining.Load(); !closed &&
		!errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve inference requests: %w", err)
	}
	return nil
}

// Drain turns readiness off at once: /health answers 503, and connections close after their request. Requests
// are still served, so that a load balancer has time to notice.
func (in *Ingress) Drain() {
	in.draining.Store(true)
	in.server.SetKeepAlivesEnabled(false)
}

// Close drains: it accepts no new connection, lets running requests go on until ctx is over, and then cuts
// them with an error event (ErrDrained). It waits for all of them, is idempotent, and returns the first
// error.
func (in *Ingress) Close(ctx context.Context) error {
	in.closeOnce.Do(func() { in.closeErr = in.close(ctx) })
	return in.closeErr
}

func (in *Ingress) close(ctx context.Context) error {
	in.Drain()
	err := in.server.Shutdown(ctx)
	in.cutRequests(ErrDrained) // either no request is left, or their time is over
	if err != nil {
		err = in.finishCut(ctx)
	}
	in.awaitHandlers()
	in.stop()
	<-in.followDone // before closeAppRouters, because follow creates them
	in.mu.Lock()
	if in.listener != nil {
		err = errors.Join(err, ignoreClosed(in.listener.Close()))
	}
	if in.unsubscribe != nil {
		in.unsubscribe()
		in.unsubscribe = nil
	}
	in.mu.Unlock()
	in.closeAppRouters()
	in.background.Wait()
	in.legs.Close()
	return err
}

// finishCut gives requests that were cut the time to write their error events, then closes the remaining
// connections.
func (in *Ingress) finishCut(ctx context.Context) error {
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.timers.Tail)
	defer cancel()
	if in.server.Shutdown(last) == nil {
		return nil
	}
	return in.server.Close()
}

// handlersPoll is the interval of awaitHandlers, the same as in http.Server.Shutdown.
const handlersPoll = 2 * time.Millisecond

// awaitHandlers waits for requests whose connection is gone: net/http does not wait for the streams of a lost
// HTTP/2 connection. Their contexts are over, so they end soon; awaitHandlers waits at most Timers.Tail.
func (in *Ingress) awaitHandlers() {
	for last := time.Now().Add(in.timers.Tail); in.inflight.Load() > 0 && time.Now().Before(last); {
		time.Sleep(handlersPoll)
	}
}

func (in *Ingress) closeAppRouters() {
	in.appRoutersMu.Lock()
	defer in.appRoutersMu.Unlock()
	for _, ar := range in.appRouters {
		ar.close()
	}
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}
