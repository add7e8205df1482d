package routing

import "math/rand/v2"

// State is a policy's own memory. Only Observe changes it.
type State any

// Policy decides. Implementations are pure in Decide and need no locking: one Router serializes them.
type Policy interface {
	Name() string
	NewState(v *View, r *rand.Rand) State
	Observe(s State, v *View, e *Event)
	Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision)
}
