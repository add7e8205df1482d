// Package api is the admin REST of a node and its Go client; the command line uses nothing else. It holds no state: every
// answer comes from the Backend. JSON bodies carry apiVersion, query keys are strict, errors say what to do next.
package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gin-gonic/gin"
	"golang.org/x/net/netutil"

	"github.com/dpserve/dpserve/internal/problem"
)

// Limits of the server. The API is for people and scripts of one machine: small bodies, few connections.
const (
	maxBody        = 1 << 20 // bytes of an app file
	maxHeader      = 64 << 10
	maxConnections = 512
	maxStreams     = 64 // logs and events at one time
	headerTimeout  = 10 * time.Second
	bodyTimeout    = 30 * time.Second
	callTimeout    = 30 * time.Second // one Backend call
	writeTimeout   = 60 * time.Second // rolling, per write; never a total: streams last for days (TRAPS 3)
	idleTimeout    = 120 * time.Second
	closeTimeout   = 5 * time.Second // requests still running at Close
	keepAlive      = 15 * time.Second
)

// Config is what a server is made of. Backend is required.
type Config struct {
	Backend  Backend
	Routers  Routers      // nil = 404 on /api/v1/routers
	Ranks    Ranks        // nil = 404 on the paths of rank changes
	Nodes    Nodes        // nil = 404 on the paths of nodes
	Forward  Forward      // nil = this node answers everything
	NoLeader func() error // the answer while no node leads; needed with Forward
	Metrics  http.Handler // nil = 404 on /metrics
	Hosts    []string     // names of this node in Host headers; localhost and IP addresses need no name here
	Version  BuildInfo
	Log      *slog.Logger // nil = silent
}

// Server serves the admin API, or the page of metrics alone: New, Listen (or Attach), Serve, Close.
type Server struct {
	cfg       Config
	name      string // in errors and logs
	flag      string // that says where it listens
	routes    http.Handler
	protect   func(bound net.Addr) http.Handler // routes behind what a bind needs
	streams   chan struct{}                     // a slot per open stream
	generates chan struct{}                     // a slot per generate call or dump

	mu     sync.Mutex
	ln     net.Listener
	http   *http.Server
	closed bool
	stop   chan struct{} // closed by Close: ends streams
	once   sync.Once
	err    error
}

// NewServer makes a server that does not listen yet.
func NewServer(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	gin.SetMode(gin.ReleaseMode) // debug mode prints to stdout, which belongs to the commands
	s := &Server{
		cfg: cfg, name: "admin api", flag: "--admin-bind",
		streams: make(chan struct{}, maxStreams), generates: make(chan struct{}, maxGenerates), stop: make(chan struct{}),
	}
	s.routes = s.newRoutes()
	s.protect = func(bound net.Addr) http.Handler { return newGuard(s.routes, loopbackAddr(bound), cfg.Hosts) }
	return s
}

// NewMetricsServer makes a server that answers GET and HEAD of /metrics and nothing else: for those who may read numbers and
// not deploy. It does not listen yet.
func NewMetricsServer(metrics http.Handler, log *slog.Logger) *Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: Config{Log: log}, name: "metrics", flag: "--metrics-bind", routes: metricsAlone(metrics), stop: make(chan struct{})}
	s.protect = func(net.Addr) http.Handler { return s.routes } // numbers are no secret from those who reach the port
	return s
}

// Handler is the API without a listener, as if bound to loopback.
func (s *Server) Handler() http.Handler { return newGuard(s.routes, true, s.cfg.Hosts) }

// Listen binds a TCP address; port 0 picks a free one (see Addr). A taken port is problem.Unavailable.
func (s *Server) Listen(ctx context.Context, addr string) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return problem.New(problem.Unavailable, "listen for the %s: %w", s.name, err).
			WithHint("another dpserve may be running: stop it, or choose a port with %s", s.flag)
	}
	if err != nil {
		return problem.New(problem.InvalidArgument, "listen for the %s: %w", s.name, err).WithHint("%s takes HOST:PORT of this machine", s.flag)
	}
	return s.Attach(ln)
}

// Attach takes a listener that is already bound. The server closes it.
func (s *Server) Attach(ln net.Listener) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.ln != nil {
		return errors.Join(fmt.Errorf("the %s listens already, or is closed", s.name), ln.Close())
	}
	s.ln = ln
	s.http = &http.Server{
		Handler:           s.protect(ln.Addr()),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	return nil
}

// Addr is where the server listens; nil before Listen.
func (s *Server) Addr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ln == nil {
		return nil
	}
	return s.ln.Addr()
}

// Serve answers requests until Close, and then returns nil.
func (s *Server) Serve() error {
	s.mu.Lock()
	srv, ln := s.http, s.ln
	s.mu.Unlock()
	if srv == nil {
		return fmt.Errorf("serve the %s: call Listen first", s.name)
	}
	if err := srv.Serve(netutil.LimitListener(ln, maxConnections)); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close ends streams, gives running requests closeTimeout, then cuts them. Idempotent; waits; returns the first error.
func (s *Server) Close() error {
	s.once.Do(func() { s.err = s.close() })
	return s.err
}

func (s *Server) close() error {
	s.mu.Lock()
	s.closed = true
	srv, ln := s.http, s.ln
	s.mu.Unlock()
	close(s.stop)
	if srv == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := srv.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		s.cfg.Log.Warn("closed with requests running", "room", "api", "server", s.name)
		err = srv.Close()
	}
	if cerr := ln.Close(); err == nil && !errors.Is(cerr, net.ErrClosed) { // never served: Shutdown does not know it
		err = cerr
	}
	return err
}

// Forward gives the way of a request to the node that leads the cluster. ok is false while this node leads, or is alone: then it
// answers itself. A nil handler with ok means that nobody leads.
type Forward func() (to http.Handler, ok bool)

// forwarded marks a request that came from another node: it is not sent on, whoever leads by now.
const forwarded = "X-Dpserve-Forwarded"

// local says that a path is about this very node: its process, its routers, its metrics.
func local(path string) bool {
	switch path {
	case pathVersion, pathHealthz, pathValidate, pathMetrics:
		return true
	}
	return strings.HasPrefix(path, pathRouters)
}

// forward sends what only the leader can answer to the leader.
func (s *Server) forward(next http.Handler) http.Handler {
	if s.cfg.Forward == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if local(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		to, ok := s.cfg.Forward()
		switch {
		case !ok:
			next.ServeHTTP(w, r)
		case to == nil && r.Method == http.MethodGet && r.URL.Path == pathNodes:
			next.ServeHTTP(w, r) // this node's own view is all there is
		case to == nil || r.Header.Get(forwarded) != "":
			writeError(w, s.cfg.NoLeader())
		default:
			r.Header.Set(forwarded, "1")
			to.ServeHTTP(w, r)
		}
	})
}

// metricsAlone answers GET and HEAD of /metrics, and every other request with an error that says so. The Host header is not looked
// at: scrapers reach the port by any name, and nothing can be changed here.
func metricsAlone(metrics http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rearm(w)
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout)) // nobody reads the body
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		switch {
		case r.URL.Path != pathMetrics:
			writeError(w, problem.New(problem.NotFound, "no path %q here", r.URL.Path).WithHint("this port serves %s alone", pathMetrics))
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			writeJSON(w, http.StatusMethodNotAllowed, errorReply{Envelope{APIVersion}, toBody(
				problem.New(problem.InvalidArgument, "%s does not take %s", pathMetrics, r.Method).WithHint("it takes GET, HEAD"))})
		default:
			metrics.ServeHTTP(w, r)
		}
	})
}
