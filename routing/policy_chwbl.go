package routing

import (
	"math/rand/v2"
	"unicode/utf8"
)

const (
	// chwblChars is how much of the prompt is KubeAI's key, in characters.
	chwblChars = 100
	// chwblNodes is KubeAI's virtual nodes per rank, prefixHashNodes that of variant prefix-hash.
	chwblNodes, prefixHashNodes = 256, 150
	// prefixHashTokens is the key of variant prefix-hash: the first 256 tokens.
	prefixHashTokens = 256
	// chwblFactor is KubeAI's c; chwblFactorTuned goes with the session as key.
	chwblFactor, chwblFactorTuned = 1.25, 3
	// maxNodes bounds the points per rank.
	maxNodes = 4096
)

// CHWBL is consistent hashing with bounded loads (KubeAI): from the key's point on the ring, the first rank
// with
//
//	O ≤ Factor · (ΣO + 1) / N
//
// over the N ranks that the request may go to. The key is the first chwblChars characters of the prompt and
// the adapter, or the session; a request without either has its number as the key. Variant prefix-hash: the
// first 256 tokens are the key, and a rank above the bound is left for the shortest queue, not for the next
// rank on the ring. Parameters: variant, key (prefix, session), load_factor, virtual_nodes.
type CHWBL struct {
	Factor     float64 // c, at least 1
	Nodes      int     // points per rank
	Session    bool    // key: session
	PrefixHash bool    // variant prefix-hash
}

type ringState struct{ ring ring }

func newCHWBL(p *params) Policy {
	hash := p.word("variant", nameCHWBL, nameCHWBL, "prefix-hash") == "prefix-hash"
	nodes, key := chwblNodes, "prefix"
	if hash {
		nodes = prefixHashNodes
	}
	if p.tuned && !hash {
		key = "session"
	}
	return CHWBL{
		Factor:     p.number("load_factor", p.choose(chwblFactor, chwblFactorTuned), 1, maxWeight),
		Nodes:      p.integer("virtual_nodes", nodes, 1, maxNodes),
		Session:    p.word("key", key, "prefix", "session") == "session",
		PrefixHash: hash,
	}
}

// Name is "chwbl".
func (CHWBL) Name() string { return nameCHWBL }

func (p CHWBL) needs() Needs {
	return Needs{Text: !p.Session, Session: p.Session, Blocks: p.PrefixHash}
}

// NewState has a ring of the view's ranks.
func (p CHWBL) NewState(v *View, _ *rand.Rand) State { return &ringState{ring: newRing(v, p.Nodes)} }

// Observe keeps the ring.
func (CHWBL) Observe(s State, _ *View, e *Event) {
	if st, ok := s.(*ringState); ok {
		st.ring.observe(e)
	}
}

// Decide takes the first rank on the ring that is not overloaded.
func (p CHWBL) Decide(q *Request, v *View, s State, r *rand.Rand, d *Decision) {
	decideByScore(p, q, v, s, r, d)
}

// key is the request's point on the ring.
func (p CHWBL) key(q *Request) uint64 {
	switch {
	case p.Session && q.Session != "":
		return hashString(q.Session)
	case p.Session:
	case p.PrefixHash && q.BlockSize > 0 && len(q.Blocks)*q.BlockSize >= prefixHashTokens:
		return q.Blocks[max(1, prefixHashTokens/q.BlockSize)-1]
	case p.PrefixHash && len(q.Text) > 0:
		return hashBytes(q.Text[:min(len(q.Text), charsPerToken*prefixHashTokens)])
	case len(q.Text) > 0:
		return hashBytes(firstChars(q.Text, chwblChars)) ^ spread(hashString(q.Adapter))
	}
	return spread(q.ID)
}

// firstChars is the first n characters of text; a byte that is no UTF-8 counts as one.
func firstChars(text []byte, n int) []byte {
	end := 0
	for ; n > 0 && end < len(text); n-- {
		_, size := utf8.DecodeRune(text[end:])
		end += size
	}
	return text[:end]
}

// prepare: extra is 0 for the rank that the ring gives, 1 for the others; all 0 if it gives none. x[0] is the
// bound.
func (p CHWBL) prepare(q *Request, v *View, s State, c *scratch) aggregate {
	sum, n := 0, 0
	for i := range v.Ranks {
		if rk := &v.Ranks[i]; isEligible(q, rk) {
			sum += rk.ongoing()
			n++
		}
	}
	bound := p.Factor * float64(sum+1) / float64(max(1, n))
	found := -1
	if st, ok := s.(*ringState); ok {
		st.ring.walk(v, p.key(q), c.extra, func(row int) bool {
			rk := &v.Ranks[row]
			if !isEligible(q, rk) {
				return true
			}
			if c.tier.has(q, rk) && float64(rk.ongoing()) <= bound {
				found = row
				return false
			}
			return !p.PrefixHash
		})
	}
	return onRing(found, c, aggregate{why: ReasonRing, x: [4]float64{bound}})
}

// onRing leaves extra 0 for the found row alone, or for all of them.
func onRing(found int, c *scratch, a aggregate) aggregate {
	if found < 0 {
		clear(c.extra)
		a.why = ReasonRingFallback
		return a
	}
	c.exclude()
	c.extra[found] = 0
	return a
}

func (CHWBL) summands(_ *Request, rk *Rank, _, extra int64, a *aggregate) sums {
	return three(float64(extra), notPreferredCost, float64(rk.ongoing()), 1, a.x[0], 0)
}

func (p CHWBL) fill(q *Request, v *View, c *scratch) {
	for k, i := range c.candidates {
		c.scores[k] = total(p.summands(q, &v.Ranks[i], c.hits[i], c.extra[i], &c.all))
	}
}

func (CHWBL) labels(*aggregate) []label {
	return []label{{"not_first_on_ring", "none"}, {"open", "requests"}, {"bound", "requests"}}
}

func (CHWBL) rule(*aggregate) rule { return rule{} }
