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
	devices []int // free, ascending; a shared one is not among them
	shared  sharedDevices
	cells   cells
	ranks   int
}

// pools are the nodes, sorted by id.
type pools []*pool

func newPools(nodes []Node) pools {
	ps := make(pools, len(nodes))
	for i := range nodes {
		n := &nodes[i]
		ps[i] = &pool{
			Node: n, slots: n.freeSlots(), devices: without(n.Devices, n.UsedDevices),
			shared: sharedDevices{}, cells: newCells(n), ranks: n.Ranks,
		}
		for device, parts := range n.UsedShares {
			takeShare(ps[i], device, parts)
		}
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

// without returns all minus used, sorted and without duplicates.
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

func (ps pools) findNode(id string) *pool {
	for _, p := range ps {
		if p.ID == id {
			return p
		}
	}
	return nil
}

func (p *pool) matches(g *Group) bool {
	for k, v := range g.Labels {
		if p.Labels[k] != v {
			return false
		}
	}
	return true
}

// capacityFor returns how many more ranks of g the node can take.
func (p *pool) capacityFor(g *Group) int {
	room, _ := p.findLimit(g)
	return room
}

// portCapacityFor counts free blocks: a lockstep unit needs one per node, independent ranks one each. The
// blocks of kept ranks are not taken yet, so they are subtracted.
func (p *pool) portCapacityFor(g *Group) int {
	kept := 0
	for i := range g.Keep {
		if g.Keep[i].Node == p.ID {
			kept++
		}
	}
	if !g.Lockstep {
		return max(0, p.cells.countFree(BlockSize(1))-kept)
	}
	if _, ok := p.cells.findFree(g.blockSize()); !ok {
		return 0
	}
	return math.MaxInt32
}

// deviceSets returns the free sets of k devices, in the order in which ranks get them: first those within one
// set of Near, then consecutive numbers of which the first is a multiple of k. If that is fewer than the
// consecutive sets alone, it returns these. If loose, sets of the remaining devices follow, in ascending
// order.
func (p *pool) deviceSets(k int, loose bool) [][]int {
	out, rest := alignedSets(p.devices, k)
	if k > 1 && len(p.Near) > 0 {
		near, left := p.nearSets(k)
		aligned, left := alignedSets(left, k)
		if near = append(near, aligned...); len(near) >= len(out) {
			out, rest = near, left
		}
	}
	if loose {
		out = append(out, chunks(rest, k)...)
	}
	return out
}

// nearSets returns the free sets of k devices within one set of Near, and the devices that remain.
func (p *pool) nearSets(k int) (sets [][]int, rest []int) {
	rest = p.devices
	for _, near := range p.Near {
		free := slices.DeleteFunc(slices.Clone(rest), func(d int) bool { return !slices.Contains(near, d) })
		found, left := alignedSets(free, k)
		found = append(found, chunks(left, k)...)
		for _, set := range found {
			rest = without(rest, set)
		}
		sets = append(sets, found...)
	}
	return sets, rest
}

// alignedSets returns the sets of k consecutive devices of which the first is a multiple of k, the lowest
// first, and the devices that remain.
func alignedSets(devices []int, k int) (sets [][]int, rest []int) {
	for i := 0; i < len(devices); {
		first := devices[i]
		if i+k <= len(devices) && first%k == 0 && devices[i+k-1] == first+k-1 {
			sets = append(sets, devices[i:i+k])
			i += k
			continue
		}
		rest = append(rest, first)
		i++
	}
	return sets, rest
}

// chunks returns as many sets of k devices as there are, in ascending order.
func chunks(devices []int, k int) [][]int {
	return slices.Collect(slices.Chunk(devices[:len(devices)-len(devices)%k], k))
}

// takeSeat seats one rank on the lowest free slot and devices. The caller has checked capacityFor.
func (p *pool) takeSeat(g *Group, rank int) Seat {
	s := Seat{Rank: rank, Node: p.ID, Slot: -1}
	if g.Slots > 0 {
		s.Slot, p.slots = p.slots[0], p.slots[1:]
	}
	switch {
	case g.Share > 0:
		s.Devices, s.Share = []int{chooseShared(p, g)}, g.Share
		takeShare(p, s.Devices[0], g.Share)
	case g.Devices > 0:
		s.Devices = slices.Clone(p.deviceSets(g.Devices, g.loose)[0])
		p.devices = without(p.devices, s.Devices)
	}
	p.ranks++
	return s
}

func (ps pools) takeKept(g *Group) {
	for i := range g.Keep {
		s := &g.Keep[i]
		if p := ps.findNode(s.Node); p != nil {
			p.slots = without(p.slots, []int{s.Slot})
			if s.Share > 0 {
				takeShare(p, s.Devices[0], s.Share)
			} else {
				p.devices = without(p.devices, s.Devices)
			}
			p.ranks++
		}
	}
}

// takeBlocks takes the port block of each (unit, node) of the group.
func (ps pools) takeBlocks(g *Group, seats []Seat) ([]Block, *shortage) {
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
		p := ps.findNode(s.Node)
		if p == nil {
			return nil, &shortage{why: "node " + s.Node + " is not there"}
		}
		base, ok := p.cells.findFree(b.Size)
		if !ok {
			return nil, &shortage{why: "node " + s.Node + " has no free port block"}
		}
		b.Base = base
		p.cells.setAge(Ports{base, base + b.Size - 1}, cellUsed)
		out = append(out, b)
	}
	return out, nil
}

// Port blocks. For D ranks the offsets are: HTTP 0…D-1, KV events D…, replay 2D…, side channel 3D…, bootstrap
// 4D…, rpc 5D; 7 ports are spare.
const (
	portsPerRank = 5
	portsPerUnit = 8
	blockUnit    = 16 // block sizes and bases are multiples of it, counted from the start of the range
)

// reservedPorts are dpserve's own: inference, admin, gossip, wire. A block never contains one of them.
var reservedPorts = [...]int{8000, 8265, 7946, 7947}

// BlockSize returns the size of the port block of a unit of d ranks: 5*d + 8, rounded up to a multiple of 16.
func BlockSize(d int) int {
	return (portsPerRank*d + portsPerUnit + blockUnit - 1) / blockUnit * blockUnit
}

// cells is a node's port range in pieces of blockUnit. An age is -1 = in use, 0 = never used, n = freed,
// later ones higher.
type cells struct {
	lo  int
	age []int
}

const cellUsed = -1

func newCells(n *Node) cells {
	c := cells{lo: n.Ports.Lo, age: make([]int, max(0, (n.Ports.Hi-n.Ports.Lo+1)/blockUnit))}
	for i, b := range n.FreedBlocks {
		c.setAge(b, i+1)
	}
	for _, b := range n.UsedBlocks {
		c.setAge(b, cellUsed)
	}
	for _, p := range reservedPorts {
		c.setAge(Ports{p, p}, cellUsed)
	}
	return c
}

func (c cells) setAge(p Ports, age int) {
	for i := range c.age {
		lo := c.lo + i*blockUnit
		if p.Lo < lo+blockUnit && lo <= p.Hi {
			c.age[i] = age
		}
	}
}

// findFree returns the free block of size ports whose newest part was freed first; among equals the lowest.
func (c cells) findFree(size int) (base int, ok bool) {
	n := size / blockUnit
	best, bestAge := -1, 0
	for i := 0; i+n <= len(c.age); i++ {
		if a, free := c.newestAge(i, n); free && (best < 0 || a < bestAge) {
			best, bestAge = i, a
		}
	}
	if best < 0 {
		return 0, false
	}
	return c.lo + best*blockUnit, true
}

// newestAge returns the highest age in n cells from i, and whether all are free.
func (c cells) newestAge(i, n int) (int, bool) {
	age := 0
	for _, a := range c.age[i : i+n] {
		if a == cellUsed {
			return 0, false
		}
		age = max(age, a)
	}
	return age, true
}

// countFree returns how many blocks of size ports can still be taken.
func (c cells) countFree(size int) int {
	n, run, found := size/blockUnit, 0, 0
	for _, a := range c.age {
		if run++; a == cellUsed {
			run = 0
		}
		if run == n {
			found, run = found+1, 0
		}
	}
	return found
}

func (ps pools) placeGroup(g *Group) (Placed, error) {
	ps.takeKept(g)
	var seats []Seat
	var short *shortage
	if g.Attach {
		seats, short = ps.assignAttached(g)
	} else {
		seats, short = ps.seatRanks(g)
	}
	if short != nil {
		return Placed{}, short.unplaceableError(ps, g)
	}
	all := append(append([]Seat(nil), g.Keep...), seats...)
	slices.SortFunc(all, func(a, b Seat) int { return cmp.Compare(a.Rank, b.Rank) })
	blocks, short := ps.takeBlocks(g, all)
	if short != nil {
		return Placed{}, short.unplaceableError(ps, g)
	}
	return Placed{Group: g.ID, Seats: all, Blocks: blocks}, nil
}
