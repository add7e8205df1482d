package routing

import (
	"math"
	"math/rand/v2"
)

const (
	// kvWeight and kvWeightTuned are overlap_score_weight. The documented 1, and anything up to 8, is far too
	// low.
	kvWeight, kvWeightTuned = 1, 32
	// maxWeight bounds weights and temperatures, so that no cost overflows.
	maxWeight = 1e9
)

// KV is Dynamo's KV cache routing (the page of v0.7.1). The lowest cost wins, ties are drawn:
//
//	cost           = Weight * prefill_blocks + decode_blocks
//	prefill_blocks = (Q + L - hit) / b
//	decode_blocks  = distinct prompt blocks of the rank's active sequences and of this request
//
// Temperature T > 0 draws a rank with probability ∝ exp(-(c - min)/((max - min)·T)); all equal is uniform.
// Per request, weight and temperature may be overridden (Request.Override).
type KV struct {
	Weight      float64 // overlap_score_weight; 0 ignores caches, and no index is built
	Temperature float64 // router_temperature, 0 = lowest cost
	NoTrack     bool    // no_track_active_blocks: no decode term, for ranks that only prefill
	NoEvents    bool    // no_kv_events: approximate mode
}

func newKV(p *params) Policy {
	return KV{
		Weight:      p.number("overlap_score_weight", p.choose(kvWeight, kvWeightTuned), 0, maxWeight),
		Temperature: p.number("router_temperature", 0, 0, maxWeight),
		NoTrack:     p.boolean("no_track_active_blocks"),
		NoEvents:    p.boolean("no_kv_events"),
	}
}

func (KV) Name() string { return nameKV }

func (p KV) needs() Needs {
	hits := p.Weight > 0
	return Needs{Hits: hits, Blocks: !p.NoTrack, Approximate: hits && p.NoEvents}
}

func (p KV) NewState(v *View, _ *rand.Rand) State {
	if p.NoTrack {
		return nil
	}
	return newActiveBlocks(v)
}

func (KV) Observe(s State, v *View, e *Event) {
	active, ok := s.(*activeBlocks)
	if !ok {
		return
	}
	switch e.Kind {
	case EvRankUp:
		active.align(v)
	case EvRankDown:
		active.removeRank(e.Rank)
		active.align(v)
	case EvOpened:
		if i, ok := v.Find(e.Rank); ok {
			q := e.Request
			if q == nil {
				q = &Request{}
			}
			blocks := ceilDiv(int64(e.Tokens), int64(v.Ranks[i].blockSize(q)))
			active.open(e.Rank, e.ReqID, blocks, q.Blocks)
		}
	case EvClosed:
		active.close(e.Rank, e.ReqID)
	default:
	}
}

// Decide takes the candidate with the lowest cost, or draws one.
func (p KV) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	p = p.overridden(q.Override)
	resetDecision(d)
	t, ok := gather(q, v, &d.scratch)
	if !ok {
		queueOrReject(q, v, d)
		return
	}
	decideAmong(p, t, q, v, s, r, d)
	if p.Temperature > 0 && d.Kind == Route {
		p.sample(t, v, r, d)
	}
}

func (p KV) overridden(o *Override) KV {
	if o == nil {
		return p
	}
	if o.HasOverlapScoreWeight {
		p.Weight = o.OverlapScoreWeight
	}
	if o.HasRouterTemperature {
		p.Temperature = o.RouterTemperature
	}
	return p
}

// prepare: extra is the rank's decode_blocks.
func (p KV) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	p.decodeBlocks(q, v, s, c)
	return aggregate{why: ReasonLowestScore}
}

// decodeBlocks fills c.extra, aligned with the view.
func (p KV) decodeBlocks(q *Request, v *View, s State, c *scratch) {
	active, ok := s.(*activeBlocks)
	if p.NoTrack || !ok || len(active.rows) != len(v.Ranks) {
		return
	}
	depths := active.depths(q.Blocks, c)
	size, own := 0, int64(0)
	for i := range v.Ranks {
		if b := v.Ranks[i].blockSize(q); b != size { // mostly all ranks have the same, and a division is dear
			size, own = b, ceilDiv(int64(q.Tokens), int64(b))
		}
		slot := int(active.rows[i])
		c.extra[i] = active.of(slot) + max(0, own-int64(depths[slot])) + v.Ranks[i].Failed.K/int64(size)
	}
}

func (p KV) summands(q *Request, rk *Rank, hit, extra int64, _ *aggregate) sums {
	return kvTerms(q, rk, hit, extra, p.Weight)
}

func kvTerms(q *Request, rk *Rank, hit, extra int64, weight float64) sums {
	return two(float64(rk.Load.Q+int64(q.Tokens)-hit)/float64(rk.blockSize(q)), weight, float64(extra), 1)
}

func (p KV) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(kvTerms(q, &v.Ranks[i], c.hits[i], c.extra[i], p.Weight))
	}
}

func (p KV) labels(*aggregate) []label {
	all := []label{{"prefill_blocks", "blocks"}, {"decode_blocks", "blocks"}}
	if p.NoTrack {
		return all[:1]
	}
	return all
}

// sample replaces the choice by a draw from the softmax over the costs, scaled to [0, 1].
func (p KV) sample(t tier, v *View, r *rand.Rand, d *Decision) {
	c := &d.scratch
	low, high := math.Inf(1), math.Inf(-1)
	for _, cost := range c.scores {
		if cost-cost == 0 { // a number
			low, high = min(low, cost), max(high, cost)
		}
	}
	scale, sum := (high-low)*p.Temperature, 0.0
	for k, cost := range c.scores {
		switch {
		case cost-cost != 0:
			c.scores[k] = 0
		case scale > 0:
			c.scores[k] = math.Exp((low - cost) / scale)
		default:
			c.scores[k] = 1
		}
		sum += c.scores[k]
	}
	d.Ranked = d.Ranked[:0]
	routeTo(d, t, &v.Ranks[c.candidates[draw(c.scores, r.Float64()*sum)]], ReasonSampled)
}

// draw is the index whose share of the weights' sum x falls into; an index of weight 0 never.
func draw(weights []float64, x float64) int {
	last := 0
	for i, w := range weights {
		if w == 0 {
			continue
		}
		if last = i; x < w {
			break
		}
		x -= w
	}
	return last
}
