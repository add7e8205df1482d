// Package host collects the facts of this machine for internal/doctor: sockets, limits, disks, processes,
// devices, programs and model folders. It changes nothing but one temporary file in the data dir, and every
// step that waits for something has a bound.
package host

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/devices"
	"github.com/dpserve/dpserve/internal/diskfile"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/process"
)

// Config says what to look at.
type Config struct {
	DataDir string
	Ports   []doctor.Port // Use, Flag, Network and Address of each that a node would bind
	Range   doctor.Span   // of the ports of engines
	Slots   int           // ranks without devices that the node takes
	GPUs    []int         // devices that the node offers
	AllGPUs bool          // it offers those that are found
	Streams int           // client connections that a node accepts
	Built   time.Time     // of this dpserve; zero = not known
	Apps    []*app.Application
	Environ []string // of this process
}

// Collect looks at the machine. It fills in everything but the facts of a cluster.
func Collect(ctx context.Context, c *Config) *doctor.Facts {
	holders, env := newHolders(), environment(c.Environ)
	f := &doctor.Facts{Now: time.Now()}
	f.Clock = clock(c.Built)
	f.Ports = tryPorts(ctx, c.Ports, holders)
	f.EnginePorts = enginePorts(c.Range, holders)
	f.Files = fileLimit(c, f.Ports)
	f.Shared = sharedMemory("/dev/shm", largestRank(c.Apps))
	f.DataDir = inspectDataDir(c.DataDir)
	if !f.DataDir.Missing && f.DataDir.Error == "" {
		f.Certificate = certificate(c.DataDir)
	}
	f.Leftovers = leftovers(c.DataDir)
	f.Devices = findDevices(ctx, c, holders)
	f.Engines = engines(ctx, c.Apps, env)
	f.Models = models(c.Apps, env)
	return f
}

// clockPause is the pause over which the clocks are compared.
const clockPause = 20 * time.Millisecond

func clock(built time.Time) *doctor.Clock {
	before := time.Now()
	time.Sleep(clockPause)
	after := time.Now()
	return &doctor.Clock{
		Built: built, Slept: after.Sub(before), Passed: after.Round(0).Sub(before.Round(0)),
		Sync: clockSync(),
	}
}

// largestRank is the most devices that one rank of real engines uses; 0 = there are no such engines.
func largestRank(apps []*app.Application) int {
	most := 0
	for _, a := range apps {
		if a.Engine.Kind == app.KindVLLM || a.Engine.Kind == app.KindSGLang {
			most = max(most, a.Resources.Devices())
		}
	}
	return most
}

// fileLimit reads how many files dpserve may have open: the dpserve that holds one of the ports, else a
// process that this shell would start.
func fileLimit(c *Config, ports []doctor.Port) *doctor.Files {
	out := &doctor.Files{Of: "this shell", Streams: c.Streams, Ranks: c.Slots}
	for i := range ports {
		o := ports[i].Owner
		if !o.Ours {
			continue
		}
		if limit, ok := process.FileLimit(o.PID); ok {
			out.Limit, out.Of = limit, o.String()
			return out
		}
	}
	limit, ok := process.FileLimit(0)
	if !ok {
		return nil
	}
	out.Limit = limit
	return out
}

func sharedMemory(path string, devices int) *doctor.SharedMemory {
	if _, err := os.Stat(procRoot); err != nil {
		return nil // no Linux, so there is no /dev/shm
	}
	out := &doctor.SharedMemory{Path: path, Devices: devices}
	free, size, err := diskfile.Space(path)
	if err != nil {
		out.Error = plain(err)
		return out
	}
	out.Free, out.Size = free, size
	return out
}

// findDevices looks at the devices that the node would offer; nil = none, and no rank wants one.
func findDevices(ctx context.Context, c *Config, h *holders) *doctor.Devices {
	out := &doctor.Devices{Wanted: largestRank(c.Apps)}
	if !c.AllGPUs && len(c.GPUs) == 0 {
		if out.Wanted == 0 {
			return nil
		}
		return out
	}
	ctx, cancel := context.WithTimeout(ctx, devices.DefaultProbe)
	defer cancel()
	inv, err := devices.Probe(ctx, nil)
	if err != nil {
		out.Error = err.Error()
		return out
	}
	out.Tool, out.Warnings = toolOf(inv.Kind), inv.Warnings
	for i := range inv.Devices {
		if d := &inv.Devices[i]; c.AllGPUs || slices.Contains(c.GPUs, d.Index) {
			out.List = append(out.List, describeDevice(d, h))
		}
	}
	for _, index := range c.GPUs {
		if out.Tool != "" && inv.Find(index) == nil {
			out.Missing = append(out.Missing, index)
		}
	}
	return out
}

// toolOf is the program that lists the devices of a maker.
func toolOf(kind devices.Kind) string {
	return map[devices.Kind]string{devices.Nvidia: "nvidia-smi", devices.AMD: "rocm-smi"}[kind]
}

func describeDevice(d *devices.Device, h *holders) doctor.Device {
	out := doctor.Device{Index: d.Index, Name: d.Name, Fault: d.Fault}
	if d.TotalMiB > 0 && d.UsedMiB >= 0 {
		out.Total = uint64(d.TotalMiB) << 20
		out.Free = uint64(max(d.TotalMiB-d.UsedMiB, 0)) << 20
	}
	for _, holder := range d.Holders {
		owner := doctor.Owner{PID: holder.PID, Program: "a process"} // of the host, beyond a container
		if _, isHere := process.ReadStat(holder.PID); isHere {
			owner = h.describe(holder.PID)
		}
		if owner.Ours {
			out.Ours = true
			continue
		}
		out.Others = append(out.Others, owner)
	}
	return out
}

// procRoot is where Linux shows its processes.
const procRoot = "/proc"

func procFile(pid int, name string) string { return filepath.Join(procRoot, strconv.Itoa(pid), name) }
