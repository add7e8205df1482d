package ingress

import (
	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/dispatch"
	"github.com/dpserve/dpserve/internal/routerapi"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// explainPair completes the explanation of a question that both pools have decided.
func explainPair(q *inquiry, x *client.Explanation) {
	s, p, way := q.split, q.split.pair, telemetry.WayNone
	x.App = p.name
	if s.choice.Kind == routing.Route {
		way = wayNames[s.way]
	}
	prefill := explainDecision(p.prefill, asked{&s.prompt, &s.query}, &q.Prefill, &q.PrefillView)
	routerapi.ExplainPair(x, prefill, &routerapi.PairFacts{
		Decision: &s.choice, Why: &q.PairWhy, Query: &q.query, Rule: p.rule, Way: way, NotSplit: q.notSplit,
	})
	if s.way == dispatch.WayFallback && p.failsWithoutPrefill() {
		x.Notes = append(x.Notes, "disaggregation.fallback is fail: such a request is refused with 503")
	}
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
	out := &client.PairInfo{
		Decide: p.rule, Transfer: p.traits.Name, Fallback: pairFallback(p), Pairs: state, Met: count.met,
		All: count.all, Decisions: p.router.Counts(), Prefill: &prefill,
	}
	usual, links := p.router.TransferTimes(p.in.clock())
	out.TransferMs = usual
	for _, l := range links {
		out.Links = append(out.Links, client.TransferLink{
			Prefill: l.Prefill, Decode: l.Decode, TokenMs: l.TokenMS, Spread: l.Spread,
			Transfers: l.Transfers, AgeS: l.Age.Seconds(),
		})
	}
	return out
}

// pairPick is the pair part of a recorded decision; the zero value: the application has one pool.
type pairPick struct {
	way     string
	prefill routing.RankID // of way remote
}

// recordPair keeps the decision of a live request that got a pair, or a decode rank alone. decide is the
// rule; p and q are the request as the decode pool reads it; way is how it goes on.
func (r *decisionLog) recordPair(id string, attempt int, decide string, p *prompt, q *routing.Request,
	d *routing.PairDecision, way string,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.add(id, attempt, decide, p, q, d.Decode)
	e.reason, e.pair = d.Reason, pairPick{way, d.Prefill}
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
