package routing

import (
	"math/rand/v2"

	"github.com/dpserve/dpserve/internal/steptime"
)

// LPWL is least prefill work left:
//
//	score = Q + u
//
// the uncached prompt tokens in front of the request, and its own. The lowest wins, ties go to fewer open
// requests, then are drawn. No parameters.
type LPWL struct{ byHits }

// Name is "lpwl".
func (LPWL) Name() string { return nameLPWL }

// Decide takes the candidate where the request's prefill would end first, counted in tokens.
func (p LPWL) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
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

func (LPWL) rule(*aggregate) rule { return rule{second: secondOpen} }

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

// Name is "lmetric" or "lmetric-1".
func (p LMetric) Name() string {
	if p.PlusOne {
		return nameLMetric1
	}
	return nameLMetric
}

// Decide takes the candidate with the smallest product.
func (p LMetric) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
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

func (p LMetric) rule(*aggregate) rule {
	if p.PlusOne {
		return rule{tie: tieRotate, second: secondUncached}
	}
	return rule{}
}

// LeastKV controls memory, as the DPLB article proposes for independent ranks:
//
//	score = (K + Kq + L) / C
//
// the context of everything running and waiting, this request included, over the rank's KV capacity. The
// lowest wins; ties go to fewer open requests, then rotate. No parameters, no cache term. A rank that has not
// told its capacity gets the mean of those that have; if none has, tokens are compared.
type LeastKV struct{ rotatingTies }

// Name is "least-kv".
func (LeastKV) Name() string { return nameLeastKV }

func (LeastKV) needs() Needs { return Needs{} }

// Decide takes the candidate whose KV cache would be the least full.
func (p LeastKV) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x[0] is the capacity of ranks that have not told theirs.
func (LeastKV) prepare(_ *Request, v *View, _ State, _ *scratch) aggregate {
	a := aggregate{why: ReasonLowestScore, x: [4]float64{1}}
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

func (LeastKV) rule(*aggregate) rule { return rule{tie: tieRotate, second: secondOpen} }

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

type minTTFTState struct{ traffic traffic }

func newMinTTFT(p *params) Policy { return MinTTFT{Eta: p.boolean("eta", false)} }

func (p MinTTFT) law() steptime.Coefficients {
	if p.Law == (steptime.Coefficients{}) {
		return steptime.Reference()
	}
	return p.Law
}

// prefill is the predicted prefill of u uncached tokens behind hit cached ones, in ms.
func prefill(law *steptime.Coefficients, u, hit int64) float64 {
	return law.Prefill(int(u), int(hit))
}

// Name is "min-ttft".
func (MinTTFT) Name() string { return nameMinTTFT }

// NewState begins with an idle system.
func (MinTTFT) NewState(v *View, _ *rand.Rand) State { return &minTTFTState{newTraffic(v)} }

// Observe measures ρ.
func (p MinTTFT) Observe(s State, v *View, e *Event) {
	st, ok := s.(*minTTFTState)
	if !ok || !p.Eta {
		return
	}
	law := p.law()
	st.traffic.observe(v, e, &law)
}

// Decide takes the candidate with the smallest predicted time to first token.
func (p MinTTFT) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// prepare: x is gT, pA, η.
func (p MinTTFT) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	law := p.law()
	a := aggregate{why: ReasonLowestScore, x: [4]float64{law.TokenMS, law.PairMS}}
	if c.creditNewRanks(q, v) {
		a.mode = modeNewRanks
	}
	if st, ok := s.(*minTTFTState); ok && p.Eta {
		a.x[2] = st.traffic.later()
	}
	return a
}

func (p MinTTFT) summands(q *Request, rk *Rank, hit, _ int64, a *aggregate) sums {
	law := steptime.Coefficients{TokenMS: a.x[0], PairMS: a.x[1]}
	queue := float64(law.TokenMS*float64(rk.Load.Q)) + float64(law.PairMS*(float64(rk.Pairs)/2))
	own := prefill(&law, int64(q.Tokens)-hit, hit)
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

func (MinTTFT) rule(a *aggregate) rule { return newRanksRule(a) }
