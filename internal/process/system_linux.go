package process

import (
	"errors"
	"syscall"

	"golang.org/x/sys/unix"
)

// Self is what executes this program as it runs. The file at its path may be another one by now: an upgrade
// replaces it before the running program ends. A child that executes this link executes its parent's image.
func Self() string { return "/proc/self/exe" }

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
