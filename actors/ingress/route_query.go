package ingress

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
)

// routeQuery is a request outside of the live path, made by the functions that make live requests.
type routeQuery struct {
	prompt prompt
	query  routing.Request
}

// describeQuery prepares the query for Router.Pick, as describeRequest does. Its id is the next request's id,
// because policies without a session depend on it.
func describeQuery(ar *appRouter, query *routeQuery) {
	query.query.ID = ar.in.nextID.Load() + 1
	ar.describeRequest(&query.query, &query.prompt)
}

// newRouteQuery makes a query of a msg.RouteQuery without Replay.
func newRouteQuery(ctx context.Context, ar *appRouter, rq *client.Query) (*routeQuery, error) {
	query := &routeQuery{}
	var err error
	switch {
	case rq.Prompt != nil:
		err = readPromptText(ctx, ar, query, rq)
	case len(rq.Request) > 0:
		err = readRequest(ctx, ar, query, rq.Route, rq.Request, rq.Headers)
	default:
		err = readTokens(ar, query, rq.TokenIDs, rq.Model)
	}
	if err != nil {
		return nil, err
	}
	return query, applyOverrides(ar, query, rq.Worker, rq.Override)
}

// readTokens fills the query from token ids for a model of the application.
func readTokens(ar *appRouter, query *routeQuery, ids []uint32, model string) error {
	if err := checkModel(ar, model); err != nil {
		return err
	}
	query.prompt.fromTokens(ar, ids, promptContext{adapter: ar.adapterOf([]byte(model))})
	return nil
}

// checkModel checks a model's name; "" is the application's own.
func checkModel(ar *appRouter, model string) error {
	if names := ar.revision.Load().names; model != "" && !slices.Contains(names, model) {
		return problem.New(problem.NotFound, "app %s does not serve the model %q", ar.name,
			clipped([]byte(model))).WithHint("it serves %s", joinNames(names))
	}
	return nil
}

// applyOverrides adds what only the router's own API may ask for: a forced rank, other parameters.
func applyOverrides(ar *appRouter, query *routeQuery, worker string, o *client.Override) error {
	if worker != "" {
		id, err := workerID(worker)
		if err != nil {
			return err
		}
		query.prompt.direct, query.prompt.hasDirect = id, true
	}
	var err error
	query.query.Override, err = checkOverride(ar, o)
	return err
}

func workerID(s string) (routing.RankID, error) {
	id, ok := rankleg.ParseRankID(s)
	if !ok {
		return 0, problem.New(problem.InvalidArgument, "worker %q is not GROUP/RANK",
			s[:min(len(s), maxNameShown)]).WithHint("for example 0/3")
	}
	return id, nil
}

// maxParameter bounds an override, as the policy bounds its own parameters.
const maxParameter = 1e9

// checkOverride validates router_config_override. Policies without these parameters refuse it, because it
// would have no effect.
func checkOverride(ar *appRouter, o *client.Override) (*routing.Override, error) {
	if o == nil || o.OverlapScoreWeight == nil && o.RouterTemperature == nil {
		return nil, nil //nolint:nilnil // nothing is overridden
	}
	if policy := ar.router.Load().Policy(); policy != "kv" {
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

// readPromptText fills the query from a text.
func readPromptText(ctx context.Context, ar *appRouter, query *routeQuery, rq *client.Query) error {
	text, route, err := promptBody(ar, rq)
	if err != nil {
		return err
	}
	return readRequest(ctx, ar, query, route, text, rq.Headers)
}

// promptBody makes a body of a text, as a client would.
func promptBody(ar *appRouter, rq *client.Query) (body []byte, route string, err error) {
	route = rq.Route
	if route == "" {
		route = openai.Completions.Path()
	}
	model := cmp.Or(rq.Model, ar.modelID())
	fields := map[string]any{"model": model, "prompt": *rq.Prompt}
	if route == openai.Chat.Path() {
		fields = map[string]any{"model": model, "messages": []map[string]string{
			{"role": "user", "content": *rq.Prompt},
		}}
	}
	if body, err = json.Marshal(fields); err != nil {
		return nil, "", fmt.Errorf("make a request of the prompt: %w", err)
	}
	return body, route, nil
}

// readRequest scans a body and fills the query as request.handle does.
func readRequest(ctx context.Context, ar *appRouter, query *routeQuery, path string, body []byte,
	headers map[string]string,
) error {
	q, err := scanRequest(ar, path, body, headers)
	if err != nil {
		return err
	}
	if f := query.prompt.fromBody(ctx, ar, q.route, &q.scan, body, q.header); f != nil {
		return problemOf(f)
	}
	return nil
}

// scannedRequest is a request for an application, as its body and its header say.
type scannedRequest struct {
	route  openai.Route
	scan   openai.Body
	header http.Header
}

// scanRequest scans a body for an application.
func scanRequest(ar *appRouter, path string, body []byte, headers map[string]string) (*scannedRequest,
	error,
) {
	q := &scannedRequest{header: http.Header{}}
	var err error
	if q.route, err = routeOf(path, body); err != nil {
		return nil, err
	}
	if err := q.scan.Scan(q.route, body); err != nil {
		return nil, problemOf(badBody(err))
	}
	if err := checkModel(ar, string(q.scan.Model)); q.scan.HasModel && err != nil {
		return nil, err
	}
	for name, value := range headers {
		q.header[textproto.CanonicalMIMEHeaderKey(name)] = []string{value}
	}
	return q, nil
}

// clipped is the part of a client's text that an error repeats.
func clipped(b []byte) string {
	return strings.ToValidUTF8(string(b[:min(len(b), maxNameShown)]), "?")
}

// routeOf is the route of a path; without a path the body distinguishes a chat from a completion.
func routeOf(path string, body []byte) (openai.Route, error) {
	if path == "" {
		var fields map[string]json.RawMessage // a struct would also accept "Messages", which engines do not
		if json.Unmarshal(body, &fields) == nil && fields["messages"] != nil {
			return openai.Chat, nil
		}
		return openai.Completions, nil
	}
	route := openai.RouteOf(path)
	if route == openai.NoRoute || route.Method() != http.MethodPost {
		return route, problem.New(problem.InvalidArgument, "route %q takes no requests that are routed",
			path[:min(len(path), maxNameShown)]).
			WithHint("routes are %s and %s", openai.Chat.Path(), openai.Completions.Path())
	}
	return route, nil
}

// problemOf converts an answer of the inference endpoint into an error of the admin API.
func problemOf(f *failure) error {
	code := problem.Internal
	switch f.status {
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
	case http.StatusBadGateway:
		code = problem.Upstream
	case http.StatusServiceUnavailable:
		code = problem.Unavailable
		if f.code == openai.CodeOverloaded || f.code == openai.CodeQueueTimeout {
			code = problem.Overloaded
		}
	case http.StatusGatewayTimeout:
		code = problem.Timeout
	}
	e := problem.New(code, "%s", f.message)
	if f.retryAfter > 0 {
		return e.WithHint("try again in %d s", f.retryAfter)
	}
	return e.WithHint("change the request and try again")
}
