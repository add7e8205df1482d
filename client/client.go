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
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
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
	http    *http.Client // for all calls but generate
	patient *http.Client // for generate
}

// Option changes how New builds a client.
type Option func(*Client)

// WithTransport makes the client use rt instead of transports of its own.
func WithTransport(rt http.RoundTripper) Option {
	return func(c *Client) { c.http.Transport, c.patient.Transport = rt, rt }
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
	method, path string
	query        url.Values
	body         []byte
	json         bool // body is JSON; otherwise YAML or JSON
	patient      bool // the answer may take generateTimeout
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
		return nil, c.notDpserveError(res)
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
		return c.notDpserveError(res)
	}
	if head.APIVersion != APIVersion {
		return newError(CodeUpstream, versionHint, "%s speaks %s, this command %s", c.base, head.APIVersion,
			APIVersion)
	}
	return nil
}

// notDpserveError is the error for a server that is not dpserve's admin API.
func (c *Client) notDpserveError(res *http.Response) error {
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
	var inner *url.Error
	if errors.As(err, &inner) {
		err = inner.Err // without method and URL, which the message has already
	}
	switch {
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return newError(CodeTimeout, "try again with a longer --timeout", "no answer from %s in time: %w",
			c.base, err)
	case ctx.Err() != nil:
		return newError(CodeUnavailable, "", "request to %s ended: %w", c.base, ctx.Err())
	}
	return newError(CodeUnavailable,
		"is dpserve running? start it with `dpserve start`, or name another node with --addr or DPSERVE_ADDR",
		"no answer from %s: %w", c.base, err)
}

// streamError describes why a stream without a regular end has ended.
func (c *Client) streamError(ctx context.Context, err error) error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	if ctx.Err() == nil && (errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)) {
		return newError(CodeUnavailable, "dpserve has stopped there, or is being restarted",
			"the event stream of %s ended: %w", c.base, err)
	}
	return c.transportError(ctx, err)
}
