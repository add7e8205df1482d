package placement

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// occupy places groups one by one and marks what they use. It leaves out groups that find no room.
func occupy(nodes []Node, groups ...Group) ([]Node, []Occupant) {
	var out []Occupant
	for _, g := range groups {
		p, err := Place(nodes, []Group{g})
		if err != nil {
			continue
		}
		o := Occupant{Unit: g.ID, Group: g, Seats: p[0].Seats, Blocks: p[0].Blocks}
		nodes = mark(nodes, p[0])
		out = append(out, o)
	}
	return nodes, out
}

func mark(nodes []Node, p Placed) []Node {
	out := append([]Node(nil), nodes...)
	for i := range out {
		n := &out[i]
		n.UsedSlots, n.UsedDevices = append([]int(nil), n.UsedSlots...), append([]int(nil), n.UsedDevices...)
		n.UsedBlocks = append([]Ports(nil), n.UsedBlocks...)
		for _, s := range p.Seats {
			if s.Node == n.ID {
				n.UsedSlots, n.UsedDevices = append(n.UsedSlots, s.Slot), append(n.UsedDevices, s.Devices...)
			}
		}
		for _, b := range p.Blocks {
			if b.Node == n.ID {
				n.UsedBlocks = append(n.UsedBlocks, Ports{b.Base, b.Base + b.Size - 1})
			}
		}
	}
	return out
}

// on pins a group to one node by a label, so that tests can make holes.
func on(id string, ranks int, s Strategy, node string) Group {
	g := group(id, ranks, s)
	g.Labels = map[string]string{"name": node}
	return g
}

func named(n Node) Node {
	n.Labels = map[string]string{"name": n.ID}
	return n
}

// free lets a unit that was pinned go anywhere.
func free(os []Occupant) []Occupant {
	for i := range os {
		os[i].Group.Labels = nil
	}
	return os
}

func TestHintMovesOneUnit(t *testing.T) {
	nodes, os := occupy([]Node{named(slots("a", 8)), named(slots("b", 8))}, on("chat/0", 4, Pack, "a"),
		on("chat/1", 4, Pack, "b"))
	g := group("big/0", 8, StrictPack)
	assert.Equal(t, "moving chat/0 from a to b would make room", Hint(nodes, g, free(os)).String())
	g.Labels = map[string]string{"name": "b"}
	assert.Equal(t, "moving chat/1 from b to a would make room", Hint(nodes, g, os).String())
}

func TestHintMovesTwoUnits(t *testing.T) {
	nodes, os := occupy([]Node{named(slots("a", 4)), named(slots("b", 3)), named(slots("c", 3))},
		on("x/0/0", 2, Pack, "a"), on("y/0/0", 2, Pack, "a"), on("w/0", 1, Pack, "b"),
		on("z/0", 1, Pack, "c"))
	assert.Equal(t, "moving x/0/0 from a to b and y/0/0 from a to c would make room",
		Hint(nodes, group("big/0", 4, StrictPack), free(os)).String())
}

func TestHintSaysNothing(t *testing.T) {
	for name, c := range map[string]struct {
		sizes  []int
		group  Group
		pinned bool
	}{
		"when there is room":            {[]int{8, 8}, group("g", 4, Pack), false},
		"when the sum does not suffice": {[]int{8, 8}, group("g", 9, Pack), false},
		"when nobody may move":          {[]int{8, 8}, group("g", 8, StrictPack), true},
		"when no move helps":            {[]int{7, 7}, group("g", 6, StrictPack), false},
		"without nodes":                 {nil, group("g", 1, Pack), false},
		"for a strategy that is none":   {[]int{8, 8}, group("g", 8, "BEST"), false},
	} {
		t.Run(name, func(t *testing.T) {
			var nodes []Node
			for i, n := range c.sizes {
				nodes = append(nodes, named(slots(string(rune('a'+i)), n)))
			}
			nodes, os := occupy(nodes, on("chat/0", 4, StrictPack, "a"), on("chat/1", 4, StrictPack, "b"))
			if !c.pinned {
				os = free(os)
			}
			assert.Empty(t, Hint(nodes, c.group, os).String())
		})
	}
}

// TestAnyHintIsTrue: after the moves, each unit whole and under its own rules, the group finds room.
func TestAnyHintIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := make([]Node, rapid.IntRange(2, 4).Draw(t, "nodes"))
		for i := range nodes {
			nodes[i] = named(gpus(string(rune('a'+i)),
				count0(rapid.SampledFrom([]int{0, 6, 8}).Draw(t, "devices"))...))
			nodes[i].Slots = rapid.IntRange(4, 6).Draw(t, "slots")
		}
		var groups []Group
		for i := range rapid.IntRange(1, 5).Draw(t, "units") {
			where := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "where")
			groups = append(groups, on(fmt.Sprintf("u%d/0", i), rapid.IntRange(1, 3).Draw(t, "ranks"), Pack,
				where))
		}
		nodes, os := occupy(nodes, groups...)
		os = free(os)
		g := group("g/0", rapid.IntRange(3, 6).Draw(t, "ranks"),
			rapid.SampledFrom([]Strategy{StrictPack, StrictPack, Pack, StrictSpread}).Draw(t, "strategy"))
		g.Devices = rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "devices")
		ms := Hint(nodes, g, os)
		if len(ms) == 0 {
			return
		}
		_, err := Place(nodes, []Group{g})
		require.Error(t, err, "a hint where there is room")
		require.LessOrEqual(t, len(ms), 2)
		var moving []*Occupant
		after := []Group{g}
		for _, m := range ms {
			for i := range os {
				if os[i].Unit == m.Unit {
					require.Equal(t, nodesOf(os[i].Seats), m.From)
					moving, after = append(moving, &os[i]), append(after, os[i].Group)
				}
			}
		}
		require.Len(t, moving, len(ms))
		p, err := Place(withoutUnits(nodes, moving), after)
		require.NoError(t, err)
		checkAlone(t, withoutUnits(nodes, moving), after, p)
	})
}

// checkAlone walks over what was handed out: nothing of it is in use.
func checkAlone(t *rapid.T, nodes []Node, groups []Group, p []Placed) {
	for i := range groups {
		require.Len(t, p[i].Seats, len(groups[i].Ranks))
		for _, s := range p[i].Seats {
			for _, n := range nodes {
				require.False(t, n.ID == s.Node && s.Slot >= 0 && contains(n.UsedSlots, s.Slot))
			}
		}
		nodes = mark(nodes, p[i])
	}
}

func contains(all []int, x int) bool {
	for _, y := range all {
		if x == y {
			return true
		}
	}
	return false
}

func BenchmarkHintOfALargeCluster(b *testing.B) {
	var nodes []Node
	var groups []Group
	for i := range 256 {
		id := fmt.Sprintf("n%03d", i)
		nodes = append(nodes, named(slots(id, 8)))
		groups = append(groups, on("x/"+id, 6, Pack, id))
	}
	nodes, os := occupy(nodes, groups...)
	g := group("g", 8, StrictPack)
	for b.Loop() {
		Hint(nodes, g, free(os))
	}
}
