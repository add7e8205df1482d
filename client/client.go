// Package client is a Go client for the routers of a dpserve node: it asks for the best worker of a prompt,
// reserves a place there, generates through the router, and reads the router's state. It imports only the
// standard library, so it can be vendored as one folder.
//
// The names are those of Dynamo's KvPushRouter. A worker is one data-parallel rank, written GROUP/RANK
// ("0/3").
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
	"strings"
	"time"
)

// DefaultAddr is the default address of a node's admin API.
const DefaultAddr = "127.0.0.1:8265"

// Limits of the client.
const (
	maxReply    = 64 << 20 // bytes of one JSON answer
	maxEvent    = 1 << 20  // bytes of one line of a stream
	dialTimeout = 5 * time.Second
	// until the first byte: generate waits in the application's queue and for the first token
	headerTimeout = 10 * time.Minute
	idleTimeout   = 60 * time.Second
)

// apiVersion is the first field of every answer of the admin API.
const apiVersion = "dpserve/v1"

// Client is a client of one node's admin API. It is safe for concurrent use. Close drops its idle
// connections.
type Client struct {
	base string
	http *http.Client
}

// Option changes how New builds a client.
type Option func(*Client)

// WithTransport makes the client use rt instead of a transport of its own.
func WithTransport(rt http.RoundTripper) Option {
	return func(c *Client) { c.http.Transport = rt }
}

// New returns a client for HOST:PORT or http(s)://HOST:PORT; "" is DefaultAddr. It does not connect yet.
func New(addr string, options ...Option) (*Client, error) {
	if addr == "" {
		addr = DefaultAddr
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(strings.TrimSuffix(addr, "/"))
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" ||
		u.RawQuery != "" || u.User != nil {
		return nil, fmt.Errorf("%q is not the address of a dpserve: want HOST:PORT or http://HOST:PORT", addr)
	}
	c := &Client{base: u.Scheme + "://" + u.Host, http: &http.Client{CheckRedirect: refuseRedirect}}
	for _, o := range options {
		o(c)
	}
	if c.http.Transport == nil {
		c.http.Transport = &http.Transport{
			DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
			DisableCompression:    true,
			ResponseHeaderTimeout: headerTimeout,
			IdleConnTimeout:       idleTimeout,
			MaxIdleConnsPerHost:   64,
		}
	}
	return c, nil
}

// refuseRedirect returns the redirect itself: the API sends none.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Router returns a client for the router of one application. It sends no request.
func (c *Client) Router(app string) *RouterClient {
	return &RouterClient{c: c, path: "/api/v1/routers/" + url.PathEscape(app)}
}

// Error is an answer of dpserve that is not a success.
type Error struct {
	Status  int    // of HTTP
	Code    string // invalid_argument, not_found, conflict, overloaded, unavailable, upstream, timeout …
	Message string // the reason
	Hint    string // a remedy
}

func (e *Error) Error() string { return e.Message }

// CodeOf returns the code of the first *Error in err's chain, "" if there is none.
func CodeOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// errorReply is an error on the wire.
type errorReply struct {
	APIVersion string `json:"apiVersion"`
	Error      struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Hint    string `json:"hint"`
	} `json:"error"`
}

func (r *errorReply) err(status int) error {
	return &Error{Status: status, Code: r.Error.Code, Message: r.Error.Message, Hint: r.Error.Hint}
}

// call sends in as JSON (nil: no body) and reads the answer into out.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	res, err := c.do(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
	data, err := readAll(res.Body)
	if err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.base, err)
	}
	var head struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(data, &head); err != nil || head.APIVersion != apiVersion {
		return c.notDpserveError(res)
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("answer of %s cannot be read: %w", c.base, err)
	}
	return nil
}

// encoded is a body that is already JSON.
type encoded []byte

// do sends a request. The caller closes the body of a successful answer; any other answer is an error.
func (c *Client) do(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if data, ok := in.(encoded); ok {
		body = bytes.NewReader(data)
	} else if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer from %s: %w", c.base, err)
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
	data, err := readAll(res.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", c.base, err)
	}
	var e errorReply
	if err := json.Unmarshal(data, &e); err != nil || e.Error.Code == "" {
		return nil, c.notDpserveError(res)
	}
	return nil, e.err(res.StatusCode)
}

func (c *Client) notDpserveError(res *http.Response) error {
	return fmt.Errorf("%s is not the admin API of a dpserve of this version (status %d)", c.base,
		res.StatusCode)
}

func readAll(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxReply+1))
	if err == nil && len(data) > maxReply {
		err = fmt.Errorf("it is larger than %d bytes", maxReply)
	}
	return data, err
}
