package placement

import (
	"cmp"
	"math"
	"slices"
)

// pool is what is left of a node while groups are placed.
type pool struct {
	*Node
	slots   []int // free, ascending
	devices []int // free, ascending
	cells   cells
	ranks   int
}

// pools are the nodes in node order: ascending by id.
type pools []*pool

func newPools(nodes []Node) pools {
	ps := make(pools, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		ps[i] = &pool{Node: n, slots: n.freeSlots(), devices: without(n.Devices, n.UsedDevices), cells: newCells(n), ranks: n.Ranks}
	}
	slices.SortFunc(ps, func(a, b *pool) int { return cmp.Compare(a.ID, b.ID) })
	return ps
}

func (n *Node) freeSlots() []int {
	all := make([]int, max(0, n.Slots))
	for i := range all {
		all[i] = i
	}
	return without(all, n.UsedSlots)
}

// without is all minus used, ascending, each once.
func without(all, used []int) []int {
	out := make([]int, 0, len(all))
	for _, x := range all {
		if !slices.Contains(used, x) {
			out = append(out, x)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (ps pools) find(id string) *pool {
	for _, p := range ps {
		if p.ID == id {
			return p
		}
	}
	return nil
}

// matches says whether the node has all labels of the group.
func (p *pool) matches(g *Group) bool {
	for k, v := range g.Labels {
		if p.Labels[k] != v {
			return false
		}
	}
	return true
}

// fits is how many more ranks of g the node can take, slots, devices, ports and max_ranks_per_node considered.
func (p *pool) fits(g *Group) int {
	if !p.matches(g) {
		return 0
	}
	n := math.MaxInt32
	if g.MaxRanksPerNode > 0 {
		n = max(0, g.MaxRanksPerNode-g.on(p.ID))
	}
	if g.Slots > 0 {
		n = min(n, len(p.slots))
	}
	if g.Devices > 0 {
		n = min(n, len(p.deviceSets(g.Devices, g.loose)))
	}
	return min(n, p.fitsPorts(g))
}

// fitsPorts counts by blocks: a lockstep unit has one per node, independent ranks one each. Those of kept ranks are not cut
// yet, so they are put aside.
func (p *pool) fitsPorts(g *Group) int {
	kept := 0
	for i := range g.Keep {
		if g.Keep[i].Node == p.ID {
			kept++
		}
	}
	if !g.Lockstep {
		return max(0, p.cells.count(BlockSize(1))-kept)
	}
	if _, ok := p.cells.find(g.blockSize()); !ok {
		return 0
	}
	return math.MaxInt32
}

func (g *Group) blockSize() int {
	if g.Lockstep {
		return BlockSize(g.DPSize)
	}
	return BlockSize(1)
}

// on is how many ranks of the group the node has already.
func (g *Group) on(node string) int {
	n := g.Held[node]
	for i := range g.Keep {
		if g.Keep[i].Node == node {
			n++
		}
	}
	return n
}

// deviceSets are the free sets of k devices: consecutive numbers, the first a multiple of k, lowest first; if loose, then also what
// is left, in ascending order.
func (p *pool) deviceSets(k int, loose bool) [][]int {
	var out [][]int
	var rest []int
	for i := 0; i < len(p.devices); {
		first := p.devices[i]
		if i+k <= len(p.devices) && first%k == 0 && p.devices[i+k-1] == first+k-1 {
			out = append(out, p.devices[i:i+k])
			i += k
			continue
		}
		rest = append(rest, first)
		i++
	}
	if loose {
		out = slices.AppendSeq(out, slices.Chunk(rest[:len(rest)-len(rest)%k], k))
	}
	return out
}

// take seats one rank on the lowest free slot and devices. The caller has asked fits.
func (p *pool) take(g *Group, rank int) Seat {
	s := Seat{Rank: rank, Node: p.ID, Slot: -1}
	if g.Slots > 0 {
		s.Slot, p.slots = p.slots[0], p.slots[1:]
	}
	if g.Devices > 0 {
		s.Devices = slices.Clone(p.deviceSets(g.Devices, g.loose)[0])
		p.devices = without(p.devices, s.Devices)
	}
	p.ranks++
	return s
}

// takeKept takes the seats that ranks keep out of the pools.
func (ps pools) takeKept(g *Group) {
	for i := range g.Keep {
		s := &g.Keep[i]
		if p := ps.find(s.Node); p != nil {
			p.slots, p.devices = without(p.slots, []int{s.Slot}), without(p.devices, s.Devices)
			p.ranks++
		}
	}
}

// blocks cuts the port block of each (unit, node) of the group.
func (ps pools) blocks(g *Group, seats []Seat) ([]Block, *shortage) {
	if g.Attach {
		return nil, nil
	}
	var out []Block
	done := map[string]bool{}
	for i := range seats {
		s := &seats[i]
		if g.Lockstep && done[s.Node] {
			continue
		}
		done[s.Node] = true
		b := Block{Rank: s.Rank, Node: s.Node, Size: g.blockSize()}
		if g.Lockstep {
			b.Rank = -1
		}
		p := ps.find(s.Node)
		if p == nil {
			return nil, &shortage{why: "node " + s.Node + " is not there"}
		}
		base, ok := p.cells.find(b.Size)
		if !ok {
			return nil, &shortage{why: "node " + s.Node + " has no free port block"}
		}
		b.Base = base
		p.cells.mark(Ports{base, base + b.Size - 1}, cellUsed)
		out = append(out, b)
	}
	return out, nil
}

func sortSeats(s []Seat) {
	slices.SortFunc(s, func(a, b Seat) int { return cmp.Compare(a.Rank, b.Rank) })
}
