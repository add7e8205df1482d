// Package placement assigns groups of ranks to nodes: slots, devices and port blocks, for all ranks of a
// group or for none. It is pure: the same nodes and groups give the same placement, in whatever order the
// nodes come.
//
// PACK takes the tightest node that takes all ranks, else as few nodes as possible in equal blocks;
// STRICT_PACK one node; SPREAD goes rank by rank to the node with the fewest of the group; STRICT_SPREAD one
// rank a node. Either all ranks of a group are placed or none; no slot, device or port is used twice; ranks
// are numbered along the nodes. The answer does not depend on the order of the nodes, and a group alone is
// refused only if no placement of it exists. The devices of a rank are on one node, within a set of close
// ones where that does not cost a rank its place. Shares of a device are integers, so that sums are exact.
//
// Place is a computation: the caller says what is in use, and the state refuses what was taken meanwhile.
// Hint names one or two units whose move would let a group fit; it moves nothing.
package placement

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

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
	Slots   int   // slots are numbered 0..Slots-1
	Devices []int // device numbers
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

// shortage says why a group cannot be placed: only fits ranks found a place, or why.
type shortage struct {
	fits int
	why  string
}

// unplaceableError returns the error for people: what is needed, and what each node has free.
func (s *shortage) unplaceableError(ps pools, g *Group) error {
	need := len(g.Ranks) + len(g.Keep)
	fits := fmt.Sprintf("%d of %s can be placed", s.fits, count(len(g.Ranks), "rank"))
	if s.why != "" {
		fits = s.why
	}
	lines := []string{fmt.Sprintf("need: %s of %s", count(need, "rank"), g.describeRank())}
	for _, p := range ps {
		lines = append(lines, p.describeFree(g))
	}
	if len(ps) == 0 {
		lines = append(lines, "there is no node")
	}
	return problem.New(problem.Unplaceable, "place %s: %s (%s)", g.ID, fits, g.Strategy).
		WithHint("%s", g.chooseHint(ps)).WithDetails(lines...)
}

// describeRank says what one rank needs and where it may be placed.
func (g *Group) describeRank() string {
	var parts []string
	if g.Slots > 0 {
		parts = append(parts, count(g.Slots, "slot"))
	}
	switch {
	case g.Share > 0:
		parts = append(parts, share.Format(g.Share)+" of a device")
	case g.Devices > 0:
		parts = append(parts, count(g.Devices, "device"))
	}
	if len(parts) == 0 {
		parts = append(parts, "no slot")
	}
	out := strings.Join(parts, " and ") + " each, " + string(g.Strategy)
	if g.MaxRanksPerNode > 0 {
		out += fmt.Sprintf(", at most %d per node", g.MaxRanksPerNode)
	}
	if len(g.Labels) > 0 {
		out += ", on nodes with " + labels(g.Labels)
	}
	if g.Other.Apart {
		out += ", on nodes without ranks of " + g.Other.Name
	}
	return out
}

// isKeptOff reports whether the group must not have ranks on a node because the other pool has some there.
func (g *Group) isKeptOff(node string) bool { return g.Other.Apart && g.Other.Ranks[node] > 0 }

// describeFree is one node's line: what it has free, and for how many ranks of the group.
func (p *pool) describeFree(g *Group) string {
	switch {
	case !p.matches(g):
		return fmt.Sprintf("node %s: labels do not match (%s)", p.ID, labels(p.Labels))
	case g.isKeptOff(p.ID):
		return fmt.Sprintf("node %s: has ranks of %s, which are kept apart", p.ID, g.Other.Name)
	}
	line := fmt.Sprintf("node %s: %d of %s free, %d of %s free", p.ID,
		len(p.slots), count(p.Slots, "slot"), len(p.devices), count(len(p.Devices), "device"))
	if parts := p.shared.freeParts(); parts > 0 {
		line += " and " + share.Format(parts) + " of shared ones"
	}
	if n := p.capacityFor(g); n < math.MaxInt32 {
		line += ", room for " + count(n, "rank")
		if p.lacksPorts(g) {
			line += fmt.Sprintf(" by its ports %d-%d", p.Ports.Lo, p.Ports.Hi)
		}
	}
	return line
}

func (g *Group) chooseHint(ps pools) string {
	devices, matched, keptOff, noPorts := false, false, false, false
	for _, p := range ps {
		devices, matched = devices || len(p.Devices) > 0, matched || p.matches(g)
		keptOff = keptOff || p.matches(g) && g.isKeptOff(p.ID)
		noPorts = noPorts || p.lacksPorts(g)
	}
	if len(ps) > 0 && !matched {
		return "no node has these labels: correct resources.labels, or start a node with them in --labels"
	}
	if g.Devices > 0 && !devices {
		return "--engine sim runs the file on the simulated engine; for real ones start nodes where " +
			"nvidia-smi or rocm-smi lists devices (or --gpus names them), or write resources.gpus: 0 for a " +
			"build that needs none"
	}
	if keptOff {
		return "add nodes, or leave disaggregation.colocate: no out, so that both pools may share a node"
	}
	if noPorts {
		return "give nodes more ports with --port-range, add nodes, ask for fewer ranks, or delete an " +
			"application"
	}
	return "add nodes or slots, ask for fewer ranks, or delete an application"
}

func labels(m map[string]string) string {
	if len(m) == 0 {
		return "none"
	}
	parts := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, ", ")
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
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
