package routing

import "math/rand/v2"

var _ Policy = PowerOfTwo{}

// PowerOfTwo draws two distinct ranks and takes the one with fewer ongoing requests: the choice rule, tie
// rule and full-means-unknown rule of Ray Serve's router, on the published view instead of probes.
type PowerOfTwo struct {
	// PreferLocal draws among ranks of the ingress's own node first (params: prefer_local, default false).
	PreferLocal bool
}

func newPowerOfTwo(p *params) Policy {
	return PowerOfTwo{PreferLocal: p.boolean("prefer_local", false)}
}

// Name is "power-of-two".
func (PowerOfTwo) Name() string { return namePowerOfTwo }

// NewState is nil.
func (PowerOfTwo) NewState(*View, *rand.Rand) State { return nil }

// Observe does nothing: own bumps are in the view.
func (PowerOfTwo) Observe(State, *View, *Event) {}

// Decide draws from the first tier that is not empty: local (if asked for), open, silent.
func (p PowerOfTwo) Decide(q *Request, v *View, _ State, r *rand.Rand, d *Decision) {
	begin(d)
	t := tierOpen
	if p.PreferLocal {
		t = tierLocal
	}
	for ; t <= tierSilent; t++ {
		if i, j := t.pair(q, v, r); i >= 0 {
			choose(v, t, i, j, d)
			return
		}
	}
	none(q, v, d)
}

// choose ranks the pair. The pair comes in random order, so keeping the first of equals is a uniform
// tie-break.
func choose(v *View, t tier, i, j int, d *Decision) {
	if j < 0 {
		routeTo(d, t, &v.Ranks[i], ReasonOnlyCandidate)
		explainOngoing(&v.Ranks[i], d)
		return
	}
	if v.Ranks[j].ongoing() < v.Ranks[i].ongoing() {
		i, j = j, i
	}
	routeTo(d, t, &v.Ranks[i], ReasonFewerOngoing)
	d.Ranked = append(d.Ranked, v.Ranks[j].ID)
	explainOngoing(&v.Ranks[i], d)
	explainOngoing(&v.Ranks[j], d)
}

func explainOngoing(rk *Rank, d *Decision) {
	if d.Explain {
		o := float64(rk.ongoing())
		d.Terms = append(d.Terms, Term{Rank: rk.ID, Name: "ongoing", Unit: "requests", Raw: o, Weight: 1,
			Value: o})
	}
}
