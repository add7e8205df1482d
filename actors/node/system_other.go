//go:build unix && !linux

package node

import "time"

// reapOrphans needs /proc.
func reapOrphans(<-chan struct{}, time.Duration) {}

// suspended is not known on this system.
func suspended() time.Duration { return 0 }

// sinceBoot is the time of the machine's clock, in ns: engines do not outlive a node here.
func sinceBoot() uint64 { return uint64(max(0, time.Now().UnixNano())) }
