package routing

import (
	"math/rand/v2"
	"time"
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

// LMetric is lmetric-1: prefill work times open requests, this one included. The lowest wins.
//
//	score = (Q + u) * (O + 1)     ties go to the smaller u, then rotate
//
// No parameters. It has one term: Raw is the work in tokens, Weight the number of requests that it would
// delay.
type LMetric struct{ rotatingTies }

func (LMetric) Name() string { return nameLMetric1 }

func (p LMetric) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (LMetric) prepare(*Request, *View, State, *scratch) aggregate {
	return aggregate{why: ReasonLowestScore, rule: rule{tie: tieRotate, second: secondUncached}}
}

func (LMetric) summands(q *Request, rk *Rank, hit, _ int64, _ *aggregate) sums {
	return one(float64(rk.Load.Q+int64(q.Tokens)-hit), float64(rk.ongoing()+1))
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
		TTFT: span("ttft_s", 2, 0.001, 3600), TPOT: span("tpot_s", 0.05, 0.0001, 60),
	}
}

func (Cohorts) Name() string { return nameCohorts }

func (p Cohorts) goals() Goals { return Goals{TTFT: p.TTFT, TPOT: p.TPOT} }

// GroupRule is the rule for the groups of an application.
func (p Cohorts) GroupRule() GroupRule { return NewGroupRule(p.TTFT, p.TPOT) }
