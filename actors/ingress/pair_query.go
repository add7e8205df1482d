package ingress

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/telemetry"
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
	q := &pairQuery{pair: p}
	r, err := q.decode.readBody(ctx, p.decode, rq)
	if err != nil {
		return nil, err
	}
	if err := applyOverrides(p.decode, &q.decode, rq.Worker, rq.Override); err != nil {
		return nil, err
	}
	return q, q.readPrefill(ctx, r)
}

// readPrefill makes the prefill pool's query of the decode pool's.
func (q *pairQuery) readPrefill(ctx context.Context, r *scannedRequest) error {
	if !r.route.Generates() {
		q.notSplit = "it computes no tokens"
		return nil
	}
	s := q.newSplit()
	s.req.r = (&http.Request{Header: r.header}).WithContext(ctx)
	s.req.route, s.req.scan, s.req.body = r.route, r.scan, &bodyBuffer{b: r.body}
	if err := s.body.Scan(q.pair.transfer, transfer.RouteOf(r.route.Path()), r.body); err != nil {
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
	describeQuery(q.pair.prefill, &q.prefill)
	describeQuery(q.pair.decode, &q.decode)
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
	if way := wayOf(d); way != wayNames[dispatch.WayFallback] || q.pair.isOn() {
		return way
	}
	return wayNames[dispatch.WayLocal]
}

// refusal is the error for a decision without ranks, nil if there are some.
func (q *pairQuery) refusal(d *routing.PairDecision) error {
	switch {
	case d.Kind != routing.Route:
		return refusal(q.pair.name, q.pair.decode, &q.decode, &routing.Decision{Reason: d.Reason})
	case d.IsFallback() && q.pair.isOn() && q.pair.failsWithoutPrefill():
		return problem.New(problem.Unavailable, "no prefill rank of app %s can compute the prompt: %s%s",
			q.pair.name, d.Reason, q.pair.prefill.whyNotReady()).
			WithHint("`dpserve status %s` shows why", q.pair.name)
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
		Decide: p.rule, Transfer: p.traits.Name, Fallback: pairFallback(p), Pairs: state, Met: count.met,
		All: count.all, Decisions: p.router.Counts(), Prefill: &prefill,
	}
}

// explainPair is the decision for a request as it would be now.
func explainPair(q *pairQuery) *client.Explanation {
	p, why := q.pair, q.why()
	d := &why.Pair
	x := explainDecision(p.decode, &q.decode, &why.Decode, &why.DecodeView)
	prefill := explainDecision(p.prefill, &q.prefill, &why.Prefill, &why.PrefillView)
	x.App, x.Decision = p.name, kindName(d.Kind)
	repick(x, d.Decode, d.Kind == routing.Route, d.Reason)
	repick(prefill, d.Prefill, d.Remote, d.Reason)
	x.Pair = &client.PairExplanation{
		Decide: p.rule, Way: q.wayOf(d), Prefill: prefill.Pick, Reason: d.Reason,
		Candidates: pairCandidates(d), PrefillPool: prefill,
	}
	if why.Decode.Kind == routing.Route {
		x.Pair.UncachedTokens = x.Tokens - heldBy(&why.DecodeView, &q.decode.query, why.Decode.Ranked[0])
	}
	x.Pair.Why = pairWords(d, x, q.notSplit)
	if d.IsFallback() && p.isOn() && p.failsWithoutPrefill() {
		x.Notes = append(x.Notes, "disaggregation.fallback is fail: such a request is refused with 503")
	}
	return x
}

// explainPairQuery is ExplainRoute for an application with two pools.
func explainPairQuery(ctx context.Context, p *pairApp, rq *client.Query) (*client.Explanation, error) {
	if rq.Replay != "" {
		return replayPair(p, rq)
	}
	q, err := newPairQuery(ctx, p, rq)
	if err != nil {
		return nil, err
	}
	return explainPair(q), nil
}

// replayPair shows the inputs of a recent decision, and the decision that a new request would get now.
func replayPair(p *pairApp, rq *client.Query) (*client.Explanation, error) {
	e, err := findDecision(p.decode, p.name, rq.Replay)
	if err != nil {
		return nil, err
	}
	q := &pairQuery{pair: p, decode: routeQuery{prompt: e.prompt}}
	if err := applyOverrides(p.decode, &q.decode, rq.Worker, rq.Override); err != nil {
		return nil, err
	}
	if e.pair.way == "" {
		q.notSplit = "it went to one rank"
	} else {
		q.keepPrefill()
	}
	x := explainPair(q)
	x.Replay = e.toReplay(p.in.clockBase)
	x.Notes = append(x.Notes, e.notes(p.decode)...)
	return x, nil
}

// heldBy is how many tokens of the prompt a rank holds, as policies see it.
func heldBy(v *routing.View, q *routing.Request, id routing.RankID) int {
	if v.PrefixCachingOff {
		return 0
	}
	return q.HitOn(id)
}

// repick shows the rank that a pair decision takes in place of the policy's own choice; none if taken is
// false.
func repick(x *client.Explanation, id routing.RankID, taken bool, reason string) {
	pick := ""
	if taken {
		pick = id.String()
	}
	if taken && pick != x.Pick {
		x.Reason = reason
	}
	x.Pick = pick
	for i := range x.Ranks {
		x.Ranks[i].Picked = taken && x.Ranks[i].Worker == pick
	}
}

// wayOf is the way on which a pair decision sends the request.
func wayOf(d *routing.PairDecision) string {
	switch {
	case d.Kind != routing.Route:
		return telemetry.WayNone
	case d.Remote:
		return telemetry.WayRemote
	case d.IsFallback():
		return telemetry.WayFallback
	}
	return telemetry.WayLocal
}

// pairCandidates lists the pairs that were compared by their ranks, then the decode rank alone.
func pairCandidates(d *routing.PairDecision) []client.PairCandidate {
	list := slices.Clone(d.Candidates)
	slices.SortStableFunc(list, func(a, b routing.PairCandidate) int {
		switch {
		case a.Remote != b.Remote && a.Remote:
			return -1
		case a.Remote != b.Remote:
			return 1
		}
		return cmp.Or(cmp.Compare(a.Prefill, b.Prefill), cmp.Compare(a.Decode, b.Decode))
	})
	out := make([]client.PairCandidate, 0, len(list))
	for _, c := range list {
		row := client.PairCandidate{
			Decode: c.Decode.String(), Skip: c.Skip, CostMs: c.Cost,
			Picked: d.Kind == routing.Route && c.Remote == d.Remote && c.Decode == d.Decode &&
				(!c.Remote || c.Prefill == d.Prefill),
		}
		if c.Remote {
			row.Prefill = c.Prefill.String()
		}
		for _, t := range c.Terms {
			row.Terms = append(row.Terms, termOf(t))
		}
		out = append(out, row)
	}
	return out
}

// pairWords says a decision's reason in words.
func pairWords(d *routing.PairDecision, x *client.Explanation, notSplit string) string {
	if d.Kind != routing.Route {
		return "no rank can take it now"
	}
	rank, uncached := d.Decode.String(), x.Pair.UncachedTokens
	switch d.Reason {
	case routing.PairLongPrefill:
		return fmt.Sprintf("decode rank %s would have to compute %d of %d tokens", rank, uncached, x.Tokens)
	case routing.PairPrefillHasRoom:
		return fmt.Sprintf("prefill rank %s is not above its busy threshold", d.Prefill)
	case routing.PairAlways:
		return "nothing speaks against it"
	case routing.PairRemoteCheaper:
		return "the pair costs at least 5 % less than the decode rank alone"
	case routing.PairShortPrefill:
		return fmt.Sprintf("decode rank %s has only %d of %d tokens to compute", rank, uncached, x.Tokens)
	case routing.PairLocalCheaper:
		return "no pair costs 5 % less than the decode rank alone"
	case routing.PairDecodeHolds:
		return fmt.Sprintf("decode rank %s has only %d of %d tokens to compute, less than a second request "+
			"costs", rank, uncached, x.Tokens)
	case routing.PairPrefillQueue:
		return fmt.Sprintf("the prompt would wait for a prefill rank longer than decode rank %s needs for it",
			rank)
	case routing.PairCannotSplit:
		return "the request cannot be split: " + notSplit
	case routing.PairNoPrefill:
		return "no prefill rank is ready"
	case routing.PairPrefillFull:
		return "every prefill rank has all the requests that it may hold"
	case routing.PairPrefillBusy:
		return "the prefill ranks are above their busy threshold"
	case routing.PairLeasesFull:
		return "prompts that wait for their decode ranks fill the prefill ranks' caches"
	case routing.PairNotPrewarmed:
		return fmt.Sprintf("no prefill rank has met decode rank %s since both started", rank)
	}
	return "by the decode pool's policy"
}

// pairPick is the pair part of a recorded decision; the zero value: the application has one pool.
type pairPick struct {
	way     string
	prefill routing.RankID // of way remote
}

// recordPair keeps the decision of a live request that got a pair, or a decode rank alone. decide is the
// rule; p and q are the request as the decode pool reads it.
func (r *decisionLog) recordPair(id string, attempt int, decide string, p *prompt, q *routing.Request,
	d *routing.PairDecision,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.add(id, attempt, decide, p, q, d.Decode)
	e.reason, e.pair = d.Reason, pairPick{wayOf(d), d.Prefill}
}

func (p *pairPick) toReplay() *client.PairReplay {
	if p.way == "" {
		return nil
	}
	out := &client.PairReplay{Way: p.way}
	if p.way == telemetry.WayRemote {
		out.Prefill = p.prefill.String()
	}
	return out
}
