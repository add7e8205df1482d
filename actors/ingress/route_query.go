package ingress

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// inquiry is a request of the router's own API. Its decisions change nothing, and are kept, until it becomes
// a reservation.
type inquiry struct {
	*request
	routing.PairWhy        // of an application with one pool: Decode and DecodeView
	notSplit        string // why one rank gets it whatever the other pool does; "": because that has no rank
	isExact         bool   // it decides as the next live request will; else it draws like one
	lastID          uint64 // of isExact: policies without a session depend on the numbers of requests
}

// asked is a request as one pool reads it.
type asked struct {
	prompt *prompt
	query  *routing.Request
}

// newInquiry makes a question to an application, with nothing to route yet. It is not of the pool of
// requests: actors may read its blocks after a late reply.
func newInquiry(ctx context.Context, e *appRoute) *inquiry {
	q := &inquiry{request: newRequest(e.router.in)}
	q.app, q.route, q.why = e, openai.Completions, q
	q.query.DrawsByID = true
	q.r = (&http.Request{Header: http.Header{}}).WithContext(ctx)
	return q
}

// makeExact lets the question decide as the next live request will.
func (q *inquiry) makeExact() {
	q.isExact, q.lastID, q.query.DrawsByID = true, q.in.nextID.Load(), false
}

// ask keeps what the Routers would decide about a rank alone.
func (q *inquiry) ask(router *routing.Router) {
	if s := q.split; s == nil {
		q.Decode, q.DecodeView = router.Why(&q.query)
	} else {
		s.describePrefill(routing.RankRef{})
		q.PairWhy = s.pair.router.Explain(&s.query, &q.query, true)
		if s.choice = q.Pair; s.choice.Kind == routing.Route && q.notSplit == "" {
			s.choice.Reason = routing.PairNoPrefill
		}
	}
	q.choice = q.Decode
}

// readQuery reads a client.Query without Replay, as request.handle does with a client's request.
func (q *inquiry) readQuery(c *client.Query) error {
	ar := q.app.router
	if c.Prompt != nil || len(c.Request) > 0 || q.app.pair != nil {
		if err := q.readQueryBody(c); err != nil {
			return err
		}
	} else {
		if err := checkModel(ar, c.Model); err != nil {
			return err
		}
		q.prompt.fromTokens(ar, c.TokenIDs, ar.adapterOf([]byte(c.Model)))
	}
	return q.override(c.Worker, c.Override)
}

// readQueryBody reads a query with a body, or to two pools: what can be split depends on the body.
func (q *inquiry) readQueryBody(c *client.Query) error {
	ar := q.app.router
	body, path, err := queryBody(ar, c)
	if err != nil {
		return err
	}
	if q.route, err = routeOf(path, body); err != nil {
		return err
	}
	if err := q.scan.Scan(q.route, body); err != nil {
		return problemOf(badBody(err))
	}
	if err := checkModel(ar, string(q.scan.Model)); q.scan.HasModel && err != nil {
		return err
	}
	for name, value := range c.Headers {
		q.r.Header[textproto.CanonicalMIMEHeaderKey(name)] = []string{value}
	}
	f := q.prompt.fromBody(q.r.Context(), ar, q.route, &q.scan, body, q.r.Header)
	if f == nil {
		q.body = &bodyBuffer{b: body}
		f = prepareSplit(q.request)
	}
	if f != nil {
		return problemOf(f)
	}
	switch s := q.split; {
	case q.app.pair == nil:
	case s == nil:
		q.goToOne("it computes no tokens")
	case s.body.Reason != transfer.CanSplit:
		q.notSplit = s.body.Reason.String()
	}
	return nil
}

// goToOne sends a question to one rank of two pools.
func (q *inquiry) goToOne(why string) {
	q.notSplit = why
	q.split = &split{req: q.request, pair: q.app.pair, way: dispatch.WayLocal}
}

// recall makes the question that a recent request was.
func (q *inquiry) recall(e *decisionRecord) {
	q.prompt = e.prompt
	if q.app.pair == nil {
		return
	}
	q.goToOne("it went to one rank")
	s := q.split
	if e.pair.way == "" {
		return
	}
	q.notSplit, s.prompt = "", e.prompt
	if s.pair.isOn() {
		s.way = dispatch.WayNone
	}
	s.prompt.promptMemory, s.prompt.hasDirect = promptMemory{}, false
	if s.sharesPrompt() {
		s.prompt.blocks = e.prompt.blocks
	} else {
		s.prompt.unit = 0
	}
}

// checkModel checks a model's name; "" is the application's own.
func checkModel(ar *appRouter, model string) error {
	if names := ar.revision.Load().names; model != "" && !slices.Contains(names, model) {
		return problem.New(problem.NotFound, "app %s does not serve the model %q", ar.name,
			clipped([]byte(model))).WithHint("it serves %s", joinNames(names))
	}
	return nil
}

// override adds what only the router's own API may ask for: a forced rank, other parameters.
func (q *inquiry) override(worker string, o *client.Override) (err error) {
	if worker != "" {
		if q.prompt.direct, err = workerID(worker); err != nil {
			return err
		}
		q.prompt.hasDirect = true
	}
	q.query.Override, err = checkOverride(q.app.router, o)
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

// queryBody is the body of a query and its path, as a client would send them; path "": see routeOf.
func queryBody(ar *appRouter, rq *client.Query) (body []byte, path string, err error) {
	if len(rq.Request) > 0 && rq.Prompt == nil {
		return rq.Request, rq.Route, nil
	}
	model, path := cmp.Or(rq.Model, ar.modelID()), openai.Completions.Path()
	fields := map[string]any{"model": model, "prompt": rq.TokenIDs}
	if rq.Prompt != nil {
		fields["prompt"], path = *rq.Prompt, cmp.Or(rq.Route, path)
		if path == openai.Chat.Path() {
			fields = map[string]any{"model": model, "messages": []map[string]string{
				{"role": "user", "content": *rq.Prompt},
			}}
		}
	}
	if body, err = json.Marshal(fields); err != nil {
		return nil, "", fmt.Errorf("make a request of the prompt: %w", err)
	}
	return body, path, nil
}

// worker describes a picked rank, or two; prefill nil: one alone.
func (q *inquiry) worker(rk, prefill *rank) client.Worker {
	reason, s := q.choice.Reason, q.split
	if s != nil && s.choice.Reason != "" {
		reason = s.choice.Reason
	}
	w := asked{&q.prompt, &q.query}.worker(rk, reason)
	if prefill != nil {
		other := asked{&s.prompt, &s.query}.worker(prefill, reason)
		w.PrefillWorker = &other
	}
	return w
}

// notReserved is why a reservation has got no tickets.
func (q *inquiry) notReserved(name string) error {
	switch r := q.hold; r.answer {
	case dispatch.AnswerNoRank:
		return notPicked(name, q.failure)
	case dispatch.AnswerNoPrefill:
		return problemOf(q.split.noPrefillFailure())
	case dispatch.AnswerOwn:
		return problem.New(problem.Unavailable, "no rank of app %s admitted it: %s", name,
			r.why).WithHint("try again later")
	default:
		return problem.New(problem.Timeout, "the caller has left")
	}
}

// notPicked is the error of the router's own API where no rank was picked; f nil: there is no room now.
func notPicked(name string, f *failure) error {
	if f != nil {
		return problemOf(f)
	}
	return problem.New(problem.Overloaded, "every rank of app %s has all the requests it may hold", name).
		WithHint("try again later")
}

// worker describes a picked rank.
func (q asked) worker(rk *rank, reason string) client.Worker {
	out := client.Worker{
		Worker: rk.ID.String(), Group: rk.ID.Group(), DPRank: rk.ID.Rank(),
		HitTokens: q.query.HitOn(rk.ID), Reason: reason,
		Node: rk.Node, URL: rk.Target.URL, Addressing: rk.Target.Addressing, Selector: rk.Target.Selector,
	}
	if q.prompt.unit == kvindex.Tokens {
		out.BlockSize = q.prompt.size
		out.OverlapBlocks = out.HitTokens / q.prompt.size
	}
	return out
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
	case http.StatusBadGateway, http.StatusInternalServerError, http.StatusNotImplemented:
		code = problem.Upstream
	case http.StatusServiceUnavailable:
		if code = problem.Overloaded; f.code == openai.CodeNoReadyRank || f.code == openai.CodeNoFiles {
			code = problem.Unavailable
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

// newGeneration makes the request of a generation, and the parameters that a header cannot express.
func newGeneration(ctx context.Context, ar *appRouter, q *msg.Generate) (*http.Request, *routing.Override,
	error,
) {
	override, err := checkOverride(ar, q.Override)
	if err != nil {
		return nil, nil, err
	}
	if q.RequestID != "" {
		if err := validReservation(q.RequestID); err != nil {
			return nil, nil, err
		}
	}
	if err := checkModel(ar, q.Model); err != nil {
		return nil, nil, err
	}
	body, err := completionBody(ar, q)
	if err != nil {
		return nil, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, openai.Completions.Path(),
		bytes.NewReader(body))
	if err != nil {
		return nil, nil, problem.New(problem.Internal, "make the request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(headerRequestID, cmp.Or(q.RequestID, hex16(mix(ar.in.requestID()))))
	if q.Worker != "" {
		id, err := workerID(q.Worker)
		if err != nil {
			return nil, nil, err
		}
		req.Header.Set(headerRank, id.String())
	}
	return req, override, nil
}

// completionBody is the body: the caller's sampling fields, and the fields that Generate sets itself.
func completionBody(ar *appRouter, q *msg.Generate) ([]byte, error) {
	own := map[string]any{
		"model": cmp.Or(q.Model, ar.modelID()), "prompt": q.TokenIDs, "stream": true,
		"stream_options": map[string]bool{"include_usage": true}, "return_token_ids": true,
	}
	for name, value := range q.Sampling {
		if _, taken := own[name]; taken || name == "n" || name == "best_of" {
			return nil, problem.New(problem.InvalidArgument, "sampling.%s is not the caller's to set",
				name[:min(len(name), maxNameShown)]).
				WithHint("generate sends one prompt of token ids and streams one answer")
		}
		own[name] = value
	}
	body, err := json.Marshal(own)
	if err != nil {
		return nil, problem.New(problem.InvalidArgument, "sampling is not JSON: %w", err).WithHint(
			"its members are those of a /v1/completions body")
	}
	if int64(len(body)) > ar.in.limits.MaxBody {
		return nil, problemOf(ar.in.limits.tooLarge())
	}
	return body, nil
}

// maxLine bounds a line of an engine's answer that is held here, in bytes.
const maxLine = 1 << 20

// tokenWriter is the client's end of a generation: it parses the relayed events and emits their tokens.
type tokenWriter struct {
	header http.Header
	emit   func(*client.Part) error
	status int
	told   bool // the first part, which names worker and request, is emitted
	rest   []byte
	failed error // of emit, or an error event
	done   bool
	cut    bool
}

var _ http.ResponseWriter = (*tokenWriter)(nil)

// Header implements http.ResponseWriter.
func (w *tokenWriter) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter.
func (w *tokenWriter) WriteHeader(status int) { w.status = cmp.Or(w.status, status) }

// FlushError is called after every relayed event. It does nothing, because emit has already been called.
func (w *tokenWriter) FlushError() error { return nil }

// Write takes a piece of the answer.
func (w *tokenWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if len(w.rest)+len(b) > maxLine {
		return 0, errors.New("the engine's answer has a line that is too long to be taken apart")
	}
	w.rest = append(w.rest, b...)
	if w.status != http.StatusOK {
		return len(b), nil // outcome reads the body of an error
	}
	for {
		end := bytes.IndexByte(w.rest, '\n')
		if end < 0 {
			return len(b), nil
		}
		line := bytes.TrimSuffix(w.rest[:end], []byte("\r"))
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok {
			if err := w.event(bytes.TrimSpace(data)); err != nil {
				return 0, err
			}
		}
		w.rest = w.rest[end+1:]
	}
}

// completionEvent is the part of a completion's event that tokenWriter reads.
type completionEvent struct {
	Choices []struct {
		Text         string   `json:"text"`
		TokenIDs     []uint32 `json:"token_ids"`
		FinishReason string   `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

// event emits one event.
func (w *tokenWriter) event(data []byte) error {
	if string(data) == "[DONE]" {
		w.done = true
		return nil
	}
	var e completionEvent
	if err := json.Unmarshal(data, &e); err != nil {
		w.failed = problem.New(problem.Upstream, "an event of the engine cannot be read: %w", err).WithHint(
			"is it an engine that answers return_token_ids?")
		return w.failed
	}
	if len(e.Error) > 0 {
		w.failed = upstreamError(http.StatusBadGateway, data)
		return nil
	}
	return w.part(&e)
}

func (w *tokenWriter) part(e *completionEvent) error {
	out := client.Part{TokenIDs: []uint32{}}
	if !w.told {
		w.told = true
		out.Worker = w.header.Get(headerGroup) + "/" + w.header.Get(headerRank)
		out.RequestID = w.header.Get(headerRequestID)
	}
	if len(e.Choices) > 0 {
		c := &e.Choices[0]
		out.Text, out.FinishReason = c.Text, c.FinishReason
		out.TokenIDs = append(out.TokenIDs, c.TokenIDs...)
	}
	if u := e.Usage; u != nil && len(e.Choices) == 0 {
		out.Usage = &client.Usage{Prompt: u.Prompt, Completion: u.Completion}
		if u.Details != nil {
			out.Usage.Cached = u.Details.Cached
		}
	}
	if err := w.emit(&out); err != nil {
		w.failed = err
		return err
	}
	return nil
}

// outcome is how the generation ended, once the handler has returned.
func (w *tokenWriter) outcome() error {
	switch {
	case w.failed != nil:
		return w.failed
	case w.status != http.StatusOK && w.status != 0:
		return upstreamError(w.status, w.rest)
	case w.cut || !w.done:
		return problem.New(problem.Upstream, "the answer broke off").WithHint(
			"dpserve's log says why; try again")
	}
	return nil
}

// upstreamError parses an error in the OpenAI shape: the engine's, or dpserve's own with a word as its code.
func upstreamError(status int, body []byte) error {
	var own struct {
		Error struct {
			Code any `json:"code"`
		} `json:"error"`
	}
	_ = json.Unmarshal(body, &own) // an unreadable body has no code
	code, _ := own.Error.Code.(string)
	e := openai.ParseError(body)
	return problemOf(&failure{
		status: status, code: code,
		message: cmp.Or(e.Message, "the engine answered with status "+strconv.Itoa(status)),
	})
}
