// Package rankleg is the way to ask a rank: be admitted at the rank's actor, send the request to its engine,
// hand out the answer. Near asks the ranks of its own node. The data client of package noderpc asks those of
// other nodes; there, the data port asks through a Near of its own. Both are an Asker, and one test suite of
// package ingress runs over both.
package rankleg

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/enginehttp"
	"github.com/dpserve/dpserve/routing"
)

// Asker asks ranks.
type Asker interface {
	// Ask returns when the header of the engine's answer has arrived, or when none will come. A refused
	// request has a reply with a refusal, no answer and no error. Without refusal and error, the caller
	// closes the answer's body. An error is one of those below, or the engine broke off. The body of an
	// answer can end with ErrUnreachable or ErrNoLease.
	//
	// The rank's ticket goes to q.OnTicket, at most once and before Ask returns. From then on the caller
	// returns it, with exactly one Done. Without that call no ticket is left.
	Ask(ctx context.Context, q *Request) (*http.Response, msg.AdmitReply, error)
	// Reserve asks for the ticket alone. The ticket lives until q.Admit.Ctx ends; ctx bounds the wait for it.
	Reserve(ctx context.Context, q *Request) (msg.AdmitReply, error)
}

// Errors of a request that an engine has not answered. Any other error means that the engine was asked and
// broke off.
var (
	ErrUnreachable   = errors.New("the node's data port cannot be reached")
	ErrEngineRefused = errors.New("the engine took no connection")
	ErrFirstToken    = errors.New("the engine did not answer in time")
	ErrMalformed     = errors.New("the engine's answer is no well-formed HTTP answer, " +
		"or its head is too large")
	ErrNoLease = errors.New("the rank's node has lost its lease")
	ErrNoFiles = errors.New("the node has no file descriptor left for a connection to the engine")
	// ErrTooLate: Guard refused the write. Nothing of the request was written.
	ErrTooLate = errors.New("the request must not be sent any more")
	// ErrNotResent: the engine, which lives, was closing the idle connection when the request was written,
	// and a guarded request is not sent twice.
	ErrNotResent = errors.New("the engine had closed its idle connection, and the request is sent only once")
)

// IsRefused says that the engine took no connection: nothing was sent.
func IsRefused(err error) bool {
	var op *net.OpError
	return errors.Is(err, ErrEngineRefused) || errors.As(err, &op) && op.Op == "dial" && !IsOutOfFiles(err)
}

// IsOutOfFiles says that there was no connection because this process, or its machine, has no file left.
func IsOutOfFiles(err error) bool {
	return errors.Is(err, ErrNoFiles) || errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
}

// IsMalformed says that the engine sent bytes that are no HTTP answer, or a head that is too large.
func IsMalformed(err error) bool {
	var p *enginehttp.ProtocolError
	return errors.Is(err, ErrMalformed) || errors.As(err, &p)
}

// Request is a request for one rank. It is used for one Ask only.
type Request struct {
	Rank  *Rank
	Route openai.Route // at the engine
	// path and query at the engine, of a route without a fixed path; "": the route's path
	Target string
	// the engine's name of the adapter that the body names in another way; "": the body says it, or the model
	Model   string
	Reset   bool        // in place of a Route: the engine is asked to drop its prefix cache
	Header  http.Header // for the engine, read only
	Body    []byte      // for the engine, read only, and not after Ask has returned
	IsPlain bool        // Body is no JSON object
	Rest    Rest        // follows Body; nil for most: the whole body is in memory
	// Ctx is the life of the ticket, Reply belongs to Ask; nil: the request needs no ticket, or IsHeld
	Admit *msg.Admit
	// the caller holds a ticket of this incarnation already, from Reserve: Ask asks for none and returns none
	IsHeld bool
	// of a request that must not be sent late, and never twice; nil: it may be
	Guard *Guard
	// receives the ticket; set if Admit is
	OnTicket func(t *msg.Ticket)
	// time limit for the header of the engine's answer, which the other node of a far rank enforces; 0: none
	FirstToken time.Duration

	// set by Ask

	Resent         bool // the engine was asked a second time, because it had closed the idle connection
	IsAdmitPending bool // the rank's actor may still read Admit after Ask has returned
}

// Rest is the part of a body that comes from the client while the request is sent. It is read once: after its
// first Read the request cannot be sent again. It may be read after Ask has returned, until its owner ends
// it.
type Rest interface {
	io.Reader
	Size() int64 // in bytes
	IsBegun() bool
	End() // if it has begun: a Read that waits ends, and none follows
}

// Guard watches the sending of a request. Its functions must not block.
type Guard struct {
	// IsUsable is asked directly before the request is written; false: it is not written. nil: it always may
	IsUsable func() bool
	// TimeLeft is how long the request may still be written, for the node of a far rank, which has no
	// IsUsable of its own; nil: it always may
	TimeLeft func() time.Duration
	// OnWritten is called when the whole request is written: to the engine, or to the node of a far rank,
	// which observes TimeLeft; nil: nobody wants to know
	OnWritten func()
}

// allow is ErrTooLate if the request must not be written.
func (g *Guard) allow() error {
	if g.IsUsable != nil && !g.IsUsable() {
		return ErrTooLate
	}
	return nil
}

// Send is called by an Asker that sends the request to another node instead of an engine.
func (g *Guard) Send() error {
	if g == nil {
		return nil
	}
	if err := g.allow(); err != nil {
		return err
	}
	if g.OnWritten != nil {
		g.OnWritten()
	}
	return nil
}

// Rank is one incarnation of a rank. It is immutable.
type Rank struct {
	Node        string // that runs the rank
	App         string
	Unit        string
	ID          routing.RankID
	Epoch       uint64
	Incarnation uint64
	Mailbox     msg.Mailbox
	Target      msg.Target
	base        *url.URL
	urls        [fixedRoutes]*url.URL
	reset       *url.URL
}

// Machine names the machine that runs the rank's engine: of an attached engine by its address, unless that is
// the node's own.
func (r *Rank) Machine() string {
	host := r.base.Hostname()
	if ip := net.ParseIP(host); r.Target.Owned || host == "localhost" || ip != nil && ip.IsLoopback() {
		return r.Node
	}
	return host
}

// fixedRoutes are the routes to which requests go without a Target.
const fixedRoutes = int(openai.Models) + 1

// ResetPath is the route of vLLM's and SGLang's engines that drops the prefix cache.
const ResetPath = "/reset_prefix_cache"

// NewRank makes a rank from its snapshot. The error is about the engine's URL.
func NewRank(rec *msg.Record) (*Rank, error) {
	s := rec.Snapshot
	r := &Rank{
		Node: s.Node, App: rec.App, Unit: rec.Unit, ID: rec.Rank, Epoch: rec.Epoch,
		Incarnation: rec.Incarnation, Mailbox: s.Mailbox, Target: s.Target,
	}
	base, err := url.Parse(s.Target.URL)
	if err != nil || base.Host == "" || !httpguts.ValidHostHeader(base.Host) {
		return nil, fmt.Errorf("rank %s: engine URL %q has no host in ASCII; want http://host:port", rec.Rank,
			s.Target.URL)
	}
	r.base = base
	for route := range r.urls {
		u := *base
		u.Path = strings.TrimRight(base.Path, "/") + openai.Route(route).Path()
		r.urls[route] = &u
	}
	u := *base
	u.Path = strings.TrimRight(base.Path, "/") + ResetPath
	u.RawQuery = "reset_running_requests=true" // or vLLM resets only an idle engine
	r.reset = &u
	return r, nil
}

// trust says whom this node trusts as the rank's engine; nil: as the machine does.
func (r *Rank) trust() *tls.Config {
	if r.Target.Access == nil {
		return nil
	}
	return r.Target.Access.TLS()
}

// withKey is the header of a request with the key that the rank's engine asks for, if its application says
// so. What the client has sent as its key is for dpserve.
func (r *Rank) withKey(h http.Header) http.Header {
	if r.Target.Access == nil {
		return h
	}
	key := r.Target.Access.ClientKey()
	if key == "" {
		return h
	}
	out := make(http.Header, len(h)+1) // an earlier attempt may still read the shared one
	maps.Copy(out, h)
	out["Authorization"] = []string{"Bearer " + key}
	return out
}

// urlOf is where the engine gets the request.
func (q *Request) urlOf() *url.URL {
	switch {
	case q.Reset:
		return q.Rank.reset
	case q.Target == "":
		return q.Rank.urls[q.Route]
	}
	u, path := *q.Rank.base, ""
	path, u.RawQuery, _ = strings.Cut(q.Target, "?")
	u.Path = strings.TrimRight(u.Path, "/") + path
	return &u
}

// OwnPrefix begins the header fields of the data port. No client and no engine can set them.
const OwnPrefix = "Dpserve-"

const (
	headerRequestID = "X-Request-Id"
	headerRank      = "X-Data-Parallel-Rank" // for an engine that hosts several ranks
)

// CopyHeader adds src to dst without the fields of one connection (RFC 9110, 7.6.1) and those that isDropped
// names. Values are shared and not copied; no code changes them. A name with "_" is dropped like the one with
// "-" in its place: servers with a CGI interface take both for one name.
func CopyHeader(dst, src http.Header, isDropped func(name string) bool) {
	named := namedByConnection(src)
	for name, values := range src {
		if read := withDashes(name); !isOfConnection(read) && !named[read] && !isDropped(read) {
			dst[name] = values
		}
	}
}

// withDashes is a name in canonical form as a server reads it that takes "_" for "-".
func withDashes(name string) string {
	if !strings.Contains(name, "_") {
		return name
	}
	return textproto.CanonicalMIMEHeaderKey(strings.ReplaceAll(name, "_", "-"))
}

// EngineHeader is the header for an engine, made of that of a client. via is what the sender adds to Via.
func EngineHeader(src http.Header, requestID, via []string) http.Header {
	out := make(http.Header, len(src)+2)
	CopyHeader(out, src, isOwn)
	if before := out["Via"]; len(before) > 0 {
		via = append(slices.Clip(before), via...)
	}
	out["Via"] = via
	return finishHeader(out, requestID)
}

// StripHeader is EngineHeader for the header that an ingress of another node has sent. It changes h itself.
func StripHeader(h http.Header) http.Header {
	requestID := h[headerRequestID]
	named := namedByConnection(h)
	for name := range h {
		if read := withDashes(name); isOwn(read) || isOfConnection(read) || named[read] {
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
