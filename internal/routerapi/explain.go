package routerapi

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// Pool is what an explanation says of the ranks of an application beside a Router's view.
type Pool struct {
	App, Policy string
	Ranks       []routing.RankID // of the application
	Notes       map[routing.RankID]RankNotes
	Waiting     int                         // requests in the queue
	NotReady    string                      // why no rank is ready, as the end of a sentence
	HeldBlocks  func(id routing.RankID) int // leading blocks of the prompt that a rank holds
	HasNoTokens bool                        // prompts are known by their tokens, and this one by its text
}

// RankNotes is what a rank's stream says of why routing leaves it out.
type RankNotes struct {
	IsDraining bool
	Full       string // why it counts as full whatever its numbers say; "": by its numbers
}

// Explain describes a policy's decision on a view.
func Explain(p *Pool, q *routing.Request, d *routing.Decision, v *routing.View) *client.Explanation {
	x := &client.Explanation{
		App: p.App, Policy: p.Policy, Tokens: q.Tokens, Estimated: q.Estimated, Decision: KindName(d.Kind),
		Reason: d.Reason, Formula: formula(p.Policy, d.Terms), Notes: notesOf(p, q, d, v),
	}
	if d.Kind == routing.Route {
		x.Pick = d.Ranked[0].String()
	}
	excluded := v.Exclusions(q)
	x.Ranks = make([]client.RankExplanation, 0, len(v.Ranks))
	for i := range v.Ranks {
		x.Ranks = append(x.Ranks, p.explainRow(&v.Ranks[i], excluded[i], q, d, v))
	}
	x.Ranks = addMissingRanks(p.Ranks, x.Ranks)
	return x
}

// explainRow describes a rank that the Router knows.
func (p *Pool) explainRow(rk *routing.Rank, why routing.Exclusion, q *routing.Request, d *routing.Decision,
	v *routing.View,
) client.RankExplanation {
	row := client.RankExplanation{
		Worker: rk.ID.String(), Group: rk.ID.Group(), Rank: rk.ID.Rank(), InFlight: rk.Open(),
		MaxOngoing: rk.MaxOngoing, Picked: d.Kind == routing.Route && d.Ranked[0] == rk.ID,
		Eligible: why == routing.NotExcluded,
	}
	row.State, row.Why = explainRank(rk, why, p.Notes[rk.ID], v)
	if rk.HasKVUsage || rk.Capacity > 0 {
		usage := rk.Usage()
		row.KVUsage = &usage
	}
	if !v.PrefixCachingOff {
		p.addHit(&row, q, rk.ID)
	}
	score(&row, rk.ID, d.Terms)
	return row
}

// addHit adds what the rank holds of the prompt.
func (p *Pool) addHit(row *client.RankExplanation, q *routing.Request, id routing.RankID) {
	row.HitTokens = q.HitOn(id)
	i := slices.IndexFunc(q.Hits, func(h routing.Hit) bool { return h.Rank == id })
	if i < 0 {
		return
	}
	row.HostTokens, row.DiskTokens = int(q.Hits[i].Host), int(q.Hits[i].Disk)
	row.HitBlocks = p.HeldBlocks(id)
}

// KindName is a decision's kind in a word.
func KindName(k routing.Kind) string {
	switch k {
	case routing.Route:
		return "route"
	case routing.Queue:
		return "queue"
	case routing.Reject:
	}
	return "reject"
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

// explainRank returns the rank's state and the reason in words; "" if the rank may be picked.
func explainRank(rk *routing.Rank, why routing.Exclusion, notes RankNotes, v *routing.View) (
	state, text string,
) {
	switch why {
	case routing.Tried:
		return "tried", "it takes no such request: of a role or without a pair for it"
	case routing.Lacking:
		return "lacking", "its engine does not have the adapter"
	case routing.NotReady:
		if notes.IsDraining {
			return "draining", "it takes nothing new and lets its requests end"
		}
		return "not-ready", "its unit is not ready, or its engine does not accept"
	case routing.LeftOut:
		return "ejected", "its last answers failed, and no probe has succeeded yet"
	case routing.AboveBusy:
		return "busy", fmt.Sprintf("KV usage %.2f, busy_threshold %.2f", rk.Usage(), v.BusyThreshold)
	case routing.SilentStream:
		return "silent", "its stream is silent, and others are not"
	case routing.NoRoom:
		if notes.Full != "" {
			return "full", notes.Full
		}
		return "full", fmt.Sprintf("%d of %d requests in flight", rk.Open(), rk.MaxOngoing)
	case routing.NotExcluded:
	}
	if rk.Silent {
		return "silent", "" // admission decides
	}
	return "ok", ""
}

// notesOf are remarks for a person beside the numbers.
func notesOf(p *Pool, q *routing.Request, d *routing.Decision, v *routing.View) []string {
	var out []string
	if v.PrefixCachingOff {
		out = append(out, "the engines run without prefix caching: every hit counts as 0")
	}
	if p.HasNoTokens {
		out = append(out, "identity is tokens, but no tokenizer answered: the prompt is known by its text")
	}
	if d.Reason == routing.ReasonSampled {
		out = append(out, "router_temperature is above 0: the pick is drawn, the next one may differ")
	}
	if n := p.Waiting; n > 0 {
		out = append(out, fmt.Sprintf("%d requests wait: a new one stands behind them", n))
	}
	if d.Reason == routing.ReasonOnTheWay {
		out = append(out, "no rank is ready"+p.NotReady)
	}
	if d.Disqualified > 0 {
		out = append(out, fmt.Sprintf("%d ranks have no score that is a number", d.Disqualified))
	}
	switch {
	case q.HasDirect:
		out = append(out, "the caller names the rank: the policy has no say")
	case v.HasBusyThreshold && slices.ContainsFunc(v.Ranks, func(rk routing.Rank) bool { return rk.Busy }):
		out = append(out, fmt.Sprintf("ranks above busy_threshold %g get nothing", v.BusyThreshold))
	}
	return out
}

// addMissingRanks adds ranks of the application that have no stream here, and keeps the order.
func addMissingRanks(all []routing.RankID, rows []client.RankExplanation) []client.RankExplanation {
	known := map[string]bool{}
	for i := range rows {
		known[rows[i].Worker] = true
	}
	for _, id := range all {
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

// CostModel is the cost model of a Router's engines, nil if its policy predicts nothing. view is a snapshot
// of the Router, and now the ingress's clock: a Router learns the time from events, and an idle application
// has none.
func CostModel(router *routing.Router, view *routing.View, now time.Duration) *client.CostModel {
	info, ok := router.CostModel()
	if !ok {
		return nil
	}
	out := &client.CostModel{
		Preset: info.Preset, Prefill: info.Prefill, Decode: info.Decode, PrefillSamples: info.PrefillSamples,
		DecodeSamples: info.DecodeSamples,
	}
	if info.PrefillSamples+info.DecodeSamples > 0 {
		out.AgeS, out.Error = max(0, info.Age+now-view.Now).Seconds(), info.Error
	}
	for i := range view.Ranks {
		if rk := &view.Ranks[i]; rk.Slow > 0 {
			out.Ranks = append(out.Ranks, client.WorkerSpeed{
				Worker: rk.ID.String(), Slow: rk.Slow, Spread: rk.SlowSpread,
				LagMs: float64(rk.Lag) / float64(time.Millisecond),
			})
		}
	}
	return out
}
