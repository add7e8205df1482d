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

// seat chooses nodes by the strategy and seats the ranks along them. Only a group that finds no room else takes devices that are
// not consecutive and aligned.
func (ps pools) seat(g *Group) ([]Seat, *shortage) {
	choices, got := ps.choose(g)
	if got < len(g.Ranks) && g.Devices > 1 {
		g.loose = true
		choices, got = ps.choose(g)
	}
	if got < len(g.Ranks) {
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

// choose deals the ranks to nodes by what each has room for, and returns how many found one.
func (ps pools) choose(g *Group) ([]*choice, int) {
	choices := make([]*choice, len(ps))
	for i, p := range ps {
		choices[i] = &choice{pool: p, fits: p.fits(g)}
	}
	return choices, g.share(choices)
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

// pack takes the tightest single node; without one as few nodes as possible, and of those the ones that take the most equal
// blocks, the tightest first.
func (g *Group) pack(choices []*choice, need int) int {
	if c := g.tightest(choices, need); c != nil {
		c.n = need
		return need
	}
	nodes, most, fits := evenest(choices, need)
	if fits < need {
		return fits
	}
	chosen := make([]*choice, 0, nodes)
	for left := need; left > 0; {
		c := g.last(choices, left, most, need/nodes)
		if c == nil {
			c = g.roomiest(choices, most)
		}
		c.n = min(c.fits, most) // taken; dealt anew below
		left -= c.n
		chosen = append(chosen, c)
	}
	for _, c := range chosen {
		c.n = 0
	}
	return g.spread(inNodeOrder(choices, chosen), need)
}

func inNodeOrder(choices, chosen []*choice) []*choice {
	return slices.DeleteFunc(slices.Clone(choices), func(c *choice) bool { return !slices.Contains(chosen, c) })
}

// evenest is the least number of nodes that take need ranks, and the size of the largest block if they share them as equally as
// they can. Without room for all it gives how many fit.
func evenest(choices []*choice, need int) (nodes, most, fits int) {
	rooms := make([]int, 0, len(choices))
	for _, c := range choices {
		rooms = append(rooms, c.fits)
	}
	slices.SortFunc(rooms, func(a, b int) int { return cmp.Compare(b, a) })
	for nodes < len(rooms) && fits < need {
		fits += min(rooms[nodes], need)
		nodes++
	}
	if fits < need {
		return nodes, 0, fits
	}
	for left, i := need, nodes-1; i >= 0; i-- { // the roomiest nodes, the smallest first: each takes its share or all it has
		share := (left + i) / (i + 1)
		most = max(most, min(share, rooms[i]))
		left -= min(share, rooms[i])
	}
	return nodes, most, fits
}

// last is the tightest node that takes what is left, and an equal share if one can.
func (g *Group) last(choices []*choice, left, most, share int) *choice {
	if left > most {
		return nil
	}
	if c := g.tightest(choices, max(left, share)); c != nil {
		return c
	}
	return g.tightest(choices, left)
}

// roomiest is the node that takes the largest block of at most most ranks; among equals the tightest.
func (g *Group) roomiest(choices []*choice, most int) *choice {
	var best *choice
	for _, c := range choices {
		if c.n > 0 || c.fits == 0 {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(min(best.fits, most), min(c.fits, most)), g.closer(c, best)) < 0 {
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
	if c := g.roomiest(allowed, need); c != nil {
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
