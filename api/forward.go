package api

import (
	"net/http"
	"strings"
)

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
