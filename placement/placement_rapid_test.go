package placement

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/share"
)

func drawNodes(t *rapid.T) []Node {
	nodes := make([]Node, rapid.IntRange(0, 4).Draw(t, "nodes"))
	for i := range nodes {
		n := &nodes[i]
		n.ID = string(rune('a' + i))
		n.Slots = rapid.IntRange(0, 6).Draw(t, "slots")
		n.Devices = rapid.SliceOfDistinct(rapid.IntRange(0, 7), rapid.ID[int]).Draw(t, "devices")
		n.UsedSlots = rapid.SliceOfN(rapid.IntRange(0, 5), 0, 3).Draw(t, "used")
		n.UsedDevices = rapid.SliceOfN(rapid.IntRange(0, 7), 0, 3).Draw(t, "used devices")
		n.UsedShares = map[int]int{}
		for range rapid.IntRange(0, 2).Draw(t, "shared") {
			device := rapid.IntRange(0, 7).Draw(t, "shared device")
			if !slices.Contains(n.UsedDevices, device) {
				n.UsedShares[device] = 1000 * rapid.IntRange(1, 10).Draw(t, "used parts")
			}
		}
		n.Ports = Ports{7930, 7930 + rapid.IntRange(0, 400).Draw(t, "ports")}
		n.UsedBlocks = []Ports{{7960, 7960 + rapid.IntRange(0, 40).Draw(t, "block")}}
		n.FreedBlocks = []Ports{{8050, 8065}}
		if rapid.Bool().Draw(t, "label") {
			n.Labels = map[string]string{"zone": "1"}
		}
	}
	return nodes
}

func drawGroup(t *rapid.T, id string) Group {
	g := group(id, rapid.IntRange(1, 8).Draw(t, "ranks"),
		rapid.SampledFrom([]Strategy{Pack, StrictPack, Spread, StrictSpread}).Draw(t, "strategy"))
	g.Lockstep = rapid.Bool().Draw(t, "lockstep")
	g.Devices = rapid.IntRange(0, 3).Draw(t, "devices")
	if g.Devices == 1 && rapid.Bool().Draw(t, "shares") {
		g.Share = 1000 * rapid.IntRange(1, 9).Draw(t, "parts")
	}
	g.Slots = rapid.IntRange(0, 1).Draw(t, "slots")
	g.MaxRanksPerNode = rapid.IntRange(0, 3).Draw(t, "max")
	if rapid.IntRange(0, 3).Draw(t, "labels") == 0 {
		g.Labels = map[string]string{"zone": "1"}
	}
	if rapid.IntRange(0, 3).Draw(t, "apart") == 0 {
		g.Other = drawOther(t)
		g.Other.Apart = true
	}
	return g
}

// drawOther puts ranks of another pool on some of the nodes.
func drawOther(t *rapid.T) OtherPool {
	out := OtherPool{Name: "other", Ranks: map[string]int{}}
	for _, id := range []string{"a", "b", "c", "d"} {
		if rapid.Bool().Draw(t, "other ranks") {
			out.Ranks[id] = 1
		}
	}
	return out
}

// checkPlacement is the dumb oracle: it walks over everything that was handed out.
func checkPlacement(t *rapid.T, nodes []Node, groups []Group, p []Placed) {
	require.Len(t, p, len(groups))
	taken, parts := map[string]bool{}, map[string]int{}
	takeParts := func(node string, device, n int) {
		what := fmt.Sprint("device ", node, " ", device)
		parts[what] += n
		require.LessOrEqual(t, parts[what], share.Whole, "%s is overbooked", what)
	}
	take := func(format string, args ...any) {
		what := fmt.Sprintf(format, args...)
		require.False(t, taken[what], "%s twice", what)
		taken[what] = true
	}
	at := map[string]*Node{}
	for i := range nodes {
		n := &nodes[i]
		at[n.ID] = n
		for _, s := range slices.Compact(slices.Sorted(slices.Values(n.UsedSlots))) {
			take("slot %s %d", n.ID, s)
		}
		for _, d := range slices.Compact(slices.Sorted(slices.Values(n.UsedDevices))) {
			takeParts(n.ID, d, share.Whole)
		}
		for d, used := range n.UsedShares {
			takeParts(n.ID, d, used)
		}
		for port := n.UsedBlocks[0].Lo; port <= n.UsedBlocks[0].Hi; port++ {
			take("port %s %d", n.ID, port)
		}
		for _, own := range []int{8000, 8265, 7946, 7947} {
			if !taken[fmt.Sprintf("port %s %d", n.ID, own)] {
				take("port %s %d", n.ID, own)
			}
		}
	}
	for i := range groups {
		g, placed := &groups[i], &p[i]
		per := map[string]int{}
		var order []string
		require.Len(t, placed.Seats, len(g.Ranks), "all ranks")
		for r, s := range placed.Seats {
			n := at[s.Node]
			require.Equal(t, r, s.Rank)
			require.True(t, g.Labels == nil || n.Labels["zone"] == "1")
			if per[s.Node]++; per[s.Node] == 1 {
				order = append(order, s.Node)
			}
			require.Equal(t, s.Node, order[len(order)-1], "contiguous per node")
			require.Equal(t, g.Slots > 0, s.Slot >= 0)
			if s.Slot >= 0 {
				require.Less(t, s.Slot, n.Slots)
				take("slot %s %d", s.Node, s.Slot)
			}
			require.Len(t, s.Devices, g.Devices)
			require.Equal(t, g.Share, s.Share)
			require.True(t, slices.IsSorted(s.Devices))
			for _, d := range s.Devices {
				require.Contains(t, n.Devices, d)
				takeParts(s.Node, d, share.On(g.Share))
			}
		}
		require.True(t, slices.IsSorted(order), "in node order")
		checkStrategy(t, g, per)
		checkBlocks(t, g, placed, per, at, take)
	}
}

func checkStrategy(t *rapid.T, g *Group, per map[string]int) {
	for node, n := range per {
		require.False(t, g.Other.Apart && g.Other.Ranks[node] > 0, "%s has ranks of the other pool", node)
		require.True(t, g.MaxRanksPerNode == 0 || n <= g.MaxRanksPerNode)
		require.True(t, g.Strategy != StrictSpread || n == 1)
	}
	require.True(t, g.Strategy != StrictPack || len(per) == 1)
}

func checkBlocks(t *rapid.T, g *Group, p *Placed, per map[string]int, at map[string]*Node,
	take func(string, ...any),
) {
	want := len(g.Ranks)
	size := BlockSize(1)
	if g.Lockstep {
		want, size = len(per), BlockSize(g.DPSize)
	}
	require.Len(t, p.Blocks, want)
	for _, b := range p.Blocks {
		require.Equal(t, size, b.Size)
		require.Positive(t, per[b.Node])
		require.GreaterOrEqual(t, b.Base, at[b.Node].Ports.Lo)
		require.LessOrEqual(t, b.Base+b.Size-1, at[b.Node].Ports.Hi)
		for port := b.Base; port < b.Base+b.Size; port++ {
			take("port %s %d", b.Node, port)
		}
	}
}

// room is the oracle for one node: how many ranks of g it takes, found by seating one after the other.
func room(n Node, g Group) int {
	best := 0
	for k := 1; k <= len(g.Ranks); k++ {
		g := g
		g.Ranks, g.Strategy = g.Ranks[:k], StrictPack
		if _, err := Place([]Node{n}, []Group{g}); err != nil {
			break
		}
		best = k
	}
	return best
}

// possible says whether any placement of one group exists, from the room of each node alone.
func possible(nodes []Node, g Group) bool {
	sum, most, any1 := 0, 0, 0
	for _, n := range nodes {
		r := room(n, g)
		sum, most = sum+r, max(most, r)
		any1 += min(1, r)
	}
	switch g.Strategy {
	case StrictPack:
		return most >= len(g.Ranks)
	case StrictSpread:
		return any1 >= len(g.Ranks)
	default:
		return sum >= len(g.Ranks)
	}
}

// HF76: nothing twice, the strategy kept, all or none, whatever the nodes' order; and a group alone is
// refused only when no placement exists.
func TestAnyPlacementIsSound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		groups := []Group{drawGroup(t, "g/0"), drawGroup(t, "g/1")}
		p, err := Place(nodes, groups)
		shuffled := slices.Clone(nodes)
		slices.Reverse(shuffled)
		again, againErr := Place(shuffled, groups)
		require.Equal(t, p, again)
		require.Equal(t, err == nil, againErr == nil)
		if err == nil {
			checkPlacement(t, nodes, groups, p)
		} else {
			require.Equal(t, err.Error(), againErr.Error())
		}
		_, alone := Place(nodes, groups[:1])
		require.Equal(t, possible(nodes, groups[0]), alone == nil)
	})
}

// TestRanksGoBesideTheOtherPool: on its nodes if these have room for the whole group, else as without it.
func TestRanksGoBesideTheOtherPool(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		g := drawGroup(t, "g/0")
		g.Other = OtherPool{}
		without, err := Place(nodes, []Group{g})
		beside := g
		beside.Other = drawOther(t)
		p, besideErr := Place(nodes, []Group{beside})
		require.Equal(t, err == nil, besideErr == nil)
		if err != nil {
			return
		}
		only := slices.DeleteFunc(slices.Clone(nodes),
			func(n Node) bool { return beside.Other.Ranks[n.ID] == 0 })
		want, onlyErr := Place(only, []Group{g})
		strict := g.Devices < 2 // else devices that are not aligned are the last resort everywhere
		switch {
		case onlyErr == nil && strict:
			require.Equal(t, want, p)
		case onlyErr != nil:
			require.Equal(t, without, p)
		}
	})
}

// rooms is how many ranks each node takes: with aligned devices if that is room enough for all, else with
// any.
func rooms(nodes []Node, g Group) map[string]int {
	strict, loose, sum := map[string]int{}, map[string]int{}, 0
	for _, n := range nodes {
		strict[n.ID], loose[n.ID] = newPools([]Node{n})[0].capacityFor(&g), room(n, g)
		sum += min(strict[n.ID], len(g.Ranks))
	}
	if sum >= len(g.Ranks) {
		return strict
	}
	return loose
}

// shares is the oracle of PACK: all ways to deal need ranks to the rooms from i on; it keeps the best by
// (nodes, largest block).
func shares(rooms []int, i, need, nodes, most int, best *[2]int) {
	if need == 0 {
		if (*best)[0] == 0 || nodes < (*best)[0] || (nodes == (*best)[0] && most < (*best)[1]) {
			*best = [2]int{nodes, most}
		}
		return
	}
	if i == len(rooms) {
		return
	}
	shares(rooms, i+1, need, nodes, most, best)
	for n := 1; n <= min(need, rooms[i]); n++ {
		shares(rooms, i+1, need-n, nodes+1, max(most, n), best)
	}
}

// HF76: of all ways to deal the ranks none has fewer nodes, and of those none a smaller largest block.
func TestPackUsesFewNodesInEqualBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		g := drawGroup(t, "g/0")
		g.Strategy = Pack
		p, err := Place(nodes, []Group{g})
		if err != nil {
			return
		}
		per, most := map[string]int{}, 0
		for _, s := range p[0].Seats {
			per[s.Node]++
			most = max(most, per[s.Node])
		}
		var best [2]int
		shares(slices.Collect(maps.Values(rooms(nodes, g))), 0, len(g.Ranks), 0, 0, &best)
		require.Equal(t, [2]int{len(per), most}, best)
	})
}

// TestDevicesAreAlignedWherePossible: a rank has devices that are not consecutive and aligned only if the
// group had no room else.
func TestDevicesAreAlignedWherePossible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		g := drawGroup(t, "g/0")
		g.Strategy, g.Devices, g.Share = Pack, rapid.IntRange(2, 3).Draw(t, "devices"), 0
		p, err := Place(nodes, []Group{g})
		if err != nil {
			return
		}
		strict := 0
		for _, n := range nodes {
			strict += newPools([]Node{n})[0].capacityFor(&g)
		}
		for _, s := range p[0].Seats {
			aligned := s.Devices[0]%g.Devices == 0 && s.Devices[g.Devices-1] == s.Devices[0]+g.Devices-1
			require.True(t, aligned || strict < len(g.Ranks))
		}
	})
}

// HF76: two nodes differ by more than one only if the emptier one is full.
func TestSpreadIsEven(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := drawNodes(t)
		g := drawGroup(t, "g/0")
		g.Strategy = Spread
		p, err := Place(nodes, []Group{g})
		if err != nil {
			return
		}
		per := map[string]int{}
		for _, s := range p[0].Seats {
			per[s.Node]++
		}
		left := rooms(nodes, g)
		for _, low := range nodes {
			for _, high := range nodes {
				if per[high.ID] > per[low.ID]+1 {
					require.Equal(t, per[low.ID], left[low.ID], "%s has room and %s has more", low.ID,
						high.ID)
				}
			}
		}
	})
}

// drawNear gives nodes sets of close devices, which may overlap and name devices that are not there.
func drawNear(t *rapid.T, nodes []Node) {
	for i := range nodes {
		set := rapid.SliceOfNDistinct(rapid.IntRange(0, 9), 1, 6, rapid.ID[int])
		nodes[i].Near = rapid.SliceOfN(set, 0, 4).Draw(t, "near")
	}
}

// TestCloseDevicesCostNoRoom: sets of close devices change neither whether a group finds room, nor how many
// ranks fit on a node without devices that are scattered; and what is placed is sound.
func TestCloseDevicesCostNoRoom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plain := drawNodes(t)
		nodes := slices.Clone(plain)
		drawNear(t, nodes)
		groups := []Group{drawGroup(t, "g/0"), drawGroup(t, "g/1")}
		p, err := Place(nodes, groups)
		if err == nil {
			checkPlacement(t, nodes, groups, p)
		}
		reversed := slices.Clone(nodes)
		slices.Reverse(reversed)
		again, againErr := Place(reversed, groups)
		require.Equal(t, p, again)
		require.Equal(t, err == nil, againErr == nil)

		_, before := Place(plain, groups[:1])
		_, after := Place(nodes, groups[:1])
		require.Equal(t, before == nil, after == nil, "room for a group alone")
		for i := range nodes {
			require.GreaterOrEqual(t, newPools(nodes[i : i+1])[0].capacityFor(&groups[0]),
				newPools(plain[i : i+1])[0].capacityFor(&groups[0]), "room of %s", nodes[i].ID)
		}
	})
}

// isNear reports whether all devices are in one set of the node.
func isNear(n *Node, devices []int) bool {
	return slices.ContainsFunc(n.Near, func(near []int) bool {
		return !slices.ContainsFunc(devices, func(d int) bool { return !slices.Contains(near, d) })
	})
}

// TestARankGetsCloseDevices: on one node whose sets are disjoint, a rank gets devices of one set if there are
// enough, unless this would leave room for fewer ranks.
func TestARankGetsCloseDevices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := gpus("a", 0, 1, 2, 3, 4, 5, 6, 7)
		n.UsedDevices = rapid.SliceOfN(rapid.IntRange(0, 7), 0, 4).Draw(t, "used")
		all := rapid.Permutation(slices.Clone(n.Devices)).Draw(t, "order")
		cut := rapid.IntRange(1, 7).Draw(t, "cut")
		n.Near = [][]int{all[:cut], all[cut:]}
		g := group("g/0", 1, Pack)
		g.Slots, g.Devices = 0, rapid.IntRange(2, 4).Draw(t, "devices")
		p, err := Place([]Node{n}, []Group{g})
		if err != nil {
			return
		}
		possible := 0
		for _, set := range n.Near {
			possible += len(without(set, n.UsedDevices)) / g.Devices
		}
		aligned, _ := alignedSets(without(n.Devices, n.UsedDevices), g.Devices)
		require.True(t, isNear(&n, p[0].Seats[0].Devices) || len(aligned) > possible || possible == 0,
			"%v are not close, %d sets could be", p[0].Seats[0].Devices, possible)
	})
}
