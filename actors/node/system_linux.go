package node

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dpserve/dpserve/internal/process"
)

// reapOrphans reaps, until done is closed, orphans that this process inherited. Process 1 of a container
// gets the orphans of dead engines, and an unreaped one keeps its number for ever. dpserve waits for
// everything that it starts, so its own children are zombies for a moment only. A child that is a zombie in
// two checks is therefore an orphan.
func reapOrphans(done <-chan struct{}, each time.Duration) {
	tick := time.NewTicker(each)
	defer tick.Stop()
	seen := map[int]string{} // zombies of the last check, by start time
	for {
		select {
		case <-tick.C:
		case <-done:
			return
		}
		now := map[int]string{}
		for _, s := range process.Children(os.Getpid()) {
			switch {
			case !s.Zombie:
			case seen[s.PID] == s.Start:
				_, _ = unix.Wait4(s.PID, nil, unix.WNOHANG, nil)
			default:
				now[s.PID] = s.Start
			}
		}
		seen = now
	}
}

// suspended is how long the machine has been suspended since its boot: CLOCK_BOOTTIME counts that time, and
// CLOCK_MONOTONIC, the clock of time.Now, does not.
func suspended() time.Duration {
	var all, awake unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) != nil ||
		unix.ClockGettime(unix.CLOCK_BOOTTIME, &all) != nil {
		return 0
	}
	return time.Duration(all.Nano() - awake.Nano())
}

// sinceBoot is the time since the machine's boot, in ns. It never goes back.
func sinceBoot() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) // cannot fail on any kernel that Go supports
	return uint64(max(0, now.Nano()))
}
