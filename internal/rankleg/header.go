package rankleg

import (
	"net/http"
	"net/textproto"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// OwnPrefix begins the header fields of the data port. No client and no engine can set them.
const OwnPrefix = "Dpserve-"

const (
	headerRequestID = "X-Request-Id"
	headerRank      = "X-Data-Parallel-Rank" // for an engine that hosts several ranks
)

// CopyHeader adds src to dst without the fields of one connection (RFC 9110, 7.6.1) and those that isDropped
// names. Values are shared and not copied; no code changes them.
func CopyHeader(dst, src http.Header, isDropped func(name string) bool) {
	named := namedByConnection(src)
	for name, values := range src {
		if !isOfConnection(name) && !named[name] && !isDropped(name) {
			dst[name] = values
		}
	}
}

// EngineHeader is the header for an engine, made of that of a client.
func EngineHeader(src http.Header, requestID []string) http.Header {
	out := make(http.Header, len(src)+1)
	CopyHeader(out, src, isOwn)
	return finishHeader(out, requestID)
}

// StripHeader is EngineHeader for the header that an ingress of another node has sent. It changes h itself.
func StripHeader(h http.Header) http.Header {
	requestID := h[headerRequestID]
	named := namedByConnection(h)
	for name := range h {
		if isOwn(name) || isOfConnection(name) || named[name] {
			delete(h, name)
		}
	}
	return finishHeader(h, requestID)
}

// finishHeader sets what every engine gets.
func finishHeader(h http.Header, requestID []string) http.Header {
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil // or net/http adds its own
	}
	if len(requestID) > 0 {
		h[headerRequestID] = requestID
	}
	return h
}

// isOwn says that only dpserve may set a header field towards an engine: how far a request came, and which
// rank it is for.
func isOwn(name string) bool {
	switch name {
	case "Host", "Content-Length", "Accept-Encoding", "Expect", "Forwarded", "X-Real-Ip", headerRequestID:
		return true
	}
	return strings.HasPrefix(name, "X-Forwarded-") || strings.HasPrefix(name, "X-Dpserve-") ||
		strings.HasPrefix(name, OwnPrefix) || strings.HasPrefix(name, "X-Data-Parallel-")
}

// isOfConnection says that a header field (in canonical form) belongs to one connection and is never passed
// on.
func isOfConnection(name string) bool {
	switch name {
	case "Connection", "Keep-Alive", "Proxy-Connection", "Proxy-Authenticate", "Proxy-Authorization", "Te",
		"Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

// namedByConnection returns the fields that Connection declares to belong to this connection; nil for most
// messages.
func namedByConnection(h http.Header) map[string]bool {
	var out map[string]bool
	for _, line := range h["Connection"] {
		for _, name := range strings.Split(line, ",") {
			name = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))
			if name == "" || name == "Close" || name == "Keep-Alive" {
				continue
			}
			if out == nil {
				out = map[string]bool{}
			}
			out[name] = true
		}
	}
	return out
}

// ParseRankID reads GROUP/RANK.
func ParseRankID(s string) (id routing.RankID, ok bool) {
	group, rank, ok := client.ParseRankName(s)
	if !ok {
		return 0, false
	}
	return routing.ID(group, rank), true
}
