package ingress

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/dpserve/dpserve/internal/engine/openai"
)

// allowed are the methods of the endpoint.
var allowed = []string{"GET, HEAD, OPTIONS, POST"}

// serveOther serves the models, paths behind the route prefixes of applications, and every other path that an
// engine may know. again looks a path up once more that was written in another way; nil: it is clean.
func (h surface) serveOther(w http.ResponseWriter, r *http.Request, again func(path string)) {
	s, path := h.in.table.Load().split(r.URL.Path)
	if id, isModel := strings.CutPrefix(path, modelsPath+"/"); isModel && id != "" && isRead(r.Method) {
		h.showModel(w, r, s, id)
		return
	}
	clean, ok := openai.CleanPath(r.URL.Path)
	switch {
	case r.Method == http.MethodOptions:
		w.Header()["Allow"] = allowed
		h.answerPlain(w, r, func() { w.WriteHeader(http.StatusNoContent) })
		return
	case !ok:
		h.refuseUnrouted(w, r, openai.NoRoute, newFailure(openai.CodeInvalidRequest,
			"the path is too long, has a segment of dots, or has characters other than letters, digits and "+
				"-._~$&+,=:@; write it as the engine's documentation does"))
		return
	case clean != r.URL.Path && again != nil:
		again(clean)
		return
	}
	s, path = h.in.table.Load().split(clean)
	route := h.routeOf(s, path, r.Method)
	switch {
	case openai.IsDenied(path):
		h.refuseUnrouted(w, r, route, denied(s, path))
	case route == openai.NoRoute || !takes(route, r.Method):
		h.refuseMethod(w, r, route, path)
	case route == openai.Models:
		h.listModels(w, r, s)
	default:
		target, f := targetOf(route, path, r.URL)
		if f != nil {
			h.refuseUnrouted(w, r, route, f)
			return
		}
		h.in.serveWith(w, r, s, route, target, nil)
	}
}

// routeOf is the route of a clean path; NoRoute if the path is dpserve's own, or the method is none that
// engines take.
func (h surface) routeOf(s *routeScope, path, method string) openai.Route {
	route := openai.RouteOf(path).ForMethod(method)
	switch {
	case route != openai.NoRoute, s == h.in.table.Load().root && own[path] != nil:
		return route
	case isRead(method):
		return openai.OtherRead
	case method == http.MethodPost:
		return openai.Other
	}
	return openai.NoRoute
}

// targetOf is the path and query at the engine, "" for a route with a fixed path.
func targetOf(route openai.Route, path string, u *url.URL) (string, *failure) {
	if route <= openai.Models {
		return "", nil
	}
	if u.RawQuery != "" {
		path += "?" + u.RawQuery
	}
	if len(path) > openai.MaxTarget {
		return "", &failure{
			status: http.StatusRequestURITooLong, code: openai.CodeInvalidRequest,
			message: fmt.Sprintf("path and query are longer than %d bytes", openai.MaxTarget),
		}
	}
	return path, nil
}

// isRead reports whether a method is GET, or HEAD, which is GET without the body that net/http leaves out.
func isRead(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// takes reports whether a route takes a method.
func takes(route openai.Route, method string) bool {
	return method == route.Method() || isRead(method) && isRead(route.Method())
}

// refuseMethod refuses a method that the path does not take.
func (h surface) refuseMethod(w http.ResponseWriter, r *http.Request, route openai.Route, path string) {
	takes := "GET and POST"
	switch {
	case route == openai.ResponseRead:
		takes = "GET and DELETE"
		w.Header()["Allow"] = []string{"GET, HEAD, DELETE"}
	case route != openai.NoRoute:
		takes = route.Method()
		w.Header()["Allow"] = []string{takes}
	case own[path] != nil:
		takes = http.MethodGet
		w.Header()["Allow"] = []string{takes}
	default:
		w.Header()["Allow"] = allowed
	}
	h.refuseUnrouted(w, r, route, &failure{
		status: http.StatusMethodNotAllowed, code: openai.CodeInvalidRequest,
		message: fmt.Sprintf("%s takes %s, not %s", path, takes, clipped([]byte(r.Method))),
	})
}

// denied refuses a path that steers an engine.
func denied(s *routeScope, path string) *failure {
	text := clipped([]byte(path)) +
		" steers an engine, or shows what only an operator should see; clients do not reach it"
	if c := openai.ControlOf(path); c != nil && c.IsAllowed() {
		app := "APP"
		if s.only != nil {
			app = s.only.app.Name
		}
		text += fmt.Sprintf("; an operator calls it with `dpserve ranks call %s %s`", app, path)
	} else {
		text += "; what an operator needs of it is on the admin port"
	}
	return newFailure(openai.CodeRouteDenied, text)
}

// wantsWebsocket reports whether a request wants to go on as a websocket.
func wantsWebsocket(r *http.Request) bool {
	for _, line := range r.Header["Upgrade"] {
		if strings.Contains(strings.ToLower(line), "websocket") {
			return true
		}
	}
	return false
}

// refuseUpgrade refuses a websocket, which cannot be passed on.
func (h surface) refuseUpgrade(w http.ResponseWriter, r *http.Request) {
	_, path := h.in.table.Load().split(r.URL.Path)
	w.Header()["Upgrade"] = []string{"HTTP/1.1"}
	h.refuseUnrouted(w, r, openai.RouteOf(path), &failure{
		status: http.StatusUpgradeRequired, code: openai.CodeInvalidRequest,
		message: "websockets are not passed on; send the request over HTTP, and read the answer as a stream",
	})
}

// scanBody reads what dpserve needs of a body.
func (req *request) scanBody(body []byte) error {
	if req.route.IsFree() {
		return req.scan.ScanFree(req.route, req.r.Header.Get("Content-Type"), body)
	}
	return req.scan.Scan(req.route, body)
}
