package routing

import "math/rand/v2"

var _ Policy = RoundRobin{}

// RoundRobin takes live ranks in id order. The cursor holds the last rank id, not an index, so that joins and
// leaves do not shift the turn. The start is drawn, or all front-ends would pile their first requests onto
// rank 0. No parameters.
type RoundRobin struct{}

type roundRobinState struct {
	last    RankID
	started bool
}

// Name is "round-robin".
func (RoundRobin) Name() string { return nameRoundRobin }

// NewState begins before the first turn.
func (RoundRobin) NewState(*View, *rand.Rand) State { return &roundRobinState{} }

// Observe moves the cursor to the rank that was dispatched to.
func (RoundRobin) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*roundRobinState); ok && e.Kind == EvDispatched {
		st.last, st.started = e.Rank, true
	}
}

// Decide takes the smallest candidate id above the cursor, cyclically.
func (RoundRobin) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	begin(d)
	t, ok := openTier(q, v)
	if !ok {
		none(q, v, d)
		return
	}
	first := startIndex(t, q, v, s, r)
	routeTo(d, t, &v.Ranks[first], ReasonNextInTurn)
	if d.Explain {
		explainTurns(t, q, v, first, d)
	}
}

// startIndex is the candidate whose turn it is; the tier is not empty.
func startIndex(t tier, q *Request, v *View, s State, r *rand.Rand) int {
	st, ok := s.(*roundRobinState)
	if !ok || !st.started {
		return t.one(q, v, r)
	}
	first := -1
	for i := range v.Ranks {
		if !t.has(q, &v.Ranks[i]) {
			continue
		}
		if v.Ranks[i].ID > st.last {
			return i
		}
		if first < 0 {
			first = i
		}
	}
	return first
}

// explainTurns gives each candidate its distance from the chosen one, in turns.
func explainTurns(t tier, q *Request, v *View, first int, d *Decision) {
	turn := 0.0
	for k := range v.Ranks {
		rk := &v.Ranks[(first+k)%len(v.Ranks)]
		if t.has(q, rk) {
			d.Terms = append(d.Terms, Term{Rank: rk.ID, Name: "turns_away", Unit: "turns", Raw: turn,
				Weight: 1, Value: turn})
			turn++
		}
	}
}
