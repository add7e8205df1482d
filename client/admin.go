package client

import (
	"bufio"
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Version returns the build, the name and the endpoint of the answering node.
func (c *Client) Version(ctx context.Context) (BuildInfo, error) {
	var r BuildInfo
	err := c.get(ctx, "/api/v1/version", &r)
	return r, err
}

// Healthz is nil when the node answers, which says nothing about applications.
func (c *Client) Healthz(ctx context.Context) error { return c.get(ctx, "/api/v1/healthz", nil) }

func (c *Client) get(ctx context.Context, path string, reply any) error {
	return c.call(ctx, request{method: http.MethodGet, path: path}, reply)
}

// Validate lets the node check a file; the error holds the faults.
func (c *Client) Validate(ctx context.Context, file string, text []byte) ([]Fault, error) {
	var r struct{ Warnings []Fault }
	q := DeployRequest{File: file}.query()
	err := c.call(ctx, request{method: http.MethodPost, path: "/api/v1/validate", query: q, body: text}, &r)
	return r.Warnings, err
}

// Plan returns the changes that Deploy would make, and changes nothing.
func (c *Client) Plan(ctx context.Context, d DeployRequest) (Plan, error) {
	var r struct{ Plan Plan }
	d.Revision, d.Partial = nil, false
	err := c.call(ctx,
		request{method: http.MethodPost, path: "/api/v1/plan", query: d.query(), body: d.Text}, &r)
	return r.Plan, err
}

// Deploy stores the apps of a file. It returns once that is committed; App shows the progress.
func (c *Client) Deploy(ctx context.Context, d DeployRequest) (DeployResult, error) {
	var r DeployResult
	err := c.call(ctx, request{method: http.MethodPut, path: pathApps, query: d.query(), body: d.Text}, &r)
	return r, err
}

const pathApps = "/api/v1/apps"

func appPath(name string) string { return pathApps + "/" + url.PathEscape(name) }

// Apps lists every application.
func (c *Client) Apps(ctx context.Context) ([]AppStatus, error) {
	var r struct{ Apps []AppStatus }
	err := c.get(ctx, pathApps, &r)
	return r.Apps, err
}

// App returns one application.
func (c *Client) App(ctx context.Context, name string) (AppStatus, error) {
	var r struct{ App AppStatus }
	err := c.get(ctx, appPath(name), &r)
	return r.App, err
}

// Delete marks an application for deletion. It is gone when App returns code not_found.
func (c *Client) Delete(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: appPath(name)}, nil)
}

// AddRank attaches an engine to an application of kind attach. rank is a map like an item of engine.ranks, in
// JSON or YAML. It returns once that is committed; App shows when the rank serves.
func (c *Client) AddRank(ctx context.Context, app string, rank []byte) (RankChange, error) {
	var r RankChange
	err := c.call(ctx, request{method: http.MethodPost, path: appPath(app) + "/ranks", body: rank}, &r)
	return r, err
}

// RemoveRank detaches a rank. It returns once that is committed, while the rank's streams continue; App no
// longer lists the rank when it is gone.
func (c *Client) RemoveRank(ctx context.Context, app string, rm RankRemoval) (RankChange, error) {
	var r RankChange
	err := c.call(ctx,
		request{method: http.MethodDelete, path: appPath(app) + "/ranks", query: rm.query()}, &r)
	return r, err
}

// Logs opens a stream of log lines as text, one per line (see ParseLogLine). The caller closes it. A cut
// stream ends with io.ErrUnexpectedEOF.
func (c *Client) Logs(ctx context.Context, q LogQuery) (io.ReadCloser, error) {
	res, err := c.do(ctx, request{method: http.MethodGet, path: appPath(q.App) + "/logs", query: q.query()})
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Events yields state changes with a number above since, of app ("" = any), until ctx ends or the caller
// stops. An error is the last pair. A node that stops ends the stream with code unavailable; continue from
// the last number.
func (c *Client) Events(ctx context.Context, app string, since uint64) iter.Seq2[Event, error] {
	q := url.Values{"since": {strconv.FormatUint(since, 10)}}
	if app != "" {
		q.Set("app", app)
	}
	return func(yield func(Event, error) bool) {
		res, err := c.do(ctx, request{method: http.MethodGet, path: "/api/v1/events", query: q})
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer func() { _ = res.Body.Close() }() // no longer read
		lines := bufio.NewReaderSize(res.Body, 4096)
		for {
			e, err := readEvent(lines)
			if err != nil {
				yield(e, c.streamError(ctx, err))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

const pathNodes = "/api/v1/nodes"

func nodePath(name string) string { return pathNodes + "/" + url.PathEscape(name) }

// Nodes lists the cluster's nodes.
func (c *Client) Nodes(ctx context.Context) ([]NodeStatus, error) {
	var r struct{ Nodes []NodeStatus }
	err := c.get(ctx, pathNodes, &r)
	return r.Nodes, err
}

// Drain moves a node's ranks to other nodes. It returns once that is committed; Nodes shows the progress.
// With a nil deadline, running streams end within each application's graceful_shutdown_timeout_s.
func (c *Client) Drain(ctx context.Context, node string, deadline *time.Duration) error {
	q := url.Values{}
	if deadline != nil {
		q.Set("deadline", deadline.String())
	}
	return c.call(ctx, request{method: http.MethodPost, path: nodePath(node) + "/drain", query: q}, nil)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, node string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: nodePath(node) + "/drain"}, nil)
}

// CheckLeave returns nil if the node could be removed after a drain. It changes nothing.
func (c *Client) CheckLeave(ctx context.Context, node string) error {
	return c.get(ctx, nodePath(node)+"/removal", nil)
}

// RemoveNode removes a node for good.
func (c *Client) RemoveNode(ctx context.Context, node string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: nodePath(node)}, nil)
}

// NewToken makes a token that lets nodes join.
func (c *Client) NewToken(ctx context.Context, t TokenRequest) (Token, error) {
	var r Token
	q := url.Values{"ttl": {t.TTL.String()}, "uses": {strconv.Itoa(t.Uses)}}
	err := c.call(ctx, request{method: http.MethodPost, path: "/api/v1/join-tokens", query: q}, &r)
	return r, err
}

const pathGossipKey = "/api/v1/gossip-key"

// RotateKey starts a change of the gossip key; KeyRotation shows the progress.
func (c *Client) RotateKey(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodPost, path: pathGossipKey}, nil)
}

// KeyRotation returns the progress of a change of the gossip key.
func (c *Client) KeyRotation(ctx context.Context) (KeyRotation, error) {
	var r KeyRotation
	err := c.get(ctx, pathGossipKey, &r)
	return r, err
}
