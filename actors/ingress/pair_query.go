package ingress

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/dpserve/dpserve/actors/pdproxy"
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
)

// pairQuery is a request to an application with two pools outside of the live path, as either pool reads it,
// made by the functions that make live requests.
type pairQuery struct {
	pair            *pairApp
	prefill, decode routeQuery
	notSplit        string // why it goes to one rank; "": it can be split
}

// newPairQuery makes the query of a client.Query without Replay.
func newPairQuery(ctx context.Context, p *pairApp, rq *client.Query) (*pairQuery, error) {
	body, path, err := pairBody(p.decode, rq)
	if err != nil {
		return nil, err
	}
	r, err := scanRequest(p.decode, path, body, rq.Headers)
	if err != nil {
		return nil, err
	}
	q := &pairQuery{pair: p}
	if f := q.decode.prompt.fromBody(ctx, p.decode, r.route, &r.scan, body, r.header); f != nil {
		return nil, problemOf(f)
	}
	if err := applyOverrides(p.decode, &q.decode, rq.Worker, rq.Override); err != nil {
		return nil, err
	}
	return q, q.readPrefill(ctx, r, body)
}

// pairBody is the body of a query and its path, as a client would send them; path "": see routeOf.
func pairBody(ar *appRouter, rq *client.Query) (body []byte, path string, err error) {
	switch {
	case rq.Prompt != nil:
		return promptBody(ar, rq)
	case len(rq.Request) > 0:
		return rq.Request, rq.Route, nil
	}
	body, err = json.Marshal(map[string]any{"model": cmp.Or(rq.Model, ar.modelID()), "prompt": rq.TokenIDs})
	if err != nil {
		return nil, "", fmt.Errorf("make a request of the token ids: %w", err)
	}
	return body, openai.Completions.Path(), nil
}

// readPrefill makes the prefill pool's query of the decode pool's.
func (q *pairQuery) readPrefill(ctx context.Context, r *scannedRequest, body []byte) error {
	if !r.route.Generates() {
		q.notSplit = "it computes no tokens"
		return nil
	}
	s := q.newSplit()
	s.req.r = (&http.Request{Header: r.header}).WithContext(ctx)
	s.req.route, s.req.scan, s.req.body = r.route, r.scan, &bodyBuffer{b: body}
	if err := s.body.Scan(q.pair.transfer, transfer.RouteOf(r.route.Path()), body); err != nil {
		return problemOf(badBody(err))
	}
	if s.body.Reason != transfer.CanSplit {
		q.notSplit = s.body.Reason.String()
		return nil
	}
	if f := s.readPrompt(); f != nil { //nolint:contextcheck // it is in s.req.r
		return problemOf(f)
	}
	q.prefill.prompt = s.prompt
	return nil
}

// keepPrefill makes the prefill pool's query of what a decision has kept of the decode pool's prompt.
func (q *pairQuery) keepPrefill() {
	q.prefill.prompt = q.decode.prompt
	m := promptMemory{}
	if s := q.newSplit(); s.sharesPrompt() {
		m.blocks = q.decode.prompt.blocks
	} else {
		q.prefill.prompt.unit = 0
	}
	q.prefill.prompt.promptMemory, q.prefill.prompt.hasDirect = m, false
}

// newSplit is a split request for the query, with the decode pool's prompt. It is of no pool: actors may read
// its blocks after a late reply.
func (q *pairQuery) newSplit() *split {
	req := newRequest(q.pair.in)
	req.app = &appRoute{appRevision: q.pair.decodeSpec, router: q.pair.decode, pair: q.pair}
	req.prompt, req.query = q.decode.prompt, q.decode.query
	req.split = &split{req: req, pair: q.pair}
	return req.split
}

// describe prepares both queries for the PairRouter as live requests do, with the next numbers of requests:
// policies without a session depend on them.
func (q *pairQuery) describe() {
	q.pair.describe(&q.prefill, &q.decode)
	if q.goesToOne() {
		q.decode.query.Tried = append(q.decode.query.Tried[:0], q.pair.splitOnly...)
		return
	}
	q.decode.query.ID++ // the prefill pool's query is numbered first
}

// goesToOne reports whether the request goes to one rank whatever the prefill pool has to do.
func (q *pairQuery) goesToOne() bool { return q.notSplit != "" || !q.pair.isOn() }

// why is the decision for the query as it would be now. Like split.decide, it takes another decode rank for
// one that has met no prefill rank, where requests without a prefill rank are refused.
func (q *pairQuery) why() (why routing.PairWhy) {
	q.describe()
	d := &q.decode.query
	tried := len(d.Tried)
	why = q.pair.router.Explain(&q.prefill.query, d, q.goesToOne())
	switch pair := &why.Pair; {
	case pair.Kind == routing.Reject && len(d.Tried) > tried:
		pair.Reason = routing.PairNotPrewarmed
	case pair.Kind == routing.Route && q.goesToOne() && q.notSplit == "":
		pair.Reason = routing.PairNoPrefill
	}
	return why
}

// wayOf is the way on which a decision sends the query. An application without a prefill rank misses none.
func (q *pairQuery) wayOf(d *routing.PairDecision) string {
	if way := wayOf(d); way != wayNames[pdproxy.WayFallback] || q.pair.isOn() {
		return way
	}
	return wayNames[pdproxy.WayLocal]
}

// refusal is the error for a decision without ranks, nil if there are some.
func (q *pairQuery) refusal(d *routing.PairDecision) error {
	switch {
	case d.Kind != routing.Route:
		return refusal(q.pair.name, &q.decode, &routing.Decision{Reason: d.Reason})
	case d.IsFallback() && q.pair.isOn() && q.pair.failsWithoutPrefill():
		return problem.New(problem.Unavailable, "no prefill rank of app %s can compute the prompt: %s",
			q.pair.name, d.Reason).WithHint("`dpserve status %s` shows why", q.pair.name)
	}
	return nil
}

// noPlace is the error for a reservation without ranks.
func (q *pairQuery) noPlace(s *split) error {
	if err := q.refusal(&s.choice); err != nil {
		return err
	}
	return problem.New(problem.Internal, "no decision was made")
}

// bestPair is BestWorker for an application with two pools.
func bestPair(ctx context.Context, p *pairApp, q *client.BestWorkerRequest) (client.Worker, error) {
	query, err := newPairQuery(ctx, p, &client.Query{
		TokenIDs: q.TokenIDs, Model: q.Model, Worker: q.Worker, Override: q.Override,
	})
	if err != nil {
		return client.Worker{}, err
	}
	if q.RequestID != "" {
		return reservePair(ctx, query, q.RequestID)
	}
	why := query.why()
	d := &why.Pair
	if err := query.refusal(d); err != nil {
		return client.Worker{}, err
	}
	decode, prefill := p.decode.findRank(d.Decode), (*rank)(nil)
	if d.Remote {
		prefill = p.prefill.findRank(d.Prefill)
	}
	if decode == nil || d.Remote && prefill == nil {
		return client.Worker{}, problem.New(problem.Unavailable, "a rank of app %s is gone", p.name).
			WithHint("ask again")
	}
	return query.worker(decode, prefill, d.Reason), nil
}

// worker describes a pair of ranks; prefill nil: the decode rank alone.
func (q *pairQuery) worker(decode, prefill *rank, reason string) client.Worker {
	w := q.decode.worker(decode, reason)
	if prefill != nil {
		other := q.prefill.worker(prefill, reason)
		w.PrefillWorker = &other
	}
	return w
}

// pairFallback is what a request gets that no prefill rank can compute.
func pairFallback(p *pairApp) string {
	if p.failsWithoutPrefill() {
		return app.FallbackFail
	}
	return app.FallbackLocal
}

// pairInfo describes how the pools work together.
func pairInfo(p *pairApp) *client.PairInfo {
	state, count := p.state()
	prefill := routerInfo(p.prefill, p.prefill.router.Load())
	return &client.PairInfo{
		Decide: p.decide(), Transfer: p.traits.Name, Fallback: pairFallback(p), Pairs: state, Met: count.met,
		All: count.all, Decisions: p.router.Counts(), Prefill: &prefill,
	}
}
