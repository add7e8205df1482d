package ingress

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/routing"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// ExplainRoute decides for rq with the code and state of live requests, explains the decision, and changes
// nothing. Errors are *problem.Error.
func (in *Ingress) ExplainRoute(ctx context.Context, app string, rq *msg.RouteQuery) (
	*msg.Explanation, error) {
	ar, router, err := in.routerOf(app)
	if err != nil {
		return nil, err
	}
	if rq.Replay != "" {
		return ar.replay(router, rq)
	}
	query, err := ar.newRouteQuery(ctx, rq)
	if err != nil {
		return nil, err
	}
	return ar.explain(router, query), nil
}

// explain is the decision for k as it would be now.
func (ar *appRouter) explain(router *routing.Router, query *routeQuery) *msg.Explanation {
	ar.describeQuery(query)
	d, view := router.Why(&query.query)
	x := &msg.Explanation{
		App: ar.name, Policy: router.Policy(), Tokens: query.query.Tokens, Estimated: query.query.Estimated,
		Decision: kindName(d.Kind), Reason: d.Reason, Formula: formula(router.Policy(), d.Terms),
	}
	x.Blocks, x.BlockSize, x.BlockUnit, x.Identity = query.prompt.blockInfo()
	if d.Kind == routing.Route {
		x.Pick = d.Ranked[0].String()
	}
	x.Ranks = ar.explainRanks(query, &d, &view)
	x.Notes = ar.explainNotes(query, &d, &view)
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
func (ar *appRouter) explainRanks(query *routeQuery, d *routing.Decision,
	v *routing.View) []msg.RankExplanation {
	j := ar.newRankExplainer(query, v)
	out := make([]msg.RankExplanation, 0, len(v.Ranks))
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		row := msg.RankExplanation{
			Worker: rk.ID.String(), Group: rk.ID.Group(), Rank: rk.ID.Rank(), InFlight: rk.Load.O(),
			MaxOngoing: rk.MaxOngoing,
			Picked:     d.Kind == routing.Route && d.Ranked[0] == rk.ID,
		}
		row.State, row.Why, row.Eligible = j.explain(rk)
		if rk.HasKVUsage || rk.Capacity > 0 {
			usage := rk.Usage()
			row.KVUsage = &usage
		}
		if !v.PrefixCachingOff {
			query.hit(&row, rk.ID)
		}
		score(&row, rk.ID, d.Terms)
		out = append(out, row)
	}
	return ar.addMissing(out)
}

// hit adds what the rank holds of the prompt.
func (query *routeQuery) hit(row *msg.RankExplanation, id routing.RankID) {
	row.HitTokens = query.query.HitOn(id)
	i := slices.IndexFunc(query.query.Hits, func(h routing.Hit) bool { return h.Rank == id })
	if i < 0 {
		return
	}
	row.HostTokens, row.DiskTokens = int(query.query.Hits[i].Host), int(query.query.Hits[i].Disk)
	row.HitBlocks = query.prompt.cachedPrefix(id)
}

// score adds the rank's terms and their sum, in the order in which the policy adds them.
func score(row *msg.RankExplanation, id routing.RankID, terms []routing.Term) {
	sum := 0.0
	for _, t := range terms {
		if t.Rank == id {
			row.Terms = append(row.Terms, msg.Term{
				Name: t.Name, Unit: t.Unit, Raw: t.Raw, Weight: t.Weight, Value: t.Value})
			sum += t.Value
		}
	}
	if row.Terms != nil {
		row.Score = &sum
	}
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
		if t.Weight != 1 {
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

// scoring is the one policy whose highest score wins.
const scoring = "scoring"

// explainNotes are remarks for a person beside the numbers.
func (ar *appRouter) explainNotes(query *routeQuery, d *routing.Decision, v *routing.View) []string {
	var out []string
	r := ar.inputs()
	if v.PrefixCachingOff {
		out = append(out, "the engines run without prefix caching: every hit counts as 0")
	}
	if r.identity == app.IdentityTokens && query.prompt.unit == kvindex.Text {
		out = append(out, "identity is tokens, but no tokenizer answered: the prompt is known by its text")
	}
	if d.Reason == routing.ReasonSampled {
		out = append(out, "router_temperature is above 0: the pick is drawn, the next one may differ")
	}
	if n, _ := ar.queue.size(); n > 0 {
		out = append(out, fmt.Sprintf("%d requests wait: a new one stands behind them", n))
	}
	if d.Disqualified > 0 {
		out = append(out, fmt.Sprintf("%d ranks have no score that is a number", d.Disqualified))
	}
	if query.query.Force || v.HasBusyThreshold && slices.ContainsFunc(
		v.Ranks, func(rk routing.Rank) bool { return rk.Busy }) {
		if query.query.Force {
			out = append(out, "the caller names the rank: the policy has no say")
		} else {
			out = append(out, fmt.Sprintf("ranks above busy_threshold %g get nothing", v.BusyThreshold))
		}
	}
	return out
}

// addMissing adds ranks of the application that have no stream here, and keeps the order.
func (ar *appRouter) addMissing(rows []msg.RankExplanation) []msg.RankExplanation {
	known := map[string]bool{}
	for i := range rows {
		known[rows[i].Worker] = true
	}
	for _, u := range ar.revision.Load().app.Units() {
		for _, n := range u.Ranks {
			id := routing.ID(u.Group, n)
			if known[id.String()] {
				continue
			}
			rows = append(rows, msg.RankExplanation{
				Worker: id.String(), Group: u.Group, Rank: n, State: "unknown",
				Why: "it has not started yet, or is gone; see `dpserve status`",
			})
		}
	}
	slices.SortStableFunc(rows, func(a, b msg.RankExplanation) int {
		return int(routing.ID(a.Group, a.Rank)) - int(routing.ID(b.Group, b.Rank))
	})
	return rows
}

// refusal is the error for a decision without a rank.
func refusal(app string, query *routeQuery, d *routing.Decision) error {
	switch d.Reason {
	case routing.ReasonUnknownRank:
		return problem.New(problem.NotFound, "app %s has no rank %s", app, query.query.Direct).WithHint(
			"`dpserve status %s` lists them", app)
	case routing.ReasonRankUnavailable:
		return problem.New(problem.Unavailable, "rank %s of app %s cannot take it now", query.query.Direct,
			app).WithHint("try again later, or leave worker out")
	case routing.ReasonNoRankGiven:
		return problem.New(problem.InvalidArgument,
			"app %s uses routing policy direct, and no worker is named", app).WithHint(
			"give worker as GROUP/RANK")
	case routing.ReasonNoRoom:
		return problem.New(problem.Overloaded, "every rank of app %s has all the requests it may hold",
			app).WithHint("try again later")
	case routing.ReasonAllBusy:
		return problem.New(problem.Overloaded, "every rank of app %s is above busy_threshold", app).WithHint(
			"try again later")
	}
	return problem.New(problem.Unavailable, "no rank of app %s is ready: %s", app, d.Reason).WithHint(
		"`dpserve status %s` shows why", app)
}
