package api

import (
	"errors"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
)

// guard refuses requests that a browser may send on behalf of a web page. It protects every bind, with and
// without a token: the Host header must name this node (DNS rebinding needs the attacker's own name), a page
// of another origin may not send requests (CSRF), and no answer has CORS headers.
type guard struct {
	next     http.Handler
	origin   *http.CrossOriginProtection
	loopback bool            // bound to loopback: an IP address in the Host header must be a loopback one
	names    map[string]bool // names of this node beside localhost, in lower case
}

func newGuard(next http.Handler, loopback bool, names []string) *guard {
	g := &guard{
		next: next, origin: http.NewCrossOriginProtection(), loopback: loopback,
		names: map[string]bool{"localhost": true},
	}
	for _, name := range names {
		g.names[canonicalName(name)] = true
	}
	return g
}

// ServeHTTP passes a request on or answers 403.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	beginAnswer(w, r)
	if err := g.check(r); err != nil {
		WriteError(w, err)
		return
	}
	g.next.ServeHTTP(w, r)
}

// beginAnswer sets the deadlines of a request and the headers that every answer has.
func beginAnswer(w http.ResponseWriter, r *http.Request) {
	extendWriteDeadline(w) // the connection still has the deadline of its previous request
	if r.ContentLength != 0 {
		// also bounds bodies that no handler reads
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
}

func (g *guard) check(r *http.Request) error {
	if err := g.checkHost(r.Host); err != nil {
		return err
	}
	if isPagePath(r.URL.Path) {
		return nil // a link on another page leads here, and these files are the same everywhere
	}
	asPost := *r // the standard check lets GET pass, but other pages must not read events and logs
	asPost.Method = http.MethodPost
	err := g.origin.Check(&asPost)
	if err == nil && r.Method != http.MethodGet && r.Method != http.MethodHead {
		err = checkOwnPage(r)
	}
	if err != nil {
		return problem.New(problem.PermissionDenied, "request from another web page refused: %w", err).
			WithHint("use the dpserve command or a client that is not a browser")
	}
	return nil
}

// checkHost refuses a Host header that does not name this node. A name server cannot redirect an IP address,
// so every address passes; on a loopback bind only loopback addresses are valid.
func (g *guard) checkHost(host string) error {
	name := hostName(host)
	ip := net.ParseIP(name)
	switch {
	case ip != nil && g.loopback && !ip.IsLoopback():
		return problem.New(problem.PermissionDenied, "host %q is not this machine's loopback address", host).
			WithHint("use http://%s, or bind another address with --admin-bind", client.DefaultAddr)
	case ip != nil, g.names[canonicalName(name)]:
		return nil
	}
	return problem.New(problem.PermissionDenied, "host %q is not a name of this node", host).
		WithHint("use an IP address of the node, such as http://%s, or start the node with --admin-host NAME",
			client.DefaultAddr)
}

// checkOwnPage refuses a changing request that a browser marks as coming from another page than one of this
// port.
func checkOwnPage(r *http.Request) error {
	const site = "Sec-Fetch-Site"
	for name := range r.Header {
		if strings.HasPrefix(name, "Sec-Fetch-") && r.Header.Get(site) != "same-origin" {
			return errors.New("a browser sends it, and not for a page of this port")
		}
	}
	for _, origin := range r.Header["Origin"] {
		if u, err := url.Parse(origin); err != nil || !strings.EqualFold(u.Host, r.Host) {
			return errors.New("its Origin is not its Host")
		}
	}
	return nil
}

// hostName returns a Host header without port and without the brackets of IPv6.
func hostName(host string) string {
	if h, _, err := net.SplitHostPort(host); err == nil {
		return h
	}
	return strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
}

// canonicalName returns a host name in the form that is compared: lower case, without the root's dot.
func canonicalName(name string) string { return strings.TrimSuffix(strings.ToLower(name), ".") }

// isLoopback says whether a listener takes connections from this machine only. What is not TCP (tests) does.
func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return !ok || tcp.IP.IsLoopback()
}
