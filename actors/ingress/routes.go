package ingress

import (
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"

	"github.com/gin-gonic/gin"

	"github.com/dpserve/dpserve/engine/openai"
)

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

// routes builds the HTTP surface. gin only picks the handler: its Recovery would turn the panic that cuts a
// connection into a clean end.
func (in *Ingress) routes() http.Handler {
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
	return in.limitAndRecover(g)
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
