package loadgen

import (
	"syscall"
	"time"
)

// exactSleep sleeps a few milliseconds with the kernel's resolution (about 60 µs). It may return early.
func exactSleep(d time.Duration) {
	spec := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&spec, nil) // an interrupted sleep only ends early
}
