package ingress

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// Header names in canonical form, as net/http keeps them.
const (
	headerRequestID = "X-Request-Id"
	headerApp       = "X-Dpserve-App"
	headerGroup     = "X-Dpserve-Group"
	headerRank      = "X-Dpserve-Rank"
	headerAttempts  = "X-Dpserve-Attempts"
	headerTimeout   = "X-Dpserve-Timeout-Ms"
	headerTTFT      = "X-Dpserve-Ttft-Ms"
	headerTPOT      = "X-Dpserve-Tpot-Ms"
	headerPriority  = "X-Dpserve-Priority"
	headerSession   = "X-Dpserve-Session"
	headerSessionID = "X-Session-Id"
	headerCached    = "X-Dpserve-Cached-Tokens"
	// of applications with two pools
	headerPrefill     = "X-Dpserve-Prefill"      // of an answer: remote, local or fallback
	headerPrefillRank = "X-Dpserve-Prefill-Rank" // of an answer and of a request: GROUP/RANK
)

// clientHeader copies an engine's header into the answer. The relay sets Content-Length, and the ingress says
// which origins may read its answers.
func clientHeader(dst, engine http.Header) {
	rankleg.CopyHeader(dst, engine, func(name string) bool {
		return name == "Content-Length" || name == headerRequestID || strings.HasPrefix(name, "X-Dpserve-") ||
			strings.HasPrefix(name, rankleg.OwnPrefix) || strings.HasPrefix(name, "Access-Control-")
	})
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

// hex16 writes a number as 16 hex digits: the id of a request, or a hash.
func hex16(n uint64) string {
	var b [8]byte
	var digits [16]byte
	binary.BigEndian.PutUint64(b[:], n)
	hex.Encode(digits[:], b[:])
	return string(digits[:])
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

// routingHeaders are the request headers that influence routing.
type routingHeaders struct {
	direct    routing.RankID // the rank that the request must go to, if hasDirect
	hasDirect bool
	// the rank is that which the queue of a lockstep group has named
	isReleased bool
	ttftMs     float64 // 0: none
	tpotMs     float64
	priority   int
}

// parse reads the routing headers.
func (w *routingHeaders) parse(h http.Header) *failure {
	*w = routingHeaders{}
	var ok bool
	if v := h[headerRank]; len(v) > 0 {
		if w.direct, ok = rankleg.ParseRankID(v[0]); !ok || len(v) > 1 {
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
