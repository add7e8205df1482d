package placement

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/share"
)

// sharing is a group of ranks with a share of a device.
func sharing(id string, ranks, parts int, s Strategy) Group {
	g := group(id, ranks, s)
	g.Slots, g.Devices, g.Share = 0, 1, parts
	return g
}

// used is a node on which ranks have parts of devices.
func used(n Node, parts map[int]int) Node { //nolint:gocritic // a copy
	n.UsedShares = parts
	return n
}

func TestSharesOfDevices(t *testing.T) {
	whole := group("w", 1, Pack)
	whole.Slots, whole.Devices = 0, 1
	kept := sharing("k", 1, 5000, Pack)
	kept.Ranks, kept.Keep = nil, []Seat{{Node: "a", Slot: -1, Devices: []int{1}, Share: 5000}}
	for _, c := range []struct {
		name   string
		nodes  []Node
		groups []Group
		want   string // the places of all groups, or the error with its details
	}{
		{
			"four quarters are a device",
			[]Node{gpus("a", 0, 1)},
			[]Group{sharing("g", 5, 2500, Pack)},
			"a: 0@-1[0] 1@-1[0] 2@-1[0] 3@-1[0] 4@-1[1]",
		},
		{"ten tenths are a device", []Node{gpus("a", 0)}, []Group{sharing("g", 10, 1000, StrictPack)}, "a: " +
			"0@-1[0] 1@-1[0] 2@-1[0] 3@-1[0] 4@-1[0] 5@-1[0] 6@-1[0] 7@-1[0] 8@-1[0] 9@-1[0]"},
		{
			"three thirds are a device",
			[]Node{gpus("a", 0)},
			[]Group{sharing("g", 3, 3333, Pack)},
			"a: 0@-1[0] 1@-1[0] 2@-1[0]",
		},
		{
			"too much for a device",
			[]Node{gpus("a", 0)},
			[]Group{sharing("g", 1, 5000, Pack), sharing("h", 1, 6000, Pack)},
			"place h: 0 of 1 rank can be placed (PACK): short of devices: " +
				"need: 1 rank of 0.6 of a device each, PACK; " +
				"node a: 64 of 64 slots free, 0 of 1 device free and 0.5 of shared ones, " +
				"room for 0 ranks by its devices",
		},
		{
			"applications share a device, and the fullest one with room comes first",
			[]Node{used(gpus("a", 0, 1, 2), map[int]int{0: 2500, 1: 7500})},
			[]Group{sharing("g", 1, 2500, Pack), sharing("h", 1, 5000, Pack), sharing("i", 1, 5000, Pack)},
			"a: 0@-1[1] a: 0@-1[0] a: 0@-1[2]",
		},
		{
			"a rank with whole devices never shares",
			[]Node{used(gpus("a", 0, 1), map[int]int{0: 1})},
			[]Group{whole, sharing("g", 1, 9999, Pack)},
			"a: 0@-1[1] a: 0@-1[0]",
		},
		{
			"pack fills a shared device before it opens another one, on whatever node",
			[]Node{gpus("a", 0), used(gpus("b", 0, 1), map[int]int{1: 5000})},
			[]Group{sharing("g", 2, 2500, Pack)},
			"b: 0@-1[1] 1@-1[1]",
		},
		{
			"spread takes the device with the most room",
			[]Node{used(gpus("a", 0, 1, 2), map[int]int{0: 2500})},
			[]Group{sharing("g", 3, 2500, Spread)},
			"a: 0@-1[1] 1@-1[2] 2@-1[0]",
		},
		{
			"strict spread, one a node",
			[]Node{
				used(gpus("a", 0), map[int]int{0: 9000}), gpus("b", 0),
				used(gpus("c", 3), map[int]int{3: 5000}),
			},
			[]Group{sharing("g", 2, 5000, StrictSpread)},
			"b: 0@-1[0] c: 1@-1[3]",
		},
		{
			"a kept seat takes its share",
			[]Node{gpus("a", 0, 1)},
			[]Group{kept, sharing("g", 1, 5000, Pack)},
			"a: 0@-1[1] a: 0@-1[1]",
		},
		{
			"a share is of one device", nil,
			[]Group{{ID: "g", Strategy: Pack, Devices: 2, Share: 1}},
			"place g: 1 of 10000 parts of 2 devices",
		},
	} {
		placed, err := Place(c.nodes, c.groups)
		got := ""
		for i := range placed {
			got += " " + draw(placed[i])
		}
		if err != nil {
			got = " " + explain(err)
		}
		assert.Equal(t, c.want, got[1:], c.name)
	}
}

// HF76: whatever groups come one after the other, the shares of a device never add up to more than one
// device, whole devices are not shared, and a rank is refused only if no device has room.
func TestSharesAreNeverOverbooked(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		nodes := []Node{gpus("a", 0, 1), gpus("b", 3)}
		free := map[string]int{"a0": share.Whole, "a1": share.Whole, "b3": share.Whole}
		for range rapid.IntRange(1, 20).Draw(t, "groups") {
			parts := rapid.SampledFrom([]int{0, 1, 1000, 2500, 3333, 3334, 5000, 9999}).Draw(t, "parts")
			g := sharing("g", 1, parts, rapid.SampledFrom([]Strategy{Pack, Spread}).Draw(t, "strategy"))
			hasRoom := slices.ContainsFunc(slices.Collect(maps.Values(free)),
				func(left int) bool { return left >= share.On(parts) })
			placed, err := Place(nodes, []Group{g})
			require.Equal(t, hasRoom, err == nil, "%d of %v", parts, free)
			if err != nil {
				continue
			}
			seat := placed[0].Seats[0]
			at := fmt.Sprint(seat.Node, seat.Devices[0])
			free[at] -= share.On(seat.Share)
			require.GreaterOrEqual(t, free[at], 0)
			for i := range nodes {
				if nodes[i].ID != seat.Node {
					continue
				}
				if seat.Share == 0 {
					nodes[i].UsedDevices = append(nodes[i].UsedDevices, seat.Devices...)
				} else {
					nodes[i] = used(nodes[i], maps.Clone(nodes[i].UsedShares))
					if nodes[i].UsedShares == nil {
						nodes[i].UsedShares = map[int]int{}
					}
					nodes[i].UsedShares[seat.Devices[0]] += seat.Share
				}
			}
		}
	})
}

// HF76: a unit that has a share of a device moves, and then a rank has the device as a whole.
func TestAHintMovesAShare(t *testing.T) {
	nodes := []Node{used(gpus("a", 0), map[int]int{0: 2500}), used(gpus("b", 0), map[int]int{0: 5000})}
	nodes[0].Ranks, nodes[1].Ranks = 1, 1
	small := Occupant{
		Unit: "s/0/0", Group: sharing("s", 1, 2500, Pack),
		Seats: []Seat{{Node: "a", Slot: -1, Devices: []int{0}, Share: 2500}},
	}
	g := group("g", 1, Pack)
	g.Slots, g.Devices = 0, 1
	assert.Equal(t, "moving s/0/0 from a to b would make room", Hint(nodes, g, []Occupant{small}).String())
	assert.Equal(t, map[int]int{0: 2500}, nodes[0].UsedShares, "nothing is moved")
}

// explain is an error with its details, in one line.
func explain(err error) string {
	if p, ok := errors.AsType[*problem.Error](err); ok && len(p.Details) > 1 {
		return p.Message + ": " + strings.Join(p.Details, "; ")
	}
	return err.Error()
}
