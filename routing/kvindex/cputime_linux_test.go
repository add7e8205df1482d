package kvindex

import (
	"time"

	"golang.org/x/sys/unix"
)

// cpu is the processor time of the calling thread (lock it first): what a busy machine takes away does not
// count.
func cpu() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
