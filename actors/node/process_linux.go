package node

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// groupAttr gives an engine a process group of its own, out of the terminal's Ctrl-C, and ends it with the forking thread.
func groupAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit blocks until the process ended, and leaves it unreaped; false if the kernel cannot do that.
func awaitExit(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, syscall.EINTR) {
			return err == nil
		}
	}
}

// stat is what the ledger reads of /proc/PID/stat.
type stat struct {
	pid, group int
	parent     int
	zombie     bool
	start      string // clock ticks since boot
}

func readStat(pid int) (stat, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, false
	}
	return parseStat(pid, string(b))
}

// parseStat splits a stat line behind the command, which may hold spaces and parentheses.
func parseStat(pid int, line string) (stat, bool) {
	at := strings.LastIndexByte(line, ')')
	f := strings.Fields(line[at+1:])
	if at < 0 || len(f) < 20 { // field 3 of proc(5) is f[0]
		return stat{}, false
	}
	parent, errParent := strconv.Atoi(f[1])
	group, err := strconv.Atoi(f[2])
	if err != nil || errParent != nil {
		return stat{}, false
	}
	return stat{pid: pid, parent: parent, group: group, zombie: f[0] == "Z" || f[0] == "X", start: f[19]}, true
}

// hasProc says that processes can be listed.
func hasProc() bool { return true }

func allProcesses() []stat {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil
	}
	var out []stat
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if s, ok := readStat(pid); ok {
			out = append(out, s)
		}
	}
	return out
}

// environHas says whether a process was started with an environment entry.
func environHas(pid int, entry string) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	if err != nil {
		return false
	}
	for kv := range strings.SplitSeq(string(b), "\x00") {
		if kv == entry {
			return true
		}
	}
	return false
}

// reapOrphans reaps, until done is closed, children of this process that nobody waits for. Process 1 of a container is given the
// orphans of dead engines, and what nobody reaps keeps its number for ever. Engines are waited for, and so is all else that dpserve
// starts: such a child is a zombie for a moment only. So one that owns does not name, and that is a zombie in two looks, is an orphan.
func reapOrphans(done <-chan struct{}, each time.Duration, owns func(pid int) bool) {
	tick := time.NewTicker(each)
	defer tick.Stop()
	seen := map[int]string{} // zombies of the last look, by their start time
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		now := map[int]string{}
		for _, s := range allProcesses() {
			switch {
			case !s.zombie || s.parent != os.Getpid() || owns(s.pid):
			case seen[s.pid] == s.start:
				_, _ = unix.Wait4(s.pid, nil, unix.WNOHANG, nil)
			default:
				now[s.pid] = s.start
			}
		}
		seen = now
	}
}

// suspended is how long the machine has been suspended since its boot: what CLOCK_BOOTTIME counts and the clock of time.Now, which
// is CLOCK_MONOTONIC, does not.
func suspended() time.Duration {
	var all, awake unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &all) != nil {
		return 0
	}
	return time.Duration(all.Nano() - awake.Nano())
}
