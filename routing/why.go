package routing

import "slices"

// Why is Explain with the very view that was decided on: what ranks the decision saw, and why some could not
// be picked.
func (r *Router) Why(q *Request) (Decision, View) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.explain(q)
	v := r.view
	v.Ranks = slices.Clone(v.Ranks)
	return d, v
}
