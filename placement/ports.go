package placement

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

// setAge sets the age of every cell that overlaps p.
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
