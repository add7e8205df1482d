package ingress

import (
	"math"
	"net/http"
	"strconv"

	"github.com/dpserve/dpserve/engine/openai"
	"github.com/dpserve/dpserve/routing"
)

// routingHeaders are the request headers that influence routing.
type routingHeaders struct {
	direct    routing.RankID
	hasDirect bool
	ttftMs    float64 // 0: none
	tpotMs    float64
	priority  int
}

// parse reads the routing headers.
func (w *routingHeaders) parse(h http.Header) *failure {
	*w = routingHeaders{}
	var ok bool
	if v := h[headerRank]; len(v) > 0 {
		if w.direct, ok = parseRank(v[0]); !ok {
			return newFailure(openai.CodeInvalidRequest, "x-dpserve-rank must be GROUP/RANK, for example 0/3")
		}
		w.hasDirect = true
	}
	if v := h[headerTTFT]; len(v) > 0 {
		if w.ttftMs, ok = parseMillis(v[0]); !ok {
			return newFailure(openai.CodeInvalidRequest,
				"x-dpserve-ttft-ms must be a number of milliseconds above 0, at most 86400000")
		}
	}
	if v := h[headerTPOT]; len(v) > 0 {
		if w.tpotMs, ok = parseMillis(v[0]); !ok {
			return newFailure(openai.CodeInvalidRequest,
				"x-dpserve-tpot-ms must be a number of milliseconds above 0, at most 86400000")
		}
	}
	if v := h[headerPriority]; len(v) > 0 {
		n, err := strconv.ParseInt(v[0], 10, 32)
		if err != nil {
			return newFailure(openai.CodeInvalidRequest,
				"x-dpserve-priority must be a whole number; higher goes first")
		}
		w.priority = int(n)
	}
	return nil
}

// parseMillis parses a time of a service level objective: above 0, at most a day.
func parseMillis(s string) (ms float64, ok bool) {
	ms, err := strconv.ParseFloat(s, 64)
	if err != nil || math.IsNaN(ms) || ms <= 0 || ms > float64(maxTimeout.Milliseconds()) {
		return 0, false
	}
	return ms, true
}

// maxSession bounds a session's name; the rest of a longer name is ignored.
const maxSession = 256

// sessionOf is the session of a request: from a header, otherwise the body's user; "" for none.
func sessionOf(h http.Header, user []byte) string {
	for _, name := range [...]string{headerSessionID, headerSession} {
		if v := h[name]; len(v) > 0 && v[0] != "" {
			return v[0][:min(len(v[0]), maxSession)]
		}
	}
	return string(user[:min(len(user), maxSession)])
}
