package ingress

import (
	"fmt"
	"sync"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
)

// Bounds of a decisionLog.
const (
	maxRecent       = 1024 // decisions
	maxRecentBlocks = 1024 // leading blocks of each prompt: 8 KiB, 8 MiB in all
)

// decisionLog is a ring of the last live requests with their decisions, for replays. It keeps the request
// without its text, and the decision. It does not keep the ranks' load: a copy of it per request would cost
// more than the decision. Entries are reused, so a request allocates nothing here in the long run. The zero
// value is ready; safe for concurrent use.
type decisionLog struct {
	mu   sync.Mutex
	ring []decisionRecord
	next int
}

// decisionRecord is one entry of a decisionLog.
type decisionRecord struct {
	id      string        // x-request-id
	at      time.Duration // on the ingress's clock
	attempt int
	policy  string
	reason  string
	pick    routing.RankID
	hit     int

	prompt prompt // without text; blocks are the entry's own memory
	whole  bool   // every block was kept
	hits   []routing.Hit
	tried  []routing.RankID
}

// record keeps the decision of a live request that was routed.
func (r *decisionLog) record(id string, attempt int, policy string, p *prompt, q *routing.Request,
	d *routing.Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ring) < maxRecent {
		r.ring = append(r.ring, decisionRecord{})
	}
	e := &r.ring[r.next]
	r.next = (r.next + 1) % maxRecent
	blocks := append(e.prompt.blocks[:0], p.blocks[:min(len(p.blocks), maxRecentBlocks)]...)
	*e = decisionRecord{
		id: id, at: q.Now, attempt: attempt, policy: policy, reason: d.Reason, pick: d.Ranked[0],
		hit: q.HitOn(d.Ranked[0]),
		prompt: prompt{
			routingHeaders: p.routingHeaders, tokens: p.tokens, estimated: p.estimated, adapter: p.adapter,
			session: p.session,
			unit:    p.unit, size: p.size, promptMemory: promptMemory{blocks: blocks}, perBlock: p.perBlock,
		},
		whole: len(blocks) == len(p.blocks), hits: append(e.hits[:0], q.Hits...),
		tried: append(e.tried[:0], q.Tried...),
	}
}

// find copies the newest entry of a request.
func (r *decisionLog) find(id string) (decisionRecord, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := range r.ring {
		e := &r.ring[(r.next-1-n+len(r.ring))%len(r.ring)]
		if e.id != id {
			continue
		}
		out := *e
		out.prompt.blocks = append([]uint64(nil), e.prompt.blocks...)
		out.hits = append([]routing.Hit(nil), e.hits...)
		out.tried = append([]routing.RankID(nil), e.tried...)
		return out, true
	}
	return decisionRecord{}, false
}

// replay shows the inputs of a recent decision, and the decision that a new request would get now.
func (ar *appRouter) replay(router *routing.Router, rq *msg.RouteQuery) (*msg.Explanation, error) {
	e, ok := ar.decisions.find(rq.Replay)
	if !ok {
		return nil, problem.New(problem.NotFound, "no request %q among the last %d of app %s",
			rq.Replay[:min(len(rq.Replay), maxRequestID)], maxRecent, ar.name).
			WithHint("the id is in the answer's x-request-id header; requests that found no rank are not kept")
	}
	query := &routeQuery{prompt: e.prompt}
	if err := ar.applyOverrides(query, rq.Worker, rq.Override); err != nil {
		return nil, err
	}
	x := ar.explain(router, query)
	x.Replay = e.toReplay(ar.in.clockBase)
	if ar.inputs().needs.Text {
		x.Notes = append(x.Notes,
			"this policy reads the prompt's text, which is not kept: what it would get now is without it")
	}
	if !e.whole {
		x.Notes = append(x.Notes,
			fmt.Sprintf("only the first %d blocks of the prompt are kept: hits behind them are not seen now",
				maxRecentBlocks))
	}
	return x, nil
}

// toReplay describes the recorded decision. base is the origin of its clock.
func (e *decisionRecord) toReplay(base time.Time) *msg.Replay {
	out := &msg.Replay{
		RequestID: e.id, At: base.Add(e.at).Round(0), Attempt: e.attempt, Policy: e.policy,
		Pick: e.pick.String(), Reason: e.reason, HitTokens: e.hit,
	}
	for _, h := range e.hits {
		if out.Hits == nil {
			out.Hits = map[string]int{}
		}
		out.Hits[h.Rank.String()] = int(h.Tokens)
	}
	for _, id := range e.tried {
		out.Tried = append(out.Tried, id.String())
	}
	return out
}
