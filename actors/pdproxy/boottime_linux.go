package pdproxy

import (
	"time"

	"golang.org/x/sys/unix"
)

// sinceBoot is the time since the machine started, with the time in which it slept.
func sinceBoot() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return time.Since(processStart) // a kernel before 2.6.39
	}
	return time.Duration(t.Nano())
}

var processStart = time.Now()
