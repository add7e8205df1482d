package process

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// CgroupPrefix begins the name of a launch's cgroup; the launch follows.
const CgroupPrefix = "dpserve-launch-"

// mainCgroup is the name of a cgroup for dpserve and its shims alone (systemd: DelegateSubgroup). Launches
// get theirs beside it, with numbers of memory: the kernel hands a controller down only from a cgroup
// without processes.
const mainCgroup = "dpserve.main"

// Files of a cgroup, see the kernel's cgroup-v2.rst.
const (
	controllersFile = "cgroup.controllers"
	subtreeFile     = "cgroup.subtree_control"
	procsFile       = "cgroup.procs"
	killFile        = "cgroup.kill"
	memoryFile      = "memory.current"
	memoryEvents    = "memory.events"
)

// CgroupOf names the cgroup of a launch: a child of this process's own one, which may have children where it
// is delegated (systemd: Delegate=yes). The error says why there is none.
func CgroupOf(launch string) (string, error) {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	root, point, ok := findCgroup2(string(mounts))
	if !ok {
		return "", errors.New("cgroup v2 is not mounted")
	}
	folder, ok := joinCgroup(root, point, string(own))
	if !ok {
		return "", errors.New("the cgroup of this process is not below the mount of cgroup v2")
	}
	return cgroupBelow(folder, launch), nil
}

// cgroupBelow names the cgroup of a launch for a process whose own one is in a folder.
func cgroupBelow(own, launch string) string {
	if filepath.Base(own) == mainCgroup {
		own = filepath.Dir(own)
	}
	return filepath.Join(own, CgroupPrefix+launch)
}

// cgroup2Mount is where cgroup v2 is mounted; "" = nowhere.
func cgroup2Mount() string {
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	_, point, _ := findCgroup2(string(mounts))
	return point
}

// findCgroup2 finds the mount of cgroup v2 in a mountinfo file, see proc(5): the cgroup that is mounted, and
// where.
func findCgroup2(mounts string) (root, point string, ok bool) {
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(line, " - ")
		f, kind := strings.Fields(before), strings.Fields(after)
		if len(f) >= 5 && len(kind) > 0 && kind[0] == "cgroup2" {
			return unescape.Replace(f[3]), unescape.Replace(f[4]), true
		}
	}
	return "", "", false
}

// unescape undoes how mountinfo writes the characters that separate its fields.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// joinCgroup returns the folder of the cgroup v2 that /proc/PID/cgroup names.
func joinCgroup(root, point, own string) (string, bool) {
	for line := range strings.Lines(own) {
		path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::")
		if !ok {
			continue
		}
		below, err := filepath.Rel(root, path)
		isOutside := below == ".." || strings.HasPrefix(below, "../") || strings.HasPrefix(path, "/..")
		if err != nil || isOutside {
			return "", false
		}
		return filepath.Join(point, below), true
	}
	return "", false
}

// MakeCgroup makes a cgroup. Where the controller of memory may be handed down, it is.
func MakeCgroup(folder string) error {
	parent := filepath.Dir(folder)
	if isListed(parent, controllersFile, "memory") && !isListed(parent, subtreeFile, "memory") {
		// refused while this process itself is in the parent: then there are no numbers of memory
		_ = writeCgroup(parent, subtreeFile, "+memory")
	}
	return os.Mkdir(folder, 0o755) //nolint:gosec // of a cgroup, whose files everybody may read
}

func isListed(folder, file, word string) bool {
	text, err := os.ReadFile(filepath.Join(folder, file))
	return err == nil && slices.Contains(strings.Fields(string(text)), word)
}

// writeCgroup writes to a control file, which takes a line in one write.
func writeCgroup(folder, file, text string) error {
	f, err := os.OpenFile(filepath.Join(folder, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// cgroupPIDs lists the processes of a cgroup and of those below it.
func cgroupPIDs(folder string) (out []int) {
	walkCgroup(folder, func(folder string) {
		text, _ := os.ReadFile(filepath.Join(folder, procsFile))
		for word := range strings.FieldsSeq(string(text)) {
			pid, err := strconv.Atoi(word)
			if s, there := ReadStat(pid); err == nil && pid > 1 && (!there || !s.Zombie) {
				out = append(out, pid)
			}
		}
	})
	return out
}

// walkCgroup calls f for a cgroup, after those below it.
func walkCgroup(folder string, f func(folder string)) {
	if folder == "" {
		return
	}
	below, err := os.ReadDir(folder)
	if err != nil {
		return
	}
	for _, entry := range below {
		if entry.IsDir() {
			walkCgroup(filepath.Join(folder, entry.Name()), f)
		}
	}
	f(folder)
}

// killCgroup kills the processes of a cgroup and of those below it, with what they fork meanwhile. Linux
// before 5.14 cannot do that: then they are killed one by one.
func killCgroup(folder string) {
	if folder != "" {
		_ = writeCgroup(folder, killFile, "1")
	}
}

// removeCgroup removes an empty cgroup, and those below it that its processes have made. It reports whether
// there is none any more: a process that has just ended is counted by the kernel for a moment longer.
func removeCgroup(folder string) bool {
	walkCgroup(folder, func(folder string) { _ = syscall.Rmdir(folder) })
	_, err := os.Stat(folder)
	return err != nil
}

// emptyFor is how long a cgroup without processes is left alone: its shim may be about to use it.
const emptyFor = time.Minute

// RemoveEmptyCgroups removes the cgroups of launches, below that of this process, whose shims could not: they
// were killed, and nobody has found their folders.
func RemoveEmptyCgroups() {
	at, err := CgroupOf("*")
	if err != nil {
		return
	}
	folders, _ := filepath.Glob(at) // one without processes is removed, another one is not
	for _, folder := range folders {
		if info, err := os.Stat(folder); err == nil && time.Since(info.ModTime()) > emptyFor {
			_ = syscall.Rmdir(folder)
		}
	}
}

// LaunchCgroups lists the cgroups of launches that have processes, wherever in the machine they are.
func LaunchCgroups() []Launch {
	var out []Launch
	walkCgroup(cgroup2Mount(), func(folder string) {
		l := Launch{Boot: BootID(), Cgroup: folder}
		if strings.HasPrefix(filepath.Base(folder), CgroupPrefix) && len(l.PIDs()) > 0 {
			out = append(out, l)
		}
	})
	return out
}

// InLaunchCgroup reports whether a process is in the cgroup of a launch.
func InLaunchCgroup(pid int) bool {
	for line := range strings.Lines(string(read(pid, "cgroup"))) {
		if strings.HasPrefix(line, "0::") && strings.Contains(line, "/"+CgroupPrefix) {
			return true
		}
	}
	return false
}

// Memory is what the processes of a cgroup use, in bytes; 0 = not known.
func Memory(cgroup string) uint64 {
	if cgroup == "" {
		return 0
	}
	text, err := os.ReadFile(filepath.Join(cgroup, memoryFile))
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// outOfMemory counts the processes of a cgroup that the kernel has ended for want of memory.
func outOfMemory(cgroup string) uint64 {
	if cgroup == "" {
		return 0
	}
	text, _ := os.ReadFile(filepath.Join(cgroup, memoryEvents))
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "oom_kill" {
			n, _ := strconv.ParseUint(f[1], 10, 64)
			return n
		}
	}
	return 0
}
