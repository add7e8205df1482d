//go:build unix && !linux

package process

import "syscall"

// groupAttr gives an engine its own process group. Without a parent-death signal the engine ends when its
// standard input ends.
func groupAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit cannot wait without reaping on this system.
func awaitExit(int) bool { return false }
