package node

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"

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
	group, err := strconv.Atoi(f[2])
	if err != nil {
		return stat{}, false
	}
	return stat{pid: pid, group: group, zombie: f[0] == "Z" || f[0] == "X", start: f[19]}, true
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
