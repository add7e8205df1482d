package ingress

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// explain decides the question and explains the decision.
func explain(q *inquiry) *client.Explanation {
	_, _, _ = search{q.request}.decide()
	x := explainDecision(q.app.router, asked{&q.prompt, &q.query}, &q.Decode, &q.DecodeView)
	if q.split != nil {
		explainPair(q, x)
	}
	x.Notes = append(x.Notes, explainHolding(&q.app.router.groups, &q.query)...)
	return x
}

// explainDecision describes a policy's decision on a view.
func explainDecision(ar *appRouter, q asked, d *routing.Decision, view *routing.View) *client.Explanation {
	p := routerapi.Pool{
		App: ar.name, Policy: ar.router.Load().Policy(), Ranks: ar.revision.Load().ranks,
		Notes: rankNotesOf(ar), NotReady: ar.whyNotReady(), HeldBlocks: q.prompt.cachedPrefix,
		HasNoTokens: ar.inputs().identity == app.IdentityTokens && q.prompt.unit == kvindex.Text,
	}
	p.Waiting, _ = ar.queue.size()
	x := routerapi.Explain(&p, q.query, d, view)
	x.Blocks, x.BlockSize, x.BlockUnit, x.Identity = q.prompt.blockInfo()
	return x
}

// blockInfo describes the prompt's blocks.
func (p *prompt) blockInfo() (blocks, size int, unit, identity string) {
	switch p.unit {
	case kvindex.Tokens:
		return len(p.blocks), p.size, "tokens", app.IdentityTokens
	case kvindex.Text:
		return len(p.blocks), p.size, "bytes", app.IdentityText
	}
	return 0, 0, "", ""
}

// rankNotesOf returns the notes of every rank.
func rankNotesOf(ar *appRouter) map[routing.RankID]routerapi.RankNotes {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	out := make(map[routing.RankID]routerapi.RankNotes, len(ar.ranks))
	for id, r := range ar.ranks {
		n := routerapi.RankNotes{IsDraining: r.draining}
		switch {
		case r.busy:
			n.Full = "its engine said that it is busy"
		case r.full && r.offeredTo != "" && r.offered == 0:
			n.Full = "its free room is for another ingress, which waits as well"
		case r.full:
			n.Full = "it said that it is full"
		}
		out[id] = n
	}
	return out
}

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
	pair   pairPick
}

// record keeps the decision of a live request that was routed.
func (r *decisionLog) record(id string, attempt int, policy string, p *prompt, q *routing.Request,
	d *routing.Decision,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(id, attempt, policy, p, q, d.Ranked[0]).reason = d.Reason
}

// add makes the next entry, without its reason. The caller holds mu.
func (r *decisionLog) add(id string, attempt int, policy string, p *prompt, q *routing.Request,
	pick routing.RankID,
) *decisionRecord {
	if len(r.ring) < maxRecent {
		r.ring = append(r.ring, decisionRecord{})
	}
	e := &r.ring[r.next]
	r.next = (r.next + 1) % maxRecent
	blocks := append(e.prompt.blocks[:0], p.blocks[:min(len(p.blocks), maxRecentBlocks)]...)
	*e = decisionRecord{
		id: id, at: q.Now, attempt: attempt, policy: policy, pick: pick, hit: q.HitOn(pick),
		prompt: prompt{
			routingHeaders: p.routingHeaders, tokens: p.tokens, estimated: p.estimated, adapter: p.adapter,
			session: p.session,
			unit:    p.unit, size: p.size, promptMemory: promptMemory{blocks: blocks}, perBlock: p.perBlock,
		},
		whole: len(blocks) == len(p.blocks), hits: append(e.hits[:0], q.Hits...),
		tried: append(e.tried[:0], q.Tried...),
	}
	return e
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
		out.prompt.blocks, out.hits, out.tried = slices.Clone(e.prompt.blocks), slices.Clone(e.hits),
			slices.Clone(e.tried)
		return out, true
	}
	return decisionRecord{}, false
}

// latest describes the last decisions, the newest first, at most the given number. base is the origin of
// their clock.
func (r *decisionLog) latest(most int, base time.Time) []client.Replay {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]client.Replay, 0, min(most, len(r.ring)))
	for n := range cap(out) {
		out = append(out, *r.ring[(r.next-1-n+len(r.ring))%len(r.ring)].toReplay(base))
	}
	return out
}

// findDecision returns a recent decision of the application that users know by a name.
func findDecision(ar *appRouter, name, id string) (decisionRecord, error) {
	e, ok := ar.decisions.find(id)
	if !ok {
		return e, problem.New(problem.NotFound, "no request %q among the last %d of app %s",
			id[:min(len(id), maxRequestID)], maxRecent, name).
			WithHint("the id is in the answer's x-request-id header; " +
				"requests that found no rank are not kept")
	}
	return e, nil
}

// notes say what a recorded decision has not kept.
func (e *decisionRecord) notes(ar *appRouter) (out []string) {
	if ar.inputs().needs.Text {
		out = append(out,
			"this policy reads the prompt's text, which is not kept: what it would get now is without it")
	}
	if !e.whole {
		out = append(out,
			fmt.Sprintf("only the first %d blocks of the prompt are kept: hits behind them are not seen now",
				maxRecentBlocks))
	}
	return out
}

// toReplay describes the recorded decision. base is the origin of its clock.
func (e *decisionRecord) toReplay(base time.Time) *client.Replay {
	out := &client.Replay{
		RequestID: e.id, At: base.Add(e.at).Round(0), Attempt: e.attempt, Policy: e.policy,
		Pick: e.pick.String(), Reason: e.reason, Tokens: e.prompt.tokens,
		HitTokens: e.hit, Pair: e.pair.toReplay(),
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
