package process

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Self is what executes this program: the file at its path, which may be another one by now.
func Self() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// sessionAttr gives an engine its own session. Without a parent-death signal the engine ends when its
// standard input ends.
func sessionAttr(string) (*syscall.SysProcAttr, func(), error) {
	return &syscall.SysProcAttr{Setsid: true}, func() {}, nil
}

// awaitExit cannot wait without reaping on this system.
func awaitExit(int) bool { return false }

// States of a process, see sys/proc.h.
const (
	stateStopped = 4
	stateZombie  = 5
)

// FileLimit returns how many files this process may have open; false for others than 0.
func FileLimit(pid int) (uint64, bool) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return limit.Cur, pid == 0 && err == nil
}

// ReadStat reads one process; false if it does not exist.
func ReadStat(pid int) (Stat, bool) {
	p, err := unix.SysctlKinfoProc("kern.proc.pid", pid)
	if err != nil || int(p.Proc.P_pid) != pid {
		return Stat{}, false
	}
	return Stat{
		PID: pid, Parent: int(p.Eproc.Ppid), Group: int(p.Eproc.Pgid), Zombie: p.Proc.P_stat == stateZombie,
		Stopped: p.Proc.P_stat == stateStopped,
		Start:   fmt.Sprint(p.Proc.P_starttime.Sec, ".", p.Proc.P_starttime.Usec), CPU: -1,
	}, true
}

// CgroupPrefix begins the name of a launch's cgroup.
const CgroupPrefix = "dpserve-launch-"

var errNoCgroups = errors.New("this system has no cgroups")

// CgroupOf needs Linux.
func CgroupOf(string) (string, error) { return "", errNoCgroups }

// MakeCgroup needs Linux.
func MakeCgroup(string) error { return errNoCgroups }

// RemoveEmptyCgroups has nothing to remove on this system.
func RemoveEmptyCgroups() {}

// LaunchCgroups lists none on this system.
func LaunchCgroups() []Launch { return nil }

// InLaunchCgroup is false on this system.
func InLaunchCgroup(int) bool { return false }

// Memory is not known on this system.
func Memory(string) uint64 { return 0 }

func cgroupPIDs(string) []int { return nil }

func killCgroup(string) {}

func removeCgroup(string) bool { return true }

func outOfMemory(string) uint64 { return 0 }
