package routing

import "math/rand/v2"

var _ Policy = Random{}

// Random is uniform over the live ranks with room. No parameters, no state.
type Random struct{}

// Name is "random".
func (Random) Name() string { return nameRandom }

// NewState is nil.
func (Random) NewState(*View, *rand.Rand) State { return nil }

// Observe does nothing.
func (Random) Observe(State, *View, *Event) {}

// Decide draws one candidate.
func (Random) Decide(q *Request, v *View, _ State, r *rand.Rand, d *Decision) {
	begin(d)
	for _, t := range [...]tier{tierOpen, tierSilent} {
		if i := t.one(q, v, r); i >= 0 {
			routeTo(d, t, &v.Ranks[i], ReasonUniform)
			explainUniform(t, q, v, d)
			return
		}
	}
	none(q, v, d)
}

// explainUniform shows every candidate with the same score.
func explainUniform(t tier, q *Request, v *View, d *Decision) {
	if !d.Explain {
		return
	}
	for i := range v.Ranks {
		if t.has(q, &v.Ranks[i]) {
			d.Terms = append(d.Terms, Term{Rank: v.Ranks[i].ID, Name: "uniform", Unit: "none"})
		}
	}
}
