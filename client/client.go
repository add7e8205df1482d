// Package client is a Go client of dpserve's admin API: it deploys applications, shows their status, logs and
// events, manages nodes, and asks an application's router for the best worker of a prompt. It holds the API's
// JSON types, and it imports only the standard library, so it can be vendored as one folder.
//
// Every node of a cluster answers: it forwards what only the leader can answer. Names around routers are
// those of Dynamo's KvPushRouter: a worker is one data-parallel rank, written GROUP/RANK ("0/3").
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// APIVersion is the field apiVersion of every answer of the admin API. The client refuses any other version.
const APIVersion = "dpserve/v1"

// DefaultAddr is the default address of a node's admin API.
const DefaultAddr = "127.0.0.1:8265"

// Limits of the client.
const (
	maxReply      = 64 << 20 // bytes of one JSON answer: 65,536 ranks at 1 KiB
	maxEvent      = 1 << 20  // bytes of one line of a stream; an event has a few hundred
	dialTimeout   = 5 * time.Second
	answerTimeout = 35 * time.Second // until the headers of an answer: the node gives up after 30 s
	// the same for generate, which waits in the application's queue and for the first token
	generateTimeout = 10 * time.Minute
	idleTimeout     = 60 * time.Second
)

// Client is a client of one node's admin API. It is safe for concurrent use. Close drops its idle
// connections. Errors are *Error, except for those of a stream that breaks off.
type Client struct {
	base    string       // scheme://host:port
	token   string       // "" = none is shown
	http    *http.Client // for all calls but generate
	patient *http.Client // for generate
}

// Option changes how New builds a client.
type Option func(*Client)

// WithTransport makes the client use rt instead of transports of its own.
func WithTransport(rt http.RoundTripper) Option {
	return func(c *Client) { c.http.Transport, c.patient.Transport = rt, rt }
}

// WithToken makes the client show a token, which a node keeps in the file admin.token of its data dir.
func WithToken(token string) Option {
	return func(c *Client) { c.token = token }
}

// New returns a client for HOST, HOST:PORT, :PORT or a URL like http://HOST:PORT; "" is DefaultAddr. It does
// not connect yet.
func New(addr string, options ...Option) (*Client, error) {
	base, err := baseURL(addr)
	if err != nil {
		return nil, err
	}
	c := &Client{
		base:    base,
		http:    &http.Client{CheckRedirect: refuseRedirect},
		patient: &http.Client{CheckRedirect: refuseRedirect},
	}
	for _, o := range options {
		o(c)
	}
	if c.http.Transport == nil {
		c.http.Transport, c.patient.Transport = newTransport(answerTimeout), newTransport(generateTimeout)
	}
	return c, nil
}

// newTransport returns a transport without a proxy: the admin API is on this machine or in this network.
func newTransport(answer time.Duration) *http.Transport {
	return &http.Transport{
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:    true,
		ResponseHeaderTimeout: answer,
		IdleConnTimeout:       idleTimeout,
		MaxIdleConnsPerHost:   64,
	}
}

// refuseRedirect returns the redirect itself: the API sends none, so another server has answered.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Addr returns the node's address as a URL.
func (c *Client) Addr() string { return c.base }

// Close drops idle connections.
func (c *Client) Close() {
	c.http.CloseIdleConnections()
	c.patient.CloseIdleConnections()
}

// Router returns a client for the router of one application. It sends no request.
func (c *Client) Router(app string) *RouterClient {
	return &RouterClient{c: c, path: "/api/v1/routers/" + url.PathEscape(app)}
}

// request is one request to the API.
type request struct {
	method  string // "" = GET
	path    string
	query   url.Values
	body    []byte
	json    bool // body is JSON; otherwise YAML or JSON
	patient bool // the answer may take generateTimeout
}

// ask sends a request and returns its JSON answer.
func ask[T any](ctx context.Context, c *Client, r request) (reply T, err error) {
	err = c.call(ctx, r, &reply)
	return reply, err
}

// get asks for what is at a path.
func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	return ask[T](ctx, c, request{path: path})
}

// call sends a request and reads its JSON answer into reply; nil: only the answer's version is checked.
func (c *Client) call(ctx context.Context, r request, reply any) error {
	res, err := c.do(ctx, r)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
	data, err := readAll(res.Body)
	if err != nil {
		return c.transportError(ctx, err)
	}
	if err := c.checkVersion(res, data); err != nil || reply == nil {
		return err
	}
	if err := json.Unmarshal(data, reply); err != nil {
		return newError(CodeUpstream, versionHint, "answer of %s cannot be read: %w", c.base, err)
	}
	return nil
}

// streamOf sends a request and yields what read finds in the answer. An error is the last pair.
func streamOf[T any](ctx context.Context, c *Client, r request,
	read func(body io.Reader, yield func(T, error) bool),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		res, err := c.do(ctx, r)
		if err != nil {
			var none T
			yield(none, err)
			return
		}
		defer func() { _ = res.Body.Close() }() // no longer read
		read(res.Body, yield)
	}
}

// do sends a request. The caller closes the body of a successful answer; any other answer is an error.
func (c *Client) do(ctx context.Context, r request) (*http.Response, error) {
	target := c.base + r.path
	if len(r.query) > 0 {
		target += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, target, bytes.NewReader(r.body))
	if err != nil {
		return nil, newError(CodeInvalidArgument, "", "make request: %w", err)
	}
	if r.json {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	hc := c.http
	if r.patient {
		hc = c.patient
	}
	res, err := hc.Do(req)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	if res.StatusCode < http.StatusMultipleChoices {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
	data, err := readAll(res.Body)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	if err := c.checkVersion(res, data); err != nil {
		return nil, err
	}
	var e errorReply
	if err := json.Unmarshal(data, &e); err != nil || e.Error.Code == "" {
		return nil, c.notDpserveError(res, data)
	}
	e.Error.Status = res.StatusCode
	return nil, &e.Error
}

// versionHint is the hint for a server of another version.
const versionHint = "use the dpserve command of the version that is running there"

// checkVersion checks that the answer is from dpserve's admin API of this version.
func (c *Client) checkVersion(res *http.Response, data []byte) error {
	var head struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(data, &head); err != nil || head.APIVersion == "" {
		return c.notDpserveError(res, data)
	}
	if head.APIVersion != APIVersion {
		return newError(CodeUpstream, versionHint, "%s speaks %s, this command %s", c.base, head.APIVersion,
			APIVersion)
	}
	return nil
}

// notDpserveError is the error for a server that is not dpserve's admin API, or that wants TLS.
func (c *Client) notDpserveError(res *http.Response, data []byte) error {
	if res.StatusCode == http.StatusBadRequest && strings.HasPrefix(c.base, "http://") &&
		bytes.Contains(data, []byte("HTTPS server")) { // the words of net/http
		return newError(CodeUpstream, "name it with its scheme: --addr or DPSERVE_ADDR "+
			"https"+strings.TrimPrefix(c.base, "http"), "%s wants TLS", c.base)
	}
	return newError(CodeUpstream,
		"check the address: the admin port is 8265 by default, 8000 is for OpenAI clients",
		"%s is not a dpserve admin api (status %d)", c.base, res.StatusCode)
}

func readAll(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxReply+1))
	if err == nil && len(data) > maxReply {
		err = fmt.Errorf("answer is larger than %d bytes", maxReply)
	}
	return data, err
}

// transportError describes why no answer came. errors.Is finds the cause of an ended ctx.
func (c *Client) transportError(ctx context.Context, err error) error {
	if inner, ok := errors.AsType[*url.Error](err); ok {
		err = inner.Err // without method and URL, which the message has already
	}
	switch {
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return newError(CodeTimeout, "try again with a longer --timeout", "no answer from %s in time: %w",
			c.base, err)
	case ctx.Err() != nil:
		return newError(CodeUnavailable, "", "request to %s ended: %w", c.base, ctx.Err())
	}
	if errors.Is(err, http.ErrSchemeMismatch) {
		return newError(CodeUpstream, "name it with its scheme: --addr or DPSERVE_ADDR "+
			"http"+strings.TrimPrefix(c.base, "https"), "%s speaks HTTP without TLS", c.base)
	}
	if wrong, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return newError(CodeUpstream, "use a name that the certificate has, and let SSL_CERT_FILE name the "+
			"file of the authority that signed it", "the certificate of %s is not trusted: %w", c.base,
			wrong.Err)
	}
	return newError(CodeUnavailable,
		"is dpserve running? start it with `dpserve start`, or name another node with --addr or DPSERVE_ADDR",
		"no answer from %s: %w", c.base, err)
}

// streamError describes why a stream without a regular end has ended.
func (c *Client) streamError(ctx context.Context, err error) error {
	if known, ok := errors.AsType[*Error](err); ok {
		return known
	}
	if ctx.Err() == nil && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
		return newError(CodeUnavailable, "dpserve has stopped there, or is being restarted",
			"the event stream of %s ended: %w", c.base, err)
	}
	return c.transportError(ctx, err)
}

// The codes of an Error. The list is closed.
const (
	CodeInvalidArgument  = "invalid_argument"
	CodeUnauthenticated  = "unauthenticated"
	CodePermissionDenied = "permission_denied"
	CodeNotFound         = "not_found"
	CodeSlowRequest      = "slow_request"
	CodeConflict         = "conflict"
	CodeTooLarge         = "too_large"
	CodeUnplaceable      = "unplaceable" // there is no room for a rank
	CodeQuotaExceeded    = "quota_exceeded"
	CodeHeaderTooLarge   = "header_too_large"
	CodeInternal         = "internal" // a fault of dpserve
	CodeUpstream         = "upstream" // the engine, or the server at the address, answers wrongly
	CodeOverloaded       = "overloaded"
	CodeUnavailable      = "unavailable" // also: no server answers
	CodeTimeout          = "timeout"     // also: the context's deadline
)

// Error says what is wrong and what to do next. It is an answer of dpserve that is not a success, or the
// reason why there is no answer.
type Error struct {
	Status  int      `json:"-"` // of HTTP; 0: dpserve has not answered
	Code    string   `json:"code"`
	Message string   `json:"message"`           // the reason
	Hint    string   `json:"hint,omitempty"`    // a remedy
	Doc     string   `json:"doc,omitempty"`     // a page that says more
	Details []string `json:"details,omitempty"` // more lines for people
	Faults  []Fault  `json:"faults,omitempty"`  // of an application's file, which Details list for people
	cause   error
}

// newError makes an error without an answer; format may wrap a cause with %w.
func newError(code, hint, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...) //nolint:err113 // this is the constructor
	return &Error{Code: code, Message: err.Error(), Hint: hint, cause: errors.Unwrap(err)}
}

func (e *Error) Error() string { return e.Message }

// Unwrap returns the cause of an error without an answer: errors.Is finds context.Canceled and the like.
func (e *Error) Unwrap() error { return e.cause }

// CodeOf returns the code of the first *Error in err's chain, "" if there is none.
func CodeOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return ""
}

// Fault is one place of an application's file that breaks a rule, or that is legal but probably a mistake.
type Fault struct {
	File string `json:"file"`
	Line int    `json:"line"`           // from 1
	Col  int    `json:"col"`            // from 1, in characters
	Path string `json:"path,omitempty"` // applications[0].engine.kind; empty for the file as a whole
	// the broken rule; may be empty when Found and Wanted are enough
	Message string `json:"message,omitempty"`
	Found   string `json:"found,omitempty"`
	Wanted  string `json:"wanted,omitempty"`
	Hint    string `json:"hint,omitempty"` // what to do next
}

// errorReply is an error on the wire.
type errorReply struct {
	Error Error `json:"error"`
}
