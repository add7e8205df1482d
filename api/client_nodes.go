package api

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
)

// Nodes lists the cluster's nodes.
func (c *Client) Nodes(ctx context.Context) ([]msg.NodeStatus, error) {
	var r NodesReply
	err := c.call(ctx, http.MethodGet, pathNodes, nil, nil, &r)
	return r.Nodes, err
}

// Drain moves a node's ranks elsewhere. It returns once that is committed; Nodes shows how it goes on. A nil deadline leaves running
// streams each application's grace.
func (c *Client) Drain(ctx context.Context, node string, deadline *time.Duration) error {
	q := url.Values{}
	if deadline != nil {
		q.Set("deadline", deadline.String())
	}
	var r NodeReply
	return c.call(ctx, http.MethodPost, nodePath(node)+pathDrain, q, nil, &r)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, node string) error {
	var r NodeReply
	return c.call(ctx, http.MethodDelete, nodePath(node)+pathDrain, nil, nil, &r)
}

// CheckLeave says whether a node could be removed if it were drained, and changes nothing.
func (c *Client) CheckLeave(ctx context.Context, node string) error {
	var r NodeReply
	return c.call(ctx, http.MethodGet, nodePath(node)+pathRemoval, nil, nil, &r)
}

// RemoveNode forgets a node for good.
func (c *Client) RemoveNode(ctx context.Context, node string) error {
	var r NodeReply
	return c.call(ctx, http.MethodDelete, nodePath(node), nil, nil, &r)
}

// NewToken makes a token that lets nodes join.
func (c *Client) NewToken(ctx context.Context, req TokenRequest) (Token, error) {
	q := url.Values{"ttl": {req.TTL.String()}, "uses": {strconv.Itoa(req.Uses)}}
	var r TokenReply
	err := c.call(ctx, http.MethodPost, pathJoinTokens, q, nil, &r)
	return r.Token, err
}

// RotateKey begins to give the gossip a new key; KeyRotation shows how it goes on.
func (c *Client) RotateKey(ctx context.Context) error {
	var r KeyRotationReply
	return c.call(ctx, http.MethodPost, pathGossipKey, nil, nil, &r)
}

// KeyRotation says how far a change of the gossip key is.
func (c *Client) KeyRotation(ctx context.Context) (KeyRotation, error) {
	var r KeyRotationReply
	err := c.call(ctx, http.MethodGet, pathGossipKey, nil, nil, &r)
	return r.KeyRotation, err
}

// Plan says what Deploy would do, and changes nothing.
func (c *Client) Plan(ctx context.Context, req DeployRequest) (msg.Plan, error) {
	q := fileQuery(req.File)
	if req.Prune {
		q.Set("prune", "true")
	}
	var r PlanReply
	err := c.call(ctx, http.MethodPost, pathPlan, q, req.Text, &r)
	return r.Plan, err
}

func nodePath(name string) string { return pathNodes + "/" + url.PathEscape(name) }
