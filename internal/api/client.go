package api

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
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// Limits of the client.
const (
	maxReply      = 64 << 20 // bytes of one JSON answer: 65,536 ranks at 1 KiB
	dialTimeout   = 5 * time.Second
	answerTimeout = callTimeout + 5*time.Second // until the headers of an answer
)

// noAnswerHint is the hint when no server answers.
const noAnswerHint = "is dpserve running? start it with `dpserve start`, or set DPSERVE_ADDR"

// Client is a client of one node's admin API. It is safe for concurrent use; close it after use. Errors are
// *problem.Error with the server's code; errors.As(err, *app.Faults) finds the faults of an app file.
type Client struct {
	base string // scheme://host:port
	http *http.Client
}

// NewClient makes a client for host:port or http(s)://host:port; "" is DefaultAddr. It does not connect yet.
func NewClient(addr string) (*Client, error) {
	return NewClientWith(addr, &http.Transport{
		Proxy:                 nil, // the admin API is on this machine or in this network
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		DisableCompression:    true,
		ResponseHeaderTimeout: answerTimeout,
		IdleConnTimeout:       idleTimeout,
	})
}

// NewClientWith is NewClient over another transport.
func NewClientWith(addr string, rt http.RoundTripper) (*Client, error) {
	base, err := baseURL(addr)
	if err != nil {
		return nil, err
	}
	return &Client{base: base, http: &http.Client{Transport: rt, CheckRedirect: refuseRedirect}}, nil
}

// refuseRedirect returns the redirect itself: the API sends none, so another server has answered.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

func baseURL(addr string) (string, error) {
	if addr == "" {
		addr = defaultAddr
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(strings.TrimSuffix(addr, "/"))
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" ||
		u.RawQuery != "" || u.User != nil {
		return "", problem.New(problem.InvalidArgument, "%q is not the address of a dpserve", addr).
			WithHint("DPSERVE_ADDR and --addr take HOST:PORT or http://HOST:PORT")
	}
	return u.Scheme + "://" + u.Host, nil
}

// Addr returns the server's address as a URL.
func (c *Client) Addr() string { return c.base }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Version returns the build of the answering node.
func (c *Client) Version(ctx context.Context) (BuildInfo, error) {
	var r versionReply
	err := c.call(ctx, http.MethodGet, pathVersion, nil, nil, &r)
	return r.BuildInfo, err
}

// Healthz is nil when the node answers.
func (c *Client) Healthz(ctx context.Context) error {
	var r healthReply
	return c.call(ctx, http.MethodGet, pathHealthz, nil, nil, &r)
}

// Validate lets the node check a file; the error holds the faults.
func (c *Client) Validate(ctx context.Context, file string, text []byte) ([]app.Warning, error) {
	var r validateReply
	err := c.call(ctx, http.MethodPost, pathValidate, fileQuery(file), text, &r)
	return r.Warnings, err
}

// Deploy stores the apps of a file. It returns once that is committed; App shows the progress.
func (c *Client) Deploy(ctx context.Context, req DeployRequest) (DeployResult, error) {
	q := fileQuery(req.File)
	if req.Revision != nil {
		q.Set("revision", strconv.FormatUint(*req.Revision, 10))
	}
	if req.Prune {
		q.Set("prune", "true")
	}
	if req.Partial {
		q.Set("partial", "true")
	}
	var r deployReply
	err := c.call(ctx, http.MethodPut, pathApps, q, req.Text, &r)
	return r.DeployResult, err
}

func fileQuery(file string) url.Values {
	q := url.Values{}
	if file != "" {
		q.Set("file", file)
	}
	return q
}

// Apps lists every application.
func (c *Client) Apps(ctx context.Context) ([]msg.AppStatus, error) {
	var r appsReply
	err := c.call(ctx, http.MethodGet, pathApps, nil, nil, &r)
	return r.Apps, err
}

// App returns one application.
func (c *Client) App(ctx context.Context, name string) (msg.AppStatus, error) {
	var r appReply
	err := c.call(ctx, http.MethodGet, appPath(name), nil, nil, &r)
	return r.App, err
}

// Delete marks an application for deletion. It is gone when App returns NotFound.
func (c *Client) Delete(ctx context.Context, name string) error {
	var r deleteReply
	return c.call(ctx, http.MethodDelete, appPath(name), nil, nil, &r)
}

func appPath(name string) string { return pathApps + "/" + url.PathEscape(name) }

// call makes one request and reads its JSON answer into reply.
func (c *Client) call(ctx context.Context, method, path string, q url.Values, body []byte, reply any) error {
	res, err := c.do(ctx, method, path, q.Encode(), body)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
	data, err := readReply(res)
	if err != nil {
		return c.transportError(ctx, err)
	}
	if err := c.checkVersion(res, data); err != nil {
		return err
	}
	if err := json.Unmarshal(data, reply); err != nil {
		return problem.New(problem.Upstream, "answer of %s cannot be read: %w", c.base, err).
			WithHint(versionHint)
	}
	return nil
}

// do sends a request. The caller closes the body of a successful answer; any other answer is an error.
func (c *Client) do(ctx context.Context, method, path, query string, body []byte) (*http.Response, error) {
	target := c.base + path
	if query != "" {
		target += "?" + query
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "make request: %w", err)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, c.transportError(ctx, err)
	}
	if res.StatusCode >= http.StatusMultipleChoices {
		defer func() { _ = res.Body.Close() }() // read completely, or no longer needed
		return nil, c.errorOf(ctx, res)
	}
	return res, nil
}

// errorOf returns the error that an answer carries.
func (c *Client) errorOf(ctx context.Context, res *http.Response) error {
	data, err := readReply(res)
	if err != nil {
		return c.transportError(ctx, err)
	}
	if err := c.checkVersion(res, data); err != nil {
		return err
	}
	var r errorReply
	if err := json.Unmarshal(data, &r); err != nil || r.Error.Code == "" {
		return c.notDpserveError(res)
	}
	return errorFromBody(r.Error)
}

// versionHint is the hint for a server of another version.
const versionHint = "use the dpserve command of the version that is running there"

// checkVersion checks that the answer is from dpserve's admin API of this version.
func (c *Client) checkVersion(res *http.Response, data []byte) error {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil || e.APIVersion == "" {
		return c.notDpserveError(res)
	}
	if e.APIVersion != apiVersion {
		return problem.New(problem.Upstream, "%s speaks %s, this command %s", c.base, e.APIVersion,
			apiVersion).WithHint(versionHint)
	}
	return nil
}

// notDpserveError is the error for a server that is not dpserve's admin API.
func (c *Client) notDpserveError(res *http.Response) error {
	return problem.New(problem.Upstream, "%s is not a dpserve admin api (status %d)", c.base, res.StatusCode).
		WithHint("check DPSERVE_ADDR: the admin port is 8265 by default, 8000 is for OpenAI clients")
}

func readReply(res *http.Response) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(res.Body, maxReply+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxReply {
		return nil, fmt.Errorf("answer is larger than %d bytes", maxReply)
	}
	return data, nil
}

// transportError describes why no answer came. errors.Is finds the cause of an ended ctx.
func (c *Client) transportError(ctx context.Context, err error) error {
	var inner *url.Error
	if errors.As(err, &inner) {
		err = inner.Err // without method and URL, which the message has already
	}
	switch {
	case ctx.Err() != nil && errors.Is(ctx.Err(), context.DeadlineExceeded):
		return problem.New(problem.Timeout, "no answer from %s in time: %w", c.base, err).
			WithHint("try again with a longer --timeout")
	case ctx.Err() != nil:
		return problem.New(problem.Unavailable, "request to %s ended: %w", c.base, ctx.Err())
	default:
		return problem.New(problem.Unavailable, "no answer from %s: %w", c.base, err).WithHint(noAnswerHint)
	}
}

// Nodes lists the cluster's nodes.
func (c *Client) Nodes(ctx context.Context) ([]msg.NodeStatus, error) {
	var r nodesReply
	err := c.call(ctx, http.MethodGet, pathNodes, nil, nil, &r)
	return r.Nodes, err
}

// Drain moves a node's ranks to other nodes. It returns once that is committed; Nodes shows the progress.
// With a nil deadline, running streams end within each application's graceful_shutdown_timeout_s.
func (c *Client) Drain(ctx context.Context, node string, deadline *time.Duration) error {
	q := url.Values{}
	if deadline != nil {
		q.Set("deadline", deadline.String())
	}
	var r nodeReply
	return c.call(ctx, http.MethodPost, nodePath(node)+pathDrain, q, nil, &r)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, node string) error {
	var r nodeReply
	return c.call(ctx, http.MethodDelete, nodePath(node)+pathDrain, nil, nil, &r)
}

// CheckLeave returns nil if the node could be removed after a drain. It changes nothing.
func (c *Client) CheckLeave(ctx context.Context, node string) error {
	var r nodeReply
	return c.call(ctx, http.MethodGet, nodePath(node)+pathRemoval, nil, nil, &r)
}

// RemoveNode removes a node for good.
func (c *Client) RemoveNode(ctx context.Context, node string) error {
	var r nodeReply
	return c.call(ctx, http.MethodDelete, nodePath(node), nil, nil, &r)
}

// NewToken makes a token that lets nodes join.
func (c *Client) NewToken(ctx context.Context, req TokenRequest) (Token, error) {
	q := url.Values{"ttl": {req.TTL.String()}, "uses": {strconv.Itoa(req.Uses)}}
	var r tokenReply
	err := c.call(ctx, http.MethodPost, pathJoinTokens, q, nil, &r)
	return r.Token, err
}

// RotateKey starts a change of the gossip key; KeyRotation shows the progress.
func (c *Client) RotateKey(ctx context.Context) error {
	var r keyRotationReply
	return c.call(ctx, http.MethodPost, pathGossipKey, nil, nil, &r)
}

// KeyRotation returns the progress of a change of the gossip key.
func (c *Client) KeyRotation(ctx context.Context) (KeyRotation, error) {
	var r keyRotationReply
	err := c.call(ctx, http.MethodGet, pathGossipKey, nil, nil, &r)
	return r.KeyRotation, err
}

// Plan returns the changes that Deploy would make, and changes nothing.
func (c *Client) Plan(ctx context.Context, req DeployRequest) (msg.Plan, error) {
	q := fileQuery(req.File)
	if req.Prune {
		q.Set("prune", "true")
	}
	var r planReply
	err := c.call(ctx, http.MethodPost, pathPlan, q, req.Text, &r)
	return r.Plan, err
}

func nodePath(name string) string { return pathNodes + "/" + url.PathEscape(name) }

// AddRank attaches an engine to an application of kind attach. rank is a map like an item of engine.ranks, in
// JSON or YAML. It returns once that is committed; App shows when the rank serves.
func (c *Client) AddRank(ctx context.Context, appName string, rank []byte) (RankChange, error) {
	var r rankReply
	err := c.call(ctx, http.MethodPost, appPath(appName)+pathRanks, nil, rank, &r)
	return r.RankChange, err
}

// RemoveRank detaches a rank. It returns once that is committed, while the rank's streams continue; App no
// longer lists the rank when it is gone.
func (c *Client) RemoveRank(ctx context.Context, appName string, rm RankRemoval) (RankChange, error) {
	q := encodeRankRef(rm.Rank)
	if rm.Deadline != nil {
		q.Set("deadline", rm.Deadline.String())
	}
	var r rankReply
	err := c.call(ctx, http.MethodDelete, appPath(appName)+pathRanks, q, nil, &r)
	return r.RankChange, err
}

// encodeRankRef returns the query that rankRef reads.
func encodeRankRef(ref app.RankRef) url.Values {
	if ref.URL == "" {
		return url.Values{"rank": {ref.String()}}
	}
	q := url.Values{"url": {ref.URL}}
	if ref.Selector != nil {
		q.Set("selector", strconv.Itoa(*ref.Selector))
	}
	return q
}

func routerPath(app string) string { return pathRouters + "/" + url.PathEscape(app) }

// Explain returns the Router's decision for q and its reasons.
func (c *Client) Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error) {
	body, err := encodeQuery(q)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "the request is not JSON: %w", err).
			WithHint("it must be the body of an inference request")
	}
	var r explainReply
	if err := c.call(ctx, http.MethodPost, routerPath(app)+"/explain", nil, body, &r); err != nil {
		return nil, err
	}
	return &r.Explanation, nil
}

// encodeQuery returns the JSON of q with the bytes of q.Request unchanged. json.Marshal would compact them
// and escape <, > and &. The Router hashes the bytes of a prompt, so it would explain a different request.
func encodeQuery(q *msg.RouteQuery) ([]byte, error) {
	rest := *q
	rest.Request = nil
	out, err := json.Marshal(&rest)
	if err != nil || len(q.Request) == 0 {
		return out, err
	}
	if !json.Valid(q.Request) {
		return nil, errors.New("it is cut or malformed")
	}
	out = out[:len(out)-1] // without the closing brace
	if len(out) > 1 {
		out = append(out, ',')
	}
	out = append(out, `"request":`...)
	return append(append(out, q.Request...), '}'), nil
}

// ResetRouter drops the Router's state, which the Router then rebuilds from the ranks.
func (c *Client) ResetRouter(ctx context.Context, app string) (msg.ResetResult, error) {
	var r resetReply
	err := c.call(ctx, http.MethodPost, routerPath(app)+"/reset", nil, nil, &r)
	return r.ResetResult, err
}

// Router returns a description of the Router of an application.
func (c *Client) Router(ctx context.Context, app string) (msg.RouterInfo, error) {
	var r routerReply
	err := c.call(ctx, http.MethodGet, routerPath(app), nil, nil, &r)
	return r.RouterInfo, err
}
