package ingress

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
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
	return x
}

// explainDecision describes a policy's decision on a view.
func explainDecision(ar *appRouter, q asked, d *routing.Decision, view *routing.View) *client.Explanation {
	policy := ar.router.Load().Policy()
	x := &client.Explanation{
		App: ar.name, Policy: policy, Tokens: q.query.Tokens, Estimated: q.query.Estimated,
		Decision: kindName(d.Kind), Reason: d.Reason, Formula: formula(policy, d.Terms),
	}
	x.Blocks, x.BlockSize, x.BlockUnit, x.Identity = q.prompt.blockInfo()
	if d.Kind == routing.Route {
		x.Pick = d.Ranked[0].String()
	}
	x.Ranks = explainRanks(ar, q, d, view)
	x.Notes = explainNotes(ar, q.prompt, d, view)
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

func kindName(k routing.Kind) string {
	switch k {
	case routing.Route:
		return "route"
	case routing.Queue:
		return "queue"
	case routing.Reject:
	}
	return "reject"
}

// explainRanks describes every rank that the Router knows, and the application's other ranks.
func explainRanks(ar *appRouter, q asked, d *routing.Decision, v *routing.View) []client.RankExplanation {
	excluded, notes := v.Exclusions(q.query), rankNotesOf(ar)
	out := make([]client.RankExplanation, 0, len(v.Ranks))
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		row := client.RankExplanation{
			Worker: rk.ID.String(), Group: rk.ID.Group(), Rank: rk.ID.Rank(), InFlight: rk.Open(),
			MaxOngoing: rk.MaxOngoing,
			Picked:     d.Kind == routing.Route && d.Ranked[0] == rk.ID,
		}
		row.Eligible = excluded[i] == routing.NotExcluded
		row.State, row.Why = explainRank(rk, excluded[i], notes[rk.ID], v)
		if rk.HasKVUsage || rk.Capacity > 0 {
			usage := rk.Usage()
			row.KVUsage = &usage
		}
		if !v.PrefixCachingOff {
			q.hit(&row, rk.ID)
		}
		score(&row, rk.ID, d.Terms)
		out = append(out, row)
	}
	return addMissingRanks(ar, out)
}

// hit adds what the rank holds of the prompt.
func (q asked) hit(row *client.RankExplanation, id routing.RankID) {
	row.HitTokens = q.query.HitOn(id)
	i := slices.IndexFunc(q.query.Hits, func(h routing.Hit) bool { return h.Rank == id })
	if i < 0 {
		return
	}
	row.HostTokens, row.DiskTokens = int(q.query.Hits[i].Host), int(q.query.Hits[i].Disk)
	row.HitBlocks = q.prompt.cachedPrefix(id)
}

// score adds the rank's terms and their sum, in the order in which the policy adds them.
func score(row *client.RankExplanation, id routing.RankID, terms []routing.Term) {
	sum := 0.0
	for _, t := range terms {
		if t.Rank == id {
			row.Terms, sum = append(row.Terms, termOf(t)), sum+t.Value
		}
	}
	if row.Terms != nil {
		row.Score = &sum
	}
}

func termOf(t routing.Term) client.Term {
	return client.Term{Name: t.Name, Unit: t.Unit, Raw: t.Raw, Weight: t.Weight, Value: t.Value}
}

// formula describes how the terms add up and which sum wins; "" if there are no terms.
func formula(policy string, terms []routing.Term) string {
	var parts []string
	for _, t := range terms {
		if t.Rank != terms[0].Rank || t.Weight == 0 {
			continue // all ranks have the same terms; a term without weight is only information
		}
		part := t.Name
		if t.Unit != "none" {
			part += " (" + t.Unit + ")"
		}
		switch {
		case t.Weight >= lastResort:
			part += " (never unless nothing else is left)"
		case t.Weight != 1:
			part = strconv.FormatFloat(t.Weight, 'g', -1, 64) + " × " + part
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return ""
	}
	wins := "lowest wins"
	if policy == scoring {
		wins = "highest wins"
	}
	return strings.Join(parts, " + ") + "; " + wins
}

// lastResort is a weight beyond every other cost: a policy gives it to ranks that it takes only if no other
// is left.
const lastResort = 1 << 40

// scoring is the one policy whose highest score wins.
const scoring = "scoring"

// explainNotes are remarks for a person beside the numbers.
func explainNotes(ar *appRouter, p *prompt, d *routing.Decision, v *routing.View) []string {
	var out []string
	r := ar.inputs()
	if v.PrefixCachingOff {
		out = append(out, "the engines run without prefix caching: every hit counts as 0")
	}
	if r.identity == app.IdentityTokens && p.unit == kvindex.Text {
		out = append(out, "identity is tokens, but no tokenizer answered: the prompt is known by its text")
	}
	if d.Reason == routing.ReasonSampled {
		out = append(out, "router_temperature is above 0: the pick is drawn, the next one may differ")
	}
	if n, _ := ar.queue.size(); n > 0 {
		out = append(out, fmt.Sprintf("%d requests wait: a new one stands behind them", n))
	}
	if d.Reason == routing.ReasonOnTheWay {
		out = append(out, "no rank is ready"+ar.whyNotReady())
	}
	if d.Disqualified > 0 {
		out = append(out, fmt.Sprintf("%d ranks have no score that is a number", d.Disqualified))
	}
	switch {
	case p.hasDirect:
		out = append(out, "the caller names the rank: the policy has no say")
	case v.HasBusyThreshold && slices.ContainsFunc(v.Ranks, func(rk routing.Rank) bool { return rk.Busy }):
		out = append(out, fmt.Sprintf("ranks above busy_threshold %g get nothing", v.BusyThreshold))
	}
	return out
}

// addMissingRanks adds ranks of the application that have no stream here, and keeps the order.
func addMissingRanks(ar *appRouter, rows []client.RankExplanation) []client.RankExplanation {
	known := map[string]bool{}
	for i := range rows {
		known[rows[i].Worker] = true
	}
	for _, id := range ar.revision.Load().ranks {
		if !known[id.String()] {
			rows = append(rows, client.RankExplanation{
				Worker: id.String(), Group: id.Group(), Rank: id.Rank(), State: "unknown",
				Why: "it has not started yet, or is gone; see `dpserve status`",
			})
		}
	}
	slices.SortStableFunc(rows, func(a, b client.RankExplanation) int {
		return int(routing.ID(a.Group, a.Rank)) - int(routing.ID(b.Group, b.Rank))
	})
	return rows
}

// rankNotes is what the streams say of ranks that routing leaves out.
type rankNotes struct {
	draining bool
	full     string // why it counts as full whatever its numbers say; "": by its numbers
}

// rankNotesOf returns the notes of every rank.
func rankNotesOf(ar *appRouter) map[routing.RankID]rankNotes {
	ar.mu.Lock()
	defer ar.mu.Unlock()
	out := make(map[routing.RankID]rankNotes, len(ar.ranks))
	for id, r := range ar.ranks {
		n := rankNotes{draining: r.draining}
		switch {
		case r.busy:
			n.full = "its engine said that it is busy"
		case r.full && r.turn != "" && r.offered == 0:
			n.full = "its free room is for another ingress, which waits as well"
		case r.full:
			n.full = "it said that it is full"
		}
		out[id] = n
	}
	return out
}

// explainRank returns the rank's state and the reason in words; "" if the rank may be picked.
func explainRank(rk *routing.Rank, why routing.Exclusion, notes rankNotes, v *routing.View) (
	state, text string,
) {
	switch why {
	case routing.Tried:
		return "tried", "it takes no such request: of a role or without a pair for it"
	case routing.NotReady:
		if notes.draining {
			return "draining", "it takes nothing new and lets its requests end"
		}
		return "not-ready", "its unit is not ready, or its engine does not accept"
	case routing.LeftOut:
		return "tripped", "its last answers failed, and no canary has come back yet"
	case routing.AboveBusy:
		return "busy", fmt.Sprintf("KV usage %.2f, busy_threshold %.2f", rk.Usage(), v.BusyThreshold)
	case routing.SilentStream:
		return "silent", "its stream is silent, and others are not"
	case routing.NoRoom:
		if notes.full != "" {
			return "full", notes.full
		}
		return "full", fmt.Sprintf("%d of %d requests in flight", rk.Open(), rk.MaxOngoing)
	case routing.NotExcluded:
	}
	if rk.Silent {
		return "silent", "" // admission decides
	}
	return "ok", ""
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
		Pick: e.pick.String(), Reason: e.reason, HitTokens: e.hit, Pair: e.pair.toReplay(),
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
