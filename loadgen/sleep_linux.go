package loadgen

import (
	"syscall"
	"time"
)

// exactSleep sleeps at most a few milliseconds with the kernel's resolution (about 60 µs); it may return early.
func exactSleep(d time.Duration) {
	spec := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&spec, nil) // an interrupted sleep is only a shorter one
}
