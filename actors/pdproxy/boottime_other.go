//go:build !linux

package pdproxy

import "time"

// sinceBoot is the time since the process started. Whether it counts while the machine sleeps depends on the
// system.
func sinceBoot() time.Duration { return time.Since(processStart) }

var processStart = time.Now()
