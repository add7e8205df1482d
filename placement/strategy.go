package placement

import (
	"cmp"
	"maps"
	"slices"
)

// choice is a node and how many ranks of the present group it can take.
type choice struct {
	pool *pool
	fits int
	n    int // ranks given to it
}

// seatRanks chooses nodes by the strategy and seats the ranks along them.
func (ps pools) seatRanks(g *Group) ([]Seat, *shortage) {
	var choices []*choice
	got := -1
	for avoid := len(g.Avoid); avoid >= 0 && got < len(g.Ranks); avoid-- {
		choices, got = ps.without(g.Avoid[:avoid]).chooseDevices(g)
	}
	if got < len(g.Ranks) {
		return nil, &shortage{fits: got}
	}
	seats := make([]Seat, 0, len(g.Ranks))
	for _, c := range choices {
		for range c.n {
			seats = append(seats, c.pool.takeSeat(g, g.Ranks[len(seats)]))
		}
	}
	return seats, nil
}

func (ps pools) without(nodes []string) pools {
	return slices.DeleteFunc(slices.Clone(ps), func(p *pool) bool { return slices.Contains(nodes, p.ID) })
}

// chooseDevices is chooseNodes. Only a group that finds no other room gets devices that are not consecutive
// and aligned.
func (ps pools) chooseDevices(g *Group) (choices []*choice, got int) {
	g.loose = false
	choices, got = ps.chooseNodes(g)
	if got < len(g.Ranks) && g.Devices > 1 {
		g.loose = true
		choices, got = ps.chooseNodes(g)
	}
	return choices, got
}

// chooseNodes deals the ranks to nodes by their capacity, and returns how many found a node. Ranks that
// should be beside those of the other pool go to its nodes if these have room for all.
func (ps pools) chooseNodes(g *Group) ([]*choice, int) {
	if len(g.Other.Ranks) > 0 && !g.Other.Apart {
		beside := slices.DeleteFunc(slices.Clone(ps), func(p *pool) bool { return g.Other.Ranks[p.ID] == 0 })
		if choices, got := beside.dealByModel(g); got == len(g.Ranks) {
			return choices, got
		}
	}
	return ps.dealByModel(g)
}

// dealByModel is dealTo. Ranks with devices that are spread go to nodes of one device model if these have
// room for all: to the model that has ranks of the group, else to the one on the most nodes with room. Ranks
// on unequal devices would not be equally fast.
func (ps pools) dealByModel(g *Group) ([]*choice, int) {
	if g.Strategy != Spread || g.Devices == 0 {
		return ps.dealTo(g)
	}
	held, nodes := map[string]int{}, map[string]int{}
	for _, p := range ps {
		held[p.Model] += g.ranksOn(p.ID)
		nodes[p.Model] += min(1, p.capacityFor(g))
	}
	models := slices.SortedFunc(maps.Keys(nodes), func(a, b string) int {
		return cmp.Or(cmp.Compare(held[b], held[a]), cmp.Compare(nodes[b], nodes[a]), cmp.Compare(a, b))
	})
	if len(models) > 1 {
		for _, model := range models {
			equal := slices.DeleteFunc(slices.Clone(ps), func(p *pool) bool { return p.Model != model })
			if choices, got := equal.dealTo(g); got == len(g.Ranks) {
				return choices, got
			}
		}
	}
	return ps.dealTo(g)
}

// dealTo deals the ranks of a group to these nodes, and returns how many found a node.
func (ps pools) dealTo(g *Group) ([]*choice, int) {
	choices := make([]*choice, len(ps))
	for i, p := range ps {
		choices[i] = &choice{pool: p, fits: p.capacityFor(g)}
	}
	return choices, g.dealRanks(choices)
}

// dealRanks deals the ranks to nodes and returns how many found a node. The choices stay in node order.
func (g *Group) dealRanks(choices []*choice) int {
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

// findTightest returns the node that can take n ranks and has the least room beyond, so that room for larger
// groups stays together. Nodes that have ranks of the group come first, then those where the n ranks fill
// shared devices instead of whole ones; among equals the first in node order.
func (g *Group) findTightest(choices []*choice, n int) *choice {
	return findFirst(choices, func(c *choice) bool { return c.n == 0 && c.fits >= n },
		func(a, b *choice) int { return g.compareTightness(a, b, n) })
}

// findFirst returns the first in an order of the choices that may be chosen; nil if there is none.
func findFirst(choices []*choice, mayChoose func(*choice) bool, order func(a, b *choice) int) *choice {
	var first *choice
	for _, c := range choices {
		if mayChoose(c) && (first == nil || order(c, first) < 0) {
			first = c
		}
	}
	return first
}

func (g *Group) compareTightness(a, b *choice, n int) int {
	return cmp.Or(cmp.Compare(min(1, g.ranksOn(b.pool.ID)), min(1, g.ranksOn(a.pool.ID))),
		cmp.Compare(countOpened(a.pool, g, n), countOpened(b.pool, g, n)), cmp.Compare(a.fits, b.fits))
}

// pack chooses the tightest single node. If there is none, it chooses as few nodes as possible, and of those
// the ones that get the most equal blocks, the tightest first.
func (g *Group) pack(choices []*choice, need int) int {
	if c := g.findTightest(choices, need); c != nil {
		c.n = need
		return need
	}
	nodes, most, fits := countNodes(choices, need)
	if fits < need {
		return fits
	}
	chosen := make([]*choice, 0, nodes)
	for left := need; left > 0; {
		c := g.tightestForRest(choices, left, most, need/nodes)
		if c == nil {
			c = g.findRoomiest(choices, most)
		}
		c.n = min(c.fits, most) // preliminary; spread deals the ranks again below
		left -= c.n
		chosen = append(chosen, c)
	}
	for _, c := range chosen {
		c.n = 0
	}
	return g.spread(inNodeOrder(choices, chosen), need)
}

func inNodeOrder(choices, chosen []*choice) []*choice {
	return slices.DeleteFunc(slices.Clone(choices),
		func(c *choice) bool { return !slices.Contains(chosen, c) })
}

// countNodes returns the least number of nodes that can take need ranks, and the size of the largest block if
// they share the ranks as equally as possible. Without room for all it returns how many fit.
func countNodes(choices []*choice, need int) (nodes, most, fits int) {
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
	// The roomiest nodes, the smallest of them first: each takes its share or all it can.
	for left, i := need, nodes-1; i >= 0; i-- {
		share := (left + i) / (i + 1)
		most = max(most, min(share, rooms[i]))
		left -= min(share, rooms[i])
	}
	return nodes, most, fits
}

// tightestForRest returns the tightest node that can take the remaining ranks, and an equal share if one can.
func (g *Group) tightestForRest(choices []*choice, left, most, share int) *choice {
	if left > most {
		return nil
	}
	if c := g.findTightest(choices, max(left, share)); c != nil {
		return c
	}
	return g.findTightest(choices, left)
}

// findRoomiest returns the node that can take the largest block of at most most ranks; among equals the
// tightest.
func (g *Group) findRoomiest(choices []*choice, most int) *choice {
	return findFirst(choices, func(c *choice) bool { return c.n == 0 && c.fits > 0 }, func(a, b *choice) int {
		return cmp.Or(cmp.Compare(min(b.fits, most), min(a.fits, most)),
			g.compareTightness(a, b, min(a.fits, most)))
	})
}

// strictPack chooses one node: the one that has ranks of the group already, else the tightest.
func (g *Group) strictPack(choices []*choice, need int) int {
	if c := g.findTightest(choices, need); c != nil {
		c.n = need
		return need
	}
	if c := g.findRoomiest(choices, need); c != nil {
		return c.fits
	}
	return 0
}

func (g *Group) hasRanksPlaced() bool {
	for _, n := range g.Held {
		if n > 0 {
			return true
		}
	}
	return len(g.Keep) > 0
}

// spread deals one rank at a time to the node with the fewest ranks of the group; among equals to the one
// with the fewest of the pool's other groups, then to the one with the most room.
func (g *Group) spread(choices []*choice, need int) int {
	for got := range need {
		next := findFirst(choices, func(c *choice) bool { return c.n < c.fits }, g.compareLoad)
		if next == nil {
			return got
		}
		next.n++
	}
	return need
}

func (g *Group) compareLoad(a, b *choice) int {
	return cmp.Or(cmp.Compare(g.ranksOn(a.pool.ID)+a.n, g.ranksOn(b.pool.ID)+b.n),
		cmp.Compare(g.Siblings[a.pool.ID], g.Siblings[b.pool.ID]),
		cmp.Compare(b.fits-b.n, a.fits-a.n))
}

// strictSpread deals one rank each to the roomiest nodes that have none of the group.
func (g *Group) strictSpread(choices []*choice, need int) int {
	free := slices.DeleteFunc(slices.Clone(choices),
		func(c *choice) bool { return c.fits == 0 })
	slices.SortStableFunc(free, func(a, b *choice) int { return cmp.Compare(b.fits, a.fits) })
	for i := range min(need, len(free)) {
		free[i].n = 1
	}
	return min(need, len(free))
}

// assignAttached gives each attached rank to its pinned node, or to the node with the fewest ranks.
func (ps pools) assignAttached(g *Group) ([]Seat, *shortage) {
	seats := make([]Seat, 0, len(g.Ranks))
	for _, r := range g.Ranks {
		p := ps.withFewestRanks()
		if pin := g.Pinned[r]; pin != "" {
			if p = ps.findNode(pin); p == nil {
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

func (ps pools) withFewestRanks() *pool {
	if len(ps) == 0 {
		return nil
	}
	return slices.MinFunc(ps, func(a, b *pool) int { return cmp.Compare(a.ranks, b.ranks) })
}
