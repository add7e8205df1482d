package ingress

import (
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/telemetry"
)

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
