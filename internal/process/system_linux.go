package process

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Self is what executes this program as it runs. The file at its path may be another one by now: an upgrade
// replaces it before the running program ends. A child that executes this link executes its parent's image.
func Self() string { return "/proc/self/exe" }

// sessionAttr gives an engine its own session, separate from the terminal's Ctrl-C, ends it with the forking
// thread, and starts it in a cgroup, if there is one. The function is to be called after the start.
func sessionAttr(cgroup string) (*syscall.SysProcAttr, func(), error) {
	attr := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if cgroup == "" {
		return attr, func() {}, nil
	}
	folder, err := os.Open(cgroup)
	if err != nil {
		return nil, nil, err
	}
	attr.UseCgroupFD, attr.CgroupFD = true, int(folder.Fd())
	return attr, func() { _ = folder.Close() }, nil
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

// FileLimit returns how many files a process may have open, this one with 0; false if the system does not
// tell.
func FileLimit(pid int) (uint64, bool) {
	var limit unix.Rlimit
	err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &limit)
	return limit.Cur, err == nil
}

// ReadStat reads one process; false if it does not exist.
func ReadStat(pid int) (Stat, bool) { return parseStat(pid, string(read(pid, "stat"))) }
