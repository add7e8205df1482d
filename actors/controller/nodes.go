package controller

import (
	"maps"
	"slices"

	"github.com/dpserve/dpserve/placement"
	"github.com/dpserve/dpserve/state"
)

// nodesOf are the nodes that may be given ranks, in order. A state that knows no nodes is older than their records: then the
// inventory counts.
func nodesOf(s *state.State, inventory []placement.Node) []placement.Node {
	if len(s.Nodes) == 0 {
		return inventory
	}
	var out []placement.Node
	for _, id := range slices.Sorted(maps.Keys(s.Nodes)) {
		if n := s.Nodes[id]; n.Takes() {
			out = append(out, placement.Node{
				ID: id, Slots: n.Offer.Slots, Devices: n.Offer.Devices, Labels: n.Offer.Labels,
				Ports: placement.Ports{Lo: n.Offer.PortLo, Hi: n.Offer.PortHi},
			})
		}
	}
	return out
}
