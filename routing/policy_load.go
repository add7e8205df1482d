package routing

import "math/rand/v2"

// waitingWeight is the weight of a waiting request, where a running one has 1, in vLLM's DP load balancer.
const waitingWeight = 4

// LeastLoaded is vLLM's DP load balancer. The lowest score wins, ties rotate: argmin scans from a start that
// moves on by one rank per dispatch. It reads no cache. No parameters.
//
//	score = waitingWeight * W + (F + R)
type LeastLoaded struct{ rotatingTies }

func (LeastLoaded) Name() string { return nameLeastLoaded }

func (LeastLoaded) needs() Needs { return Needs{} }

func (p LeastLoaded) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (LeastLoaded) prepare(*Request, *View, State, *scratch) aggregate {
	return aggregate{why: ReasonLowestScore, rule: rule{tie: tieRotate}}
}

func (LeastLoaded) summands(_ *Request, rk *Rank, _, _ int64, _ *aggregate) sums {
	return two(float64(rk.Load.W), waitingWeight, float64(rk.Load.F+rk.Load.R), 1)
}

func (p LeastLoaded) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (LeastLoaded) labels(*aggregate) []label {
	return []label{{"waiting", "requests"}, {"running", "requests"}}
}

// The profiles of Scoring, and of nothing else.
const (
	profileBalanced = "balanced" // mixed or unknown work
	profileLocality = "locality" // repeated system prompts, multi-turn, RAG prefixes
	profileLoad     = "load"     // prompts that rarely share prefixes
)

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
//	load_score   = 1 - load / max load
//
// load is the active context in tokens: whole prompts from dispatch on, outputs as they come, until the end.
// max is over the live ranks. Exact ties keep the first live rank. Without prefix caching the load profile
// holds, whatever was asked. The source gives no formula for load_score; this one is ours. Parameters:
// profile.
type Scoring struct {
	byHits
	Profile string // profileBalanced, profileLocality or profileLoad; empty is balanced
}

func newScoring(p *params) Policy { return Scoring{Profile: p.profile()} }

func (Scoring) Name() string { return nameScoring }

func (p Scoring) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x is prefix weight, load weight, and the largest load in tokens.
func (p Scoring) prepare(_ *Request, v *View, _ State, _ *scratch) aggregate {
	a := aggregate{why: ReasonHighestScore, rule: rule{highest: true, tie: tieFirst}}
	profile := p.Profile
	if v.PrefixCachingOff {
		profile, a.why = profileLoad, ReasonPrefixCachingOff
	}
	a.x[0], a.x[1] = weights(profile)
	most := int64(1) // no load at all: every load_score is 1
	for i := range v.Ranks {
		if rk := &v.Ranks[i]; rk.Serves() {
			most = max(most, rk.Load.K+rk.Load.Kq)
		}
	}
	a.x[2] = float64(most)
	return a
}

func (Scoring) summands(q *Request, rk *Rank, hit, _ int64, a *aggregate) sums {
	return scoringTerms(hit, q.Tokens, rk.Load.K+rk.Load.Kq, a)
}

func scoringTerms(hit int64, tokens int, context int64, a *aggregate) sums {
	return two(float64(hit)/float64(max(1, tokens)), a.x[0], 1-float64(context)/a.x[2], a.x[1])
}

func (p Scoring) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (Scoring) labels(*aggregate) []label {
	return []label{{"prefix_score", "share"}, {"load_score", "share"}}
}
