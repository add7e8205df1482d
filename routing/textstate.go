package routing

import "time"

// textState is the state of prefix-aware and cache-aware: the text sent to each rank, and the time of the
// last sweep. It holds the text that its own ingress sent. The text of other ingresses shows in the hits of a
// request: the ranks record the prompts that they were sent, and every ingress receives those records,
// without the engines' events.
type textState struct {
	tree     *textTree
	swept    time.Duration // view.Now
	sweeping uint32        // slot + 1 of the rank that a sweep has left above its low; 0: none
}

func newTextState(v *View) *textState {
	return &textState{tree: newTextTree(v, maxTreeChars), swept: v.Now}
}

// sweep bounds a policy's tree: every interval, each rank above high loses its least recently used text until
// it is at low. An interval of 0 never sweeps.
type sweep struct {
	interval  time.Duration
	high, low func(v *View, id RankID) int
	nodes     bool // high and low count tree nodes, not characters
}

// observe applies rank changes and dispatches, and sweeps when the interval is over.
func (st *textState) observe(v *View, e *Event, w sweep) {
	switch e.Kind {
	case EvRankUp:
		st.tree.addRank(e.Rank, e.Incarnation)
	case EvRankDown:
		st.tree.removeRank(e.Rank)
	case EvDispatched:
		if i, ok := v.Find(e.Rank); ok && e.Request != nil && cacheable(e.Request, &v.Ranks[i]) {
			st.tree.insert(e.Request.Text, e.Rank)
		}
	default:
	}
	if w.interval > 0 && v.Now-st.swept >= w.interval && st.sweep(v, w) {
		st.swept = v.Now
	}
}

// maxSweep is how many evictions a sweep makes under the Router's lock before it leaves the rest to the next
// event: 0.1 ms.
const maxSweep = 512

// sweep is false if there is more to do.
func (st *textState) sweep(v *View, w sweep) bool {
	left := maxSweep
	for i := range v.Ranks {
		id := v.Ranks[i].ID
		s := st.tree.slots.get(uint64(id) + 1)
		if s == 0 || s != st.sweeping && st.size(s-1, w.nodes) <= w.high(v, id) {
			continue
		}
		for low := w.low(v, id); st.size(s-1, w.nodes) > low; left-- {
			if left == 0 {
				st.sweeping = s
				return false
			}
			st.tree.evict(s - 1)
		}
		st.sweeping = 0
	}
	return true
}

func (st *textState) size(slot uint32, nodes bool) int {
	if nodes {
		return st.tree.ranks[slot].nodes
	}
	return st.tree.ranks[slot].chars
}

// cacheable reports whether the tree should store a prompt: it has text, and at least one whole block that an
// engine can cache. Shorter prompts would all follow the first of their kind to one rank without a hit.
func cacheable(q *Request, rk *Rank) bool {
	return len(q.Text) > 0 && q.Tokens >= rk.blockSize(q)
}

// anyCacheable is cacheable on some rank.
func anyCacheable(q *Request, v *View) bool {
	for i := range v.Ranks {
		if cacheable(q, &v.Ranks[i]) {
			return true
		}
	}
	return false
}

// owners finds the longest match that a candidate has been sent and gives its owners among the candidates 0
// and all others 1, in c.extra. length is the match in characters; 0 if no candidate was ever sent a prefix
// of the text.
func (st *textState) owners(q *Request, v *View, c *scratch) (length int) {
	c.exclude()
	for m := st.tree.match(q.Text); m.node != 0; m = st.tree.up(m) {
		found := false
		for k := st.tree.nodes[m.node].marks; k != 0; k = st.tree.marks[k].next {
			i, ok := v.Find(st.tree.ranks[st.tree.marks[k].slot].id)
			if ok && c.tier.has(q, &v.Ranks[i]) {
				c.extra[i], found = 0, true
			}
		}
		if found {
			return m.length
		}
	}
	return 0
}

// longestMatch finds the longest match that a candidate has been sent and gives the candidates that have it 0
// and all others 1, in c.extra: the owners in the tree, or the holders by the ranks' records where these
// match more, because another ingress sent it. It returns the match's share of the prompt.
func (st *textState) longestMatch(q *Request, v *View, c *scratch) float64 {
	rate := matchRate(st.owners(q, v, c), q)
	if held := c.longestHit(); held > 0 && float64(held) > rate*float64(q.Tokens) {
		rate = float64(held) / float64(q.Tokens)
		c.exclude()
		c.preferHolders(held)
	}
	return rate
}

// needsText is what a policy with a textState reads.
func needsText() Needs {
	return Needs{Text: true, Hits: true, Approximate: true}
}

// smallest gives the candidates with the fewest characters of text 0 and all others 1, in c.extra. It never
// counts nodes of the tree, because a prompt of 100 and one of 100,000 tokens would count the same.
func (st *textState) smallest(v *View, c *scratch) {
	c.exclude()
	least := -1
	for _, i := range c.candidates {
		size := st.sizeOf(v.Ranks[i].ID)
		if least < 0 || size < least {
			least = size
		}
		c.extra[i] = int64(size)
	}
	for _, i := range c.candidates {
		c.extra[i] = min(1, c.extra[i]-int64(least))
	}
}

// sizeOf is the number of characters that the tree holds of a rank.
func (st *textState) sizeOf(id RankID) int {
	s := st.tree.slots.get(uint64(id) + 1)
	if s == 0 {
		return 0
	}
	return st.size(s-1, false)
}

// exclude gives every row 1: not preferred.
func (c *scratch) exclude() {
	for i := range c.extra {
		c.extra[i] = 1
	}
}

// longestHit is the most tokens of the prompt that a candidate holds.
func (c *scratch) longestHit() int64 {
	longest := int64(0)
	for _, i := range c.candidates {
		longest = max(longest, c.hits[i])
	}
	return longest
}

// preferHolders gives the candidates that hold so many tokens of the prompt 0 in c.extra.
func (c *scratch) preferHolders(tokens int64) {
	for _, i := range c.candidates {
		if c.hits[i] == tokens {
			c.extra[i] = 0
		}
	}
}

// matchRate is length over the text's characters; the text is not empty.
func matchRate(length int, q *Request) float64 {
	return float64(length) / float64(min(len(q.Text), maxTextChars))
}

// spreadOpen is the largest and the smallest number of open requests over the ranks that q may go to, full
// ones included: a full rank is the clearest sign of imbalance.
func spreadOpen(q *Request, v *View) (most, least int) {
	first := true
	for i := range v.Ranks {
		rk := &v.Ranks[i]
		if !isEligible(q, rk) || rk.Silent {
			continue
		}
		o := rk.ongoing()
		if first {
			first, most, least = false, o, o
		}
		most, least = max(most, o), min(least, o)
	}
	return most, least
}
