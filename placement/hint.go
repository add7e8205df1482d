package placement

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/dpserve/dpserve/internal/share"
)

// Bounds of the search for a hint. A hint is advice, so the search may give up early.
const (
	hintTries  = 512    // placements tried at most
	hintWork   = 20_000 // tries times nodes at most
	hintAtOnce = 2      // units moved at most
)

// Occupant is a unit that runs on nodes, and the group that would place it again: its own ranks, with Held
// for the rest of its group.
type Occupant struct {
	Unit   string
	Group  Group
	Seats  []Seat
	Blocks []Block
}

// Move moves a unit from some nodes to others. Both lists are sorted.
type Move struct {
	Unit     string
	From, To []string
}

// Moves are moves that together make room.
type Moves []Move

// String returns the advice as text for people; "" if there are no moves.
func (ms Moves) String() string {
	if len(ms) == 0 {
		return ""
	}
	parts := make([]string, len(ms))
	for i, m := range ms {
		parts[i] = m.Unit + " from " + strings.Join(m.From, ", ") + " to " + strings.Join(m.To, ", ")
	}
	return "moving " + strings.Join(parts, " and ") + " would make room"
}

// Hint finds one or two units whose move would make room for a group that finds no place, although the nodes
// have enough free in sum. What the occupants use must be in use in nodes. Hint prefers one unit to two, and
// small units to large ones. Its effort is bounded, so no hint does not mean that no rearrangement exists.
func Hint(nodes []Node, g Group, occupants []Occupant) Moves { //nolint:gocritic // a copy
	if len(nodes) == 0 || g.check() != nil || g.Attach || !hasEnoughInSum(nodes, &g) {
		return nil
	}
	if _, err := Place(nodes, []Group{g}); err == nil {
		return nil
	}
	movable := findMovable(nodes, &g, occupants)
	tries := min(hintTries, max(1, hintWork/len(nodes)))
	for n := 1; n <= hintAtOnce; n++ {
		for set := range subsets(movable, n) {
			if tries--; tries < 0 {
				return nil
			}
			if ms := rearrange(nodes, &g, set); ms != nil {
				return ms
			}
		}
	}
	return nil
}

// hasEnoughInSum reports whether the nodes have enough free for the group in sum. Nodes whose labels do not
// match count too, because other units may move there.
func hasEnoughInSum(nodes []Node, g *Group) bool {
	slots, parts := 0, 0
	for _, p := range newPools(nodes) {
		slots, parts = slots+len(p.slots), parts+share.Whole*len(p.devices)+p.shared.freeParts()
	}
	return slots >= g.Slots*len(g.Ranks) && parts >= share.On(g.Share)*g.Devices*len(g.Ranks)
}

// findMovable returns the occupants of nodes that the group may use, the smallest first.
func findMovable(nodes []Node, g *Group, occupants []Occupant) []*Occupant {
	allowed := map[string]bool{}
	for _, p := range newPools(nodes) {
		allowed[p.ID] = p.matches(g)
	}
	var out []*Occupant
	for i := range occupants {
		o := &occupants[i]
		if !o.Group.Attach && slices.ContainsFunc(o.Seats, func(s Seat) bool { return allowed[s.Node] }) {
			out = append(out, o)
		}
	}
	slices.SortFunc(out, func(a, b *Occupant) int {
		return cmp.Or(cmp.Compare(len(a.Seats), len(b.Seats)), cmp.Compare(a.Unit, b.Unit))
	})
	return out
}

// subsets yields every n of the occupants; n is 1 or 2. It leaves out pairs of one group, because the place
// of one limits the places of the other.
func subsets(os []*Occupant, n int) func(yield func([]*Occupant) bool) {
	return func(yield func([]*Occupant) bool) {
		for i, a := range os {
			if n == 1 {
				if !yield([]*Occupant{a}) {
					return
				}
				continue
			}
			for _, b := range os[i+1:] {
				if a.Group.ID != b.Group.ID && !yield([]*Occupant{a, b}) {
					return
				}
			}
		}
	}
}

// rearrange places the group first and then the units, on nodes without the units.
func rearrange(nodes []Node, g *Group, units []*Occupant) Moves {
	groups := []Group{*g}
	for _, o := range units {
		groups = append(groups, o.Group)
	}
	p, err := Place(withoutUnits(nodes, units), groups)
	if err != nil {
		return nil
	}
	var out Moves
	for i, o := range units {
		if m := (Move{o.Unit, nodesOf(o.Seats), nodesOf(p[i+1].Seats)}); !slices.Equal(m.From, m.To) {
			out = append(out, m)
		}
	}
	return out
}

func nodesOf(seats []Seat) []string {
	out := make([]string, 0, len(seats))
	for i := range seats {
		out = append(out, seats[i].Node)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func withoutUnits(nodes []Node, units []*Occupant) []Node {
	out := slices.Clone(nodes)
	for i := range out {
		for _, o := range units {
			out[i].releaseUnit(o)
		}
	}
	return out
}

// releaseUnit removes a unit's seats and blocks from what is in use. It replaces the lists instead of
// changing them.
func (n *Node) releaseUnit(o *Occupant) {
	for i := range o.Seats {
		if s := &o.Seats[i]; s.Node == n.ID {
			n.UsedSlots = without(n.UsedSlots, []int{s.Slot})
			if s.Share > 0 {
				n.releaseShare(s.Devices[0], s.Share)
			} else {
				n.UsedDevices = without(n.UsedDevices, s.Devices)
			}
			n.Ranks--
		}
	}
	for _, b := range o.Blocks {
		if b.Node == n.ID {
			n.UsedBlocks = slices.DeleteFunc(slices.Clone(n.UsedBlocks),
				func(p Ports) bool { return p.Lo == b.Base })
		}
	}
}

// releaseShare gives parts of a device back. It replaces the map instead of changing it.
func (n *Node) releaseShare(device, parts int) {
	n.UsedShares = maps.Clone(n.UsedShares)
	if n.UsedShares[device] -= parts; n.UsedShares[device] <= 0 {
		delete(n.UsedShares, device)
	}
}
