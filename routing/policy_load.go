package routing

import "math/rand/v2"

// The variants of LeastLoaded.
const (
	// variantCount scores request counts: releases of vLLM up to about 0.26. The empty variant is this one.
	variantCount = "count"
	// variantKV adds a penalty for queues behind a full KV cache: vLLM's main branch since July 2026.
	variantKV = "kv"
	// variantTokens is the community's form in tokens, with the hit of the longest match credited.
	variantTokens = "tokens"
)

const (
	// waitingWeight is what a waiting request weighs beside a running one in vLLM's DP load balancer.
	waitingWeight = 4
	// fullWeight and fullFrom: variant kv, penalty per waiting request and share of KV usage above fullFrom.
	fullWeight, fullFrom = 6, 0.5
	// queueTokens: variant tokens, what one unit of the count form weighs in tokens.
	queueTokens = 2048
	// recentWeight: variant tokens, share of the tokens of the last recentRequests requests sent to a rank.
	recentWeight   = 0.1
	recentRequests = 64
	// maxClients bounds the parameter clients.
	maxClients = 1024
)

// LeastLoaded is vLLM's DP load balancer. The lowest score wins, ties rotate: argmin scans from a start that
// moves on by one rank per dispatch.
//
//	count:  waitingWeight * W + (F + R)
//	kv:     max(Clients * own open requests, W + F + R) + fullWeight * W * max(0, kv usage - fullFrom)
//	tokens: L - credit + queueTokens * (waitingWeight*W + F + R) + recentWeight * recent
//
// where recent is the tokens of the last recentRequests requests sent there and credit is the hit, on the
// rank with the longest match alone (the first of equals). Count and kv know no cache.
type LeastLoaded struct {
	Variant string // variantCount, VariantKV or VariantTokens; empty is VariantCount
	Clients int    // variant kv: number of front-ends; 0 is 1
}

type leastLoadedState struct {
	rotation
	recent map[RankID]*recentTokens // variant tokens; never ranged over
}

// recentTokens is a ring of the prompt lengths sent to one rank last.
type recentTokens struct {
	lengths [recentRequests]int64
	next    int
	sum     int64
}

func (t *recentTokens) add(tokens int64) {
	t.sum += tokens - t.lengths[t.next]
	t.lengths[t.next] = tokens
	t.next = (t.next + 1) % recentRequests
}

func newLeastLoaded(p *params) Policy {
	return LeastLoaded{
		Variant: p.word("variant", variantCount, variantCount, variantKV, variantTokens),
		Clients: p.integer("clients", 1, 1, maxClients),
	}
}

func (LeastLoaded) Name() string { return nameLeastLoaded }

func (p LeastLoaded) needs() Needs {
	return Needs{Hits: p.Variant == variantTokens, Usage: p.Variant == variantKV}
}

// NewState draws the first start.
func (p LeastLoaded) NewState(v *View, r *rand.Rand) State {
	st := &leastLoadedState{rotation: newRotation(r)}
	if p.Variant == variantTokens {
		st.recent = make(map[RankID]*recentTokens, len(v.Ranks))
		for i := range v.Ranks {
			st.recent[v.Ranks[i].ID] = &recentTokens{}
		}
	}
	return st
}

// Observe moves the start on and remembers the tokens sent.
func (LeastLoaded) Observe(s State, _ *View, e *Event) {
	st, ok := s.(*leastLoadedState)
	if !ok {
		return
	}
	st.observe(e)
	if st.recent == nil {
		return
	}
	switch e.Kind {
	case EvRankUp:
		if st.recent[e.Rank] == nil {
			st.recent[e.Rank] = &recentTokens{}
		}
	case EvRankDown:
		delete(st.recent, e.Rank)
	case EvDispatched:
		if t := st.recent[e.Rank]; t != nil {
			t.add(int64(e.Tokens))
		}
	default:
	}
}

func (p LeastLoaded) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: variant tokens finds the rank that gets the credit and notes what each rank was sent.
func (p LeastLoaded) prepare(_ *Request, v *View, s State, c *scratch) aggregate {
	a := aggregate{why: ReasonLowestScore, rule: rule{tie: tieRotate}}
	st, ok := s.(*leastLoadedState)
	if p.Variant != variantTokens || !ok {
		return a
	}
	longest := int64(0)
	for _, i := range c.candidates {
		id := v.Ranks[i].ID
		if sent := st.recent[id]; sent != nil {
			c.extra[i] = sent.sum
		}
		if hit := c.hits[i]; hit > longest {
			longest, a.spare, a.mode = hit, id, 1
		}
	}
	return a
}

func (p LeastLoaded) summands(q *Request, rk *Rank, hit, extra int64, a *aggregate) sums {
	w, running := float64(rk.Load.W), float64(rk.Load.F+rk.Load.R)
	switch p.Variant {
	case variantKV:
		open := max(max(1, p.Clients)*int(rk.Own), rk.ongoing())
		return two(float64(open), 1, w*max(0, rk.Usage()-fullFrom), fullWeight)
	case variantTokens:
		if a.mode == 0 || a.spare != rk.ID {
			hit = 0
		}
		return three(float64(int64(q.Tokens)-hit), 1, waitingWeight*w+running, queueTokens, float64(extra),
			recentWeight)
	}
	return two(w, waitingWeight, running, 1)
}

func (p LeastLoaded) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (p LeastLoaded) labels(*aggregate) []label {
	switch p.Variant {
	case variantKV:
		return []label{{"open", "requests"}, {"waiting_when_full", "requests"}}
	case variantTokens:
		return []label{{"uncached", "tokens"}, {"queue", "requests"}, {"recent", "tokens"}}
	}
	return []label{{"waiting", "requests"}, {"running", "requests"}}
}

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

func (Scoring) Name() string { return nameScoring }

func (p Scoring) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x is prefix weight, load weight, the largest load (norm spread) and the divisor of the norm, both
// in tokens.
func (p Scoring) prepare(_ *Request, v *View, _ State, _ *scratch) aggregate {
	a := aggregate{why: ReasonHighestScore, rule: rule{highest: true, tie: tieFirst}}
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
