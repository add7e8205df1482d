//go:build unix && !linux

package node

import (
	"syscall"
	"time"
)

// groupAttr gives an engine its own process group. Without a parent-death signal the engine ends when its
// standard input ends.
func groupAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit cannot wait without reaping on this system.
func awaitExit(int) bool { return false }

// stat is empty without /proc.
type stat struct {
	pid, group int
	zombie     bool
	start      string
}

func hasProc() bool               { return false }
func readStat(int) (stat, bool)   { return stat{}, false }
func allProcesses() []stat        { return nil }
func environHas(int, string) bool { return false }

// reapOrphans needs /proc.
func reapOrphans(<-chan struct{}, time.Duration, func(int) bool) {}

// suspended is not known on this system.
func suspended() time.Duration { return 0 }
