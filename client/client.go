// Package client speaks to the routers of a dpserve node from Go programs: ask where a prompt should go, reserve a place there,
// generate through it, and look into what it knows. It stands alone: nothing but the standard library is imported, so it can be
// vendored as one folder.
//
// The names are those of Dynamo's KvPushRouter. A worker is one data-parallel rank, written GROUP/RANK ("0/3").
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

// DefaultAddr is where a node's admin API listens unless it was told otherwise.
const DefaultAddr = "127.0.0.1:8265"

// Limits of the client.
const (
	maxReply      = 64 << 20 // bytes of one JSON answer
	maxEvent      = 1 << 20  // bytes of one line of a stream
	dialTimeout   = 5 * time.Second
	headerTimeout = 10 * time.Minute // to the first byte: generate waits in the application's queue and for the first token
	idleTimeout   = 60 * time.Second
)

// version is what every answer of the admin API begins with.
const version = "dpserve/v1"

// Client speaks to one node's admin API. Safe for concurrent use. Close it to drop idle connections.
type Client struct {
	base string
	http *http.Client
}

// Option changes how New builds a client.
type Option func(*Client)

// WithTransport sends requests over rt in place of a transport of the client's own.
func WithTransport(rt http.RoundTripper) Option {
	return func(c *Client) { c.http.Transport = rt }
}

// New makes a client for HOST:PORT or http(s)://HOST:PORT; "" is DefaultAddr. It does not connect yet.
func New(addr string, options ...Option) (*Client, error) {
	if addr == "" {
		addr = DefaultAddr
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(strings.TrimSuffix(addr, "/"))
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" || u.RawQuery != "" || u.User != nil {
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

// refuseRedirect hands back the redirect itself: the API sends none.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Router is the router of one application. Nothing is asked yet.
func (c *Client) Router(app string) *RouterClient {
	return &RouterClient{c: c, path: "/api/v1/routers/" + url.PathEscape(app)}
}

// Error is an answer of dpserve that is not a success.
type Error struct {
	Status  int    // of HTTP
	Code    string // invalid_argument, not_found, conflict, overloaded, unavailable, upstream, timeout …
	Message string // what is wrong
	Hint    string // what to do next
}

func (e *Error) Error() string { return e.Message }

// CodeOf is the code of the first *Error in err's chain, "" if there is none.
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
	defer func() { _ = res.Body.Close() }() // read to its end, or given up
	data, err := readAll(res.Body)
	if err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.base, err)
	}
	var head struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(data, &head); err != nil || head.APIVersion != version {
		return c.stranger(res)
	}
	if err := json.Unmarshal(data, out); err != nil {
		return fmt.Errorf("answer of %s cannot be read: %w", c.base, err)
	}
	return nil
}

// encoded is a body that is JSON already.
type encoded []byte

// do sends a request. The caller closes the body of a success; everything else is an error.
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
	defer func() { _ = res.Body.Close() }() // read to its end, or given up
	data, err := readAll(res.Body)
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", c.base, err)
	}
	var e errorReply
	if err := json.Unmarshal(data, &e); err != nil || e.Error.Code == "" {
		return nil, c.stranger(res)
	}
	return nil, e.err(res.StatusCode)
}

func (c *Client) stranger(res *http.Response) error {
	return fmt.Errorf("%s is not the admin API of a dpserve of this version (status %d)", c.base, res.StatusCode)
}

func readAll(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxReply+1))
	if err == nil && len(data) > maxReply {
		err = fmt.Errorf("it is larger than %d bytes", maxReply)
	}
	return data, err
}
