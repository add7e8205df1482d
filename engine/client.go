package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Limits of what is read of an engine's answer to a question of ours.
const (
	maxAnswer  = 1 << 20 // JSON of models, version, canary
	maxMetrics = 8 << 20 // the Prometheus page
)

// ErrTooLong says that an engine's answer was longer than a sane one.
var ErrTooLong = errors.New("answer is too long")

// Addressing is how a rank is named behind its URL. The zero value is "by the URL alone".
type Addressing struct {
	Mode     string // url | header | body
	Selector int
}

// Client asks one rank's engine the questions of its keeper. It holds no state but its transport; safe for
// concurrent use. Deadlines come with the context of each call.
type Client struct {
	base string
	addr Addressing
	key  string
	http *http.Client
}

// NewClient makes a client of the engine at base (http://host:port). rt is shared by all clients of a node;
// key is sent as a bearer token on /v1 routes unless it is empty.
func NewClient(base string, addr Addressing, key string, rt http.RoundTripper) *Client {
	return &Client{base: strings.TrimRight(base, "/"), addr: addr, key: key,
		http: &http.Client{Transport: rt, CheckRedirect: noRedirect}}
}

// noRedirect keeps probes on the engine they were meant for.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Transport settings of probes.
const (
	dialTimeout = 2 * time.Second
	idleTimeout = 4 * time.Second // below the keep-alive of an attached engine: 5 s in vLLM
)

// NewTransport makes the transport of probes: no proxy, no compression, short-lived idle connections.
func NewTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:  true,
		IdleConnTimeout:     idleTimeout,
		MaxIdleConnsPerHost: 1,
	}
}

// Health is what GET /health tells.
type Health uint8

// The kinds of health. The zero value is Unanswered: nothing is known.
const (
	Unanswered Health = iota // no answer in time, or a torn one: only a canary can tell
	// 2xx, or 404 of an engine without the route: the process lives, which is all it proves
	Alive
	Dead                     // 503: the front end has given its engine up
	RefusedConn
	Odd // any other status
)

var healthNames = [...]string{"unanswered", "alive", "dead", "refused", "odd"} // by Health

func (h Health) String() string { return healthNames[h] }

// Health asks GET /health (HEAD is 405). err says why for everything but Alive.
func (c *Client) Health(ctx context.Context) (Health, error) {
	status, _, err := c.ask(ctx, http.MethodGet, "/health", nil, maxAnswer)
	switch {
	case err != nil && IsRefused(err):
		return RefusedConn, err
	case err != nil:
		return Unanswered, err
	case status/100 == 2, status == http.StatusNotFound:
		return Alive, nil
	case status == http.StatusServiceUnavailable:
		return Dead, errors.New("/health answered 503")
	}
	return Odd, fmt.Errorf("/health answered %d", status)
}

// IsRefused says that nobody listens at the address. A network in memory has no errno, so a dial that failed
// with the kernel's words counts too; other dial errors (no file descriptor left, no route) do not: they may
// be ours.
func IsRefused(err error) bool {
	var op *net.OpError
	return errors.Is(err, syscall.ECONNREFUSED) ||
		errors.As(err, &op) && op.Op == "dial" && op.Err != nil && op.Err.Error() == "connection refused"
}

// ask sends one request and reads the whole answer, at most limit bytes.
func (c *Client) ask(ctx context.Context, method, path string, body io.Reader,
	limit int64) (status int, answer []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return 0, nil, err
	}
	c.setHeaders(req)
	resp, err := c.http.Do(req)
	if err != nil {
		var inner *url.Error
		if errors.As(err, &inner) {
			err = inner.Err // without method and URL: who asks names them
		}
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err = readAll(resp.Body, limit)
	return resp.StatusCode, answer, err
}

func (c *Client) setHeaders(req *http.Request) {
	if req.Body != nil {
		req.Header.Set("Content-Type", "application/json")
		// lets the transport repeat it on a connection that was closed while idle
		req.Header["Idempotency-Key"] = nil
	}
	if c.key != "" && strings.HasPrefix(req.URL.Path, "/v1/") {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	if c.addr.Mode == "header" {
		req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(c.addr.Selector))
	}
}

// get reads a 200 answer.
func (c *Client) get(ctx context.Context, path string, limit int64) ([]byte, error) {
	status, answer, err := c.ask(ctx, http.MethodGet, path, nil, limit)
	if err == nil && status != http.StatusOK {
		return nil, &StatusError{Path: path, Status: status}
	}
	return answer, err
}

// StatusError is an answer other than 200.
type StatusError struct {
	Path   string
	Status int
	Text   string // the engine's own words, cut; "" if it had none
}

func (e *StatusError) Error() string {
	text := fmt.Sprintf("%s answered %d", e.Path, e.Status)
	if e.Text != "" {
		text += ": " + e.Text
	}
	return text
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, ErrTooLong
	}
	return b, err
}
