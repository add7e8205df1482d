package client

import (
	"bufio"
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Version returns the build, the name and the endpoint of the answering node.
func (c *Client) Version(ctx context.Context) (BuildInfo, error) {
	return get[BuildInfo](ctx, c, "/api/v1/version")
}

// Healthz is nil when the node answers, which says nothing about applications.
func (c *Client) Healthz(ctx context.Context) error {
	return c.call(ctx, request{path: "/api/v1/healthz"}, nil)
}

// Validate lets the node check a file; the error holds the faults.
func (c *Client) Validate(ctx context.Context, file string, text []byte) ([]Fault, error) {
	q := DeployRequest{File: file}.query()
	r, err := ask[struct{ Warnings []Fault }](ctx, c,
		request{method: http.MethodPost, path: "/api/v1/validate", query: q, body: text})
	return r.Warnings, err
}

// Plan returns the changes that Deploy would make, and changes nothing.
func (c *Client) Plan(ctx context.Context, d DeployRequest) (Plan, error) {
	d.Revision, d.Partial = nil, false
	r, err := ask[struct{ Plan Plan }](ctx, c,
		request{method: http.MethodPost, path: "/api/v1/plan", query: d.query(), body: d.Text})
	return r.Plan, err
}

// Deploy stores the apps of a file. It returns once that is committed; App shows the progress.
func (c *Client) Deploy(ctx context.Context, d DeployRequest) (DeployResult, error) {
	return ask[DeployResult](ctx, c,
		request{method: http.MethodPut, path: pathApps, query: d.query(), body: d.Text})
}

const pathApps = "/api/v1/apps"

func appPath(name string) string { return pathApps + "/" + url.PathEscape(name) }

// Apps lists every application.
func (c *Client) Apps(ctx context.Context) ([]AppStatus, error) {
	r, err := get[struct{ Apps []AppStatus }](ctx, c, pathApps)
	return r.Apps, err
}

// App returns one application.
func (c *Client) App(ctx context.Context, name string) (AppStatus, error) {
	r, err := get[struct{ App AppStatus }](ctx, c, appPath(name))
	return r.App, err
}

// Delete marks an application for deletion. It is gone when App returns code not_found.
func (c *Client) Delete(ctx context.Context, name string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: appPath(name)}, nil)
}

// History lists the revisions of an application that the cluster keeps, the newest first.
func (c *Client) History(ctx context.Context, app string) ([]Revision, error) {
	r, err := get[struct{ Revisions []Revision }](ctx, c, appPath(app)+"/revisions")
	return r.Revisions, err
}

// AppFile returns an application at a revision (0 = the current one) in the form of a file that deploys it.
func (c *Client) AppFile(ctx context.Context, app string, revision uint64) (AppFile, error) {
	path := appPath(app) + "/revisions/current"
	if revision != 0 {
		path = appPath(app) + "/revisions/" + strconv.FormatUint(revision, 10)
	}
	return get[AppFile](ctx, c, path)
}

// Rollback deploys what an application had at a revision; 0 = the last good one before the current one.
func (c *Client) Rollback(ctx context.Context, app string, to uint64) (DeployResult, error) {
	var out DeployResult
	q := url.Values{}
	if to != 0 {
		q.Set("to", strconv.FormatUint(to, 10))
	}
	err := c.call(ctx, request{method: http.MethodPost, path: appPath(app) + "/rollback", query: q}, &out)
	return out, err
}

// AddRank attaches an engine to an application of kind attach. rank is a map like an item of engine.ranks, in
// JSON or YAML. It returns once that is committed; App shows when the rank serves.
func (c *Client) AddRank(ctx context.Context, app string, rank []byte) (RankChange, error) {
	return ask[RankChange](ctx, c,
		request{method: http.MethodPost, path: appPath(app) + "/ranks", body: rank})
}

// RemoveRank detaches a rank. It returns once that is committed, while the rank's streams continue; App no
// longer lists the rank when it is gone.
func (c *Client) RemoveRank(ctx context.Context, app string, rm RankRemoval) (RankChange, error) {
	return ask[RankChange](ctx, c,
		request{method: http.MethodDelete, path: appPath(app) + "/ranks", query: rm.query()})
}

// RankAnswer is what the engine of a rank said to a control call.
type RankAnswer struct {
	Pool   string `json:"pool"` // the application, or its pool
	Group  int    `json:"group"`
	Rank   int    `json:"rank"`
	Node   string `json:"node"`
	URL    string `json:"url"`
	Status int    `json:"status"` // 0 = no answer
	Body   string `json:"body,omitempty"`
	Error  string `json:"error,omitempty"` // why there is no answer
	TookMs int64  `json:"took_ms"`
}

// RankAnswers are the answers of an application's ranks, in their order.
type RankAnswers struct {
	Answers []RankAnswer `json:"answers"`
}

// CallEngines makes a control call to the engines of an application or pool: of the named ranks (GROUP/RANK),
// or of all. path is the engine's, with its query; the API says which it passes on.
func (c *Client) CallEngines(
	ctx context.Context, app, method, path string, ranks []string, body []byte,
) (RankAnswers, error) {
	q := url.Values{"method": {method}, "path": {path}}
	if len(ranks) > 0 {
		q.Set("ranks", strings.Join(ranks, ","))
	}
	return ask[RankAnswers](ctx, c, request{
		method: http.MethodPost, path: appPath(app) + "/call", query: q, body: body, json: true,
		patient: true,
	})
}

// Logs opens a stream of log lines as text, one per line (see ParseLogLine). The caller closes it. A cut
// stream ends with io.ErrUnexpectedEOF.
func (c *Client) Logs(ctx context.Context, q LogQuery) (io.ReadCloser, error) {
	res, err := c.do(ctx, request{path: appPath(q.App) + "/logs", query: q.query()})
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// PastEvents returns the state changes that the leader keeps, of app ("" = any): at most the last 1000 of the
// cluster.
func (c *Client) PastEvents(ctx context.Context, app string) ([]Event, error) {
	q := url.Values{"past": {"true"}}
	if app != "" {
		q.Set("app", app)
	}
	r, err := ask[struct{ Events []Event }](ctx, c, request{path: "/api/v1/events", query: q})
	return r.Events, err
}

// Events yields state changes with a number above since, of app ("" = any), until ctx ends or the caller
// stops. An error is the last pair. A node that stops ends the stream with code unavailable; continue from
// the last number.
func (c *Client) Events(ctx context.Context, app string, since uint64) iter.Seq2[Event, error] {
	q := url.Values{"since": {strconv.FormatUint(since, 10)}}
	if app != "" {
		q.Set("app", app)
	}
	return streamOf(ctx, c, request{path: "/api/v1/events", query: q},
		func(body io.Reader, yield func(Event, error) bool) {
			lines := bufio.NewReaderSize(body, 4096)
			for {
				e, err := readEvent(lines)
				if err != nil {
					err = c.streamError(ctx, err)
				}
				if !yield(e, err) || err != nil {
					return
				}
			}
		})
}

const pathNodes = "/api/v1/nodes"

func nodePath(name string) string { return pathNodes + "/" + url.PathEscape(name) }

// Nodes lists the cluster's nodes.
func (c *Client) Nodes(ctx context.Context) ([]NodeStatus, error) {
	r, err := get[struct{ Nodes []NodeStatus }](ctx, c, pathNodes)
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

const pathRestart = "/api/v1/restart"

// Restart replaces the process of the node that answers, by the file at the path that started it, while its
// engines run. It returns before that, with the name of the old process and the version of the file. It is
// refused while no leader answers; force restarts all the same.
func (c *Client) Restart(ctx context.Context, force bool) (Process, error) {
	q := url.Values{}
	if force {
		q.Set("force", "true")
	}
	return ask[Process](ctx, c, request{method: http.MethodPost, path: pathRestart, query: q})
}

// Process names the process of the node that answers.
func (c *Client) Process(ctx context.Context) (Process, error) {
	return get[Process](ctx, c, pathRestart)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, node string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: nodePath(node) + "/drain"}, nil)
}

// CheckLeave returns nil if the node could be removed after a drain. It changes nothing.
func (c *Client) CheckLeave(ctx context.Context, node string) error {
	return c.call(ctx, request{path: nodePath(node) + "/removal"}, nil)
}

// RemoveNode removes a node for good.
func (c *Client) RemoveNode(ctx context.Context, node string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: nodePath(node)}, nil)
}

// NewToken makes a token that lets nodes join.
func (c *Client) NewToken(ctx context.Context, t TokenRequest) (Token, error) {
	q := url.Values{"ttl": {t.TTL.String()}, "uses": {strconv.Itoa(t.Uses)}}
	if len(t.Roles) > 0 {
		q.Set("roles", strings.Join(t.Roles, ","))
	}
	return ask[Token](ctx, c, request{method: http.MethodPost, path: pathJoinTokens, query: q})
}

const pathJoinTokens = "/api/v1/join-tokens" //nolint:gosec // a path

// Tokens lists the join tokens, without their secrets: those that are valid, and those that are not any more
// until the cluster drops them.
func (c *Client) Tokens(ctx context.Context) ([]JoinToken, error) {
	r, err := get[struct{ Tokens []JoinToken }](ctx, c, pathJoinTokens)
	return r.Tokens, err
}

// RevokeToken ends a join token. Nodes that have joined with it stay.
func (c *Client) RevokeToken(ctx context.Context, id string) error {
	path := pathJoinTokens + "/" + url.PathEscape(id)
	return c.call(ctx, request{method: http.MethodDelete, path: path}, nil)
}

// RevokeAllTokens ends every join token.
func (c *Client) RevokeAllTokens(ctx context.Context) error {
	return c.call(ctx, request{
		method: http.MethodDelete, path: pathJoinTokens, query: url.Values{"all": {"true"}},
	}, nil)
}

const pathGossipKey = "/api/v1/gossip-key"

// RotateKey gives the gossip of the cluster a new key. The answer comes when all nodes have it, at the latest
// after the time of a lease.
func (c *Client) RotateKey(ctx context.Context) (KeyRotation, error) {
	var out KeyRotation
	err := c.call(ctx, request{method: http.MethodPost, path: pathGossipKey}, &out)
	return out, err
}

// DefaultTokenTTL is how long a join token is valid if nothing else is asked for.
const DefaultTokenTTL = time.Hour

// TokenRequest describes a join token.
type TokenRequest struct {
	TTL   time.Duration
	Uses  int      // nodes
	Roles []string // that these nodes may have; empty = all
}

// Token lets nodes join.
type Token struct {
	Token   string    `json:"token"`
	ID      string    `json:"id"`      // names it in the list, and for its revocation
	Address string    `json:"address"` // HOST:PORT of a node port to join at
	Uses    int       `json:"uses"`
	Roles   []string  `json:"roles,omitempty"` // that its nodes may have; none = all
	Expires time.Time `json:"expires"`
}

// JoinToken describes a join token without its secret.
type JoinToken struct {
	ID       string    `json:"id"`
	Status   string    `json:"status"`          // valid, used up, expired or revoked
	Roles    []string  `json:"roles,omitempty"` // that its nodes may have; none = all
	Used     int       `json:"used"`            // nodes that have used it
	UsesLeft int       `json:"uses_left"`
	Expires  time.Time `json:"expires"`
	Made     time.Time `json:"made"`
	By       string    `json:"by"` // the node that made it
}

// KeyRotation is the result of a change of the gossip key.
type KeyRotation struct {
	Behind []string `json:"behind"` // nodes that take the key when they renew their lease again
}

// Process names a process of the node that answers. The next one has another name.
type Process struct {
	Node    string `json:"node"`
	Process string `json:"process"`
	Version string `json:"version"`        // of dpserve
	Next    string `json:"next,omitempty"` // of the program that replaces it, in the answer to Restart
}

// BuildInfo describes the node that answers: its build, its name, and where it serves.
type BuildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Date    string `json:"date,omitempty"` // of the commit, RFC 3339
	Go      string `json:"go,omitempty"`
	Node    string `json:"node,omitempty"` // that sent the answer
	// URL of the node's OpenAI endpoint, without /v1; empty without role ingress
	Endpoint string `json:"endpoint,omitempty"`
}
