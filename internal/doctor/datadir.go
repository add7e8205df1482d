package doctor

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// DataDir is the data dir of a node. Where it does not exist yet, the nearest folder above it was looked at.
type DataDir struct {
	Path    string
	Missing bool   // it does not exist yet
	InUse   bool   // a dpserve runs on it
	Error   string // why dpserve cannot use it; "" = it can
	Hint    string // what to do about Error; "" = what helps in most cases
	Synced  time.Duration
	Free    uint64 // bytes on its disk
	Size    uint64
}

const (
	// leastFree keeps the log of raft and the state writable; a node whose disk is full stops to lead.
	leastFree = 200 * mebibyte
	// plentyFree is room for the log files of some dozens of engines, 20 MiB each.
	plentyFree = 2 * gibibyte
	// slowSync delays every grant: raft syncs each entry before it counts.
	slowSync = 50 * time.Millisecond
	// deadSync is so slow that leaders lose elections.
	deadSync = time.Second
)

func checkDataDir(f *Facts) []Finding {
	d := f.DataDir
	if d == nil {
		return nil
	}
	files, disk := &findings{check: "data-dir"}, &findings{check: "disk"}
	use := ""
	switch {
	case d.InUse:
		use = ", in use by a dpserve that runs"
	case d.Missing:
		use = ", made at the first start"
	}
	switch {
	case d.Error != "":
		files.fail(cmp.Or(d.Hint, "choose another --data-dir, or make it writable for the user that runs "+
			"dpserve"), "%s: %s", d.Path, d.Error)
	case d.Synced >= deadSync:
		files.fail("put --data-dir on a local disk; network file systems and overloaded disks are too slow "+
			"for consensus", "%s: a synced write took %s", d.Path, formatDuration(d.Synced))
	case d.Synced >= slowSync:
		files.warn("put --data-dir on a faster, local disk", "%s: a synced write took %s: each grant waits "+
			"for several", d.Path, formatDuration(d.Synced))
	default:
		files.ok("%s: writable, synced in %s%s", d.Path, formatDuration(d.Synced), use)
	}
	if d.Size == 0 {
		return files.list
	}
	hint := "make room on the disk of " + d.Path + ", or choose another --data-dir"
	found := fmt.Sprintf("%s free of %s", formatBytes(d.Free), formatBytes(d.Size))
	switch {
	case d.Free < leastFree:
		disk.fail(hint, "%s: too little for the log of consensus", found)
	case d.Free < plentyFree:
		disk.warn(hint, "%s: little for the logs of engines", found)
	default:
		disk.ok("%s", found)
	}
	return append(files.list, disk.list...)
}

func formatDuration(d time.Duration) string {
	if d < 10*time.Millisecond {
		return d.Round(100 * time.Microsecond).String()
	}
	return d.Round(time.Millisecond).String()
}

// Certificate is the certificate of the node in the data dir.
type Certificate struct {
	Error   string // why it cannot be read; "" = it can
	Node    string
	Begins  time.Time
	Ends    time.Time
	RenewAt time.Time // when a running node renews it
	// the node can sign for itself: it has the key of the authority, as nodes with role control have
	OwnAuthority bool
}

// shortLife is how little of a certificate's life is left when a person must look at once.
const shortLife = 3 * 24 * time.Hour

func checkCertificate(f *Facts) []Finding {
	c, out := f.Certificate, &findings{check: "certificate"}
	if c == nil {
		return nil
	}
	runs := f.DataDir != nil && f.DataDir.InUse
	hint := "start dpserve on this data dir: it renews its certificate"
	switch {
	case runs:
		hint = "the log of dpserve says why its renewal fails: it needs a leader, and clocks that agree"
	case !c.OwnAuthority:
		hint += " at the leader"
	}
	left := c.Ends.Sub(f.Now)
	switch {
	case c.Error != "":
		out.fail("restore the data dir from a backup, or `dpserve nodes remove` this node and join again "+
			"with an empty --data-dir", "%s", c.Error)
	case left <= 0:
		out.fail(hint, "the certificate of %s ended %s ago", c.Node, formatDays(-left))
	case f.Now.Before(c.Begins):
		out.fail("correct the clock of this machine; "+hint,
			"the certificate of %s is not valid before %s UTC", c.Node, c.Begins.UTC().Format(time.DateTime))
	case left < shortLife:
		out.fail(hint, "the certificate of %s ends in %s", c.Node, formatDays(left))
	case f.Now.After(c.RenewAt.Add(time.Hour)):
		out.warn(hint, "the certificate of %s ends in %s and is due for renewal", c.Node, formatDays(left))
	default:
		out.ok("the certificate of %s is good for %s", c.Node, formatDays(left))
	}
	return out.list
}

// formatDays returns a time in days, or in hours if it is less than two days.
func formatDays(d time.Duration) string {
	if hours := int(d.Hours()); hours < 48 {
		return formatCount(hours, "hour")
	}
	return formatCount(int(d.Hours()/24), "day")
}

// Leftover is an engine that runs without its dpserve.
type Leftover struct {
	What string // engine or shim
	PIDs []int
	Path string // of its files below the data dir; "" = it is not of this data dir
	// it belongs to another node or cluster, so that no start on this data dir touches it
	Foreign bool
	Copy    bool   // it was started from another folder, of which the data dir is a copy
	Cgroup  string // of an engine that is not of this data dir
}

func checkLeftovers(f *Facts) []Finding {
	out := &findings{check: "leftovers"}
	if f.DataDir == nil || f.DataDir.Missing && len(f.Leftovers) == 0 {
		return nil
	}
	for i := range f.Leftovers {
		l := &f.Leftovers[i]
		pids := make([]string, len(l.PIDs))
		for k, pid := range l.PIDs {
			pids[k] = strconv.Itoa(pid)
		}
		kill, who := "`kill "+strings.Join(pids, " ")+"`", "(process "+strings.Join(pids, ", ")+")"
		at := ""
		if l.Path != "" {
			at = " in " + filepath.Join(f.DataDir.Path, l.Path)
		}
		switch {
		case l.Cgroup != "":
			out.warn("`echo 1 > "+filepath.Join(l.Cgroup, "cgroup.kill")+"` ends it, and so does the next "+
				"start of its dpserve", "%s %s in %s", l.What, who, l.Cgroup)
		case l.Copy:
			out.warn("start no dpserve on "+f.DataDir.Path+" while the original is in use; "+kill+" ends "+
				"the engine if it is not needed", "%s %s was started from another folder: %s is a copy",
				l.What, who, f.DataDir.Path)
		case l.Foreign:
			out.fail(kill+" if it is not needed", "%s of another node or cluster %s%s", l.What, who, at)
		case !f.DataDir.InUse:
			out.fail("`dpserve start --data-dir "+f.DataDir.Path+"` takes it over or ends it; or "+kill,
				"%s of a dpserve that has died %s%s", l.What, who, at)
		}
	}
	return out.orOK("no engine runs without its dpserve")
}
