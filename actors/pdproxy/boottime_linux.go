package pdproxy

import (
	"time"

	"golang.org/x/sys/unix"
)

// asleep is how long the machine has slept since it started. A pause of the process between the two readings
// counts as sleep, so the time is never too short.
func asleep() time.Duration {
	var awake, all unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil ||
		unix.ClockGettime(unix.CLOCK_BOOTTIME, &all) != nil {
		return 0 // a kernel before 2.6.39
	}
	return time.Duration(all.Nano() - awake.Nano())
}
