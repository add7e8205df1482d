package routing

import (
	"math"
	"math/rand/v2"
)

const (
	// stickyThreshold is the share of the prompt that a warm rank holds (llm-d's default).
	stickyThreshold = 0.8
	// stickySpill is llm-d's τ in tokens: 18 s of prefill at 15,928 tokens/s.
	stickySpill = 286_704
	// stickySpillTuned is τ of preset tuned; it is no real gain over the documented one.
	stickySpillTuned = 65_536
)

// Sticky keeps a request to the ranks that hold most of its prompt (llm-d's default since August 2026):
//
//	warm  = ranks with hit/L ≥ Threshold
//	score = Q + u (By "work") or O (By "requests"), among the warm ranks, or among all if there are none or
//	        if min Q over warm − min Q over the others > Spill
//
// The lowest wins, ties are drawn. By work, a rank that came up lately has credit for prompts that no rank is
// warm for (creditNewRanks). Parameters: threshold, spill_tokens, by.
type Sticky struct {
	byHits
	Threshold float64 // 0 to 1
	Spill     float64 // tokens
	Requests  bool    // rank by open requests (decode-bound) instead of prefill work
}

func newSticky(p *params) Policy {
	return Sticky{
		Threshold: p.number("threshold", stickyThreshold, 0, 1),
		Spill:     p.number("spill_tokens", p.choose(stickySpill, stickySpillTuned), 0, math.Inf(1)),
		Requests:  p.word("by", "work", "work", "requests") == "requests",
	}
}

// Name is "sticky".
func (Sticky) Name() string { return nameSticky }

// Decide takes the best of the warm ranks, or of all.
func (p Sticky) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (p Sticky) warm(q *Request, hit int64) bool {
	return hit > 0 && float64(hit) >= p.Threshold*float64(q.Tokens)
}

// prepare marks the ranks outside the preferred ones.
func (p Sticky) prepare(q *Request, v *View, _ State, c *scratch) aggregate {
	warm, cold := int64(math.MaxInt64), int64(math.MaxInt64)
	for _, i := range c.candidates {
		queued := v.Ranks[i].Load.Q
		if p.warm(q, c.hits[i]) {
			warm = min(warm, queued)
		} else {
			cold, c.extra[i] = min(cold, queued), 1
		}
	}
	switch {
	case warm == math.MaxInt64:
		clear(c.extra)
		a := aggregate{why: ReasonLowestScore}
		if !p.Requests && c.creditNewRanks(q, v) {
			a.mode = modeNewRanks
		}
		return a
	case cold < math.MaxInt64 && float64(warm-cold) > p.Spill:
		clear(c.extra)
		return aggregate{why: ReasonSpilled}
	}
	return aggregate{why: ReasonWarm}
}

func (p Sticky) summands(q *Request, rk *Rank, hit, extra int64, _ *aggregate) sums {
	if p.Requests {
		return two(float64(extra), notPreferredCost, float64(rk.ongoing()), 1)
	}
	return three(float64(extra), notPreferredCost, float64(rk.Load.Q), 1, float64(int64(q.Tokens)-hit), 1)
}

func (p Sticky) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (p Sticky) labels(a *aggregate) []label {
	switch {
	case p.Requests:
		return []label{{"not_warm", "none"}, {"open", "requests"}}
	case a.mode == modeNewRanks:
		return []label{{"not_warm", "none"}, {"queued_work", "tokens"}, {"own_work_with_credit", "tokens"}}
	}
	return []label{{"not_warm", "none"}, {"queued_work", "tokens"}, {"own_work", "tokens"}}
}

func (Sticky) rule(a *aggregate) rule { return newRanksRule(a) }
