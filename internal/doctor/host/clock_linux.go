package host

import (
	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/internal/doctor"
)

// clockSync asks the kernel whether a time service keeps the clock right.
func clockSync() doctor.Sync {
	var t unix.Timex
	if _, err := unix.Adjtimex(&t); err != nil {
		return doctor.SyncUnknown
	}
	if t.Status&unix.STA_UNSYNC != 0 {
		return doctor.NotSynced
	}
	return doctor.Synced
}
