package controller

import (
	"fmt"
	"maps"
	"slices"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/share"
	"github.com/dpserve/dpserve/internal/state"
)

// sharedDevices collects, for people, which ranks share which devices of which nodes.
type sharedDevices map[nodeDevice]*sharedDevice

type nodeDevice struct {
	node   string
	device int
}

type sharedDevice struct {
	parts int // of the device, that the ranks have
	ranks []string
}

// add adds a rank. It has no effect on one that has whole devices, or none.
func (s sharedDevices) add(app string, group int, r *state.RankGrant) {
	if r.Share == 0 {
		return
	}
	for _, d := range r.Devices {
		at := nodeDevice{r.Node, d}
		if s[at] == nil {
			s[at] = &sharedDevice{}
		}
		s[at].parts += r.Share
		s[at].ranks = append(s[at].ranks, fmt.Sprintf("%s/%d/%d", app, group, r.Rank))
	}
}

// on returns the shared devices of a node, in order.
func (s sharedDevices) on(node string) []client.SharedDevice {
	var out []client.SharedDevice
	for _, at := range slices.SortedFunc(maps.Keys(s), func(a, b nodeDevice) int { return a.device - b.device }) {
		if at.node == node {
			slices.Sort(s[at].ranks)
			out = append(out, client.SharedDevice{
				Device: at.device, Used: share.Devices(s[at].parts), Ranks: s[at].ranks,
			})
		}
	}
	return out
}
