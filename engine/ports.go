package engine

// Ports is a unit's port block on a node. Offsets, with D = dp_size of a lockstep unit, 1 of an independent
// one: HTTP 0…D−1 · KV PUB D… · KV replay 2D… · side channel 3D… · bootstrap 4D… · rpc / dist-init 5D. Rank
// is the rank's number in the unit.
type Ports struct {
	base, size int
}

// PortsOf lays out the block that begins at base for a unit of dpSize ranks.
func PortsOf(base, dpSize int) Ports { return Ports{base: base, size: dpSize} }

// HTTP is the port of a rank's API.
func (p Ports) HTTP(rank int) int { return p.base + rank }

// KV is where a rank's engine publishes its KV events to: the engine dials, its DPServer listens.
func (p Ports) KV(rank int) int { return p.base + p.size + rank }

// Replay is where a rank's engine answers for KV events that were missed.
func (p Ports) Replay(rank int) int { return p.base + 2*p.size + rank }

// RPC is where rank 0 of a lockstep unit meets the others.
func (p Ports) RPC() int { return p.base + 5*p.size }

// Bound lists the ports that the engines of the given ranks bind in this version: their API, the replay
// socket if they publish KV events, and the rendezvous if rank 0 is one of them in a unit of several. They
// are bind-tested before a start and verified free after an end.
func (p Ports) Bound(events bool, ranks ...int) []int {
	var out []int
	for _, r := range ranks {
		out = append(out, p.HTTP(r))
		if events {
			out = append(out, p.Replay(r))
		}
		if r == 0 && p.size > 1 {
			out = append(out, p.RPC())
		}
	}
	return out
}

// Used is Bound and the ports where DPServers listen for KV events, which their end frees. Those are not
// bind-tested before a start: to listen is the test, and a socket that a test has closed lives on for a
// moment in a child that is being forked beside it.
func (p Ports) Used(events bool, ranks ...int) []int {
	out := p.Bound(events, ranks...)
	if events {
		for _, r := range ranks {
			out = append(out, p.KV(r))
		}
	}
	return out
}
