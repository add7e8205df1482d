package routing

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/dpserve/dpserve/internal/steptime"
)

const (
	goalGoodput = "goodput"
	goalLatency = "latency"

	// nearWidth is how many times the prefill work that may have come to a rank unseen two scores may differ
	// by and count as equal.
	nearWidth = 4
	// mostUnseen bounds how many dispatches of other ingresses one own unconfirmed dispatch stands for.
	mostUnseen = 64
	// kvPressure is what each share of the KV cache that is asked for and not there costs, in goals of the
	// first token.
	kvPressure = 2
)

// Mex charges a request for what it costs everybody, in milliseconds of waiting for a first token. The lowest
// sum wins.
//
//	queue          Wq·σ                        prompts in front of it
//	prefill        P·σ                         its own prompt
//	later_arrivals η·P                         what its prompt delays requests that are still to come
//	own_tokens     TTFT·y²                     its own tokens; TTFT·(1 + 2·ln y) beyond their goal, y > 1
//	others_tokens  w·X·R·(P/ō + ½·(dB + dC·L)) tokens of the R requests that decode there, slowed by it
//	memory         2·TTFT·max(0, f-1)          the KV cache that would be missing; f is the share in use
//	beyond_goal    TTFT·(1 + ln x) - TTFT·x    goal goodput, x = (queue + prefill)/TTFT > 1: beyond the goal
//
// Its prompt stalls the requests that decode on the rank, and its context makes their steps longer. A goal
// cannot be missed twice, so the time beyond it counts logarithmically. y = d/(TPOT·(1-ρr)) is a token of d
// ms over its goal, on a rank that prefills for a share ρr of its time; w = 2·y, or 2/y beyond the goal, is
// how fast own_tokens grows with y. With goal latency own_tokens is TTFT·y, and w is 1.
//
// P and Wq are prefill times by the cost model, d = gW + dA + dB·(O+1) + dC·(K+Kq+L) the step that its tokens
// come in, σ = 1 + D/(gT·8192) the stretch of a prefill that shares its steps with D = dA + dB·R + dC·K ms of
// decoding; on a slow rank all of them are as much longer. Requests whose prompt is computed as reckoned
// count among R and K. X = TTFT/TPOT exchanges ms per token for ms of the first token, by the application's
// goals for both. η = ρ/(1-ρ) with the prefill utilisation ρ, at most 0.9; ō is the mean length of answers, f
// = (K+Kq+L+ō)/C.
//
// Behind several ingresses a Router does not see what the others sent since the ranks' last records: ρ·Lag ms
// of prefill, less its own share. Scores within four of those of the lowest count as equal, and the longest
// hit among them wins; and each own dispatch that no record has named stands for those that the other
// ingresses are taken to have sent to that rank meanwhile.
//
// Equal scores are drawn. A rank that came up lately has credit for prompts without a home (creditNewRanks).
// Parameters: goal (goodput; latency leaves beyond_goal out), ttft_s (2), tpot_s (0.05), cost_model (dense;
// moe).
type Mex struct {
	Latency    bool
	TTFT, TPOT float64 // ms: the goals
	MoE        bool    // the cost model's preset
}

func newMex(p *params) Policy {
	const ms = 1000
	return Mex{
		Latency: p.word("goal", goalGoodput, goalGoodput, goalLatency) == goalLatency,
		TTFT:    ms * p.number("ttft_s", 2, 0.001, 3600),
		TPOT:    ms * p.number("tpot_s", 0.05, 0.0001, 60),
		MoE:     p.word("cost_model", costDense, costDense, costMoE) == costMoE,
	}
}

func (Mex) Name() string { return nameMex }

func (Mex) needs() Needs { return Needs{Hits: true} }

func (p Mex) goals() Goals {
	const ms = float64(time.Millisecond)
	return Goals{TTFT: time.Duration(p.TTFT * ms), TPOT: time.Duration(p.TPOT * ms)}
}

func (p Mex) model() steptime.Coefficients {
	if p.MoE {
		return steptime.MoE()
	}
	return steptime.Reference()
}

func (p Mex) preset() string {
	if p.MoE {
		return costMoE
	}
	return costDense
}

// NewState begins with an idle system.
func (Mex) NewState(v *View, _ *rand.Rand) State { return newTraffic(v) }

func (p Mex) Observe(s State, v *View, e *Event) {
	if t, ok := s.(*traffic); ok {
		t.observe(v, e)
	}
}

// current is the cost model as measured.
func (p Mex) current(v *View) steptime.Coefficients {
	if v.Model == (steptime.Coefficients{}) {
		return p.model()
	}
	return v.Model
}

func (p Mex) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	resetDecision(d)
	c := &d.scratch
	t, ok := gather(q, v, c)
	if !ok {
		queueOrReject(q, v, d)
		return
	}
	alignHits(q, v, c)
	c.creditNewRanks(q, v)
	costs := p.costs(q, v, s)
	costs.fill(v, c)
	rule := rule{near: costs.near(v, c), second: secondUncached}
	best := rule.best(q, v, s, r, d)
	if best < 0 {
		d.Reason = ReasonBadScore
		return
	}
	if d.Explain {
		costs.explain(v, d)
	}
	reason := ReasonLowestScore
	if rule.near > 0 && costs.of(&v.Ranks[best], c.hits[best], nil) > slices.Min(c.scores) {
		reason = ReasonNearTie
	}
	routeTo(d, t, &v.Ranks[best], reason)
}

// mexCosts is what one decision charges by.
type mexCosts struct {
	model     steptime.Coefficients
	tokens    int64   // of the prompt
	stretch   float64 // 1/(gT·chunk)
	later     float64 // η
	answer    float64 // ō
	perAnswer float64 // 1/ō
	// ms per token that the request's context adds to a step, for half of the other answers' time
	slower   float64
	exchange float64 // TTFT goal over TPOT goal
	perTPOT  float64 // 1/TPOT goal
	goal     float64 // ms: TTFT
	late     bool    // what is beyond the goal counts logarithmically
	unseen   float64 // dispatches of other ingresses per own one that no record has named
	width    float64 // near per ms of lag
}

func (p Mex) costs(q *Request, v *View, s State) mexCosts {
	c := mexCosts{
		model: p.current(v), tokens: int64(q.Tokens), answer: firstAnswer, exchange: p.TTFT / p.TPOT,
		perTPOT: 1 / p.TPOT, goal: p.TTFT, late: !p.Latency, later: delay(v.Rho),
	}
	c.stretch = 1 / (c.model.TokenMS * stepTokens)
	if t, ok := s.(*traffic); ok {
		c.answer = t.answer
		if share := t.share(); share < 1 {
			c.unseen = min(1/share-1, mostUnseen-1)
			c.width = nearWidth * (1 - share) * v.Rho
		}
	}
	c.perAnswer = 1 / c.answer
	c.slower = (c.model.DecodeMS + c.model.ContextMS*float64(c.tokens)) / 2
	return c
}

// fill scores the candidates.
func (m *mexCosts) fill(v *View, c *scratch) {
	resize(&c.scores, len(c.candidates))
	for k, i := range c.candidates {
		c.scores[k] = m.of(&v.Ranks[i], c.hits[i], nil)
	}
}

// near is by how much scores may differ and count as equal, ms: prefill work that the candidates may have got
// unseen.
func (m *mexCosts) near(v *View, c *scratch) float64 {
	if m.width == 0 {
		return 0
	}
	lag := time.Duration(0)
	for _, i := range c.candidates {
		lag += v.Ranks[i].Lag
	}
	return m.width * float64(lag) / (float64(len(c.candidates)) * float64(time.Millisecond))
}

// of is what the request costs on a rank that holds hit tokens of its prompt, in ms. Its terms go into terms
// unless that is nil.
func (m *mexCosts) of(rk *Rank, hit int64, terms *mexTerms) float64 {
	model, slow := &m.model, rk.slowness()
	open, work, pairs, waiting := float64(rk.ongoing()+1), float64(rk.Load.Q), float64(rk.Pairs),
		float64(rk.Load.Kq+m.tokens)
	rho := rk.Rho
	if rk.Bumps.N > 0 && m.unseen > 0 {
		sent := model.TokenMS*float64(rk.Bumps.Q) + model.PairMS*float64(rk.Bumps.Pairs)/2
		rho = min(rho+m.unseen*sent/workMemoryMS, maxRho)
		open += m.unseen * float64(rk.Bumps.N)
		work += m.unseen * float64(rk.Bumps.Q)
		pairs += m.unseen * float64(rk.Bumps.Pairs)
		waiting += m.unseen * float64(rk.Bumps.Kq)
	}
	waiting -= float64(rk.Computed.Tokens)
	u, decodes, context := float64(m.tokens-hit), float64(rk.Load.R+rk.Computed.N),
		float64(rk.Load.K+rk.Computed.Tokens)
	decoding := model.FixedMS + model.DecodeMS*decodes + model.ContextMS*context
	stretch := 1 + decoding*m.stretch
	prompt := slow * (model.TokenMS*u + model.PairMS*(u*u/2+u*float64(hit)))
	queue := slow * (model.TokenMS*work + model.PairMS*pairs/2) * stretch
	prefill := prompt * stretch
	later := m.later * prompt
	step := model.WeightMS + decoding + model.DecodeMS*(open-decodes) + model.ContextMS*waiting
	own, push := m.pace(m.perTPOT * slow * step / (1 - rho))
	others := push * m.exchange * decodes * (prompt*m.perAnswer + slow*m.slower)
	memory, beyond := 0.0, 0.0
	if asked, all := context+waiting+m.answer, float64(rk.Capacity); rk.Capacity > 0 && asked > all {
		memory = kvPressure * m.goal * (asked/all - 1)
	}
	if first := queue + prefill; m.late && first > m.goal {
		beyond = m.goal*(1+math.Log(first/m.goal)) - first
	}
	if terms != nil {
		*terms = mexTerms{queue, prefill, later, own, others, memory, beyond}
	}
	return queue + prefill + later + own + others + memory + beyond
}

// pace is the cost of tokens that take y times their goal, in ms, and how it grows with y, in goals of the
// first token.
func (m *mexCosts) pace(y float64) (ms, push float64) {
	switch {
	case !m.late:
		return m.goal * y, 1
	case y > 1:
		return m.goal * (1 + 2*math.Log(y)), 2 / y
	}
	return m.goal * y * y, 2 * y
}

// mexTerms are the terms of a cost in their printed order, and mexLabels their names.
type mexTerms [7]float64

var mexLabels = [len(mexTerms{})]string{
	"queue", "prefill", "later_arrivals", "own_tokens", "others_tokens",
	"memory", "beyond_goal",
}

// explain adds one row per candidate and term.
func (m *mexCosts) explain(v *View, d *Decision) {
	c := &d.scratch
	for k, i := range c.candidates {
		if c.scores[k]-c.scores[k] != 0 {
			continue
		}
		var terms mexTerms
		m.of(&v.Ranks[i], c.hits[i], &terms)
		for n, ms := range terms {
			d.Terms = append(d.Terms, newTerm(v.Ranks[i].ID, label{mexLabels[n], "ms"}, ms, 1))
		}
	}
}
