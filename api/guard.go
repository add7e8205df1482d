package api

import (
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

// guard refuses what a browser may send in the name of a page that its user happens to look at (STYLE 10). The API has no
// password on loopback, so this is the lock: no foreign host name (DNS rebinding), no foreign origin (CSRF), no CORS.
type guard struct {
	next   http.Handler
	origin *http.CrossOriginProtection
	strict bool // bound to loopback: the Host header must say so too
}

func newGuard(next http.Handler, strict bool) *guard {
	return &guard{next: next, origin: http.NewCrossOriginProtection(), strict: strict}
}

// ServeHTTP lets a request pass or answers 403.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rearm(w) // a deadline of the request before this one still lies on the connection
	if r.ContentLength != 0 {
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout)) // holds for bodies nobody reads, too
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	if err := g.check(r); err != nil {
		writeError(w, err)
		return
	}
	g.next.ServeHTTP(w, r)
}

func (g *guard) check(r *http.Request) error {
	if g.strict && !loopbackHost(r.Host) {
		return problem.New(problem.PermissionDenied, "host %q is not this machine's loopback address", r.Host).
			WithHint("use http://%s, or bind another address with --admin-bind", DefaultAddr)
	}
	asPost := *r // the standard check lets GET pass, but events and logs are not for other pages either
	asPost.Method = http.MethodPost
	if err := g.origin.Check(&asPost); err != nil {
		return problem.New(problem.PermissionDenied, "request from another web page refused: %w", err).
			WithHint("use the dpserve command or a client that is not a browser")
	}
	return nil
}

// loopbackHost says whether a Host header names this machine by its loopback address.
func loopbackHost(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// loopbackAddr says whether a listener takes connections from this machine only. What is not TCP (tests) does.
func loopbackAddr(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return !ok || tcp.IP.IsLoopback()
}
