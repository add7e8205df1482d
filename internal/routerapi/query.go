package routerapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"net/http"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// maxShown bounds what an error repeats of a caller's text.
const maxShown = 100

// WorkerID reads the name of a rank.
func WorkerID(s string) (routing.RankID, error) {
	id, ok := rankleg.ParseRankID(s)
	if !ok {
		return 0, problem.New(problem.InvalidArgument, "worker %q is not GROUP/RANK",
			s[:min(len(s), maxShown)]).WithHint("for example 0/3")
	}
	return id, nil
}

// maxParameter bounds an override, as the policy bounds its own parameters.
const maxParameter = 1e9

// CheckOverride validates router_config_override. Policies without these parameters refuse it, because it
// would have no effect.
func CheckOverride(policy string, o *client.Override) (*routing.Override, error) {
	if o == nil || o.OverlapScoreWeight == nil && o.RouterTemperature == nil {
		return nil, nil //nolint:nilnil // nothing is overridden
	}
	if policy != "kv" {
		return nil, problem.New(problem.InvalidArgument,
			"router_config_override has no effect under policy %s", policy).WithHint(
			"only policy kv has these parameters")
	}
	out := &routing.Override{}
	for _, p := range []struct {
		name string
		from *float64
		to   *float64
		has  *bool
	}{
		{"overlap_score_weight", o.OverlapScoreWeight, &out.OverlapScoreWeight, &out.HasOverlapScoreWeight},
		{"router_temperature", o.RouterTemperature, &out.RouterTemperature, &out.HasRouterTemperature},
	} {
		if p.from == nil {
			continue
		}
		if v := *p.from; math.IsNaN(v) || v < 0 || v > maxParameter {
			return nil, problem.New(problem.InvalidArgument, "router_config_override.%s is %g", p.name,
				v).WithHint("it is a number from 0 to 1e9")
		}
		*p.to, *p.has = *p.from, true
	}
	return out, nil
}

// QueryBody is the body of a query and its path, as a client of that model would send them; path "": see
// RouteOf.
func QueryBody(rq *client.Query, model string) (body []byte, path string, err error) {
	if len(rq.Request) > 0 && rq.Prompt == nil {
		return rq.Request, rq.Route, nil
	}
	path = openai.Completions.Path()
	fields := map[string]any{"model": cmp.Or(rq.Model, model)}
	if rq.Prompt == nil {
		fields["prompt"] = rq.TokenIDs
	} else {
		path = cmp.Or(rq.Route, path)
		addPrompt(fields, path, *rq.Prompt)
	}
	if body, err = json.Marshal(fields); err != nil {
		return nil, "", fmt.Errorf("make a request of the prompt: %w", err)
	}
	return body, path, nil
}

// addPrompt adds a prompt to a body where the route of a path has it.
func addPrompt(fields map[string]any, path, prompt string) {
	clean, _ := openai.CleanPath(path) // a wrong one is no route
	switch name, isMessages := openai.RouteOf(clean).PromptField(); {
	case isMessages:
		fields[name] = []map[string]string{{"role": "user", "content": prompt}}
	case name != "":
		fields[name] = prompt
	}
}

// RouteOf is the route of a path; without a path the body distinguishes a chat from a completion. Every path
// by which a client posts a request to a rank is allowed, but those about a response: it stays where it is.
func RouteOf(path string, body []byte) (openai.Route, error) {
	if path == "" {
		var fields map[string]json.RawMessage // a struct would also accept "Messages", which engines do not
		if json.Unmarshal(body, &fields) == nil && fields["messages"] != nil {
			return openai.Chat, nil
		}
		return openai.Completions, nil
	}
	clean, ok := openai.CleanPath(path)
	route := openai.RouteOf(clean)
	switch {
	case !ok, openai.IsDenied(clean), openai.ResponseIDOf(clean) != "",
		route != openai.NoRoute && route.Method() != http.MethodPost:
		return openai.NoRoute, problem.New(problem.InvalidArgument,
			"route %q takes no requests that are routed", path[:min(len(path), maxShown)]).
			WithHint("name a path that clients post to, such as %s", openai.Chat.Path())
	case route == openai.NoRoute:
		return openai.Other, nil
	}
	return route, nil
}

// Problem converts an answer of the inference endpoint into an error of the admin API.
func Problem(status int, word, message string, retryAfter int) error {
	code := problem.Internal
	switch status {
	case http.StatusBadRequest:
		code = problem.InvalidArgument
	case http.StatusNotFound:
		code = problem.NotFound
	case http.StatusRequestTimeout:
		code = problem.SlowRequest
	case http.StatusRequestEntityTooLarge:
		code = problem.TooLarge
	case http.StatusTooManyRequests:
		code = problem.QuotaExceeded
	case http.StatusBadGateway, http.StatusInternalServerError, http.StatusNotImplemented:
		code = problem.Upstream
	case http.StatusServiceUnavailable:
		if code = problem.Overloaded; word == openai.CodeNoReadyRank || word == openai.CodeNoFiles {
			code = problem.Unavailable
		}
	case http.StatusGatewayTimeout:
		code = problem.Timeout
	}
	e := problem.New(code, "%s", message)
	if retryAfter > 0 {
		return e.WithHint("try again in %d s", retryAfter)
	}
	return e.WithHint("change the request and try again")
}
