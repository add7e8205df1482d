package doctor

import (
	"fmt"
	"strconv"
	"time"
)

// Clock is what the clocks of the machine show.
type Clock struct {
	Built  time.Time     // the time of this dpserve's commit; zero = not known
	Slept  time.Duration // a short pause on the monotonic clock
	Passed time.Duration // the same pause on the wall clock
	Sync   Sync
}

// Sync says whether a time service keeps the wall clock right.
type Sync string

// Values of Sync.
const (
	SyncUnknown Sync = "" // the system does not tell
	Synced      Sync = "synchronised"
	NotSynced   Sync = "not synchronised"
)

const (
	// largestSkew is the difference of two nodes' clocks from which on things go wrong: join tokens end too
	// early, the deadlines of drains are off, and beyond an hour certificates are refused.
	largestSkew = time.Minute
	// notedSkew makes the times in the logs of several nodes hard to compare.
	notedSkew = time.Second
	// stepNoted is how much the wall clock may gain or lose within a short pause.
	stepNoted = 10 * time.Millisecond
	// lifetime is how long after its build a dpserve may plausibly run.
	lifetime = 20 * 365 * 24 * time.Hour
)

// hintTime is how a clock is set right.
const hintTime = "run a time service: `timedatectl set-ntp true`, or chrony"

// oldestBuild is the build time if the binary does not tell it.
func oldestBuild() time.Time { return time.Date(2025, time.January, 1, 0, 0, 0, 0, time.UTC) }

func checkClock(f *Facts) []Finding {
	c, out := f.Clock, &findings{check: "clock"}
	if c == nil {
		return nil
	}
	built := c.Built
	if built.IsZero() {
		built = oldestBuild()
	}
	wall := f.Now.UTC().Format("2006-01-02 15:04:05 UTC")
	switch {
	case f.Now.Before(built.Add(-notedSkew)):
		out.fail(hintTime, "the wall clock says %s, and this dpserve was built at %s", wall,
			built.UTC().Format("2006-01-02 15:04"))
	case f.Now.After(built.Add(lifetime)):
		out.fail(hintTime, "the wall clock says %s", wall)
	case c.Slept <= 0:
		out.fail("restart the machine, or look at its clock source in "+
			"/sys/devices/system/clocksource/clocksource0", "the monotonic clock is stopped")
	case (c.Passed - c.Slept).Abs() > stepNoted:
		out.warn(hintTime, "the wall clock moved by %s in %s: it is being set", c.Passed, c.Slept)
	case c.Sync == NotSynced:
		out.warn(hintTime, "%s; no time service keeps it right", wall)
	}
	if f.Cluster != nil {
		compareClocks(out, f.Cluster)
	}
	if c.Sync == Synced {
		wall += ", synchronised"
	}
	return out.orOK("%s%s", wall, describeSkew(f.Cluster))
}

// compareClocks looks at the differences that the leader has measured.
func compareClocks(out *findings, c *Cluster) {
	for i := range c.Nodes {
		n := &c.Nodes[i]
		skew := time.Duration(n.SkewMs) * time.Millisecond
		text := "the clock of node " + n.Node + " differs by " + skew.String() + " from the leader's"
		switch {
		case skew.Abs() >= largestSkew:
			out.fail("on "+n.Node+": "+hintTime, "%s", text)
		case skew.Abs() >= notedSkew:
			out.warn("on "+n.Node+": "+hintTime, "%s", text)
		}
	}
}

// describeSkew says how far the clocks of several nodes are apart.
func describeSkew(c *Cluster) string {
	if c == nil || len(c.Nodes) < 2 {
		return ""
	}
	largest := int64(0)
	for i := range c.Nodes {
		largest = max(largest, c.Nodes[i].SkewMs, -c.Nodes[i].SkewMs)
	}
	return "; " + strconv.Itoa(len(c.Nodes)) + " nodes differ by at most " +
		(time.Duration(largest) * time.Millisecond).String()
}

// Files is how many files and sockets one process may have open.
type Files struct {
	Limit   uint64 // the hard limit: dpserve raises its soft limit to it at its start
	Of      string // whose limit it is: "this shell", or the running dpserve
	Streams int    // client connections that a node with role ingress accepts if the limit allows them
	Ranks   int    // that the node may run
}

// How many descriptors a node uses.
const (
	filesPerStream = 2   // the client's connection and the engine's
	filesPerRank   = 16  // pipes, event sockets, idle connections
	filesOfNode    = 256 // listeners, raft, gossip, other nodes

	// FewestStreams is less than any installation serves at once with one node.
	FewestStreams = 1000
)

// Reserve is how many files the node needs beside its streams.
func (l *Files) Reserve() int { return filesOfNode + filesPerRank*l.Ranks }

// Accepted is how many of its streams the node accepts under the limit.
func (l *Files) Accepted() int {
	rest := int(min(l.Limit, 1<<31)) - l.Reserve()
	return min(max(rest/filesPerStream, 0), l.Streams)
}

// Needed is the limit with which the node accepts all the streams that it may.
func (l *Files) Needed() int { return l.Reserve() + filesPerStream*l.Streams }

func checkFiles(f *Facts) []Finding {
	l, out := f.Files, &findings{check: "files"}
	if l == nil {
		return nil
	}
	hint := fmt.Sprintf("allow %d: LimitNOFILE= in the unit of systemd, `ulimit -n` in the shell that "+
		"starts dpserve, --ulimit nofile= of docker", l.Needed())
	found := fmt.Sprintf("%s may open %d files: enough for %d streams and %d ranks", l.Of, l.Limit,
		l.Accepted(), l.Ranks)
	switch streams := l.Accepted(); {
	case streams < min(FewestStreams, l.Streams):
		out.fail(hint, "%s", found)
	case streams < l.Streams:
		out.warn(hint, "%s; a node accepts %d", found, l.Streams)
	default:
		out.ok("%s", found)
	}
	return out.list
}

// SharedMemory is the file system /dev/shm, through which the processes of one engine exchange tensors.
type SharedMemory struct {
	Path  string
	Error string // it cannot be used; "" = it can
	Size  uint64
	Free  uint64
	// the most devices that one rank of the file uses; 0 = the file starts no real engine, or there is none
	Devices int
}

const (
	// shmOfEngine is what an engine of one device needs: the queues between its front and its core.
	shmOfEngine = 64 * mebibyte
	// shmOfSeveral is what the workers of several devices need: queues and the buffers of NCCL.
	shmOfSeveral = gibibyte
)

// checkShared looks at the size of /dev/shm. Containers often get 64 MiB, with which an engine of several
// devices dies of a bus error.
func checkShared(f *Facts) []Finding {
	m, out := f.Shared, &findings{check: "shm"}
	if m == nil {
		return nil
	}
	const hint = "give the container more: --shm-size 16g of docker, an emptyDir with medium: Memory at " +
		"/dev/shm in Kubernetes; else `mount -o remount,size=16G /dev/shm`"
	need := uint64(shmOfEngine)
	if m.Devices > 1 {
		need = shmOfSeveral
	}
	switch {
	case m.Error != "":
		out.warn("mount a tmpfs at "+m.Path, "%s cannot be used: %s", m.Path, m.Error)
	case m.Devices > 0 && m.Free < need:
		out.fail(hint, "%s has %s free of %s; a rank with %s needs %s", m.Path, formatBytes(m.Free),
			formatBytes(m.Size), formatCount(m.Devices, "device"), formatBytes(need))
	case m.Free < shmOfSeveral:
		out.warn(hint, "%s has %s free of %s: too little for engines with several devices", m.Path,
			formatBytes(m.Free), formatBytes(m.Size))
	default:
		out.ok("%s has %s free of %s", m.Path, formatBytes(m.Free), formatBytes(m.Size))
	}
	return out.list
}

// Devices are the devices that the node would offer.
type Devices struct {
	Tool     string // that lists them, nvidia-smi or rocm-smi; "" = none is installed
	Error    string // why it did not answer; "" = it did
	Warnings []string
	List     []Device
	Missing  []int // named by --gpus and not listed
	// the most devices that one rank of the file uses; 0 = no file, or its engines need none
	Wanted int
}

// Device is one device.
type Device struct {
	Index  int
	Name   string
	Fault  string  // why it cannot be used; "" = it can
	Total  uint64  // bytes of its memory; 0 = not known
	Free   uint64  //
	Others []Owner // processes with memory on it that no dpserve started, as far as they can be seen
	Ours   bool    // an engine of a dpserve has memory on it
}

// freeShare is how much of a device's memory an engine takes by default (vLLM: 0.9 of all); it does not
// start with less.
const freeShare = 0.9

func checkDevices(f *Facts) []Finding {
	d, out := f.Devices, &findings{check: "devices"}
	if d == nil {
		return nil
	}
	switch {
	case d.Error != "":
		out.fail("reload or reinstall the driver; after an update of the driver restart the machine", "%s",
			d.Error)
		return out.list
	case len(d.List) < d.Wanted && d.Tool == "":
		out.fail("install the driver and its nvidia-smi or rocm-smi, name the devices with --gpus, or write "+
			"resources: {gpus: 0} for engines on processors",
			"no device is found, and a rank of the file uses %d", d.Wanted)
	case len(d.List) < d.Wanted:
		out.fail("lower tensor_parallel_size, or start the ranks on another machine",
			"%s lists %s, and a rank of the file uses %d", d.Tool, formatCount(len(d.List), "device"),
			d.Wanted)
	}
	for _, index := range d.Missing {
		out.fail("correct --gpus, or look for the device in `dmesg`: one that fell off the bus is not listed",
			"--gpus names device %d, and %s does not list it", index, d.Tool)
	}
	for i := range d.List {
		judgeDevice(out, &d.List[i])
	}
	for _, text := range d.Warnings {
		out.warn("see what "+d.Tool+" itself prints", "%s", text)
	}
	if len(d.List) == 0 {
		return out.orOK("none: neither nvidia-smi nor rocm-smi is installed")
	}
	return out.orOK("%s answers: %s, %s", d.Tool, formatCount(len(d.List), "device"), d.List[0].Name)
}

// judgeDevice looks at the memory of a device that engines of a dpserve do not use.
func judgeDevice(out *findings, d *Device) {
	name := "device " + strconv.Itoa(d.Index) + " (" + d.Name + ")"
	isTaken := d.Total > 0 && float64(d.Free) < freeShare*float64(d.Total)
	switch {
	case d.Fault != "":
		out.fail("reset it or restart the machine, or leave it out of --gpus", "%s: %s", name, d.Fault)
	case !isTaken || d.Ours && len(d.Others) == 0:
	case len(d.Others) > 0:
		names := make([]string, len(d.Others))
		for i, o := range d.Others {
			names[i] = o.String()
		}
		out.fail("end them, leave the device out of --gpus, or lower gpu_memory_utilization",
			"%s has %s free of %s: %s", name, formatBytes(d.Free), formatBytes(d.Total), some(names))
	default:
		out.fail("end what uses it, leave the device out of --gpus, or lower gpu_memory_utilization",
			"%s has %s free of %s, and no process is listed", name, formatBytes(d.Free), formatBytes(d.Total))
	}
}
