package ingress

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engineleg"
	"github.com/dpserve/dpserve/routing"
)

// Header names in canonical form, as net/http keeps them.
const (
	headerRequestID  = "X-Request-Id"
	headerApp        = "X-Dpserve-App"
	headerGroup      = "X-Dpserve-Group"
	headerRank       = "X-Dpserve-Rank"
	headerAttempts   = "X-Dpserve-Attempts"
	headerTimeout    = "X-Dpserve-Timeout-Ms"
	headerTTFT       = "X-Dpserve-Ttft-Ms"
	headerTPOT       = "X-Dpserve-Tpot-Ms"
	headerPriority   = "X-Dpserve-Priority"
	headerSession    = "X-Dpserve-Session"
	headerSessionID  = "X-Session-Id"
	headerCached     = "X-Dpserve-Cached-Tokens"
	headerEngineRank = "X-Data-Parallel-Rank"
)

// ownHeader reports whether only dpserve may set a header field towards an engine: how far a request came,
// and which rank it is for.
func ownHeader(name string) bool {
	switch name {
	case "Host", "Content-Length", "Accept-Encoding", "Expect", "Forwarded", "X-Real-Ip", headerRequestID,
		headerEngineRank:
		return true
	}
	return strings.HasPrefix(name, "X-Forwarded-") || strings.HasPrefix(name, "X-Dpserve-") ||
		strings.HasPrefix(name, "Dpserve-") ||
		strings.HasPrefix(name, "X-Data-Parallel-")
}

// engineHeader is the header for the engine, made of the client's. Values are shared and not copied; no code
// changes them.
func engineHeader(client http.Header, requestID []string) http.Header {
	hop := engineleg.HopNames(client)
	out := make(http.Header, len(client)+1)
	for name, values := range client {
		if !engineleg.Hop(name) && !ownHeader(name) && !hop[name] {
			out[name] = values
		}
	}
	if _, ok := out["User-Agent"]; !ok {
		out["User-Agent"] = nil // or net/http adds its own
	}
	out[headerRequestID] = requestID
	return out
}

// clientHeader copies an engine's header into the answer. The relay sets Content-Length.
func clientHeader(dst, engine http.Header) {
	hop := engineleg.HopNames(engine)
	for name, values := range engine {
		if !engineleg.Hop(name) && !hop[name] && name != "Content-Length" && name != headerRequestID &&
			!strings.HasPrefix(name, "X-Dpserve-") {
			dst[name] = values
		}
	}
}

// withRank adds the rank's number, for an engine that hosts several ranks behind one URL. It copies the
// header, because an earlier attempt may still read the shared one.
func withRank(h http.Header, selector int) http.Header {
	out := make(http.Header, len(h)+1)
	for name, values := range h {
		out[name] = values
	}
	out[headerEngineRank] = []string{strconv.Itoa(selector)}
	return out
}

// validRequestID accepts ids that are safe in a log line and in an engine's own id.
func validRequestID(s string) bool {
	if s == "" || len(s) > maxRequestID {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

const requestIDDigits = "0123456789abcdef"

// newRequestID writes a request's number as 16 hex digits.
func newRequestID(id uint64) string {
	var b [16]byte
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = requestIDDigits[id&0xf]
		id >>= 4
	}
	return string(b[:])
}

// maxTimeout bounds x-dpserve-timeout-ms: a day.
const maxTimeout = 24 * time.Hour

// parseTimeout reads x-dpserve-timeout-ms; ok is false if it is no whole number of milliseconds from 1 to a
// day.
func parseTimeout(s string) (d time.Duration, ok bool) {
	ms, err := strconv.ParseInt(s, 10, 64)
	if err != nil || ms < 1 || ms > maxTimeout.Milliseconds() {
		return 0, false
	}
	return time.Duration(ms) * time.Millisecond, true
}

// parseRank reads x-dpserve-rank: GROUP/RANK.
func parseRank(s string) (id routing.RankID, ok bool) {
	g, r, found := strings.Cut(s, "/")
	group, err1 := strconv.ParseUint(g, 10, 16)
	rank, err2 := strconv.ParseUint(r, 10, 16)
	if !found || err1 != nil || err2 != nil {
		return 0, false
	}
	return routing.ID(int(group), int(rank)), true
}

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
