//go:build !linux

package kvindex

import "time"

var cpuOrigin = time.Now()

// cpu falls back to the clock.
func cpu() time.Duration { return time.Since(cpuOrigin) }
