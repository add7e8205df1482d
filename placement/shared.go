package placement

import (
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/share"
)

// Ranks with a share of a device. A device is either whole, and one rank may have it, or shared, and ranks of
// any groups may have parts of it.

// takeShare takes parts of a device, which is shared from then on. A device that the node does not offer, or
// that another rank has as a whole, has nothing to take.
func (p *pool) takeShare(device, parts int) {
	free, isShared := p.shared[device]
	if !isShared && slices.Contains(p.devices, device) {
		free, p.devices = share.Whole, without(p.devices, []int{device})
		isShared = true
	}
	if isShared {
		p.shared[device] = max(0, free-parts)
	}
}

// freeShares returns the free parts of all shared devices.
func (p *pool) freeShares() int {
	sum := 0
	for _, free := range p.shared {
		sum += free
	}
	return sum
}

// roomForShares returns how many ranks with this share find room. The order in which equal shares are taken
// does not change it.
func (p *pool) roomForShares(parts int) int {
	return p.roomOnShared(parts) + len(p.devices)*(share.Whole/parts)
}

// roomOnShared is roomForShares of the devices that are shared already.
func (p *pool) roomOnShared(parts int) int {
	n := 0
	for _, free := range p.shared {
		n += free / parts
	}
	return n
}

// opened returns how many whole devices n more ranks of the group take or begin to share.
func (p *pool) opened(g *Group, n int) int {
	if g.Share == 0 {
		return n * g.Devices
	}
	perDevice := share.Whole / g.Share
	return max(0, n-p.roomOnShared(g.Share)+perDevice-1) / perDevice
}

// chooseShared returns the device of the next rank. Under PACK that is the shared device that has the least
// room beyond the share, and a whole one only if no shared one has room. Under SPREAD it is the device with
// the most room. Among equals the lowest number wins. The caller has checked that there is room.
func (p *pool) chooseShared(g *Group) int {
	spreads := g.Strategy == Spread || g.Strategy == StrictSpread
	best, bestFree := -1, 0
	for _, device := range slices.Sorted(maps.Keys(p.shared)) {
		free := p.shared[device]
		if free >= g.Share && (best < 0 || spreads && free > bestFree || !spreads && free < bestFree) {
			best, bestFree = device, free
		}
	}
	if len(p.devices) > 0 && (best < 0 || spreads) {
		return p.devices[0]
	}
	return best
}

// releaseShare gives parts of a device back. It replaces the map instead of changing it.
func (n *Node) releaseShare(device, parts int) {
	n.UsedShares = maps.Clone(n.UsedShares)
	if n.UsedShares[device] -= parts; n.UsedShares[device] <= 0 {
		delete(n.UsedShares, device)
	}
}
