package routing

import "math/rand/v2"

var (
	_ Policy  = LeastKV{}
	_ formula = LeastKV{}
)

// LeastKV controls memory, as the DPLB article proposes for independent ranks:
//
//	score = (K + Kq + L) / C
//
// the context of everything running and waiting, this request included, over the rank's KV capacity. The
// lowest wins; ties go to fewer open requests, then rotate. No parameters, no cache term. A rank that has not
// told its capacity gets the mean of those that have; if none has, tokens are compared.
type LeastKV struct{}

// Name is "least-kv".
func (LeastKV) Name() string { return nameLeastKV }

// NewState draws the first start.
func (LeastKV) NewState(_ *View, r *rand.Rand) State { st := newRotation(r); return &st }

// Observe moves the start on.
func (LeastKV) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*rotation); ok {
		st.observe(e)
	}
}

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
