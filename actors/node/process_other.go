//go:build unix && !linux

package node

import (
	"syscall"
	"time"
)

// groupAttr gives an engine a process group of its own. Without a parent-death signal the engine's watch of its standard
// input ends it with its node.
func groupAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// awaitExit cannot wait without reaping here.
func awaitExit(int) bool { return false }

// stat is what the ledger knows of a process: nothing, without /proc.
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

// suspended is not known here.
func suspended() time.Duration { return 0 }
