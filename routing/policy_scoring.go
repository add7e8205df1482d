package routing

import "math/rand/v2"

// The profiles of Scoring, and of nothing else.
const (
	profileBalanced = "balanced" // mixed or unknown work
	profileLocality = "locality" // repeated system prompts, multi-turn, RAG prefixes
	profileLoad     = "load"     // prompts that rarely share prefixes
)

// removedProfile is what locality was called once.
const removedProfile = "prefix-aware"

func profiles() []string { return []string{profileBalanced, profileLocality, profileLoad} }

// weights of a profile: prefix, load.
func weights(profile string) (prefix, load float64) {
	switch profile {
	case profileLocality:
		return 0.90, 0.10
	case profileLoad:
		return 0.10, 0.90
	}
	return 0.55, 0.45
}

// Scoring is Furiosa-LLM's data-parallel routing, the one policy whose highest score wins:
//
//	final        = prefix_weight * prefix_score + load_weight * load_score
//	prefix_score = hit / L
//	load_score   = 1 - load / max load          (norm max)
//	             = (max - load) / (max - min)   (norm spread)
//
// load is the active context in tokens: whole prompts from dispatch on, outputs as they come, until the end.
// max and min are over the live ranks. Exact ties keep the first live rank. Without prefix caching the load
// profile holds, whatever was asked. The source gives no formula for load_score; norm max is ours.
// Parameters: profile, norm.
type Scoring struct {
	byHits
	Profile string // profileBalanced, ProfileLocality or ProfileLoad; empty is balanced
	Spread  bool   // norm: spread
}

func newScoring(p *params) Policy {
	return Scoring{Profile: p.profile(), Spread: p.word("norm", "max", "max", "spread") == "spread"}
}

// Name is "scoring".
func (Scoring) Name() string { return nameScoring }

// Decide takes the candidate with the highest score, the first of equals.
func (p Scoring) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x is prefix weight, load weight, the largest load (norm spread) and the divisor of the norm, both
// in tokens.
func (p Scoring) prepare(_ *Request, v *View, _ State, _ *scratch) aggregate {
	a := aggregate{why: ReasonHighestScore}
	profile := p.Profile
	if v.PrefixCachingOff {
		profile, a.why = profileLoad, ReasonPrefixCachingOff
	}
	a.x[0], a.x[1] = weights(profile)
	first, most, least := true, int64(0), int64(0)
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		if !rk.Serves() {
			continue
		}
		load := rk.Load.K + rk.Load.Kq
		if first {
			first, most, least = false, load, load
		}
		most, least = max(most, load), min(least, load)
	}
	switch {
	case p.Spread && most > least:
		a.x[2], a.x[3] = float64(most), float64(most-least)
	case p.Spread: // all equal: all 1
		a.x[2], a.x[3] = float64(most)+1, 1
	default: // no load at all: all 1
		a.x[3] = float64(max(1, most))
	}
	return a
}

func (p Scoring) summands(q *Request, rk *Rank, hit, _ int64, a *aggregate) sums {
	return scoringTerms(p.Spread, hit, q.Tokens, rk.Load.K+rk.Load.Kq, a)
}

func scoringTerms(spread bool, hit int64, tokens int, context int64, a *aggregate) sums {
	load := 1 - float64(context)/a.x[3]
	if spread {
		load = (a.x[2] - float64(context)) / a.x[3]
	}
	return two(float64(hit)/float64(max(1, tokens)), a.x[0], load, a.x[1])
}

func (p Scoring) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (Scoring) labels(*aggregate) []label {
	return []label{{"prefix_score", "share"}, {"load_score", "share"}}
}

func (Scoring) rule(*aggregate) rule { return rule{highest: true, tie: tieFirst} }
