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

// groupAttr gives an engine its own process group, separate from the terminal's Ctrl-C, and ends it with the
// forking thread.
func groupAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit blocks until the process has ended, and leaves it unreaped; false if the kernel cannot do that.
func awaitExit(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, syscall.EINTR) {
			return err == nil
		}
	}
}

// stat is the part of /proc/PID/stat that the process table uses.
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

// parseStat splits a stat line after the command, which may contain spaces and parentheses.
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
	return stat{pid: pid, parent: parent, group: group, zombie: f[0] == "Z" || f[0] == "X", start: f[19]},
		true
}

// hasProc reports whether processes can be listed.
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

// environHas reports whether a process was started with an environment entry.
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

// reapOrphans reaps, until done is closed, orphans that this process inherited. Process 1 of a container gets
// the orphans of dead engines, and an unreaped one keeps its number for ever. dpserve waits for everything
// that it starts, so its own children are zombies for a moment only. A child that owns does not name and that
// is a zombie in two checks is therefore an orphan.
func reapOrphans(done <-chan struct{}, each time.Duration, owns func(pid int) bool) {
	tick := time.NewTicker(each)
	defer tick.Stop()
	seen := map[int]string{} // zombies of the last check, by start time
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

// suspended is how long the machine has been suspended since its boot: CLOCK_BOOTTIME counts that time, and
// CLOCK_MONOTONIC, the clock of time.Now, does not.
func suspended() time.Duration {
	var all, awake unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil ||
		unix.ClockGettime(unix.CLOCK_BOOTTIME, &all) != nil {
		return 0
	}
	return time.Duration(all.Nano() - awake.Nano())
}
