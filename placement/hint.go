package placement

import (
	"cmp"
	"slices"
	"strings"
)

// Bounds of the search for a hint: it is advice in a plan, not worth a wait.
const (
	hintTries  = 512    // placements tried at most
	hintWork   = 20_000 // tries times nodes at most
	hintAtOnce = 2      // units moved at most
)

// Occupant is a unit that runs on nodes, and what it would ask for if it was placed anew: its own ranks, with Held for the rest of its
// group.
type Occupant struct {
	Unit   string
	Group  Group
	Seats  []Seat
	Blocks []Block
}

// Move is a unit that would give its place to another: from these nodes to those, each ascending.
type Move struct {
	Unit     string
	From, To []string
}

// Moves make room together.
type Moves []Move

// String is the advice as a person reads it; "" if there is none.
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

// Hint finds at most two units whose move to other places would make room for a group that finds none although the nodes have
// enough free in sum. The nodes show what the occupants use as in use. It prefers one unit to two and small ones to large ones, and
// gives up after a bounded effort: no hint does not mean that there is no way.
func Hint(nodes []Node, g Group, occupants []Occupant) Moves { //nolint:gocritic // a copy: the search must not change the caller's
	if len(nodes) == 0 || g.check() != nil || g.Attach || !sumSuffices(nodes, &g) {
		return nil
	}
	if _, err := Place(nodes, []Group{g}); err == nil {
		return nil
	}
	movable := inTheWay(nodes, &g, occupants)
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

// sumSuffices says whether the nodes have enough free for the group if it did not matter where. Free places on nodes that are not for
// the group count: who moves may go there.
func sumSuffices(nodes []Node, g *Group) bool {
	slots, devices := 0, 0
	for _, p := range newPools(nodes) {
		slots, devices = slots+len(p.slots), devices+len(p.devices)
	}
	return slots >= g.Slots*len(g.Ranks) && devices >= g.Devices*len(g.Ranks)
}

// inTheWay are the occupants of nodes that the group may lie on, the smallest first.
func inTheWay(nodes []Node, g *Group, occupants []Occupant) []*Occupant {
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

// subsets yields every n of the occupants, n 1 or 2; two of one group are left out, as where the one goes changes what the other
// may do.
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

// rearrange places the group where the units were, and the units anew beside it.
func rearrange(nodes []Node, g *Group, units []*Occupant) Moves {
	groups := []Group{*g}
	for _, o := range units {
		groups = append(groups, o.Group)
	}
	p, err := Place(freed(nodes, units), groups)
	if err != nil {
		return nil
	}
	var out Moves
	for i, o := range units {
		if m := (Move{o.Unit, nodesOf(o.Seats), nodesOf(p.Groups[i+1].Seats)}); !slices.Equal(m.From, m.To) {
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

// freed are the nodes without what the units use.
func freed(nodes []Node, units []*Occupant) []Node {
	out := slices.Clone(nodes)
	for i := range out {
		for _, o := range units {
			out[i].give(o)
		}
	}
	return out
}

// give takes a unit's seats and blocks out of what is in use, in lists of the node's own.
func (n *Node) give(o *Occupant) {
	for i := range o.Seats {
		if s := &o.Seats[i]; s.Node == n.ID {
			n.UsedSlots, n.UsedDevices = without(n.UsedSlots, []int{s.Slot}), without(n.UsedDevices, s.Devices)
			n.Ranks--
		}
	}
	for _, b := range o.Blocks {
		if b.Node == n.ID {
			n.UsedBlocks = slices.DeleteFunc(slices.Clone(n.UsedBlocks), func(p Ports) bool { return p.Lo == b.Base })
		}
	}
}
