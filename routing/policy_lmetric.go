package routing

import "math/rand/v2"

var (
	_ Policy  = LMetric{}
	_ formula = LMetric{}
)

// LMetric multiplies prefill work by open requests. The lowest wins.
//
//	lmetric:   (Q + u) * O        idle ranks all score 0, so the cache counts for nothing at low load; ties are drawn
//	lmetric-1: (Q + u) * (O + 1)  ties go to the smaller u, then rotate
//
// No parameters. It has one term: Raw is the work in tokens, Weight the number of requests that it would
// delay.
type LMetric struct {
	PlusOne bool // lmetric-1
}

// Name is "lmetric" or "lmetric-1".
func (p LMetric) Name() string {
	if p.PlusOne {
		return nameLMetric1
	}
	return nameLMetric
}

func (LMetric) needs() Needs { return Needs{Hits: true} }

// NewState draws the first start.
func (LMetric) NewState(_ *View, r *rand.Rand) State { st := newRotation(r); return &st }

// Observe moves the start on.
func (LMetric) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*rotation); ok {
		st.observe(e)
	}
}

// Decide takes the candidate with the smallest product.
func (p LMetric) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (LMetric) prepare(*Request, *View, State, *scratch) aggregate {
	return aggregate{why: ReasonLowestScore}
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
