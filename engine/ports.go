package engine

// Ports is a unit's port block on a node. Offsets, with D = dp_size of a lockstep unit, 1 of an independent one: HTTP 0…D−1 ·
// KV PUB D… · KV replay 2D… · side channel 3D… · bootstrap 4D… · rpc / dist-init 5D. Rank is the rank's number in the unit.
type Ports struct {
	base, size int
}

// PortsOf lays out the block that begins at base for a unit of dpSize ranks.
func PortsOf(base, dpSize int) Ports { return Ports{base: base, size: dpSize} }

// HTTP is the port of a rank's API.
func (p Ports) HTTP(rank int) int { return p.base + rank }

// RPC is where rank 0 of a lockstep unit meets the others.
func (p Ports) RPC() int { return p.base + 5*p.size }

// Used lists the ports the given ranks of the unit listen on in this version: their API, and the rendezvous if rank 0 is one
// of them in a unit of several. They are bind-tested before a start and verified free after an end.
func (p Ports) Used(ranks ...int) []int {
	var out []int
	for _, r := range ranks {
		out = append(out, p.HTTP(r))
		if r == 0 && p.size > 1 {
			out = append(out, p.RPC())
		}
	}
	return out
}
