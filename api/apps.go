package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Backend is what the admin API needs of a node. Safe for concurrent use; a method ends when its ctx does. Errors that users
// can act on are *problem.Error or app.Faults; everything else is answered as internal. Nothing is called after Server.Close
// has returned.
type Backend interface {
	// Validate checks a file as Deploy would, and changes nothing. The error is app.Faults.
	Validate(file string, text []byte) ([]app.Warning, error)
	// Plan says what Deploy would do, with the place of every rank, and changes nothing.
	Plan(ctx context.Context, req DeployRequest) (msg.Plan, []app.Warning, error)
	// Deploy makes the apps of a file wanted and returns once that is committed, before anything runs.
	Deploy(ctx context.Context, req DeployRequest) (DeployResult, error)
	// Apps lists every application, by name.
	Apps(ctx context.Context) ([]msg.AppStatus, error)
	// App is one application; problem.NotFound names those there are.
	App(ctx context.Context, name string) (msg.AppStatus, error)
	// Delete makes an application unwanted and returns once that is committed, before its engines are gone.
	Delete(ctx context.Context, name string) error
	// Logs opens the engines' log lines; the server closes the stream.
	Logs(ctx context.Context, q LogQuery) (LogStream, error)
	// Events gives the events with a number above since that are still kept, oldest first, and a channel that is closed at the
	// next one. A since above the newest number (the node has restarted) is answered like 0.
	Events(since uint64) (events []Event, next <-chan struct{})
}

// LogStream yields log lines in order of time.
type LogStream interface {
	// Next waits for at least one line; io.EOF ends a stream that does not follow. The lines are valid until the next call.
	Next(ctx context.Context) ([]LogLine, error)
	Close() error
}

// fileHeader names the app file, like the query key file.
const fileHeader = "X-Dpserve-File"

// answer is what a handler gives back: a status and a body, or an error.
type answer func(c *gin.Context) (status int, body any, err error)

func (s *Server) newRoutes() http.Handler {
	g := gin.New()
	g.HandleMethodNotAllowed = true
	g.RedirectTrailingSlash = false
	g.ContextWithFallback = false
	g.Use(s.recovered)
	g.NoRoute(func(c *gin.Context) { s.fail(c, unknownPath(c.Request)) })
	g.NoMethod(func(c *gin.Context) { s.methodNotAllowed(c) })

	g.GET(pathVersion, s.reply(s.version))
	g.GET(pathHealthz, s.reply(s.healthz))
	g.POST(pathValidate, s.reply(s.validate))
	g.POST(pathPlan, s.reply(s.plan))
	g.PUT(pathApps, s.reply(s.deploy))
	g.GET(pathApps, s.reply(s.apps))
	g.GET(pathApps+"/:app", s.reply(s.app))
	g.DELETE(pathApps+"/:app", s.reply(s.delete))
	g.GET(pathApps+"/:app/logs", s.logs)
	g.GET(pathEvents, s.events)
	s.routers(g)
	s.ranks(g)
	s.nodes(g)
	if s.cfg.Metrics != nil {
		g.GET(pathMetrics, s.metrics)
	}
	return s.forward(headAsGet(g))
}

// headAsGet answers HEAD like GET without the body, which net/http leaves out: probes ask that way. Streams have no HEAD.
func headAsGet(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodHead && r.URL.Path != pathEvents && !strings.HasSuffix(r.URL.Path, "/logs") && !strings.HasSuffix(r.URL.Path, "/dump_events") {
			r = r.WithContext(r.Context()) // a copy: the server goes by its own for what it writes
			r.Method = http.MethodGet
		}
		next.ServeHTTP(w, r)
	})
}

// recovered turns a panic into a 500 and goes on panicking for http.ErrAbortHandler, which cuts a stream: gin's own recovery
// swallows that and a cut stream would look complete (TRAPS 1).
func (s *Server) recovered(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
			panic(v)
		}
		s.cfg.Log.Error("admin request panicked", "room", "api", "path", c.FullPath(), "err", v, "stack", string(debug.Stack()))
		if c.Writer.Written() {
			panic(http.ErrAbortHandler)
		}
		writeError(c.Writer, problem.New(problem.Internal, "the request failed inside dpserve").WithHint("its log says why"))
		c.Abort()
	}()
	c.Next()
}

// reply runs a handler under the time limits of a call and writes what it gives back.
func (s *Server) reply(h answer) gin.HandlerFunc {
	return func(c *gin.Context) {
		ctx, cancel := context.WithTimeout(c.Request.Context(), callTimeout)
		defer cancel()
		c.Request = c.Request.WithContext(ctx)
		status, body, err := h(c)
		rearm(c.Writer)
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

// plainText is the body of an answer that is no JSON.
type plainText string

// rearm gives the next write its time limit. What cannot have one (tests without a connection) goes without.
func rearm(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
}

// fail answers with err; what is dpserve's own fault is logged. That a client has left is not.
func (s *Server) fail(c *gin.Context, err error) {
	left := errors.Is(err, context.Canceled) && c.Request.Context().Err() != nil
	if status := writeError(c.Writer, err); status == http.StatusInternalServerError && !left {
		s.cfg.Log.Error("admin request failed", "room", "api", "path", c.FullPath(), "err", err)
	}
}

func unknownPath(r *http.Request) error {
	hint := "paths begin with /api/v1: version, healthz, validate, plan, apps, apps/APP, apps/APP/logs, events, nodes, join-tokens, routers/APP; and /metrics"
	if strings.HasPrefix(r.URL.Path, "/v1/") {
		hint = "this is the admin api; OpenAI requests go to the other port, 8000 by default"
	}
	return problem.New(problem.NotFound, "no path %q here", r.URL.Path).WithHint("%s", hint)
}

// methodNotAllowed is 405, which has no code of its own: the caller's fault, with the methods there are (gin has set Allow).
func (s *Server) methodNotAllowed(c *gin.Context) {
	b := toBody(problem.New(problem.InvalidArgument, "%s does not take %s", c.Request.URL.Path, c.Request.Method).
		WithHint("it takes %s", c.Writer.Header().Get("Allow")))
	writeJSON(c.Writer, http.StatusMethodNotAllowed, errorReply{Envelope{APIVersion}, b})
}

func (s *Server) metrics(c *gin.Context) { s.cfg.Metrics.ServeHTTP(c.Writer, c.Request) }

func (s *Server) version(c *gin.Context) (int, any, error) {
	_, err := parseQuery(c.Request.URL.RawQuery)
	return http.StatusOK, VersionReply{Envelope{APIVersion}, s.cfg.Version}, err
}

func (s *Server) healthz(c *gin.Context) (int, any, error) {
	_, err := parseQuery(c.Request.URL.RawQuery)
	return http.StatusOK, HealthReply{Envelope{APIVersion}, "ok"}, err
}

func (s *Server) validate(c *gin.Context) (int, any, error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "file")
	if err != nil {
		return 0, nil, err
	}
	file, text, err := readFile(c, q)
	if err != nil {
		return 0, nil, err
	}
	warnings, err := s.cfg.Backend.Validate(file, text)
	if warnings == nil {
		warnings = []app.Warning{}
	}
	return http.StatusOK, ValidateReply{Envelope{APIVersion}, warnings}, err
}

func (s *Server) deploy(c *gin.Context) (int, any, error) {
	req, err := parseDeploy(c)
	if err != nil {
		return 0, nil, err
	}
	res, err := s.cfg.Backend.Deploy(c.Request.Context(), req)
	if res.Changes == nil {
		res.Changes = []Change{}
	}
	return http.StatusAccepted, DeployReply{Envelope{APIVersion}, res}, err
}

func parseDeploy(c *gin.Context) (req DeployRequest, err error) {
	q, err := parseQuery(c.Request.URL.RawQuery, "revision", "prune", "partial", "file")
	if err != nil {
		return req, err
	}
	revision, ok, err := q.counter("revision")
	if err != nil {
		return req, err
	}
	if ok {
		req.Revision = &revision
	}
	if req.Prune, err = q.flag("prune"); err != nil {
		return req, err
	}
	if req.Partial, err = q.flag("partial"); err != nil {
		return req, err
	}
	req.File, req.Text, err = readFile(c, q)
	return req, err
}

func (s *Server) plan(c *gin.Context) (int, any, error) {
	req, err := parseDeploy(c)
	if err != nil {
		return 0, nil, err
	}
	p, warnings, err := s.cfg.Backend.Plan(c.Request.Context(), req)
	return http.StatusOK, PlanReply{Envelope{APIVersion}, p, warnings}, err
}

func (s *Server) apps(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	apps, err := s.cfg.Backend.Apps(c.Request.Context())
	if apps == nil {
		apps = []msg.AppStatus{}
	}
	return http.StatusOK, AppsReply{Envelope{APIVersion}, apps}, err
}

func (s *Server) app(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	a, err := s.cfg.Backend.App(c.Request.Context(), c.Param("app"))
	return http.StatusOK, AppReply{Envelope{APIVersion}, a}, err
}

func (s *Server) delete(c *gin.Context) (int, any, error) {
	if _, err := parseQuery(c.Request.URL.RawQuery); err != nil {
		return 0, nil, err
	}
	name := c.Param("app")
	err := s.cfg.Backend.Delete(c.Request.Context(), name)
	return http.StatusAccepted, DeleteReply{Envelope{APIVersion}, name, "DELETING"}, err
}

// readFile reads the app file of a request whole, within its size limit and the time limit that guard has set.
func readFile(c *gin.Context, q query) (name string, text []byte, err error) {
	if name, err = q.file(c.GetHeader(fileHeader)); err != nil {
		return "", nil, err
	}
	if c.Request.ContentLength > maxBody {
		return "", nil, tooLarge()
	}
	text, err = io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	var big *http.MaxBytesError
	switch {
	case errors.As(err, &big):
		return "", nil, tooLarge()
	case err != nil:
		return "", nil, problem.New(problem.SlowRequest, "the body did not arrive: %w", err).WithHint("send it again")
	case len(text) == 0:
		return "", nil, problem.New(problem.InvalidArgument, "the body is empty").WithHint("send an app.yaml as the body: curl --data-binary @app.yaml")
	}
	_ = http.NewResponseController(c.Writer).SetReadDeadline(time.Time{}) // net/http reads on, to notice a client that leaves
	return name, text, nil
}

func tooLarge() error {
	return problem.New(problem.TooLarge, "the body is larger than %d bytes", maxBody).WithHint("split the file: apps that are not in it stay as they are")
}

// stream takes a stream's slot and gives a context that also ends with the server; done gives both back.
func (s *Server) stream(r *http.Request) (ctx context.Context, done func(), err error) {
	return s.open(r, s.streams, "logs and events are being followed")
}

// open is stream with slots of its own; what says who holds them.
func (s *Server) open(r *http.Request, slots chan struct{}, what string) (ctx context.Context, done func(), err error) {
	select {
	case slots <- struct{}{}:
	default:
		return nil, nil, problem.New(problem.Overloaded, "%d %s already", cap(slots), what).WithHint("end one of them")
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

// logs sends log lines as text, one per line (LogLine.String), as they come.
func (s *Server) logs(c *gin.Context) {
	q, err := parseLogQuery(c.Param("app"), c.Request.URL.RawQuery, time.Now())
	if err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.stream(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	lines, err := s.cfg.Backend.Logs(ctx, q)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer func() { _ = lines.Close() }() // nothing was written to it
	begin(c.Writer, "text/plain; charset=utf-8")
	if err := sendLines(ctx, c.Writer, lines); err != nil && c.Request.Context().Err() == nil {
		s.cfg.Log.Debug("log stream broke", "room", "api", "app", q.App, "err", err)
		panic(http.ErrAbortHandler) // the client must see that this is not the end
	}
}

// begin sends the headers of a stream.
func begin(w http.ResponseWriter, contentType string) {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	rearm(w)
	_ = http.NewResponseController(w).Flush() // a client that has left is noticed by ctx
}

func sendLines(ctx context.Context, w http.ResponseWriter, lines LogStream) error {
	buf := bufio.NewWriter(w)
	for {
		batch, err := lines.Next(ctx)
		rearm(w)
		for _, l := range batch {
			_, _ = buf.WriteString(l.String()) // a bufio.Writer keeps its first error for Flush
			_ = buf.WriteByte('\n')
		}
		if ferr := flush(buf, w); ferr != nil {
			return ferr
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func flush(buf *bufio.Writer, w http.ResponseWriter) error {
	if err := buf.Flush(); err != nil {
		return err
	}
	return http.NewResponseController(w).Flush()
}

// events sends state changes as server-sent events until the client leaves or the server closes.
func (s *Server) events(c *gin.Context) {
	since, app, err := parseEvents(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	ctx, done, err := s.stream(c.Request)
	if err != nil {
		s.fail(c, err)
		return
	}
	defer done()
	begin(c.Writer, "text/event-stream")
	if err := s.sendEvents(ctx, c.Writer, since, app); err != nil && ctx.Err() == nil {
		s.cfg.Log.Debug("event stream broke", "room", "api", "err", err)
	}
}

// parseEvents reads since (or the Last-Event-ID of a browser that reconnects) and app.
func parseEvents(r *http.Request) (since uint64, app string, err error) {
	q, err := parseQuery(r.URL.RawQuery, "since", "app")
	if err != nil {
		return 0, "", err
	}
	since, ok, err := q.counter("since")
	if id := r.Header.Get("Last-Event-ID"); !ok && err == nil && id != "" {
		if since, err = strconv.ParseUint(id, 10, 64); err != nil {
			err = problem.New(problem.InvalidArgument, "header Last-Event-ID is %q", id).WithHint("send the id of the last event, or leave it out")
		}
	}
	return since, q.values.Get("app"), err
}

func (s *Server) sendEvents(ctx context.Context, w http.ResponseWriter, since uint64, app string) error {
	buf := bufio.NewWriter(w)
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	for {
		events, next := s.cfg.Backend.Events(since)
		for i := range events {
			since = events[i].Number
			if err := writeEvent(buf, &events[i], app); err != nil {
				return err
			}
		}
		rearm(w)
		if err := flush(buf, w); err != nil {
			return err
		}
		select {
		case <-next:
		case <-alive.C:
			_, _ = buf.WriteString(": alive\n\n") // kept for the next flush, like every error of buf
		case <-ctx.Done():
			return nil
		}
	}
}

// eventReply is an event on the wire.
type eventReply struct {
	Envelope
	Event
}

// writeEvent writes one server-sent event, if it is of app ("" = any).
func writeEvent(w io.Writer, e *Event, app string) error {
	if app != "" && app != e.App {
		return nil
	}
	data, err := json.Marshal(eventReply{Envelope{APIVersion}, *e})
	if err != nil {
		return fmt.Errorf("encode event %d: %w", e.Number, err)
	}
	_, err = fmt.Fprintf(w, "id: %d\ndata: %s\n\n", e.Number, data)
	return err
}
