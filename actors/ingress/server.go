package ingress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/telemetry"
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
	in.listener = newClientConns(in, inner)
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
	in.cutRequests(errDrained) // either no request is left, or their time is over
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
	in.near.Close()
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

// modelsPath lists the models; an id behind a slash is one of them.
const modelsPath = "/v1/models"

// engineRoutes are paths that engines know and dpserve does not serve. No engine is asked: dpserve says so.
var engineRoutes = []string{
	"/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/audio/",
	"/v1/realtime", "/v1/classify", "/v1/pooling",
	"/v1/completions/render", "/v1/chat/completions/render", "/inference/v1/", "/pooling", "/classify",
	"/score", "/rerank", "/v2/rerank",
	"/generate", "/load", "/metrics",
}

// routes builds the HTTP surface.
func (in *Ingress) routes() http.Handler { return in.limitAndRecover(in.newEngine()) }

// newEngine returns the table of routes. gin only picks the handler: its Recovery would turn the panic that
// cuts a connection into a clean end.
func (in *Ingress) newEngine() *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	g := gin.New()
	g.RedirectTrailingSlash, g.HandleMethodNotAllowed = false, false
	g.UseRawPath, g.UnescapePathValues = false, false
	for r := openai.Completions; r < openai.Models; r++ {
		g.POST(r.Path(), func(c *gin.Context) { in.serve(c.Writer, c.Request, in.table.Load().root, r) })
	}
	g.GET(modelsPath, func(c *gin.Context) { in.listModels(c.Writer, c.Request, in.table.Load().root) })
	g.GET(modelsPath+"/*id", func(c *gin.Context) { in.serveOther(c) })
	for path, probe := range map[string]http.HandlerFunc{
		"/health": in.health, "/healthz": in.health, "/readyz": in.health, "/ping": in.health,
		"/livez":     in.live,
		"/-/healthz": in.rayHealth, "/-/routes": in.rayRoutes,
	} {
		for _, method := range []string{http.MethodGet, http.MethodHead} { // load balancers probe with HEAD
			g.Handle(method, path, func(c *gin.Context) { probe(c.Writer, c.Request) })
		}
	}
	g.GET("/version", func(c *gin.Context) { in.showVersion(c.Writer, c.Request) })
	g.NoRoute(in.serveOther)
	return g
}

// limitAndRecover limits header fields and catches panics. The panic that cuts a stream goes on to net/http.
func (in *Ingress) limitAndRecover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer in.recover(w, r)
		if f := in.headerTooLarge(r); f != nil {
			in.refuseUnrouted(w, r, openai.NoRoute, f)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// headerTooLarge checks a request's line and header against the limits.
func (in *Ingress) headerTooLarge(r *http.Request) *failure {
	fields, bytes := measureHeader(r)
	f := &failure{status: http.StatusRequestHeaderFieldsTooLarge, code: openai.CodeInvalidRequest}
	switch {
	case fields > in.limits.MaxHeaderFields:
		f.message = fmt.Sprintf("the request has more than %d header fields", in.limits.MaxHeaderFields)
	case bytes > in.limits.MaxHeaderBytes:
		f.message = fmt.Sprintf("the request's line and header are larger than %d bytes",
			in.limits.MaxHeaderBytes)
	default:
		return nil
	}
	return f
}

// measureHeader counts fields and bytes in their usual encoding; net/http removes Host and Transfer-Encoding
// from the map. net/http's own limit on bytes is coarse: it reads one buffer more, and another one before it
// knows the protocol.
func measureHeader(r *http.Request) (fields, bytes int) {
	const between, lineEnd = len(": "), len("\r\n")
	bytes = len(r.Method) + len(" ") + len(r.RequestURI) + len(" ") + len(r.Proto) + 2*lineEnd
	for key, values := range r.Header {
		fields += len(values)
		for _, v := range values {
			bytes += len(key) + between + len(v) + lineEnd
		}
	}
	if r.Host != "" {
		fields++
		bytes += len("Host") + between + len(r.Host) + lineEnd
	}
	if len(r.TransferEncoding) > 0 {
		fields++
		bytes += len("Transfer-Encoding: chunked") + lineEnd
	}
	return fields, bytes
}

func (in *Ingress) recover(_ http.ResponseWriter, r *http.Request) {
	switch p := recover(); p {
	case nil:
	case http.ErrAbortHandler:
		panic(p)
	default:
		in.log.Error("handler panicked", slog.String("path", r.URL.Path), slog.Any("err", p),
			slog.String("stack", string(debug.Stack())))
		panic(http.ErrAbortHandler) // the answer may have begun, so the client must see a cut
	}
}

// serveOther serves paths that are not fixed in gin: route prefixes of applications, model ids, and unknown
// paths.
func (in *Ingress) serveOther(c *gin.Context) {
	w, r := c.Writer, c.Request
	s, path := in.table.Load().split(r.URL.Path)
	route := openai.RouteOf(path)
	switch {
	case route != openai.NoRoute && r.Method != route.Method():
		w.Header()["Allow"] = []string{route.Method()}
		in.refuseUnrouted(w, r, route, &failure{
			status: http.StatusMethodNotAllowed, code: openai.CodeInvalidRequest,
			message: fmt.Sprintf("%s takes %s, not %s", path, route.Method(), r.Method),
		})
	case route == openai.Models:
		in.listModels(w, r, s)
	case route != openai.NoRoute:
		in.serve(w, r, s, route)
	case strings.HasPrefix(path, modelsPath+"/") && r.Method == http.MethodGet:
		in.showModel(w, r, s, path[len(modelsPath)+1:])
	default:
		in.refuseUnrouted(w, r, route, unsupportedRoute(path))
	}
}

// serve answers one inference request of a route scope.
func (in *Ingress) serve(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route) {
	in.serveWith(w, r, s, route, nil)
}

// serveWith is serve with a function that sets what the router's own API asks for beyond headers; nil:
// nothing.
func (in *Ingress) serveWith(w http.ResponseWriter, r *http.Request, s *routeScope, route openai.Route,
	demand func(*request),
) {
	req, _ := in.requestPool.Get().(*request)
	in.inflight.Add(1)
	req.w, req.r, req.route, req.start, req.bodySettled = w, r, route, time.Now(), true
	req.rc = http.NewResponseController(w)
	req.flush = flusher(w)
	cut, whole, rc := false, false, req.rc
	defer func() {
		in.inflight.Add(-1)
		// after a panic an engine connection may still read the buffers
		req.bodySettled = req.bodySettled && whole
		req.release()
		if cut { // the client must not take a broken stream for a complete one
			if !r.ProtoAtLeast(1, 1) {
				_ = rc.SetWriteDeadline(resetAtClose) // only network connections have deadlines
			}
			panic(http.ErrAbortHandler)
		}
	}()
	if demand != nil {
		demand(req)
	}
	if f := req.handle(s); f != nil {
		req.answerFailure(f)
	}
	cut, whole = req.cutConn, true
}

// requestIDOf returns the client's x-request-id if it is valid, otherwise a new id.
func (in *Ingress) requestIDOf(r *http.Request) string {
	if ids := r.Header[headerRequestID]; len(ids) == 1 && validRequestID(ids[0]) {
		return ids[0]
	}
	return newRequestID(mix(in.requestID()))
}

// unsupportedRoute distinguishes a path that engines have from an unknown one.
func unsupportedRoute(path string) *failure {
	for _, known := range engineRoutes {
		if path == strings.TrimSuffix(known, "/") ||
			strings.HasPrefix(path, strings.TrimSuffix(known, "/")+"/") {
			return newFailure(openai.CodeUnsupportedRoute,
				"dpserve does not serve this route; it serves "+servedPaths())
		}
	}
	return newFailure(openai.CodeUnsupportedRoute, "there is no such path; dpserve serves "+servedPaths())
}

func servedPaths() string {
	var out []string
	for r := openai.Completions; r <= openai.Models; r++ {
		out = append(out, r.Method()+" "+r.Path())
	}
	return strings.Join(append(out, "GET "+modelsPath+"/{id}", "GET /health", "GET /version"), ", ")
}

// writeError sends a failure in the OpenAI shape.
func writeError(w http.ResponseWriter, f *failure) {
	writeJSON(w, f.status, openai.ErrorBody(nil, f.status, "", f.code, f.message, f.param))
}

// writeJSON sends a whole JSON answer.
func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		return // the client has left
	}
}

// writeText answers a probe with a word.
func writeText(w http.ResponseWriter, text string) {
	h := w.Header()
	h["Content-Type"] = []string{"text/plain; charset=utf-8"}
	h["Content-Length"] = []string{strconv.Itoa(len(text))}
	w.WriteHeader(http.StatusOK)
	if _, err := io.WriteString(w, text); err != nil {
		return // the client has left
	}
}

// answerPlain sends an answer that needs no request body: the write has a deadline, and an unread body closes
// the connection.
func (in *Ingress) answerPlain(w http.ResponseWriter, r *http.Request, write func()) {
	abandonBody(w, r)
	w.Header()[headerRequestID] = []string{in.requestIDOf(r)}
	if http.NewResponseController(w).SetWriteDeadline(time.Now().Add(in.timers.SlowReader)) != nil {
		write() // not a network connection
		return
	}
	write()
}

func (in *Ingress) refusePlain(w http.ResponseWriter, r *http.Request, f *failure) {
	in.answerPlain(w, r, func() { writeError(w, f) })
}

// refuseUnrouted refuses a request that reaches no application. It counts and logs it like any other request.
func (in *Ingress) refuseUnrouted(w http.ResponseWriter, r *http.Request, route openai.Route, f *failure) {
	name := telemetry.RouteOther
	if route != openai.NoRoute {
		name = route.String()
	}
	in.metrics.RequestRefused(name, f.status)
	in.refusePlain(w, r, f)
	in.log.Info("request not served",
		slog.String("request_id", w.Header().Get(headerRequestID)), slog.String("route", name),
		slog.String("cause", f.code), slog.Int("code", f.status),
		slog.String("method", clipped([]byte(r.Method))), slog.String("path", clipped([]byte(r.URL.Path))))
}

// maxNamesListed bounds the names in an error text.
const maxNamesListed = 20

func joinNames(names []string) string {
	if len(names) > maxNamesListed {
		return strings.Join(names[:maxNamesListed], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}

// model is one entry of /v1/models, in OpenAI's shape with vLLM's root and parent: an alias or an adapter
// points to the application's own id.
type model struct {
	ID      string  `json:"id"`
	Object  string  `json:"object"`
	Created int64   `json:"created"`
	OwnedBy string  `json:"owned_by"`
	Root    string  `json:"root"`
	Parent  *string `json:"parent"`

	MaxModelLen int `json:"max_model_len,omitempty"` // the smallest of its ready ranks, in tokens
}

func modelOf(name string, e *appRoute) model {
	m := model{
		ID: name, Object: "model", Created: e.created, OwnedBy: "dpserve", Root: e.app.Model.Source,
		MaxModelLen: e.router.minModelLen(),
	}
	if name != e.app.Model.ID {
		m.Root, m.Parent = e.app.Model.ID, &e.app.Model.ID
	}
	if m.Root == "" {
		m.Root = name
	}
	return m
}

// listModels answers from the route table; no engine is asked.
func (in *Ingress) listModels(w http.ResponseWriter, r *http.Request, s *routeScope) {
	out := struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{Object: "list", Data: []model{}}
	for _, name := range s.names {
		out.Data = append(out.Data, modelOf(name, s.models[name]))
	}
	in.answerJSON(w, r, out)
}

func (in *Ingress) showModel(w http.ResponseWriter, r *http.Request, s *routeScope, id string) {
	e := s.models[id]
	if e == nil {
		in.refuseUnrouted(w, r, openai.Models, unknownModel([]byte(id), s))
		return
	}
	in.answerJSON(w, r, modelOf(id, e))
}

// health is the readiness of this ingress, for load balancers.
func (in *Ingress) health(w http.ResponseWriter, r *http.Request) {
	if in.Ready() {
		in.answerJSON(w, r, map[string]string{"status": "ready"})
		return
	}
	f := newFailure(openai.CodeNoReadyRank, "no application has a ready rank")
	if in.draining.Load() {
		f.message = "this ingress is draining"
	}
	w.Header()["Retry-After"] = []string{"1"}
	in.refusePlain(w, r, f)
}

// rayHealth is health for probes written for Ray Serve: the same status, with Ray's body.
func (in *Ingress) rayHealth(w http.ResponseWriter, r *http.Request) {
	if !in.Ready() {
		in.health(w, r)
		return
	}
	in.answerPlain(w, r, func() { writeText(w, "success") })
}

// live answers 200 as long as the process runs, whatever it can serve.
func (in *Ingress) live(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, map[string]string{"status": "live"})
}

// rayRoutes lists the applications by route prefix, as Ray Serve does. Where several share one, their names
// are joined by commas.
func (in *Ingress) rayRoutes(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, in.table.Load().routes())
}

func (in *Ingress) showVersion(w http.ResponseWriter, r *http.Request) {
	in.answerJSON(w, r, map[string]string{"version": in.version})
}

func (in *Ingress) answerJSON(w http.ResponseWriter, r *http.Request, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		in.refusePlain(w, r, &failure{
			status:  http.StatusInternalServerError,
			message: "the answer could not be written",
		})
		return
	}
	in.answerPlain(w, r, func() { writeJSON(w, http.StatusOK, body) })
}
