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

// sessionAttr gives an engine its own session. Without a parent-death signal the engine ends when its
// standard input ends.
func sessionAttr(string) (*syscall.SysProcAttr, func(), error) {
	return &syscall.SysProcAttr{Setsid: true}, func() {}, nil
}

// awaitExit cannot wait without reaping on this system.
func awaitExit(int) bool { return false }
