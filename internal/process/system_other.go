//go:build unix && !linux

package process

import (
	"os"
	"syscall"
)

// Self is what executes this program: the file at its path, which may be another one by now.
func Self() string {
	path, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return path
}

// groupAttr gives an engine its own process group. Without a parent-death signal the engine ends when its
// standard input ends.
func groupAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit cannot wait without reaping on this system.
func awaitExit(int) bool { return false }
