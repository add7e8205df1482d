package routing

import "math/rand/v2"

var (
	_ Policy  = LPWL{}
	_ formula = LPWL{}
)

// LPWL is least prefill work left:
//
//	score = Q + u
//
// the uncached prompt tokens in front of the request, and its own. The lowest wins, ties go to fewer open
// requests, then are drawn. No parameters.
type LPWL struct{}

// Name is "lpwl".
func (LPWL) Name() string { return nameLPWL }

func (LPWL) needs() Needs { return Needs{Hits: true} }

// NewState is nil.
func (LPWL) NewState(*View, *rand.Rand) State { return nil }

// Observe does nothing: own bumps are in the view.
func (LPWL) Observe(State, *View, *Event) {}

// Decide takes the candidate where the request's prefill would end first, counted in tokens.
func (p LPWL) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

func (LPWL) prepare(*Request, *View, State, *scratch) aggregate {
	return aggregate{why: ReasonLowestScore}
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
