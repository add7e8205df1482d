package placement

// Port blocks (CONTRACTS 14): for D ranks HTTP 0…D-1, KV events D…, replay 2D…, side channel 3D…, bootstrap 4D…, rpc 5D, and
// 7 to spare.
const (
	portsPerRank = 5
	portsPerUnit = 8
	blockUnit    = 16 // block sizes and bases are multiples of it, counted from the start of the range
)

// reservedPorts are dpserve's own: inference, admin, gossip, wire. A block never holds one of them.
var reservedPorts = [...]int{8000, 8265, 7946, 7947}

// BlockSize is the size of the port block of a unit of d ranks: 5*d + 8, rounded up to a multiple of 16.
func BlockSize(d int) int {
	return (portsPerRank*d + portsPerUnit + blockUnit - 1) / blockUnit * blockUnit
}

// cells is a node's port range in pieces of blockUnit: -1 = in use, 0 = never used, n = freed, the higher the later.
type cells struct {
	lo  int
	age []int
}

const cellUsed = -1

func newCells(n *Node) cells {
	c := cells{lo: n.Ports.Lo, age: make([]int, max(0, (n.Ports.Hi-n.Ports.Lo+1)/blockUnit))}
	for i, b := range n.FreedBlocks {
		c.mark(b, i+1)
	}
	for _, b := range n.UsedBlocks {
		c.mark(b, cellUsed)
	}
	for _, p := range reservedPorts {
		c.mark(Ports{p, p}, cellUsed)
	}
	return c
}

// mark sets every cell that p touches.
func (c cells) mark(p Ports, age int) {
	for i := range c.age {
		lo := c.lo + i*blockUnit
		if p.Lo < lo+blockUnit && lo <= p.Hi {
			c.age[i] = age
		}
	}
}

// find is the block of size ports whose latest part was freed the longest ago; among equals the lowest.
func (c cells) find(size int) (base int, ok bool) {
	n := size / blockUnit
	best, bestAge := -1, 0
	for i := 0; i+n <= len(c.age); i++ {
		if a, free := c.oldest(i, n); free && (best < 0 || a < bestAge) {
			best, bestAge = i, a
		}
	}
	if best < 0 {
		return 0, false
	}
	return c.lo + best*blockUnit, true
}

// oldest is the highest age in n cells from i, and whether all are free.
func (c cells) oldest(i, n int) (int, bool) {
	age := 0
	for _, a := range c.age[i : i+n] {
		if a == cellUsed {
			return 0, false
		}
		age = max(age, a)
	}
	return age, true
}

// count is how many blocks of size ports can still be cut.
func (c cells) count(size int) int {
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
