package node

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/dpserve/dpserve/internal/pause"
	"github.com/dpserve/dpserve/internal/process"
)

// Devices are the accelerators of this machine. Both methods may take seconds; their context bounds them.
// They are safe for concurrent use.
type Devices interface {
	// Check reports why no engine of a unit can start on devices; nil if one can, or if that cannot be found
	// out. The memory in use now is not the unit's.
	Check(ctx context.Context, unit string, devices []int) error
	// Held describes the devices that have more memory in use than before their last Check, and who has it;
	// "" if there are none, or if that cannot be found out. Memory of other units of this node does not
	// count.
	Held(ctx context.Context, unit string, devices []int) string
}

// engineUnits returns the units of the engines that run, by the number of each engine's first process.
func engineUnits(n *Node) map[int]string {
	out := map[int]string{}
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, u := range n.units {
		for _, p := range enginesOf(u) {
			if pid := p.PID(); pid > 0 {
				out[pid] = name
			}
		}
	}
	return out
}

// maxAncestors bounds the way from a process to the first one of its engine.
const maxAncestors = 16

// unitOf looks for the first process of an engine along the parents and groups of a process.
func unitOf(pid int, engines map[int]string, read func(pid int) (process.Stat, bool)) string {
	for range maxAncestors {
		s, isThere := read(pid)
		if !isThere {
			return ""
		}
		for _, at := range []int{pid, s.Group} {
			if unit := engines[at]; unit != "" {
				return unit
			}
		}
		pid = s.Parent
	}
	return ""
}

// devicePoll is the pause between two looks at devices: each look starts a program.
const devicePoll = 500 * time.Millisecond

// grantedDevices are the devices of a unit on this node, as far as they can be checked.
type grantedDevices struct {
	unit    *unit
	numbers []int
}

func devicesOf(u *unit) grantedDevices {
	d := grantedDevices{unit: u}
	if u.n.cfg.Devices == nil {
		return d
	}
	for i := range u.m.Ranks {
		d.numbers = append(d.numbers, u.m.Ranks[i].Devices...)
	}
	return d
}

// check looks whether the devices are there, before anything is started on them.
func (d grantedDevices) check(ctx context.Context) error {
	if len(d.numbers) == 0 {
		return nil
	}
	if err := d.unit.n.cfg.Devices.Check(ctx, d.unit.m.Unit, d.numbers); err != nil {
		return &startError{-1, err}
	}
	return nil
}

// awaitFree waits until the memory of the devices is free: a driver frees it only some time after the
// processes are gone, and the next engine would find too little. After DeviceWait it gives up, because what
// holds the memory is no process of the unit, and adds what is held to why. A node that ends or restarts does
// not wait.
func (d grantedDevices) awaitFree(why Failure) Failure {
	u := d.unit
	if len(d.numbers) == 0 || len(enginesOf(u)) == 0 {
		return why
	}
	ctx, cancel := context.WithTimeout(context.Background(), u.n.timers.DeviceWait)
	defer cancel()
	began, named := time.Now(), false
	for !u.n.isStopping() && !closed(u.n.detached) {
		held := u.n.cfg.Devices.Held(ctx, u.m.Unit, d.numbers)
		if held == "" {
			return why
		}
		for _, r := range u.ranks {
			r.setProgress("waiting for the memory of its devices: " + held)
		}
		if !named && time.Since(began) >= u.n.timers.VerifyNamed {
			named = true
			u.named(why, held, u.n.timers.VerifyNamed)
		}
		if pause.For(ctx, devicePoll) != nil {
			u.log.Warn("the memory of devices is not free after an engine's end", slog.String("held", held))
			why.Cause = fmt.Sprintf("%s; still held after %s: %s", why.Cause, u.n.timers.DeviceWait, held)
			return why
		}
	}
	return why
}
