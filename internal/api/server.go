// Package api is the server of a node's admin REST API; package client is its client. The server holds no
// state: every answer comes from the Backend. JSON bodies carry apiVersion, unknown query keys are refused,
// and errors have a hint.
package api

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"golang.org/x/net/netutil"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// The paths of the API.
const (
	pathVersion  = "/api/v1/version"
	pathHealthz  = "/api/v1/healthz"
	pathValidate = "/api/v1/validate"
	pathPlan     = "/api/v1/plan"
	pathApps     = "/api/v1/apps"
	pathEvents   = "/api/v1/events"
	pathMetrics  = "/metrics"

	pathEngineMetrics = "/metrics/engines"

	pathPage      = "/"
	pathPageFiles = "/page/"
	pathFeed      = "/api/v1/feed"
)

// Limits of the server. People and scripts use the API, so bodies are small and connections few.
const (
	maxBody        = 1 << 20 // bytes of an app file
	maxHeader      = 64 << 10
	maxConnections = 512
	maxStreams     = 64 // logs and events at one time
	maxPages       = 64 // open pages at one time
	headerTimeout  = 10 * time.Second
	bodyTimeout    = 30 * time.Second
	callTimeout    = 30 * time.Second // one Backend call
	// per write, renewed before each one; a total limit would cut streams, which last for days
	writeTimeout = 60 * time.Second
	idleTimeout  = 120 * time.Second
	closeTimeout = 5 * time.Second // requests still running at Close
	keepAlive    = 15 * time.Second
)

// Config holds the parts of a server. Backend is required.
type Config struct {
	Backend   Backend
	Routers   Routers      // nil = 404 on /api/v1/routers
	Engines   Engines      // nil = 404 on the path of control calls
	Ranks     Ranks        // nil = 404 on the paths of rank changes
	Nodes     Nodes        // nil = 404 on the paths of nodes
	Restarts  Restarts     // nil = 404 on the path of restarts
	Ray       *Ray         // nil = 404 on the paths of Ray Serve
	Forward   Forward      // nil = this node answers every request
	NoLeader  func() error // the error while no node leads; required with Forward
	Metrics   http.Handler // nil = 404 on /metrics
	TLS       *tls.Config  // nil = none
	Token     string       // that callers show, but for other nodes; "" = none
	TokenFile string       // where it lies on this node, for the hint of a refusal
	Hosts     []string     // names of this node in Host headers; localhost and IP addresses need no name here
	Version   client.BuildInfo
	Endpoint  func() string // URL of this node's OpenAI endpoint; nil = Version has none
	Log       *slog.Logger  // nil = silent

	EngineMetrics http.Handler // of NewEngineMetrics; nil = 404 on /metrics/engines
}

// Server serves the admin API, or only the metrics page. Use: New, Attach, Serve, Close.
type Server struct {
	cfg       Config
	name      string // in errors and logs
	routes    http.Handler
	protect   func(bound net.Addr) http.Handler // wraps routes with the checks that a bind needs
	streams   chan struct{}                     // one slot per open stream
	generates chan struct{}                     // one slot per generate call or dump

	mu     sync.Mutex
	ln     net.Listener
	http   *http.Server
	closed bool
	stop   chan struct{} // closed by Close: ends streams
	once   sync.Once
	err    error
}

// NewServer makes a server for the admin API. It needs Attach.
func NewServer(cfg Config) *Server {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	gin.SetMode(gin.ReleaseMode) // gin's debug mode prints to stdout, which belongs to the commands
	s := &Server{
		cfg: cfg, name: "admin api",
		streams: make(chan struct{}, maxStreams), generates: make(chan struct{}, maxGenerates),
		stop: make(chan struct{}),
	}
	s.routes = s.newRoutes()
	s.protect = func(bound net.Addr) http.Handler {
		return newGuard(requireToken(s.routes, cfg.Token, cfg.TokenFile), isLoopback(bound), cfg.Hosts)
	}
	return s
}

// NewMetricsServer makes a server that answers GET and HEAD of /metrics and /metrics/engines and nothing
// else, for clients that may read metrics but not deploy. It needs Attach.
func NewMetricsServer(metrics, engines http.Handler, log *slog.Logger) *Server {
	s := &Server{
		cfg:  Config{Log: cmp.Or(log, slog.New(slog.DiscardHandler))},
		name: "metrics", routes: metricsAlone(metrics, engines), stop: make(chan struct{}),
	}
	// metrics are not secret for clients that reach the port
	s.protect = func(net.Addr) http.Handler { return s.routes }
	return s
}

// Handler returns the API's handler without a listener, as if bound to loopback, for callers that need no
// token: the other nodes, which show their certificates.
func (s *Server) Handler() http.Handler { return newGuard(s.routes, true, s.cfg.Hosts) }

// Attach uses a listener that is already bound. The server closes it.
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

// Addr returns the address that the server listens on; nil before Attach.
func (s *Server) Addr() net.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ln == nil {
		return nil
	}
	return s.ln.Addr()
}

// Serve answers requests until Close and then returns nil.
func (s *Server) Serve() error {
	s.mu.Lock()
	srv, ln := s.http, s.ln
	s.mu.Unlock()
	if srv == nil {
		return fmt.Errorf("serve the %s: call Attach first", s.name)
	}
	ln = netutil.LimitListener(ln, maxConnections)
	if s.cfg.TLS != nil {
		ln = tls.NewListener(ln, s.cfg.TLS)
	}
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close ends streams, waits closeTimeout for running requests, then cuts them. It is idempotent and returns
// the first error.
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
		s.cfg.Log.Warn("closed with requests running", "component", "api", "server", s.name)
		err = srv.Close()
	}
	// without Serve, Shutdown does not know the listener
	if cerr := ln.Close(); err == nil && !errors.Is(cerr, net.ErrClosed) {
		err = cerr
	}
	return err
}

// Forward returns the handler that sends a request to the leader. ok is false while this node leads or has no
// cluster: then this node answers. A nil handler with ok means that no node leads.
type Forward func() (to http.Handler, ok bool)

// forwardedHeader marks a request that another node has forwarded. It is not forwarded again, even if the
// leader has changed.
const forwardedHeader = "X-Dpserve-Forwarded"

// isLocalPath reports whether this node answers a path itself, because the path is about this node: its
// process, its routers, its metrics.
func isLocalPath(path string) bool {
	switch path {
	case pathVersion, pathHealthz, pathValidate, pathPage, pathFeed, pathMetrics, pathEngineMetrics,
		pathRestart, pathRayVersion, pathRayVersion2:
		return true
	}
	return strings.HasPrefix(path, pathRouters) || strings.HasPrefix(path, pathPageFiles)
}

// forward sends requests that only the leader can answer to the leader.
func (s *Server) forward(next http.Handler) http.Handler {
	if s.cfg.Forward == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if isLocalPath(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		to, ok := s.cfg.Forward()
		switch {
		case !ok:
			next.ServeHTTP(w, r)
		case to == nil && r.Method == http.MethodGet && r.URL.Path == pathNodes:
			next.ServeHTTP(w, r) // without a leader, this node's own view is the best answer
		case to == nil || r.Header.Get(forwardedHeader) != "":
			WriteError(w, s.cfg.NoLeader())
		default:
			r.Header.Set(forwardedHeader, "1")
			to.ServeHTTP(w, r)
		}
	})
}

// metricsAlone answers GET and HEAD of the pages of metrics, and every other request with an error. It does
// not check the Host header: scrapers may use any name, and the port changes nothing.
func metricsAlone(metrics, engines http.Handler) http.Handler {
	pages := map[string]http.Handler{pathMetrics: metrics, pathEngineMetrics: engines}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		beginAnswer(w, r)
		page, isServed := pages[r.URL.Path]
		switch {
		case !isServed:
			WriteError(w, unknownPathError(r,
				"this port serves "+pathMetrics+" and "+pathEngineMetrics+" alone"))
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			writeNotAllowed(w, r)
		default:
			page.ServeHTTP(w, r)
		}
	})
}

// answer is a handler that returns a status and a body, or an error.
type answer func(c *gin.Context, q query) (status int, body any, err error)

// replier makes a handler of a route from its answer and from the keys that its query may have.
type replier func(h answer, keys ...string) gin.HandlerFunc

func (s *Server) newRoutes() http.Handler { return s.forward(headAsGet(s.newEngine())) }

// newEngine returns the table of routes.
func (s *Server) newEngine() *gin.Engine {
	g := gin.New()
	g.HandleMethodNotAllowed = true
	g.RedirectTrailingSlash = false
	g.ContextWithFallback = false
	g.Use(s.recoverPanic)
	g.NoRoute(func(c *gin.Context) { s.fail(c, unknownPathError(c.Request, hintOfPath(c.Request.URL.Path))) })
	g.NoMethod(func(c *gin.Context) { writeNotAllowed(c.Writer, c.Request) })

	g.GET(pathVersion, s.reply(s.version))
	g.GET(pathHealthz, s.reply(s.healthz))
	addPageRoutes(g)
	g.GET(pathFeed, s.stream(newFeed(s).serve))
	appHandlers{s, s.cfg.Backend}.addRoutes(g)
	if s.cfg.Routers != nil {
		routerHandlers{s, s.cfg.Routers}.addRoutes(g)
	}
	if s.cfg.Ranks != nil {
		rankHandlers{s.cfg.Ranks, s.cfg.Backend, s.cfg.Version.Version}.addRoutes(g, s.reply)
	}
	if s.cfg.Engines != nil {
		engineHandlers{s.cfg.Engines}.addRoutes(g, s.reply)
	}
	if s.cfg.Nodes != nil {
		nodeHandlers{s.cfg.Nodes}.addRoutes(g, s.reply)
	}
	if s.cfg.Restarts != nil {
		restartHandlers{s.cfg.Restarts, s.cfg.Version}.addRoutes(g, s.reply)
	}
	if s.cfg.Ray != nil {
		(&rayHandlers{server: s, backend: s.cfg.Backend, nodes: s.cfg.Nodes, ray: s.cfg.Ray}).addRoutes(g)
	}
	if s.cfg.Metrics != nil {
		g.GET(pathMetrics, gin.WrapH(s.cfg.Metrics))
	}
	if s.cfg.EngineMetrics != nil {
		g.GET(pathEngineMetrics, gin.WrapH(s.cfg.EngineMetrics))
	}
	return g
}

// headAsGet answers HEAD like GET, because probes use HEAD; net/http omits the body. Streams have no HEAD.
func headAsGet(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead && r.URL.Path != pathEvents && r.URL.Path != pathFeed &&
			!strings.HasSuffix(r.URL.Path, "/logs") && !strings.HasSuffix(r.URL.Path, "/dump_events") {
			// a copy, because the server decides by its own request what it writes
			r = r.WithContext(r.Context())
			r.Method = http.MethodGet
		}
		next.ServeHTTP(w, r)
	})
}

// recoverPanic turns a panic into a 500. It passes http.ErrAbortHandler on, which cuts the connection: gin's
// own recovery swallows that error, and a cut stream would look complete to the client.
func (s *Server) recoverPanic(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			panic(v)
		}
		s.cfg.Log.Error("admin request panicked", "component", "api", "path", c.FullPath(), "err", v, "stack",
			string(debug.Stack()))
		if c.Writer.Written() {
			panic(http.ErrAbortHandler)
		}
		WriteError(c.Writer,
			problem.New(problem.Internal, "the request failed inside dpserve").WithHint("its log says why"))
		c.Abort()
	}()
	c.Next()
}

// reply reads the query, runs a handler within the time limit of a call and writes its answer.
func (s *Server) reply(h answer, keys ...string) gin.HandlerFunc {
	return func(c *gin.Context) {
		ctx, cancel := context.WithTimeout(c.Request.Context(), callTimeout)
		defer cancel()
		c.Request = c.Request.WithContext(ctx)
		var status int
		var body any
		q, err := parseQuery(c.Request.URL.RawQuery, keys...)
		if err == nil {
			status, body, err = h(c, q)
		}
		extendWriteDeadline(c.Writer)
		if err != nil {
			s.fail(c, err)
			return
		}
		if text, ok := body.(plainText); ok {
			c.String(status, "%s", string(text))
			return
		}
		writeJSON(c.Writer, status, body)
	}
}

// stream makes a handler of one that writes a stream, and returns an error instead if there is none.
func (s *Server) stream(h func(c *gin.Context) error) gin.HandlerFunc {
	return func(c *gin.Context) {
		if err := h(c); err != nil {
			s.fail(c, err)
		}
	}
}

// extendWriteDeadline sets the deadline of the next write. Writers without a connection (in tests) have none.
func extendWriteDeadline(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
}

// fail answers with err and logs internal errors, except after the client has left.
func (s *Server) fail(c *gin.Context, err error) {
	left := errors.Is(err, context.Canceled) && c.Request.Context().Err() != nil
	if status := WriteError(c.Writer, err); status == http.StatusInternalServerError && !left {
		s.cfg.Log.Error("admin request failed", "component", "api", "path", c.FullPath(), "err", err)
	}
}

func unknownPathError(r *http.Request, hint string) error {
	return problem.New(problem.NotFound, "dpserve does not serve %s %s on this port", r.Method, r.URL.Path).
		WithHint("%s", hint)
}

// hintOfPath says which paths there are instead of an unknown one.
func hintOfPath(path string) string {
	if strings.HasPrefix(path, "/v1/") {
		return "this is the admin api; OpenAI requests go to the other port, 8000 by default"
	}
	if strings.HasPrefix(path, "/api/serve") || strings.HasPrefix(path, "/api/ray") {
		return "of Ray's paths there are " + pathRayApps + ", with its last slash, and " + pathRayVersion
	}
	return "the page for people is /; paths begin with /api/v1: version, healthz, validate, plan, apps, " +
		"apps/APP, apps/APP/logs, apps/APP/call, apps/APP/ranks, events, feed, nodes, join-tokens, " +
		"gossip-key, restart, routers/APP; and /metrics, " + strings.Join([]string{
		pathAddWorker, pathRemoveWorker, pathListWorkers, pathWorkers, pathRayApps,
	}, ", ")
}

func (s *Server) version(*gin.Context, query) (int, any, error) {
	v := s.cfg.Version
	if s.cfg.Endpoint != nil {
		v.Endpoint = s.cfg.Endpoint()
	}
	return http.StatusOK, v, nil
}

// healthz answers that the process answers, which says nothing about applications.
func (s *Server) healthz(*gin.Context, query) (int, any, error) {
	return http.StatusOK, gin.H{"status": "ok"}, nil
}

// acquireFollower acquires a slot for logs or events.
func (s *Server) acquireFollower(r *http.Request) (ctx context.Context, done func(), err error) {
	return s.acquireStream(r, s.streams, "logs and events are being followed")
}

// acquireStream acquires a slot and returns a context that ends with the request or with the server. done
// releases both. what names the holders of the slots in the error.
func (s *Server) acquireStream(
	r *http.Request, slots chan struct{}, what string,
) (ctx context.Context, done func(), err error) {
	select {
	case slots <- struct{}{}:
	default:
		return nil, nil, problem.New(problem.Overloaded, "%d %s already", cap(slots), what).
			WithHint("end one of them")
	}
	ctx, cancel := context.WithCancel(r.Context())
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-s.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(); <-over; <-slots }, nil
}

// beginStream sends the headers of a stream.
func beginStream(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	extendWriteDeadline(w)
	_ = http.NewResponseController(w).Flush() // the end of ctx reports a client that has left
}

func flush(buf *bufio.Writer, w http.ResponseWriter) error {
	if err := buf.Flush(); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}
