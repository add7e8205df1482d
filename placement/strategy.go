package placement

import (
	"cmp"
	"slices"
)

// choice is a node and what it could take of the group in hand.
type choice struct {
	pool *pool
	fits int
	n    int // ranks given to it
}

// seat chooses nodes by the strategy and seats the ranks along them.
func (ps pools) seat(g *Group) ([]Seat, *shortage) {
	choices := make([]*choice, len(ps))
	for i, p := range ps {
		choices[i] = &choice{pool: p, fits: p.fits(g)}
	}
	if got := g.share(choices); got < len(g.Ranks) {
		return nil, &shortage{fits: got}
	}
	seats := make([]Seat, 0, len(g.Ranks))
	for _, c := range choices {
		for range c.n {
			seats = append(seats, c.pool.take(g, g.Ranks[len(seats)]))
		}
	}
	return seats, nil
}

// share deals the ranks to nodes and returns how many found one. The choices stay in node order.
func (g *Group) share(choices []*choice) int {
	need := len(g.Ranks)
	if need == 0 {
		return 0
	}
	switch g.Strategy {
	case StrictPack:
		return g.strictPack(choices, need)
	case Spread:
		return g.spread(choices, need)
	case StrictSpread:
		return g.strictSpread(choices, need)
	default:
		return g.pack(choices, need)
	}
}

// tightest is the node that takes n ranks and has the least room beyond, so that room for larger groups stays whole. Nodes
// that have ranks of the group go first; among equals the first in node order.
func (g *Group) tightest(choices []*choice, n int) *choice {
	var best *choice
	for _, c := range choices {
		if c.n > 0 || c.fits < n {
			continue
		}
		if best == nil || g.closer(c, best) < 0 {
			best = c
		}
	}
	return best
}

func (g *Group) closer(a, b *choice) int {
	return cmp.Or(cmp.Compare(min(1, g.on(b.pool.ID)), min(1, g.on(a.pool.ID))), cmp.Compare(a.fits, b.fits))
}

// pack takes the tightest single node; without one the roomiest nodes until the rest fits into one.
func (g *Group) pack(choices []*choice, need int) int {
	left := need
	for left > 0 {
		if c := g.tightest(choices, left); c != nil {
			c.n = left
			return need
		}
		c := g.roomiest(choices)
		if c == nil {
			return need - left
		}
		c.n = c.fits
		left -= c.n
	}
	return need
}

func (g *Group) roomiest(choices []*choice) *choice {
	var best *choice
	for _, c := range choices {
		if c.n == 0 && c.fits > 0 && (best == nil || c.fits > best.fits) {
			best = c
		}
	}
	return best
}

// strictPack takes one node: the one that has ranks of the group already, else the tightest.
func (g *Group) strictPack(choices []*choice, need int) int {
	allowed := slices.Clone(choices)
	if g.placedAlready() {
		allowed = slices.DeleteFunc(allowed, func(c *choice) bool { return g.on(c.pool.ID) == 0 })
	}
	if c := g.tightest(allowed, need); c != nil {
		c.n = need
		return need
	}
	if c := g.roomiest(allowed); c != nil {
		return c.fits
	}
	return 0
}

func (g *Group) placedAlready() bool {
	for _, n := range g.Held {
		if n > 0 {
			return true
		}
	}
	return len(g.Keep) > 0
}

// spread deals one rank at a time to the node with the fewest ranks of the group; among equals the one with the most room.
func (g *Group) spread(choices []*choice, need int) int {
	for got := range need {
		var best *choice
		for _, c := range choices {
			if c.n < c.fits && (best == nil || g.emptier(c, best) < 0) {
				best = c
			}
		}
		if best == nil {
			return got
		}
		best.n++
	}
	return need
}

func (g *Group) emptier(a, b *choice) int {
	return cmp.Or(cmp.Compare(g.on(a.pool.ID)+a.n, g.on(b.pool.ID)+b.n), cmp.Compare(b.fits-b.n, a.fits-a.n))
}

// strictSpread gives one rank each to the roomiest nodes that have none of the group.
func (g *Group) strictSpread(choices []*choice, need int) int {
	free := slices.DeleteFunc(slices.Clone(choices), func(c *choice) bool { return c.fits == 0 || g.on(c.pool.ID) > 0 })
	slices.SortStableFunc(free, func(a, b *choice) int { return cmp.Compare(b.fits, a.fits) })
	for i := range min(need, len(free)) {
		free[i].n = 1
	}
	return min(need, len(free))
}

// watch gives each attached rank to its pinned node, or to the node with the fewest ranks.
func (ps pools) watch(g *Group) ([]Seat, *shortage) {
	seats := make([]Seat, 0, len(g.Ranks))
	for _, r := range g.Ranks {
		p := ps.fewest()
		if pin := g.Pinned[r]; pin != "" {
			if p = ps.find(pin); p == nil {
				return nil, &shortage{fits: len(seats), why: "node " + pin + " is not there"}
			}
		}
		if p == nil {
			return nil, &shortage{}
		}
		p.ranks++
		seats = append(seats, Seat{Rank: r, Node: p.ID, Slot: -1})
	}
	return seats, nil
}

func (ps pools) fewest() *pool {
	if len(ps) == 0 {
		return nil
	}
	return slices.MinFunc(ps, func(a, b *pool) int { return cmp.Compare(a.ranks, b.ranks) })
}
