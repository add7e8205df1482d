package routing

import (
	"math/rand/v2"

	"github.com/dpserve/dpserve/steptime"
)

var (
	_ Policy  = MinTTFT{}
	_ formula = MinTTFT{}
)

// MinTTFT takes the rank where the first token is predicted to come first (Mooncake's rule by the step law):
//
//	score = Wq + P [+ η·P]        milliseconds
//	P     = gT·u + pA·(u²/2 + u·hit)   own prefill
//	Wq    = Σ P of what waits or prefills there
//	η     = ρ'/(1-ρ'), ρ' = min(ρ, 0.9): the delay to requests still to come, with Eta
//
// The lowest wins, ties are drawn. A rank that came up lately has credit for prompts without a home
// (newrank.go). Mooncake also moves KV between ranks and rejects what will miss its SLO; there is neither
// here. Parameters: eta (false).
type MinTTFT struct {
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

func (MinTTFT) needs() Needs { return Needs{Hits: true} }

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
	if c.creditNewRanks(q, v, homeShare) {
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
