package placement

import (
	"maps"
	"slices"

	"github.com/dpserve/dpserve/internal/share"
)

// sharedDevices are the devices of a node that ranks share, by number, with the parts that are free. Any
// ranks may share a device, also of different groups; a rank that has whole devices shares none.
type sharedDevices map[int]int

// freeParts returns the free parts of all of them.
func (s sharedDevices) freeParts() int {
	sum := 0
	for _, free := range s {
		sum += free
	}
	return sum
}

// roomFor returns how many ranks with this share find room. The order in which equal shares are taken does
// not change it.
func (s sharedDevices) roomFor(parts int) int {
	n := 0
	for _, free := range s {
		n += free / parts
	}
	return n
}

// choose returns the device with room for a share that has the most left, else the least; false if none has
// room. Among equals the lowest number wins.
func (s sharedDevices) choose(parts int, most bool) (device int, ok bool) {
	best := -1
	for _, d := range slices.Sorted(maps.Keys(s)) {
		if s[d] >= parts && (best < 0 || most && s[d] > s[best] || !most && s[d] < s[best]) {
			best = d
		}
	}
	return best, best >= 0
}

// takeShare takes parts of a device, which is shared from then on. A device that the node does not offer, or
// that another rank has as a whole, has nothing to take.
func takeShare(p *pool, device, parts int) {
	if slices.Contains(p.devices, device) {
		p.devices = without(p.devices, []int{device})
		p.shared[device] = share.Whole
	}
	if free, isShared := p.shared[device]; isShared {
		p.shared[device] = max(0, free-parts)
	}
}

// chooseShared returns the device of the next rank that shares one. PACK fills the fullest shared device that
// has room, and begins a whole one only if none has. SPREAD takes the device with the most room. The caller
// has checked that there is room.
func chooseShared(p *pool, g *Group) int {
	spreads := g.Strategy == Spread || g.Strategy == StrictSpread
	device, ok := p.shared.choose(g.Share, spreads)
	if len(p.devices) > 0 && (spreads || !ok) {
		return p.devices[0]
	}
	return device
}

// countOpened returns how many whole devices n more ranks of the group take or begin to share.
func countOpened(p *pool, g *Group, n int) int {
	if g.Share == 0 {
		return n * g.Devices
	}
	perDevice := share.Whole / g.Share
	return max(0, n-p.shared.roomFor(g.Share)+perDevice-1) / perDevice
}
