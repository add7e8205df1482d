package ingress

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// modelsPath lists the models; an id behind a slash is one of them.
const modelsPath = "/v1/models"

// surface is what answers on the inference port: it finds the handler of each path, and answers by itself
// what needs no rank.
type surface struct{ in *Ingress }

// own are the paths that dpserve answers itself, beside the models.
var own = map[string]func(surface, http.ResponseWriter, *http.Request){
	"/health": surface.health, "/healthz": surface.health, "/readyz": surface.health,
	"/health_generate": surface.health, // of SGLang
	"/ping":            surface.health, "/livez": surface.live, "/-/healthz": surface.rayHealth,
	"/-/routes": surface.rayRoutes, "/version": surface.showVersion,
}

// routes builds the HTTP surface.
func (h surface) routes() http.Handler { return h.limitAndRecover(h.newEngine()) }

// newEngine returns the table of routes. gin only picks the handler: its Recovery would turn the panic that
// cuts a connection into a clean end.
func (h surface) newEngine() *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	g := gin.New()
	g.RedirectTrailingSlash, g.HandleMethodNotAllowed = false, false
	g.UseRawPath, g.UnescapePathValues = false, false
	for r := openai.Completions; r < openai.Models; r++ {
		g.POST(r.Path(), func(c *gin.Context) {
			h.in.serveWith(c.Writer, c.Request, h.in.table.Load().root, r, "", nil)
		})
	}
	g.POST("/ping", func(c *gin.Context) { h.health(c.Writer, c.Request) }) // of SageMaker
	for _, method := range []string{http.MethodGet, http.MethodHead} {      // load balancers probe with HEAD
		for path, answer := range own {
			g.Handle(method, path, func(c *gin.Context) { answer(h, c.Writer, c.Request) })
		}
		for _, path := range []string{modelsPath, modelsPath + "/*id"} {
			g.Handle(method, path, func(c *gin.Context) { h.serveOther(c.Writer, c.Request, nil) })
		}
	}
	g.NoRoute(func(c *gin.Context) {
		h.serveOther(c.Writer, c.Request, func(path string) {
			c.Request.URL.Path, c.Request.URL.RawPath = path, ""
			g.HandleContext(c)
		})
	})
	return g
}

// limitAndRecover limits header fields, ends circles, answers browsers, asks for API keys, and catches
// panics. The panic that cuts a stream goes on to net/http.
func (h surface) limitAndRecover(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer h.recover(r)
		if f := h.headerTooLarge(r); f != nil {
			h.refuseUnrouted(w, r, openai.NoRoute, f)
			return
		}
		if c := connOf(r); c != nil && c.isProbe {
			w.Header()["Connection"] = []string{"close"}
		}
		if h.isLoop(r) {
			h.refuseUnrouted(w, r, openai.NoRoute, newFailure(openai.CodeLoopDetected,
				"this cluster has sent the request itself: an attached engine's URL leads back to it; "+
					"remove that rank (dpserve ranks remove APP URL)"))
			return
		}
		if h.in.steers != nil {
			if answer := h.in.steers(r.URL.Path); answer != nil {
				w.Header()["Connection"] = []string{"close"} // it sets deadlines of its own
				answer.ServeHTTP(w, r)
				return
			}
		}
		if len(r.Header["Upgrade"]) > 0 && wantsWebsocket(r) {
			h.refuseUpgrade(w, r)
			return
		}
		if len(r.Header["Origin"]) > 0 && h.allowOrigin(w, r) {
			return
		}
		r, f := h.authenticate(r)
		if f != nil {
			h.refuseUnauthenticated(w, r, f)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// preflightLasts is how long browsers remember the answer to a preflight, in seconds.
const preflightLasts = "600"

// allowOrigin lets web pages of any origin use the inference port (CORS), as vLLM and SGLang do by default.
// Browsers send no cookies and no credentials of their own along. It answers a preflight; answered is false
// for every other request.
func (h surface) allowOrigin(w http.ResponseWriter, r *http.Request) (answered bool) {
	header := w.Header()
	header["Access-Control-Allow-Origin"] = []string{"*"}
	if r.Method != http.MethodOptions || len(r.Header["Access-Control-Request-Method"]) == 0 {
		header["Access-Control-Expose-Headers"] = []string{"*"}
		return false
	}
	header["Access-Control-Allow-Methods"] = []string{"GET, HEAD, OPTIONS, POST, DELETE"}
	header["Access-Control-Max-Age"] = []string{preflightLasts}
	header["Vary"] = []string{"Access-Control-Request-Headers"}
	if asked := r.Header["Access-Control-Request-Headers"]; len(asked) > 0 {
		header["Access-Control-Allow-Headers"] = asked // "*" would not include Authorization
	}
	h.answerPlain(w, r, func() { writeText(w, "OK") })
	return true
}

// isLoop reports whether this cluster has sent the request to an engine already. Without the check, a rank
// whose URL is that of an ingress would send each request to itself until every place is taken.
func (h surface) isLoop(r *http.Request) bool {
	for _, line := range r.Header["Via"] {
		words := strings.FieldsFunc(line, func(c rune) bool { return c == ',' || c == ' ' || c == '\t' })
		if slices.Contains(words, h.in.pseudonym) {
			return true
		}
	}
	return false
}

// headerTooLarge checks a request's line and header against the limits.
func (h surface) headerTooLarge(r *http.Request) *failure {
	fields, bytes := measureHeader(r)
	var text string
	switch {
	case fields > h.in.limits.MaxHeaderFields:
		text = fmt.Sprintf("the request has more than %d header fields", h.in.limits.MaxHeaderFields)
	case bytes > h.in.limits.MaxHeaderBytes:
		text = fmt.Sprintf("the request's line and header are larger than %d bytes",
			h.in.limits.MaxHeaderBytes)
	default:
		return nil
	}
	return &failure{
		status: http.StatusRequestHeaderFieldsTooLarge, code: openai.CodeInvalidRequest, message: text,
	}
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

func (h surface) recover(r *http.Request) {
	switch p := recover(); p {
	case nil:
	case http.ErrAbortHandler:
		panic(p)
	default:
		h.in.log.Error("handler panicked", slog.String("path", r.URL.Path), slog.Any("err", p),
			slog.String("stack", string(debug.Stack())))
		panic(http.ErrAbortHandler) // the answer may have begun, so the client must see a cut
	}
}

// writeError sends a failure in the shape of a route.
func writeError(w http.ResponseWriter, route openai.Route, f *failure) {
	writeJSON(w, f.status, route.Shape().Error(nil, f.status, "", f.code, f.message, f.param))
}

// writeJSON sends a whole JSON answer.
func writeJSON(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = []string{"application/json"}
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	_, _ = w.Write(body) //nolint:gosec // JSON, and its content type says so; it fails if the client has left
}

// writeText answers a probe with a word.
func writeText(w http.ResponseWriter, text string) {
	h := w.Header()
	h["Content-Type"] = []string{"text/plain; charset=utf-8"}
	h["Content-Length"] = []string{strconv.Itoa(len(text))}
	w.WriteHeader(http.StatusOK)
	_, _ = io.WriteString(w, text) // fails if the client has left
}

// answerPlain sends an answer that needs no request body: the write has a deadline, and an unread body closes
// the connection.
func (h surface) answerPlain(w http.ResponseWriter, r *http.Request, write func()) {
	skipBody(w, r)
	w.Header()[headerRequestID] = []string{h.in.requestIDOf(r)}
	// only network connections have deadlines
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(h.in.timers.SlowReader))
	write()
}

func (h surface) refusePlain(w http.ResponseWriter, r *http.Request, route openai.Route, f *failure) {
	h.answerPlain(w, r, func() { writeError(w, route, f) })
}

// refuseUnrouted refuses a request that reaches no application. It counts and logs it like any other request.
func (h surface) refuseUnrouted(w http.ResponseWriter, r *http.Request, route openai.Route, f *failure) {
	name := telemetry.RouteOther
	if route != openai.NoRoute {
		name = route.String()
	}
	h.in.metrics.RequestRefused(name, f.status)
	h.refusePlain(w, r, route, f)
	h.in.log.Info("request not served",
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

// listModels answers from the route table and the ranks' streams; no engine is asked.
func (h surface) listModels(w http.ResponseWriter, r *http.Request, s *routeScope) {
	out := struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{Object: "list", Data: []model{}}
	for _, name := range slices.Concat(s.names, s.loadedAdapters()) {
		if e := s.find(name, keyOf(r)); e != nil {
			out.Data = append(out.Data, modelOf(name, e))
		}
	}
	h.answerJSON(w, r, out)
}

func (h surface) showModel(w http.ResponseWriter, r *http.Request, s *routeScope, id string) {
	e := s.find(id, keyOf(r))
	if e == nil {
		h.refuseUnrouted(w, r, openai.Models, unknownModel([]byte(id), s, keyOf(r)))
		return
	}
	h.answerJSON(w, r, modelOf(id, e))
}

// health is the readiness of this ingress, for load balancers.
func (h surface) health(w http.ResponseWriter, r *http.Request) {
	if h.in.Ready() {
		out := map[string]string{"status": "ready"}
		if h.in.note != nil {
			if note := h.in.note(); note != "" {
				out["note"] = note
			}
		}
		h.answerJSON(w, r, out)
		return
	}
	f := newFailure(openai.CodeNoReadyRank, "no application has a ready rank")
	if h.in.draining.Load() {
		f.message = "this ingress is draining"
	}
	w.Header()["Retry-After"] = []string{"1"}
	h.refusePlain(w, r, openai.NoRoute, f)
}

// rayHealth is health for probes written for Ray Serve: the same status, with Ray's body.
func (h surface) rayHealth(w http.ResponseWriter, r *http.Request) {
	if !h.in.Ready() {
		h.health(w, r)
		return
	}
	h.answerPlain(w, r, func() { writeText(w, "success") })
}

// live answers 200 as long as the process runs, whatever it can serve.
func (h surface) live(w http.ResponseWriter, r *http.Request) {
	h.answerJSON(w, r, map[string]string{"status": "live"})
}

// rayRoutes lists the applications by route prefix, as Ray Serve does. Where several share one, their names
// are joined by commas.
func (h surface) rayRoutes(w http.ResponseWriter, r *http.Request) {
	h.answerJSON(w, r, h.in.table.Load().routes())
}

func (h surface) showVersion(w http.ResponseWriter, r *http.Request) {
	h.answerJSON(w, r, map[string]string{"version": h.in.version})
}

func (h surface) answerJSON(w http.ResponseWriter, r *http.Request, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		h.refusePlain(w, r, openai.NoRoute, &failure{
			status:  http.StatusInternalServerError,
			message: "the answer could not be written",
		})
		return
	}
	h.answerPlain(w, r, func() { writeJSON(w, http.StatusOK, body) })
}
