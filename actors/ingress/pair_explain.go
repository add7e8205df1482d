package ingress

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/telemetry"
	"github.com/dpserve/dpserve/routing"
)

// explainPair is the decision for a request as it would be now.
func explainPair(q *pairQuery) *client.Explanation {
	p, why := q.pair, q.why()
	d := &why.Pair
	x := explainDecision(p.decode, p.decode.policyName(), &q.decode, &why.Decode, &why.DecodeView)
	prefill := explainDecision(p.prefill, p.prefill.policyName(), &q.prefill, &why.Prefill, &why.PrefillView)
	x.App, x.Decision = p.name, kindName(d.Kind)
	repick(x, d.Decode, d.Kind == routing.Route, d.Reason)
	repick(prefill, d.Prefill, d.Remote, d.Reason)
	x.Pair = &client.PairExplanation{
		Decide: p.decide(), Way: q.wayOf(d), Prefill: prefill.Pick, Reason: d.Reason,
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
			row.Terms = append(row.Terms, client.Term{
				Name: t.Name, Unit: t.Unit, Raw: t.Raw, Weight: t.Weight, Value: t.Value,
			})
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
