package api

import (
	"net/http"
	"time"

	"github.com/dpserve/dpserve/internal/problem"
)

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
