package routerapi

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/routing"
)

// PairFacts is what an explanation says of a decision between two pools.
type PairFacts struct {
	Decision  *routing.PairDecision
	Why       *routing.PairWhy // what it was made of
	Query     *routing.Request // as the decode pool reads it
	Rule, Way string
	NotSplit  string // why it goes to one rank
}

// ExplainPair makes of the explanations of both pools that of one application. x is the decode pool's.
func ExplainPair(x, prefill *client.Explanation, f *PairFacts) {
	d := f.Decision
	x.Decision = KindName(d.Kind)
	repick(x, d.Decode, d.Kind == routing.Route, d.Reason)
	repick(prefill, d.Prefill, d.Remote, d.Reason)
	x.Pair = &client.PairExplanation{
		Decide: f.Rule, Way: f.Way, Prefill: prefill.Pick, Reason: d.Reason, Candidates: pairCandidates(d),
		PrefillPool: prefill,
	}
	if own := &f.Why.Decode; own.Kind == routing.Route {
		x.Pair.UncachedTokens = x.Tokens - heldBy(&f.Why.DecodeView, f.Query, own.Ranked[0])
	}
	x.Pair.Why = pairWords(d, x, f.NotSplit)
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
		return fmt.Sprintf("no prefill rank is connected to decode rank %s since both started", rank)
	}
	return "by the decode pool's policy"
}
