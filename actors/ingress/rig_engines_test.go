package ingress

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sse writes events as an engine does, one flush each.
func sse(w http.ResponseWriter, events ...string) {
	if w.Header().Get("Content-Type") == "" {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	}
	for _, e := range events {
		_, _ = io.WriteString(w, "data: "+e+"\n\n")
		w.(http.Flusher).Flush()
	}
}

func events(list ...string) string {
	var b strings.Builder
	for _, e := range list {
		b.WriteString("data: " + e + "\n\n")
	}
	return b.String()
}

// sends is an engine that answers every request with the same events.
func sends(list ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		sse(w, list...)
	}
}

func drain(r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }

// replies is an engine that answers every request with the same JSON.
func replies(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// resets is an engine that closes the connection at once.
func resets(w http.ResponseWriter, r *http.Request) {
	drain(r)
	conn, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		_ = conn.Close()
	}
}

// cutAfter sends events, then cuts the connection.
func cutAfter(list ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		sse(w, list...)
		panic(http.ErrAbortHandler)
	}
}

// hangingEngine is an engine that sends events and then nothing until its client leaves.
type hangingEngine struct{ came, left atomic.Int32 }

func (h *hangingEngine) sends(list ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		drain(r)
		if len(list) > 0 {
			sse(w, list...)
		}
		h.came.Add(1)
		<-r.Context().Done()
		h.left.Add(1)
	}
}

// lapse is how long a ticket of another node outlives its stream without a Done, as a DPServer takes back
// tickets; local tests do without.
const lapse = 500 * time.Millisecond

// soon is how long a test waits for what must come: long, because other programs may need the processors.
const soon = 30 * time.Second

func eventually(t testing.TB, what func() bool, text string) {
	t.Helper()
	require.Eventually(t, what, soon, time.Millisecond, text)
}
