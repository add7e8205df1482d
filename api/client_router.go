package api

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

func routerPath(app string) string { return pathRouters + "/" + url.PathEscape(app) }

// Explain asks what the Router of an application would decide for q, and why.
func (c *Client) Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "the request is not JSON: %w", err).WithHint("it must be the body of an inference request")
	}
	var r ExplainReply
	if err := c.call(ctx, http.MethodPost, routerPath(app)+"/explain", nil, body, &r); err != nil {
		return nil, err
	}
	return &r.Explanation, nil
}

// ResetRouter makes the Router of an application forget and learn anew.
func (c *Client) ResetRouter(ctx context.Context, app string) (msg.ResetResult, error) {
	var r ResetReply
	err := c.call(ctx, http.MethodPost, routerPath(app)+"/reset", nil, nil, &r)
	return r.ResetResult, err
}

// Router describes the Router of an application.
func (c *Client) Router(ctx context.Context, app string) (msg.RouterInfo, error) {
	var r RouterReply
	err := c.call(ctx, http.MethodGet, routerPath(app), nil, nil, &r)
	return r.RouterInfo, err
}
