// Package placement assigns groups of ranks to nodes: slots, devices and port blocks, for all ranks of a
// group or for none. It is pure: the same nodes and groups give the same placement, in whatever order the
// nodes come.
package placement

import (
	"github.com/dpserve/dpserve/internal/problem"
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
	ID          string
	Slots       int   // slots are numbered 0..Slots-1
	Devices     []int // device numbers
	Labels      map[string]string
	Ports       Ports // port blocks are taken from this range
	Ranks       int   // ranks that run there, with attached ones
	UsedSlots   []int
	UsedDevices []int
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
	Strategy        Strategy
	MaxRanksPerNode int               // of this group; 0 = any
	Labels          map[string]string // a node must have all of them
	Slots           int               // slots per rank: 0 or 1
	Devices         int               // devices per rank
	// attached engines: they need no slot, device or port, only a node that watches them
	Attach bool
	Pinned map[int]string // attach: rank → node

	loose bool // the devices of a rank need not be consecutive: there is no other room
}

// Seat is the place of a rank.
type Seat struct {
	Rank    int
	Node    string
	Slot    int // -1 = no slot
	Devices []int
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

// Placement is the placement of all groups, in their order.
type Placement struct{ Groups []Placed }

// Place seats all groups or none. Ranks of a group are numbered along the nodes, which are sorted by id, so
// they are contiguous on each node. The error is problem.Unplaceable; Details say what is needed and what
// each node has free.
func Place(nodes []Node, groups []Group) (Placement, error) {
	pools := newPools(nodes)
	out := Placement{Groups: make([]Placed, 0, len(groups))}
	for i := range groups {
		g := groups[i]
		if err := g.check(); err != nil {
			return Placement{}, err
		}
		p, err := pools.placeGroup(&g)
		if err != nil {
			return Placement{}, err
		}
		out.Groups = append(out.Groups, p)
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
	return nil
}

// placeGroup seats one group.
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
	sortSeats(all)
	blocks, short := ps.takeBlocks(g, all)
	if short != nil {
		return Placed{}, short.unplaceableError(ps, g)
	}
	return Placed{Group: g.ID, Seats: all, Blocks: blocks}, nil
}
