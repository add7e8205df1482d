// Package placement puts groups of ranks onto nodes: slots, devices and port blocks, all ranks of a group or none. It is
// pure: the same nodes and groups give the same placement, whatever their order of nodes.
package placement

import (
	"github.com/dpserve/dpserve/internal/problem"
)

// Strategy says how the ranks of a group lie on nodes.
type Strategy string

// The strategies. PACK and SPREAD do their best, the STRICT forms refuse what they cannot keep.
const (
	Pack         Strategy = "PACK"          // as few nodes as possible
	StrictPack   Strategy = "STRICT_PACK"   // one node
	Spread       Strategy = "SPREAD"        // as even as possible
	StrictSpread Strategy = "STRICT_SPREAD" // one rank per node
)

// Ports is a range of ports, both ends included.
type Ports struct{ Lo, Hi int }

// Node is what a node offers and what of it is in use.
type Node struct {
	ID          string
	Slots       int   // slots are numbered 0..Slots-1
	Devices     []int // device numbers
	Labels      map[string]string
	Ports       Ports // blocks are cut from here
	Ranks       int   // ranks that run there, attached ones included
	UsedSlots   []int
	UsedDevices []int
	UsedBlocks  []Ports
	FreedBlocks []Ports // free again, the latest last: re-used last, in that order
}

// Group is what is placed together: all of Ranks and Keep, or nothing.
type Group struct {
	ID              string         // "app/group", for error texts
	Lockstep        bool           // one unit with one port block per node; else a unit and a block per rank
	DPSize          int            // ranks of the whole group; sizes the block of a lockstep unit
	Ranks           []int          // rank numbers that need a seat, ascending
	Keep            []Seat         // ranks that start again where they were; the nodes must show these seats as free
	Held            map[string]int // ranks of the group that run on and are not placed now, per node
	Strategy        Strategy
	MaxRanksPerNode int               // of this group; 0 = any
	Labels          map[string]string // a node must have all of them
	Slots           int               // slots per rank: 0 or 1
	Devices         int               // devices per rank
	Attach          bool              // engines of someone else: no slot, device or port, only a node that watches them
	Pinned          map[int]string    // attach: rank → node

	loose bool // the devices of a rank may be any of its node: there is no room else
}

// Seat is where a rank lies.
type Seat struct {
	Rank    int
	Node    string
	Slot    int // -1 = takes none
	Devices []int
}

// Block is the port block of a unit on a node.
type Block struct {
	Rank int // the unit's rank; -1 = the whole lockstep group
	Node string
	Base int
	Size int
}

// Placed is one group on its nodes.
type Placed struct {
	Group  string
	Seats  []Seat // ascending by rank: Ranks and Keep
	Blocks []Block
}

// Placement is the answer for all groups, in their order.
type Placement struct{ Groups []Placed }

// Place seats every group or none. Within a group ranks are numbered along the nodes (ascending by id), contiguous on each.
// The error is problem.Unplaceable, with what is needed and what each node has free in Details.
func Place(nodes []Node, groups []Group) (Placement, error) {
	pools := newPools(nodes)
	out := Placement{Groups: make([]Placed, 0, len(groups))}
	for i := range groups {
		g := groups[i]
		if err := g.check(); err != nil {
			return Placement{}, err
		}
		p, err := pools.place(&g)
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
		return problem.New(problem.InvalidArgument, "place %s: slots per rank must be 0 or 1, other numbers not negative", g.ID)
	}
	return nil
}

// place seats one group.
func (ps pools) place(g *Group) (Placed, error) {
	ps.takeKept(g)
	var seats []Seat
	var short *shortage
	if g.Attach {
		seats, short = ps.watch(g)
	} else {
		seats, short = ps.seat(g)
	}
	if short != nil {
		return Placed{}, short.refuse(ps, g)
	}
	all := append(append([]Seat(nil), g.Keep...), seats...)
	sortSeats(all)
	blocks, short := ps.blocks(g, all)
	if short != nil {
		return Placed{}, short.refuse(ps, g)
	}
	return Placed{Group: g.ID, Seats: all, Blocks: blocks}, nil
}
