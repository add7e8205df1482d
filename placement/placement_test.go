package placement

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/problem"
)

var wide = Ports{20000, 29999}

func slots(id string, n int) Node { return Node{ID: id, Slots: n, Ports: wide} }

func gpus(id string, devices ...int) Node {
	return Node{ID: id, Slots: 64, Devices: devices, Ports: wide}
}

func group(id string, ranks int, s Strategy) Group {
	return Group{ID: id, DPSize: ranks, Ranks: count0(ranks), Strategy: s, Slots: 1}
}

func count0(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// draw writes a placed group as "node: rank@slot …".
func draw(p Placed) string {
	var out []string
	last := ""
	for _, s := range p.Seats {
		if s.Node != last {
			out = append(out, s.Node+":")
			last = s.Node
		}
		at := fmt.Sprintf("%d@%d", s.Rank, s.Slot)
		if len(s.Devices) > 0 {
			at += strings.ReplaceAll(fmt.Sprint(s.Devices), " ", ",")
		}
		out = append(out, at)
	}
	return strings.Join(out, " ")
}

func TestStrategies(t *testing.T) {
	cases := []struct {
		name  string
		nodes []Node
		group Group
		want  string // or the error's message
	}{
		{
			"pack: one node if it fits",
			[]Node{slots("a", 4), slots("b", 4)},
			group("g", 4, Pack),
			"a: 0@0 1@1 2@2 3@3",
		},
		{
			"pack: the tightest node",
			[]Node{slots("a", 8), slots("b", 4)},
			group("g", 3, Pack),
			"b: 0@0 1@1 2@2",
		},
		{
			"pack: fewest nodes, contiguous in node order",
			[]Node{slots("a", 2), slots("b", 4), slots("c", 2)},
			group("g", 6, Pack), "a: 0@0 1@1 b: 2@0 3@1 4@2 5@3",
		},
		{
			"pack: of as few nodes those with equal blocks",
			[]Node{slots("a", 2), slots("b", 4), slots("c", 3)},
			group("g", 6, Pack), "b: 0@0 1@1 2@2 c: 3@0 4@1 5@2",
		},
		{
			"pack: equal blocks",
			[]Node{slots("a", 4), slots("b", 5)},
			group("g", 6, Pack),
			"a: 0@0 1@1 2@2 b: 3@0 4@1 5@2",
		},
		{
			"pack: as equal as room allows",
			[]Node{slots("a", 1), slots("b", 4), slots("c", 4)},
			group("g", 9, Pack), "a: 0@0 b: 1@0 2@1 3@2 4@3 c: 5@0 6@1 7@2 8@3",
		},
		{
			"pack: ten over three",
			[]Node{slots("a", 4), slots("b", 4), slots("c", 2), slots("d", 3)},
			group("g", 10, Pack), "a: 0@0 1@1 2@2 3@3 b: 4@0 5@1 6@2 d: 7@0 8@1 9@2",
		},
		{
			"pack: too much",
			[]Node{slots("a", 2), slots("b", 1)},
			group("g", 4, Pack),
			"place g: 3 of 4 ranks can be placed (PACK): short of slots",
		},
		{
			"strict pack: one node",
			[]Node{slots("a", 2), slots("b", 5), slots("c", 4)},
			group("g", 4, StrictPack), "c: 0@0 1@1 2@2 3@3",
		},
		{
			"strict pack: no single node",
			[]Node{slots("a", 3), slots("b", 3)},
			group("g", 4, StrictPack),
			"place g: 3 of 4 ranks can be placed (STRICT_PACK): short of slots on one node",
		},
		{
			"spread: even",
			[]Node{slots("a", 8), slots("b", 8), slots("c", 8)},
			group("g", 5, Spread),
			"a: 0@0 1@1 b: 2@0 3@1 c: 4@0",
		},
		{
			"spread: as even as room allows",
			[]Node{slots("a", 1), slots("b", 8)},
			group("g", 4, Spread),
			"a: 0@0 b: 1@0 2@1 3@2",
		},
		{
			"strict spread: one each",
			[]Node{slots("a", 1), slots("b", 8), slots("c", 8)},
			group("g", 2, StrictSpread), "b: 0@0 c: 1@0",
		},
		{
			"strict spread: too few nodes",
			[]Node{slots("a", 9), slots("b", 9)},
			group("g", 3, StrictSpread),
			"place g: 2 of 3 ranks can be placed (STRICT_SPREAD): short of nodes without a rank of the group",
		},
		{"no nodes", nil, group("g", 1, Pack), "place g: 0 of 1 rank can be placed (PACK): short of nodes"},
		{
			"used slots",
			[]Node{{ID: "a", Slots: 4, UsedSlots: []int{0, 2}, Ports: wide}},
			group("g", 2, Pack),
			"a: 0@1 1@3",
		},
		{
			"unknown strategy",
			[]Node{slots("a", 1)},
			group("g", 1, "BEST"),
			`place g: unknown strategy "BEST"`,
		},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, err := Place(c.nodes, []Group{c.group})
			if err != nil {
				require.EqualError(t, err, c.want)
				return
			}
			assert.Equal(t, c.want, draw(p[0]))
		})
	}
}

func TestMaxRanksPerNodeAndHeldRanks(t *testing.T) {
	g := group("g", 4, Pack)
	g.MaxRanksPerNode = 2
	p, err := Place([]Node{slots("a", 8), slots("b", 8), slots("c", 8)}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0 1@1 b: 2@0 3@1", draw(p[0]))

	g.Ranks, g.Held = []int{3}, map[string]int{"a": 2, "b": 1}
	p, err = Place([]Node{slots("a", 8), slots("b", 8), slots("c", 8)}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "b: 3@0", draw(p[0]))

	for s, want := range map[Strategy]string{
		Pack: "b: 3@0", StrictPack: "b: 3@0", Spread: "a: 3@0",
		StrictSpread: "a: 3@0",
	} {
		g := Group{ID: "g", Ranks: []int{3}, Held: map[string]int{"b": 1}, Strategy: s, Slots: 1}
		p, err = Place([]Node{slots("a", 8), slots("b", 8)}, []Group{g})
		require.NoError(t, err)
		assert.Equal(t, want, draw(p[0]), s)
	}
}

func TestRanksBesideAndApartFromTheOtherPool(t *testing.T) {
	nodes := []Node{slots("a", 4), slots("b", 8), slots("c", 2)}
	g := group("pd.prefill/0", 2, Pack)
	g.Other = OtherPool{Name: "pd.decode", Ranks: map[string]int{"b": 4}}
	p, err := Place(nodes, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "b: 0@0 1@1", draw(p[0]), "beside them, although other nodes are tighter")
	nodes[1].UsedSlots = count0(7)
	p, err = Place(nodes, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "c: 0@0 1@1", draw(p[0]), "there is no room for all beside them")

	g.Other.Apart = true
	nodes[1].UsedSlots = nil
	p, err = Place(nodes[:2], []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0 1@1", draw(p[0]))
	g.Other.Ranks["a"] = 1
	_, err = Place(nodes[:2], []Group{g})
	var e *problem.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, "place pd.prefill/0: 0 of 2 ranks can be placed (PACK): short of nodes without ranks of "+
		"pd.decode", e.Message)
	assert.Equal(t, []string{
		"need: 2 ranks of 1 slot each, PACK, on nodes without ranks of pd.decode",
		"node a: has ranks of pd.decode, which are kept apart",
		"node b: has ranks of pd.decode, which are kept apart",
	}, e.Details)
	assert.Contains(t, e.Hint, "disaggregation.colocate")
}

func TestLabels(t *testing.T) {
	h200, other := slots("a", 8), slots("b", 8)
	h200.Labels = map[string]string{"accelerator": "H200", "zone": "1"}
	g := group("g", 4, Spread)
	g.Labels = map[string]string{"accelerator": "H200"}
	p, err := Place([]Node{other, h200}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0 1@1 2@2 3@3", draw(p[0]))

	g.Labels["zone"] = "2"
	_, err = Place([]Node{h200, other}, []Group{g})
	var e *problem.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, []string{
		"need: 4 ranks of 1 slot each, SPREAD, on nodes with accelerator=H200, zone=2",
		"node a: does not have zone=2 (labels: accelerator=H200, zone=1)",
		"node b: does not have accelerator=H200, zone=2 (labels: none)",
	}, e.Details)
	assert.Equal(t,
		"no node has these labels: correct resources.labels, or start a node with them in --labels", e.Hint)
}

func TestDevicesAreLowestContiguousAndAligned(t *testing.T) {
	place := func(k, ranks int, n Node) string {
		g := group("g", ranks, StrictPack)
		g.Devices = k
		p, err := Place([]Node{n}, []Group{g})
		if err != nil {
			return "none"
		}
		return draw(p[0])
	}
	assert.Equal(t, "a: 0@0[0,1] 1@1[2,3]", place(2, 2, gpus("a", 3, 1, 2, 0, 6)),
		"order of the list does not matter")
	assert.Equal(t, "none", place(2, 3, gpus("a", 0, 1, 2, 3, 6)))
	assert.Equal(t, "a: 0@0[2,3]", place(2, 1, gpus("a", 1, 2, 3, 4)), "aligned to a multiple of the count")
	assert.Equal(t, "a: 0@0[2,3,4,5]", place(4, 1, gpus("a", 2, 3, 4, 5)), "no aligned set: any of the node")
	assert.Equal(t, "a: 0@0[0,2] 1@1[4,6]", place(2, 2, gpus("a", 0, 2, 4, 6)))
	assert.Equal(t, "a: 0@0[2,3] 1@1[1,4]", place(2, 2, gpus("a", 1, 2, 3, 4)), "aligned sets first")
	assert.Equal(t, "none", place(4, 1, gpus("a", 2, 3, 4)))
	used := gpus("a", 0, 1, 2, 3, 4, 5, 6, 7)
	used.UsedDevices = []int{1}
	assert.Equal(t, "a: 0@0[4,5,6,7]", place(4, 1, used))
	assert.Equal(t, "a: 0@0[0] 1@1[2]", place(1, 2, used))
}

func TestDevicesOfARankAreClose(t *testing.T) {
	place := func(k, ranks int, near [][]int, used ...int) string {
		n := gpus("a", 0, 1, 2, 3, 4, 5, 6, 7)
		n.Near, n.UsedDevices = near, used
		g := group("g", ranks, StrictPack)
		g.Slots, g.Devices = 0, k
		p, err := Place([]Node{n}, []Group{g})
		if err != nil {
			return "none"
		}
		return draw(p[0])
	}
	interleaved := [][]int{{0, 1, 4, 5}, {2, 3, 6, 7}}
	assert.Equal(t, "a: 0@-1[0,1,4,5] 1@-1[2,3,6,7]", place(4, 2, interleaved), "not 0-3, of two sets")
	assert.Equal(t, "a: 0@-1[0,1] 1@-1[4,5] 2@-1[2,3]", place(2, 3, interleaved))
	assert.Equal(t, "a: 0@-1[0] 1@-1[1] 2@-1[2]", place(1, 3, interleaved), "one device is close to itself")
	assert.Equal(t, "a: 0@-1[0,1,2,3,4,5,6,7]", place(8, 1, interleaved), "no set is large enough")

	halves := [][]int{{0, 1, 2, 3}, {4, 5, 6, 7}}
	assert.Equal(t, "a: 0@-1[1,2]", place(2, 1, halves, 0, 3, 4), "close rather than consecutive and aligned")
	assert.Equal(t, "a: 0@-1[4,5,6,7]", place(4, 1, halves, 0), "not 1-4")
	assert.Equal(t, "a: 0@-1[1,2,3,4]", place(4, 1, halves, 0, 7), "else any of the node")

	bridges := [][]int{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1, 2, 3}, {4, 5, 6, 7}}
	assert.Equal(t, "a: 0@-1[0,4] 1@-1[1,5]", place(2, 2, bridges), "the closest sets come first")
	assert.Equal(t, "a: 0@-1[0,1,2,3] 1@-1[4,5,6,7]", place(4, 2, bridges))
}

// PL1: each group on one node, groups on two nodes, 16 distinct devices.
func TestPL1TwoGroupsWithTP2(t *testing.T) {
	interleaved := []int{0, 4, 1, 5, 2, 6, 3, 7}
	nodes := []Node{gpus("a", interleaved...), gpus("b", interleaved...), gpus("c", interleaved...)}
	one, two := group("x/0", 4, Pack), group("x/1", 4, Pack)
	one.Devices, two.Devices = 2, 2
	p, err := Place(nodes, []Group{one, two})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0[0,1] 1@1[2,3] 2@2[4,5] 3@3[6,7]", draw(p[0]))
	assert.Equal(t, "b: 0@0[0,1] 1@1[2,3] 2@2[4,5] 3@3[6,7]", draw(p[1]))
}

// TestPL1LabelsMoveAllMembers: a selector takes every member of both groups along.
func TestPL1LabelsMoveAllMembers(t *testing.T) {
	nodes := []Node{gpus("a", count0(8)...), gpus("b", count0(8)...), gpus("c", count0(8)...)}
	nodes[1].Labels, nodes[2].Labels = map[string]string{"pool": "new"}, map[string]string{"pool": "new"}
	one, two := group("x/0", 4, Pack), group("x/1", 4, Pack)
	one.Devices, two.Devices = 2, 2
	one.Labels, two.Labels = map[string]string{"pool": "new"}, map[string]string{"pool": "new"}
	p, err := Place(nodes, []Group{one, two})
	require.NoError(t, err)
	assert.Equal(t, "b: 0@0[0,1] 1@1[2,3] 2@2[4,5] 3@3[6,7]", draw(p[0]))
	assert.Equal(t, "c: 0@0[0,1] 1@1[2,3] 2@2[4,5] 3@3[6,7]", draw(p[1]))
}

// RG1: two groups of 8 on a node each, then one of 16 in equal consecutive blocks, however often and in
// whatever order the nodes came.
func TestRG1GroupsOverTwoNodes(t *testing.T) {
	for round := range 20 {
		nodes := []Node{slots("a", 8), slots("b", 8)}
		if round%2 == 1 {
			slices.Reverse(nodes)
		}
		one, two := group("x/0", 8, Pack), group("x/1", 8, Pack)
		one.Lockstep, two.Lockstep = true, true
		p, err := Place(nodes, []Group{one, two})
		require.NoError(t, err)
		assert.Equal(t, "a: 0@0 1@1 2@2 3@3 4@4 5@5 6@6 7@7", draw(p[0]))
		assert.Equal(t, "b: 0@0 1@1 2@2 3@3 4@4 5@5 6@6 7@7", draw(p[1]))
		for _, size := range []int{8, 10} {
			nodes[0].Slots, nodes[1].Slots = size, size
			all := group("x/0", 16, Pack)
			all.Lockstep = true
			p, err = Place(nodes, []Group{all})
			require.NoError(t, err)
			assert.Equal(t, "a: 0@0 1@1 2@2 3@3 4@4 5@5 6@6 7@7 b: 8@0 9@1 10@2 11@3 12@4 13@5 14@6 15@7",
				draw(p[0]))
			assert.Equal(t, []Block{{-1, "a", 20000, 96}, {-1, "b", 20000, 96}}, p[0].Blocks)
		}
	}
}

// RG7: of three gangs of 4 on 10 slots two fit, the third says "2 of 4" and takes nothing; one node more, and
// it fits.
func TestRG7WholeGroupsOnly(t *testing.T) {
	nodes := []Node{slots("a", 5), slots("b", 5)}
	for i := range 2 {
		p, err := Place(nodes, []Group{group(fmt.Sprintf("x/%d", i), 4, Pack)})
		require.NoError(t, err)
		nodes = mark(nodes, p[0])
	}
	_, err := Place(nodes, []Group{group("x/2", 4, Pack)})
	require.EqualError(t, err, "place x/2: 2 of 4 ranks can be placed (PACK): short of slots")
	p, err := Place(append(nodes, slots("c", 4)), []Group{group("x/2", 4, Pack)})
	require.NoError(t, err)
	assert.Equal(t, "c: 0@0 1@1 2@2 3@3", draw(p[0]))
}

// HF68: a group that finds no place refuses the whole placement, and the error says what is short on each
// node.
func TestSecondGroupThatDoesNotFitRefusesBoth(t *testing.T) {
	_, err := Place([]Node{slots("a", 5)}, []Group{group("x/0", 4, Pack), group("x/1", 4, Pack)})
	var e *problem.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, problem.Unplaceable, e.Code)
	assert.Equal(t, "place x/1: 1 of 4 ranks can be placed (PACK): short of slots", e.Message)
	assert.Equal(t, []string{
		"need: 4 ranks of 1 slot each, PACK",
		"node a: 1 of 5 slots free, 0 of 0 devices free, room for 1 rank by its slots",
	}, e.Details)
	assert.NotEmpty(t, e.Hint)

	g := group("y/0", 1, Pack)
	g.Devices, g.Slots = 2, 0
	_, err = Place([]Node{slots("a", 5)}, []Group{g})
	require.ErrorAs(t, err, &e)
	assert.Contains(t, e.Hint, "--engine sim")
	_, err = Place(nil, []Group{g})
	require.ErrorAs(t, err, &e)
	assert.Equal(t, []string{"need: 1 rank of 2 devices each, PACK", "there is no node"}, e.Details)
}

func TestBlockSizes(t *testing.T) {
	for d, want := range map[int]int{1: 16, 2: 32, 4: 32, 8: 48, 16: 96} {
		assert.Equal(t, want, BlockSize(d), "dp_size %d", d)
	}
}

func TestBlocksPerUnitAndNode(t *testing.T) {
	g := group("x/0", 4, Spread)
	p, err := Place([]Node{slots("a", 8), slots("b", 8)}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, []Block{
		{0, "a", 20000, 16},
		{1, "a", 20016, 16},
		{2, "b", 20000, 16},
		{3, "b", 20016, 16},
	}, p[0].Blocks)
	g.Lockstep = true
	p, err = Place([]Node{slots("a", 8), slots("b", 8)}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, []Block{{-1, "a", 20000, 32}, {-1, "b", 20000, 32}}, p[0].Blocks,
		"the whole dp_size on each node")
}

func TestFreedBlocksAreUsedLast(t *testing.T) {
	n := slots("a", 8)
	n.Ports = Ports{20000, 20079} // five blocks
	n.UsedBlocks = []Ports{{20032, 20047}}
	n.FreedBlocks = []Ports{{20048, 20063}, {20000, 20015}}
	p, err := Place([]Node{n}, []Group{group("x", 4, Pack)})
	require.NoError(t, err)
	var got []int
	for _, b := range p[0].Blocks {
		got = append(got, b.Base)
	}
	assert.Equal(t, []int{20016, 20064, 20048, 20000}, got, "never used, then freed the longest ago")
	_, err = Place([]Node{n}, []Group{group("x", 5, Pack)})
	require.EqualError(t, err, "place x: 4 of 5 ranks can be placed (PACK): short of port blocks of 16")
	g := group("x", 2, Pack)
	g.Lockstep = true
	p, err = Place([]Node{n}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, 20048, p[0].Blocks[0].Base,
		"32 ports: beside the used block, over the older of the freed ones")
}

// TestPortPlan: two lockstep groups of 16 ranks and 100 single ranks on one host collide nowhere and avoid
// our own ports.
func TestPortPlan(t *testing.T) {
	n := slots("a", 200)
	n.Ports = Ports{7900, 12000}
	one, two := group("x/0", 16, StrictPack), group("x/1", 16, StrictPack)
	one.Lockstep, two.Lockstep = true, true
	p, err := Place([]Node{n}, []Group{one, two, group("y/0", 100, StrictPack)})
	require.NoError(t, err)
	seen := map[int]bool{8000: true, 8265: true, 7946: true, 7947: true}
	for _, g := range p {
		for _, b := range g.Blocks {
			assert.Zero(t, b.Size%16)
			for port := b.Base; port < b.Base+b.Size; port++ {
				require.False(t, seen[port], "port %d", port)
				seen[port] = true
				require.True(t, port >= 7900 && port <= 12000)
			}
		}
	}
}

func TestKeptSeatsGetFreshBlocksOnly(t *testing.T) {
	n := slots("a", 4)
	n.UsedSlots, n.FreedBlocks = []int{0, 1}, []Ports{{20000, 20015}}
	g := Group{
		ID: "x/0", Keep: []Seat{{Rank: 2, Node: "a", Slot: 2}}, Ranks: []int{3}, Strategy: Pack,
		Slots: 1,
	}
	p, err := Place([]Node{n}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "a: 2@2 3@3", draw(p[0]))
	assert.Equal(t, []Block{{2, "a", 20016, 16}, {3, "a", 20032, 16}}, p[0].Blocks)
	g.Keep[0].Node = "z"
	_, err = Place([]Node{n}, []Group{g})
	require.EqualError(t, err, "place x/0: node z is not there (PACK)")
}

func TestAttachedRanksTakeNothing(t *testing.T) {
	a, b := slots("a", 0), slots("b", 0)
	a.Ranks = 1
	g := Group{
		ID: "x/0", Ranks: count0(4), Strategy: StrictPack, Attach: true,
		Pinned: map[int]string{2: "a"},
	}
	p, err := Place([]Node{a, b}, []Group{g})
	require.NoError(t, err)
	assert.Equal(t, "b: 0@-1 a: 1@-1 2@-1 b: 3@-1", draw(p[0]))
	assert.Empty(t, p[0].Blocks)
	g.Pinned[2] = "z"
	_, err = Place([]Node{a, b}, []Group{g})
	require.EqualError(t, err, "place x/0: node z is not there (STRICT_PACK)")
	_, err = Place(nil, []Group{g})
	require.Equal(t, problem.Unplaceable, problem.CodeOf(err))
}

// HF51: also before devices that are close to each other, but a group that must be on one node stays with its
// ranks.
func TestAvoidedNodesComeLast(t *testing.T) {
	pair := group("g", 1, Pack)
	pair.Devices, pair.Avoid = 2, []string{"a"}
	placed, err := Place([]Node{gpus("a", 0, 1), gpus("b", 1, 2)}, []Group{pair})
	require.NoError(t, err)
	assert.Equal(t, "b: 0@0[1,2]", draw(placed[0]))
	placed, err = Place([]Node{gpus("a", 0, 1), gpus("b", 1)}, []Group{pair})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0[0,1]", draw(placed[0]))

	packed := group("g", 1, StrictPack)
	packed.Held, packed.Avoid = map[string]int{"a": 1}, []string{"a"}
	placed, err = Place([]Node{slots("a", 2), slots("b", 2)}, []Group{packed})
	require.NoError(t, err)
	assert.Equal(t, "a: 0@0", draw(placed[0]))
}
