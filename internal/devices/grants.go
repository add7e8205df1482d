package devices

import (
	"slices"

	"github.com/dpserve/dpserve/internal/share"
)

// Grant is what a rank of this node was granted.
type Grant struct {
	Unit    string
	Devices []int
	Share   int // parts of its one device (share.Whole); 0: its devices are its own
}

// granted returns the devices that units of this node have.
func (k *Keeper) granted() map[int]bool {
	out := map[int]bool{}
	for _, g := range k.cfg.Granted() {
		for _, d := range g.Devices {
			out[d] = true
		}
	}
	return out
}

// findUnits notes of each process that holds memory to which unit of this node it belongs.
func (k *Keeper) findUnits(inv *Inventory) {
	for i := range inv.Devices {
		for j := range inv.Devices[i].Holders {
			h := &inv.Devices[i].Holders[j]
			h.Unit = k.cfg.UnitOf(h.PID)
		}
	}
}

// otherUnits are the units of this node beside one of them.
type otherUnits struct {
	unit   string // the one
	grants []Grant
}

func (k *Keeper) othersThan(unit string) otherUnits { return otherUnits{unit, k.cfg.Granted()} }

// areOn reports whether one of them has a share of a device.
func (o otherUnits) areOn(device int) bool {
	return slices.ContainsFunc(o.grants, func(g Grant) bool { return o.isSharer(&g, device) })
}

func (o otherUnits) isSharer(g *Grant, device int) bool {
	return g.Share > 0 && g.Unit != o.unit && slices.Contains(g.Devices, device)
}

// memoryOn returns how many MiB of a device the other units may hold: each one its share of the device, or
// what its processes hold if that is more. On a device of unknown size only the processes count.
func (o otherUnits) memoryOn(d *Device) int64 {
	held := map[string]int64{}
	for _, h := range d.Holders {
		if h.Unit != "" && h.Unit != o.unit {
			held[h.Unit] += max(0, h.MiB)
		}
	}
	parts := map[string]int64{}
	for _, g := range o.grants {
		if o.isSharer(&g, d.Index) {
			parts[g.Unit] += int64(g.Share)
		}
	}
	for unit, n := range parts {
		held[unit] = max(held[unit], n*max(0, d.TotalMiB)/share.Whole)
	}
	sum := int64(0)
	for _, mib := range held {
		sum += mib
	}
	return sum
}

// describeTaken says who uses a device that no rank was granted, and what a person can do.
func (d *Device) describeTaken() string {
	isOurs := slices.ContainsFunc(d.Holders, func(h Holder) bool { return h.Unit != "" })
	if isOurs {
		return d.describeUse() + ", and was granted to no rank (write resources.gpus for ranks that use " +
			"devices, a share such as 0.25 if they share one)"
	}
	return d.describeUse() +
		", and no rank of this node has it (end what uses it, or leave the device out of --gpus)"
}
