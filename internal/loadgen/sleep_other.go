//go:build !linux

package loadgen

import "time"

// exactSleep sleeps with the runtime's resolution.
func exactSleep(d time.Duration) { time.Sleep(d) }
