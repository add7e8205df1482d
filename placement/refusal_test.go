package placement

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

// Each limit of a node that can leave a group without a place has its words in the message, in the line of
// the node, and in the hint.
func TestARefusalNamesWhatIsShort(t *testing.T) {
	fourBlocks := slots("a", 700)
	fourBlocks.Ports = Ports{20000, 20063}
	halfUsed := gpus("a", 0)
	halfUsed.UsedShares = map[int]int{0: 5000}
	for _, c := range []struct {
		name                string
		nodes               []Node
		change              func(g *Group) // of five ranks, PACK, one slot each
		message, line, hint string
	}{
		{
			"no node", nil, func(*Group) {},
			"0 of 5 ranks can be placed (PACK): short of nodes", "there is no node", "add nodes",
		},
		{
			"slots",
			[]Node{slots("a", 3)},
			func(*Group) {},
			"3 of 5 ranks can be placed (PACK): short of slots",
			"node a: 3 of 3 slots free, 0 of 0 devices free, room for 3 ranks by its slots", "slots",
		},
		{
			"slots of one node",
			[]Node{slots("a", 3), slots("b", 3)},
			func(g *Group) { g.Strategy = StrictPack },
			"3 of 5 ranks can be placed (STRICT_PACK): short of slots on one node",
			"node b: 3 of 3 slots free, 0 of 0 devices free, room for 3 ranks by its slots", "slots",
		},
		{
			"devices",
			[]Node{gpus("a", 0, 1, 2)},
			func(g *Group) { g.Devices = 2 },
			"1 of 5 ranks can be placed (PACK): short of devices",
			"node a: 64 of 64 slots free, 3 of 3 devices free, room for 1 rank by its devices",
			"nodes with free devices",
		},
		{
			"devices on no node",
			[]Node{slots("a", 8)},
			func(g *Group) { g.Devices = 2 },
			"0 of 5 ranks can be placed (PACK): short of devices",
			"node a: 8 of 8 slots free, 0 of 0 devices free, room for 0 ranks by its devices", "--gpus",
		},
		{
			"a share of a device",
			[]Node{halfUsed},
			func(g *Group) { g.Devices, g.Share = 1, 2000 },
			"2 of 5 ranks can be placed (PACK): short of devices",
			"node a: 64 of 64 slots free, 0 of 1 device free and 0.5 of shared ones, " +
				"room for 2 ranks by its devices", "nodes with free devices",
		},
		{
			"ports",
			[]Node{fourBlocks},
			func(*Group) {},
			"4 of 5 ranks can be placed (PACK): short of port blocks of 16",
			"node a: 700 of 700 slots free, 0 of 0 devices free, " +
				"room for 4 ranks by its ports 20000-20063, in blocks of 16", "--port-range",
		},
		{
			"ports of a lockstep group",
			[]Node{fourBlocks},
			func(g *Group) { g.Lockstep, g.DPSize = true, 16 },
			"0 of 5 ranks can be placed (PACK): short of port blocks of 96",
			"node a: 700 of 700 slots free, 0 of 0 devices free, " +
				"room for 0 ranks by its ports 20000-20063, in blocks of 96", "--port-range",
		},
		{
			"labels",
			[]Node{named(slots("a", 8))},
			func(g *Group) { g.Labels = map[string]string{"name": "a", "zone": "2"} },
			"0 of 5 ranks can be placed (PACK): short of nodes with name=a, zone=2",
			"node a: does not have zone=2 (labels: name=a)", "--labels",
		},
		{
			"nodes without the other pool",
			[]Node{slots("a", 8)},
			func(g *Group) { g.Other = OtherPool{Name: "x", Ranks: map[string]int{"a": 1}, Apart: true} },
			"0 of 5 ranks can be placed (PACK): short of nodes without ranks of x",
			"node a: has ranks of x, which are kept apart", "colocate",
		},
		{
			"max_ranks_per_node",
			[]Node{slots("a", 8)},
			func(g *Group) { g.MaxRanksPerNode = 2 },
			"2 of 5 ranks can be placed (PACK): short of nodes (max_ranks_per_node: 2)",
			"node a: 8 of 8 slots free, 0 of 0 devices free, room for 2 ranks by max_ranks_per_node",
			"raise max_ranks_per_node",
		},
		{
			"nodes of STRICT_SPREAD",
			[]Node{slots("a", 8), slots("b", 8)},
			func(g *Group) { g.Strategy, g.Held = StrictSpread, map[string]int{"a": 1} },
			"1 of 5 ranks can be placed (STRICT_SPREAD): short of nodes without a rank of the group",
			"node a: it has a rank of the group", "placement_group_strategy",
		},
		{
			"the one node of STRICT_PACK",
			[]Node{slots("a", 8), slots("b", 2)},
			func(g *Group) { g.Strategy, g.Held = StrictPack, map[string]int{"b": 1} },
			"2 of 5 ranks can be placed (STRICT_PACK): short of room on the node of the group's " +
				"other ranks and slots",
			"node a: the group's other ranks are on another node", "placement_group_strategy",
		},
		{
			"two things",
			[]Node{slots("a", 2), fourBlocks},
			func(g *Group) { g.Ranks = count0(7) },
			"6 of 7 ranks can be placed (PACK): short of slots and port blocks of 16",
			"node a: 2 of 2 slots free, 0 of 0 devices free, room for 2 ranks by its slots", "--port-range",
		},
	} {
		g := group("g/0", 5, Pack)
		c.change(&g)
		_, err := Place(c.nodes, []Group{g})
		var e *problem.Error
		require.ErrorAs(t, err, &e, c.name)
		assert.Equal(t, "place g/0: "+c.message, e.Message, c.name)
		assert.Contains(t, e.Details, c.line, c.name)
		assert.Contains(t, e.Hint, c.hint, c.name)
	}
}

// Ranks of one group, and groups of one rank, are spread over nodes of unequal size; ranks with devices stay
// on nodes of one model while these have room.
func TestSpreadCountsSiblingsAndKeepsToEqualDevices(t *testing.T) {
	one := group("g/1", 1, Spread)
	one.Siblings = map[string]int{"a": 1}
	p, err := Place([]Node{slots("a", 64), slots("b", 2)}, []Group{one})
	require.NoError(t, err)
	assert.Equal(t, "b: 0@0", draw(p[0]))

	old, first, second := gpus("a", 0, 1, 2, 3), gpus("b", 0, 1, 2, 3), gpus("c", 0, 1)
	old.Model, first.Model, second.Model = "L4", "H100", "H100"
	nodes := []Node{old, first, second}
	for _, c := range []struct {
		ranks int
		held  map[string]int
		want  string
	}{
		{4, nil, "b: 0@0[0] 1@1[1] c: 2@0[0] 3@1[1]"},
		{2, map[string]int{"a": 1}, "a: 0@0[0] 1@1[1]"},
		{7, nil, "a: 0@0[0] 1@1[1] 2@2[2] b: 3@0[0] 4@1[1] c: 5@0[0] 6@1[1]"},
	} {
		g := group("g/0", c.ranks, Spread)
		g.Devices, g.Held = 1, c.held
		p, err = Place(nodes, []Group{g})
		require.NoError(t, err)
		assert.Equal(t, c.want, draw(p[0]))
	}
}
