// Package placement assigns groups of ranks to nodes: slots, devices and port blocks, for all ranks of a
// group or for none. It is pure: the same nodes and groups give the same placement, in whatever order the
// nodes come.
//
// PACK takes the tightest node that takes all ranks, else as few nodes as possible in equal blocks;
// STRICT_PACK one node; SPREAD goes rank by rank to the node with the fewest of the group, on nodes with one
// model of devices if these have room for all; STRICT_SPREAD one rank a node.
// Either all ranks of a group are placed or none; no slot, device or port is used twice; ranks are numbered
// along the nodes. The answer does not depend on the order of the nodes, and a group alone is
// refused only if no placement of it exists. The devices of a rank are on one node, within a set of close
// ones where that does not cost a rank its place. Shares of a device are integers, so that sums are exact.
//
// Place is a computation: the caller says what is in use, and the state refuses what was taken meanwhile.
// Hint names one or two units whose move would let a group fit; it moves nothing.
package placement

import (
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
)

// Strategy says how the ranks of a group are spread over nodes.
type Strategy string

// The strategies. PACK and SPREAD are best effort. The STRICT forms refuse a group that they cannot place.
const (
	Pack         Strategy = "PACK"          // as few nodes as possible
	StrictPack   Strategy = "STRICT_PACK"   // one node
	Spread       Strategy = "SPREAD"        // as even as possible
	StrictSpread Strategy = "STRICT_SPREAD" // one rank per node
)

// Ports is a range of ports, both ends included.
type Ports struct{ Lo, Hi int }

// Node is what a node offers, and which part is in use.
type Node struct {
	ID      string
	Slots   int    // slots are numbered 0..Slots-1
	Devices []int  // device numbers
	Model   string // of its devices; SPREAD keeps a group on nodes of one model where it can
	// Near are sets of close devices (one NVLink domain, one NUMA node), the closest first. A device may be
	// in several sets. Other numbers than those of Devices have no meaning.
	Near        [][]int
	Labels      map[string]string
	Ports       Ports // port blocks are taken from this range
	Ranks       int   // ranks that run there, with attached ones
	UsedSlots   []int
	UsedDevices []int
	UsedShares  map[int]int // parts of devices (share.Whole) that ranks with a share have
	UsedBlocks  []Ports
	FreedBlocks []Ports // freed blocks, the latest last; placement uses the latest last
}

// Group is what is placed together: all of Ranks and Keep, or nothing.
type Group struct {
	ID       string // "app/group", for error texts
	Lockstep bool   // one unit with one port block per node; else a unit and a block per rank
	DPSize   int    // ranks of the whole group; sizes the block of a lockstep unit
	Ranks    []int  // rank numbers that need a seat, ascending
	// ranks that start again on their old seats, which must be free in the nodes
	Keep            []Seat
	Held            map[string]int // ranks of the group that keep running and are not placed now, per node
	Siblings        map[string]int // ranks of the pool's other groups, per node: SPREAD keeps off these nodes
	Strategy        Strategy
	MaxRanksPerNode int               // of this group; 0 = any
	Labels          map[string]string // a node must have all of them
	Slots           int               // slots per rank: 0 or 1
	Devices         int               // devices per rank
	Share           int               // parts of its one device that a rank needs; 0 = whole devices
	// attached engines: they need no slot, device or port, only a node that watches them
	Attach bool
	Pinned map[int]string // attach: rank → node
	Other  OtherPool      // the other pool of the group's application
	Avoid  []string       // nodes that get ranks only if the others have no room for all; the last one first

	loose bool // the devices of a rank need not be near, or consecutive: there is no other room
}

// OtherPool says how a group stands to the ranks of the other pool of its application. The zero value means
// that their places do not matter.
type OtherPool struct {
	Name  string
	Ranks map[string]int // by node
	Apart bool           // never on a node with ranks of it; else on such nodes if there is room
}

// Seat is the place of a rank.
type Seat struct {
	Rank    int
	Node    string
	Slot    int // -1 = no slot
	Devices []int
	Share   int // parts of its one device; 0 = its devices are its own
}

// Block is the port block of a unit on a node.
type Block struct {
	Rank int // the unit's rank; -1 = the whole lockstep group
	Node string
	Base int
	Size int
}

// Placed is the placement of one group.
type Placed struct {
	Group  string
	Seats  []Seat // ascending by rank: Ranks and Keep
	Blocks []Block
}

// Place seats all groups or none, and returns their placements in order. Ranks of a group are numbered along
// the nodes, which are sorted by id, so they are contiguous on each node. The error is problem.Unplaceable;
// Details say what is needed and what each node has free.
func Place(nodes []Node, groups []Group) ([]Placed, error) {
	pools := newPools(nodes)
	out := make([]Placed, 0, len(groups))
	for i := range groups {
		g := groups[i]
		if err := g.check(); err != nil {
			return nil, err
		}
		p, err := pools.placeGroup(&g)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

func (g *Group) check() error {
	switch g.Strategy {
	case Pack, StrictPack, Spread, StrictSpread:
	default:
		return problem.New(problem.InvalidArgument, "place %s: unknown strategy %q", g.ID, g.Strategy).
			WithHint("use PACK, STRICT_PACK, SPREAD or STRICT_SPREAD")
	}
	if g.Slots < 0 || g.Slots > 1 || g.Devices < 0 || g.MaxRanksPerNode < 0 || g.DPSize < 0 {
		return problem.New(problem.InvalidArgument,
			"place %s: slots per rank must be 0 or 1, other numbers not negative", g.ID)
	}
	if g.Share < 0 || g.Share >= share.Whole || g.Share > 0 && g.Devices != 1 {
		return problem.New(problem.InvalidArgument, "place %s: %d of %d parts of %s", g.ID, g.Share,
			share.Whole, count(g.Devices, "device"))
	}
	return nil
}

func (g *Group) blockSize() int {
	if g.Lockstep {
		return BlockSize(g.DPSize)
	}
	return BlockSize(1)
}

func (g *Group) ranksOn(node string) int {
	n := g.Held[node]
	for i := range g.Keep {
		if g.Keep[i].Node == node {
			n++
		}
	}
	return n
}
