package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
)

func routerPath(app string) string { return pathRouters + "/" + url.PathEscape(app) }

// Explain asks what the Router of an application would decide for q, and why.
func (c *Client) Explain(ctx context.Context, app string, q *msg.RouteQuery) (*msg.Explanation, error) {
	body, err := encodeQuery(q)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "the request is not JSON: %w", err).WithHint("it must be the body of an inference request")
	}
	var r ExplainReply
	if err := c.call(ctx, http.MethodPost, routerPath(app)+"/explain", nil, body, &r); err != nil {
		return nil, err
	}
	return &r.Explanation, nil
}

// encodeQuery is the JSON of q with the bytes of q.Request unchanged. json.Marshal would compact them and escape <, > and &:
// the Router hashes the bytes of a prompt, so it would explain another request than the one that clients send.
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
