package ingress

import (
	"bytes"
	"cmp"
	"context"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
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
	body, path, err := routerapi.QueryBody(c, ar.modelID())
	if err != nil {
		return err
	}
	if q.route, err = routerapi.RouteOf(path, body); err != nil {
		return err
	}
	for name, value := range c.Headers {
		q.r.Header[textproto.CanonicalMIMEHeaderKey(name)] = []string{value}
	}
	if err := q.scanBody(body); err != nil {
		return problemOf(badBody(err))
	}
	if err := checkModel(ar, string(q.scan.Model)); q.scan.HasModel && err != nil {
		return err
	}
	f := q.prompt.fromBody(q.r.Context(), ar, q.route, ar.adapterOf(q.scan.Model), &q.scan, body, q.r.Header)
	if f == nil {
		if home := q.in.responses.get(string(q.scan.Previous)); ar.hasIncarnation(home) {
			q.home = home
		}
		q.goHome()
		q.body = &bodyBuffer{b: body}
		f = prepareSplit(q.request)
	}
	if f != nil {
		return problemOf(f)
	}
	switch s := q.split; {
	case q.app.pair == nil:
	case s == nil && q.scan.IsPlain:
		q.goToOne(transfer.OnRoute.String())
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
	names := ar.revision.Load().names
	if model != "" && !slices.Contains(names, model) && ar.adapterOf([]byte(model)) == "" {
		return problem.New(problem.NotFound, "app %s does not serve the model %q", ar.name,
			clipped([]byte(model))).WithHint("it serves %s", joinNames(names))
	}
	return nil
}

// override adds what only the router's own API may ask for: a forced rank, other parameters.
func (q *inquiry) override(worker string, o *client.Override) (err error) {
	if worker != "" {
		if q.prompt.direct, err = routerapi.WorkerID(worker); err != nil {
			return err
		}
		q.prompt.hasDirect = true
	}
	q.query.Override, err = routerapi.CheckOverride(q.app.router.router.Load().Policy(), o)
	return err
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
		return q.notPicked(name, q.failure)
	case dispatch.AnswerNoPrefill:
		return problemOf(q.split.noPrefillFailure())
	case dispatch.AnswerOwn:
		return problem.New(problem.Unavailable, "no rank of app %s admitted it: %s", name,
			r.why).WithHint("try again later")
	default:
		return problem.New(problem.Timeout, "the caller has left")
	}
}

// notPicked is the error of the router's own API where no rank was picked; f nil: a request would wait now.
func (q *inquiry) notPicked(name string, f *failure) error {
	if f == nil {
		f = search{q.request}.noRankInTime(0)
	}
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

// newGeneration makes the request of a generation, and the parameters that a header cannot express.
func newGeneration(ctx context.Context, ar *appRouter, q *msg.Generate) (*http.Request, *routing.Override,
	error,
) {
	override, err := routerapi.CheckOverride(ar.router.Load().Policy(), q.Override)
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
	body, err := routerapi.CompletionBody(q, ar.modelID())
	if err == nil && int64(len(body)) > ar.in.limits.MaxBody {
		err = problemOf(ar.in.limits.tooLarge(ar.in.limits.MaxBody))
	}
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
		id, err := routerapi.WorkerID(q.Worker)
		if err != nil {
			return nil, nil, err
		}
		req.Header.Set(headerRank, id.String())
	}
	return req, override, nil
}

// problemOf converts an answer of the inference endpoint into an error of the admin API.
func problemOf(f *failure) error { return routerapi.Problem(f.status, f.code, f.message, f.retryAfter) }
