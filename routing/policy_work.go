package routing

import (
	"math"
	"math/rand/v2"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

// LPWL is least prefill work left:
//
//	score = Q + u
//
// the uncached prompt tokens in front of the request, and its own. The lowest wins, ties go to fewer open
// requests, then are drawn. No parameters.
type LPWL struct{ byHits }

func (LPWL) Name() string { return nameLPWL }

func (p LPWL) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (LPWL) prepare(*Request, *View, State, *scratch) aggregate {
	return aggregate{why: ReasonLowestScore, rule: rule{second: secondOpen}}
}

func (LPWL) summands(q *Request, rk *Rank, hit, _ int64, _ *aggregate) sums {
	return two(float64(rk.Load.Q), 1, float64(int64(q.Tokens)-hit), 1)
}

func (p LPWL) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (LPWL) labels(*aggregate) []label {
	return []label{{"queued_work", "tokens"}, {"own_work", "tokens"}}
}

// LMetric multiplies prefill work by open requests. The lowest wins.
//
//	lmetric:   (Q + u) * O        all idle ranks score 0, so caches do not count at low load; ties are drawn
//	lmetric-1: (Q + u) * (O + 1)  ties go to the smaller u, then rotate
//
// No parameters. It has one term: Raw is the work in tokens, Weight the number of requests that it would
// delay.
type LMetric struct {
	rotatingTies
	PlusOne bool // lmetric-1
}

func (p LMetric) Name() string {
	if p.PlusOne {
		return nameLMetric1
	}
	return nameLMetric
}

func (p LMetric) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (p LMetric) prepare(*Request, *View, State, *scratch) aggregate {
	a := aggregate{why: ReasonLowestScore}
	if p.PlusOne {
		a.rule = rule{tie: tieRotate, second: secondUncached}
	}
	return a
}

func (p LMetric) summands(q *Request, rk *Rank, hit, _ int64, _ *aggregate) sums {
	open := rk.ongoing()
	if p.PlusOne {
		open++
	}
	return one(float64(rk.Load.Q+int64(q.Tokens)-hit), float64(open))
}

func (p LMetric) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (LMetric) labels(*aggregate) []label { return []label{{"work_times_open", "tokens"}} }

// LeastKV controls memory, as the DPLB article proposes for independent ranks:
//
//	score = (K + Kq + L) / C
//
// the context of everything running and waiting, this request included, over the rank's KV capacity. The
// lowest wins; ties go to fewer open requests, then rotate. No parameters, no cache term. A rank that has not
// told its capacity gets the mean of those that have; if none has, tokens are compared.
type LeastKV struct{ rotatingTies }

func (LeastKV) Name() string { return nameLeastKV }

func (LeastKV) needs() Needs { return Needs{} }

func (p LeastKV) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x[0] is the capacity of ranks that have not told theirs.
func (LeastKV) prepare(_ *Request, v *View, _ State, _ *scratch) aggregate {
	a := aggregate{
		why: ReasonLowestScore, x: [4]float64{1}, rule: rule{tie: tieRotate, second: secondOpen},
	}
	sum, known := 0.0, 0.0
	for i := range v.Ranks {
		if c := v.Ranks[i].Capacity; c > 0 {
			sum += float64(c)
			known++
		}
	}
	if known > 0 {
		a.x[0] = sum / known
	}
	return a
}

func (LeastKV) summands(q *Request, rk *Rank, _, _ int64, a *aggregate) sums {
	c := a.x[0]
	if rk.Capacity > 0 {
		c = float64(rk.Capacity)
	}
	return two(float64(rk.Load.K+rk.Load.Kq), 1/c, float64(q.Tokens), 1/c)
}

func (p LeastKV) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (LeastKV) labels(*aggregate) []label {
	return []label{{"context", "tokens"}, {"prompt", "tokens"}}
}

// MinTTFT takes the rank where the first token is predicted to come first (Mooncake's rule by the step law):
//
//	score = Wq + P [+ η·P]        milliseconds
//	P     = gT·u + pA·(u²/2 + u·hit)   own prefill
//	Wq    = Σ P of what waits or prefills there
//	η     = ρ'/(1-ρ'), ρ' = min(ρ, 0.9): the delay to requests still to come, with Eta
//
// The lowest wins, ties are drawn. A rank that came up lately has credit for prompts without a home
// (creditNewRanks). Mooncake also moves KV between ranks and rejects what will miss its SLO; there is neither
// here. Parameters: eta (false).
type MinTTFT struct {
	byHits
	Eta bool                  // charge what the prefill costs later arrivals
	Law steptime.Coefficients // of one rank; the zero value is steptime.Reference
}

func newMinTTFT(p *params) Policy { return MinTTFT{Eta: p.boolean("eta", false)} }

func (p MinTTFT) law() steptime.Coefficients {
	if p.Law == (steptime.Coefficients{}) {
		return steptime.Reference()
	}
	return p.Law
}

func (MinTTFT) Name() string { return nameMinTTFT }

// NewState begins with an idle system.
func (MinTTFT) NewState(v *View, _ *rand.Rand) State { return newTraffic(v) }

// Observe measures ρ.
func (p MinTTFT) Observe(s State, v *View, e *Event) {
	if t, ok := s.(*traffic); ok && p.Eta {
		law := p.law()
		t.observe(v, e, &law)
	}
}

func (p MinTTFT) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x is gT, pA, η.
func (p MinTTFT) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	law := p.law()
	a := aggregate{why: ReasonLowestScore, x: [4]float64{law.TokenMS, law.PairMS}}
	if c.creditNewRanks(q, v) {
		a.mode, a.rule.second = modeNewRanks, secondOpen
	}
	if t, ok := s.(*traffic); ok && p.Eta {
		a.x[2] = t.later()
	}
	return a
}

func (p MinTTFT) summands(q *Request, rk *Rank, hit, _ int64, a *aggregate) sums {
	law := steptime.Coefficients{TokenMS: a.x[0], PairMS: a.x[1]}
	queue := float64(law.TokenMS*float64(rk.Load.Q)) + float64(law.PairMS*(float64(rk.Pairs)/2))
	own := law.Prefill(q.Tokens-int(hit), int(hit))
	return three(queue, 1, own, 1, own, a.x[2])
}

func (p MinTTFT) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (p MinTTFT) labels(a *aggregate) []label {
	all := []label{{"queue", "ms"}, {"prefill", "ms"}, {"later_arrivals", "ms"}}
	if a.mode == modeNewRanks {
		all[1].name = "prefill_with_credit"
	}
	if p.Eta {
		return all
	}
	return all[:2]
}

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

func (Sticky) Name() string { return nameSticky }

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
			a.mode, a.rule.second = modeNewRanks, secondOpen
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

// Cohorts is the policy of lockstep groups. A GroupRule with its goals holds the requests of a group and
// releases them together. What stays outside of that (a request that names a rank, or that a rank has failed)
// goes by lmetric-1. Parameters: ttft_s (2), tpot_s (0.05).
type Cohorts struct {
	LMetric
	TTFT, TPOT time.Duration // the goals
}

func newCohorts(p *params) Policy {
	span := func(name string, def, lo, hi float64) time.Duration {
		return time.Duration(p.number(name, def, lo, hi) * float64(time.Second))
	}
	return Cohorts{
		LMetric: LMetric{PlusOne: true},
		TTFT:    span("ttft_s", 2, 0.001, 3600), TPOT: span("tpot_s", 0.05, 0.0001, 60),
	}
}

func (Cohorts) Name() string { return nameCohorts }

// GroupRule is the rule for the groups of an application.
func (p Cohorts) GroupRule() GroupRule { return NewGroupRule(p.TTFT, p.TPOT) }
